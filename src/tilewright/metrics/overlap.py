"""Figures of communication beside compute: `tilewright inspect overlap`, `inspect training`, `bench overlap`."""

from tilewright.metrics.metric import Metric

LAYER = (
    Metric("chip", "", "the topology, and its devices"),
    Metric("devices"),
    Metric(
        "schedule",
        "",
        "what was compiled; a schedule in another order than its own as `ring@compiler`, `ring@program_order`; a `decode` step "
        "has one new position in each row, with `positions` cached",
    ),
    Metric("phase"),
    Metric("batch_rows"),
    Metric("positions"),
    Metric("compute_cycles", "cycles", "of the core's operations, at the clock that the chip's peak implies"),
    Metric("compute_ms", "ms"),
    Metric("communication_ms", "ms", "time in which at least one collective is under way: `hidden_ms` + `exposed_ms`"),
    Metric("exposed_ms", "ms", "time in which the core waits for a collective"),
    Metric(
        "hidden_ms",
        "ms",
        "time in which a collective is under way and the core does not wait for one: it computes, or waits for memory",
    ),
    Metric("memory_wait_ms", "ms", "time in which the core waits for a copy between HBM and VMEM"),
    Metric("total_ms", "ms", "`compute_ms` + `exposed_ms` + `memory_wait_ms`"),
    Metric("transfers", "", "collectives, and what a device gives to them"),
    Metric("sent_bytes", "bytes"),
    Metric("exposed_share", "", "`exposed_ms` / `communication_ms`; null without communication. `--fail-above` goes by it"),
    Metric("exposed_share_of_sync", "", "`exposed_ms` over that of `sync`; null where `sync` was not asked for"),
    Metric("extra_compute_share", "", "`compute_ms` over that of `sync`, less 1"),
    Metric("busiest_link_ms", "ms", "how long the layer's transfers take that link which they take longest"),
    Metric(
        "least_exposed_ms",
        "ms",
        "`busiest_link_ms` − `compute_ms`, at least 0: what this schedule's transfers cannot hide",
    ),
    Metric(
        "all_links_communication_ms",
        "ms",
        "two all-reduces of the residual stream if every chip sent over as many links as the chip with the fewest "
        "has: no schedule of tensor parallelism takes less",
    ),
    Metric("all_links_least_exposed_ms", "ms", "that − the bound's compute, at least 0"),
    Metric("bound_compute_cycles", "cycles", "`sync` without its sums, which computes something wrong in the least time"),
    Metric("bound_total_ms", "ms"),
    Metric("total_over_bound", "", "`total_ms` / `bound_total_ms`"),
    Metric("total_over_larger", "", "`total_ms` over the larger of `compute_ms` and `busiest_link_ms`"),
    Metric(
        "model_layers",
        "",
        "layers of the model, and the layer's times multiplied by them; embedding and head are not in it",
    ),
    Metric("model_total_ms", "ms"),
    Metric("model_exposed_ms", "ms"),
    Metric("layers_compiled", "", "how many, which one, and the times of each"),
    Metric("reported_layer"),
    Metric("layers"),
    Metric(
        "unsteady_share",
        "",
        "by how much `total_ms` of the reported layer's neighbours differs at most; whether that is no more than 5 "
        "%, else the tables say *not steady* beside the time; the same of the bound",
    ),
    Metric("steady"),
    Metric("bound_steady"),
    Metric(
        "without_estimate",
        "",
        "operations of the program that the compiler has no cycles for: the full roofline stands in; which part of "
        "the reported layer's `compute_ms` these are",
    ),
    Metric("roofline_share"),
    Metric("compile_s", "s", "of the program"),
)
"""Of a layer under one schedule, in one phase, on one chip."""

TRAINING_STEP = (
    Metric(
        "program",
        "",
        "its name, and the fields of `FullyShardedPlan` (`early` and `late` are its prefetch distance and scatter "
        "delay); null of the auto-sharded step",
    ),
    Metric("plan"),
    Metric("mesh", "", "devices along its axes; sequences of a step over all devices, and positions of each"),
    Metric("batch_rows"),
    Metric("positions"),
    Metric(
        "exposed_share_of_plain",
        "",
        "`exposed_ms` over that of the step without tokens or rings; null where that was not compiled",
    ),
    Metric("compute_share", "", "`compute_ms` / `total_ms`"),
    Metric("bound_total_ms", "ms", "the layer without communication: `compute_ms` of the same program"),
    Metric(
        "peak_bytes",
        "bytes",
        "device memory of the compiled step: arguments, results and temporaries at once; parts of it",
    ),
    Metric("argument_bytes", "bytes"),
    Metric("temporary_bytes", "bytes"),
    Metric(
        "model_peak_bytes",
        "bytes",
        "that, and for each layer not compiled its weights, two moments and gradient, float32, the stream kept of "
        "it, and its whole weights where the backward pass does not gather them again",
    ),
    Metric(
        "model_total_ms",
        "ms",
        "of the compiled step, and the reported layer for each one not compiled; the update of those is not in it",
    ),
    Metric("model_exposed_ms", "ms"),
    Metric(
        "model_products_share",
        "",
        "what the products of the whole step take at the chip's peak, those of the second forward pass too, over "
        "`model_total_ms`",
    ),
    Metric("layers", "", "the times of each compiled layer in each pass"),
    Metric(
        "transfers_of_layer",
        "",
        "of the reported layer, those of one purpose together, `transfers` of them and how many are `asynchronous`: "
        "`begin_ms` and `end_ms` from the layer's first product in the pass, `alone_ms` one after another, "
        "`exposed_ms` in which the core waits for them, `beside_ms` what is computed meanwhile",
    ),
    Metric("unsteady_share", "", "by how much `total_ms` of the layer behind differs, in the pass where it differs more"),
)
"""Of a training step, besides those of `LAYER`."""

TIMES = (
    Metric("chip", "", "the slice (of predictions); `schedule` is null on one device"),
    Metric("devices"),
    Metric("schedule"),
    Metric("input_tokens", "", "of each row, and how many rows; all begin together"),
    Metric("output_tokens"),
    Metric("batch_rows"),
    Metric(
        "ttft_ms",
        "ms",
        "predicted: the reported layer's `total_ms` in a prefill of the input × layers, + `head_ms`; measured: "
        "prefill and the first step",
    ),
    Metric(
        "tpot_ms",
        "ms",
        "predicted: the same of a decoding step over `decode_positions`; measured: the time after the first token "
        "over the tokens of a row that follow",
    ),
    Metric("output_tokens_per_s", "tokens/s", "`batch_rows` / `tpot_ms`"),
    Metric("ttft_over_sync", "", "over those of `sync`; null where that was not asked for"),
    Metric("tpot_over_sync"),
    Metric("prefill_compute_over_sync"),
    Metric("prefill_exposed_ms", "ms", "the reported layer's `exposed_ms` and `compute_ms` × layers"),
    Metric("decode_exposed_ms", "ms"),
    Metric("prefill_compute_ms", "ms"),
    Metric("decode_compute_ms", "ms"),
    Metric("prefill_without_estimate", "", "see `without_estimate` above"),
    Metric("decode_without_estimate"),
    Metric("prefill_roofline_share"),
    Metric("decode_roofline_share"),
    Metric(
        "head_ms",
        "ms",
        "roofline of the head for one position of each row; `input_tokens` + half of `output_tokens`, rounded up to 128",
    ),
    Metric("decode_positions"),
    Metric("prefill_layers_compiled", "", "see `layers_compiled` and `steady` above"),
    Metric("decode_layers_compiled"),
    Metric("prefill_steady"),
    Metric("decode_steady"),
    Metric(
        "device_gb",
        "1e9 bytes",
        "weights and caches of a device in bfloat16 without activations, and whether that is less than its memory",
    ),
    Metric("fits"),
    Metric("same_tokens", "", "whether all tokens are those of one device; null there"),
    Metric("prefill_collectives", "", "by kind, in the programs of a whole prefill and in that of a step"),
    Metric("step_collectives"),
    Metric("prefill_sent_bytes", "bytes", "what a device gives to them"),
    Metric("step_sent_bytes", "bytes"),
)
"""Of tokens, predicted or measured."""
