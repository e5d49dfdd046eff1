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
        head="schedule",
        words=True,
    ),
    Metric("phase"),
    Metric("batch_rows"),
    Metric("positions"),
    Metric(
        "compute_cycles",
        "cycles",
        "of the core's operations, at the clock that the chip's published peak implies",
        head="compute kcycles",
        short="compute\nkcycles",
        form=",.0f",
        factor=1e-3,
    ),
    Metric("compute_ms", "ms", head="compute ms", short="compute\nms", digits=3),
    Metric(
        "communication_ms",
        "ms",
        "time in which at least one collective is under way: `hidden_ms` + `exposed_ms`",
        head="under way ms",
        short="under\nway ms",
        digits=3,
    ),
    Metric(
        "exposed_ms", "ms", "time in which the core waits for a collective", head="exposed ms", short="exposed\nms", digits=3
    ),
    Metric(
        "hidden_ms",
        "ms",
        "time in which a collective is under way and the core does not wait for one: it computes, or waits for memory",
        head="hidden ms",
        short="hidden\nms",
        digits=3,
    ),
    Metric("memory_wait_ms", "ms", "time in which the core waits for a copy between HBM and VMEM"),
    Metric("total_ms", "ms", "`compute_ms` + `exposed_ms` + `memory_wait_ms`", head="total ms", short="total\nms", digits=3),
    Metric("transfers", "", "collectives, and what a device gives to them"),
    Metric("sent_bytes", "bytes"),
    Metric(
        "exposed_share",
        "",
        "`exposed_ms` / `communication_ms`; null without communication. `--fail-above` goes by it",
        head="share exposed",
        short="exposed",
        form=".1%",
    ),
    Metric(
        "exposed_share_of_sync",
        "",
        "`exposed_ms` over that of `sync`; null where `sync` was not asked for",
        head="exposed of sync's",
        short="of\nsync's",
        form=".1%",
    ),
    Metric(
        "extra_compute_share",
        "",
        "`compute_ms` over that of `sync`, less 1",
        head="compute extra",
        short="compute\nextra",
        form=".1%",
    ),
    Metric("busiest_link_ms", "ms", "how long the layer's transfers take that link which they take longest"),
    Metric(
        "least_exposed_ms",
        "ms",
        "`busiest_link_ms` − `compute_ms`, at least 0: what this schedule's transfers cannot hide",
        head="least exposed ms",
        short="least\nms",
        digits=3,
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
    Metric("total_over_bound", "", "`total_ms` / `bound_total_ms`", head="× bound", short="×\nbound", form=".2f"),
    Metric("total_over_larger", "", "`total_ms` over the larger of `compute_ms` and `busiest_link_ms`"),
    Metric(
        "model_layers",
        "",
        "layers of the model, and the layer's times multiplied by them; embedding and head are not in it",
    ),
    Metric("model_total_ms", "ms", head="model ms", short="model\nms", digits=3),
    Metric("model_exposed_ms", "ms"),
    Metric(
        "layers_compiled", "", "how many, which one, and the times of each", head="layers compiled", short="layers\ncompiled"
    ),
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
        head="program",
        words=True,
    ),
    Metric("plan"),
    Metric("mesh", "", "devices along its axes; sequences of a step over all devices, and positions of each"),
    Metric("batch_rows"),
    Metric("positions"),
    Metric(
        "exposed_share_of_plain",
        "",
        "`exposed_ms` over that of the step without tokens or rings; null where that was not compiled",
        head="exposed of plain's",
        short="of\nplain's",
        form=".1%",
    ),
    Metric("compute_share", "", "`compute_ms` / `total_ms`", head="compute share", short="compute\nshare", form=".1%"),
    Metric("bound_total_ms", "ms", "the layer without communication: `compute_ms` of the same program"),
    Metric(
        "peak_bytes",
        "bytes",
        "device memory of the compiled step: arguments, results and temporaries at once; parts of it",
        head="peak GiB",
        short="peak\nGiB",
        form=".2f",
        factor=2**-30,
    ),
    Metric("argument_bytes", "bytes"),
    Metric("temporary_bytes", "bytes", head="temporary GiB", form=".2f", factor=2**-30),
    Metric(
        "model_peak_bytes",
        "bytes",
        "that, and for each layer not compiled its weights, two moments and gradient, float32, the stream kept of "
        "it, and its whole weights where the backward pass does not gather them again",
        head="all layers GiB",
        short="all layers\nGiB",
        form=".2f",
        factor=2**-30,
    ),
    Metric(
        "model_total_ms",
        "ms",
        "of the compiled step, and the reported layer for each one not compiled; the update of those is not in it",
        head="all layers ms",
        short="all layers\nms",
        digits=3,
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
        "of the reported layer, those of one purpose together: the next table",
    ),
    Metric("unsteady_share", "", "by how much `total_ms` of the layer behind differs, in the pass where it differs more"),
)
"""Of a training step, besides those of `LAYER`."""

TRANSFERS = (
    Metric("pass", "", "in which they are, and their purpose", head="pass", words=True),
    Metric("name", head="for", words=True),
    Metric("kind", "", "of collective; how many, and how many of them are asynchronous", head="kind", words=True),
    Metric("transfers"),
    Metric("asynchronous"),
    Metric("begin_ms", "ms", "from the layer's first product in the pass", head="begin ms", digits=3),
    Metric("end_ms", "ms", head="end ms", digits=3),
    Metric("alone_ms", "ms", "one after another", head="alone ms", digits=3),
    Metric("exposed_ms", "ms", "in which the core waits for them", head="exposed ms", digits=3),
    Metric("beside_ms", "ms", "by name, what is computed meanwhile", head="compute meanwhile, ms", words=True),
)
"""Of the transfers of a layer that have one purpose, in one pass."""

TIMES = (
    Metric("chip", "", "the slice (of predictions); `schedule` is null on one device"),
    Metric("devices", head="devices"),
    Metric("schedule", head="schedule", words=True),
    Metric("input_tokens", "", "of each row, and how many rows; all begin together", head="input"),
    Metric("output_tokens", head="output"),
    Metric("batch_rows", head="batch"),
    Metric(
        "ttft_ms",
        "ms",
        "predicted: the reported layer's `total_ms` in a prefill of the input × layers, + `head_ms`; measured: "
        "prefill and the first step",
        head="TTFT ms",
        digits=3,
    ),
    Metric(
        "tpot_ms",
        "ms",
        "predicted: the same of a decoding step over `decode_positions`; measured: the time after the first token "
        "over the tokens of a row that follow",
        head="TPOT ms",
        digits=3,
    ),
    Metric("output_tokens_per_s", "tokens/s", "`batch_rows` / `tpot_ms`", head="tokens/s", form=",.0f"),
    Metric(
        "ttft_over_sync",
        "",
        "over those of `sync`; null where that was not asked for",
        head="TTFT of sync's",
        short="of\nsync's",
        form=".2f",
    ),
    Metric("tpot_over_sync", head="TPOT of sync's", short="of\nsync's", form=".2f"),
    Metric("prefill_compute_over_sync", head="compute of sync's", short="compute\nof sync's", form=".2f"),
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
        head="GB a device",
        form=".1f",
    ),
    Metric("fits", head="fits"),
    Metric(
        "same_tokens", "", "whether all tokens are those of one device; null there", head="same tokens", short="same\ntokens"
    ),
    Metric(
        "prefill_collectives",
        "",
        "by kind, in the programs of a whole prefill and in that of a step",
        head="collectives of a prefill",
        short="collectives\nprefill",
    ),
    Metric("step_collectives", head="collectives of a step", short="collectives\na step"),
    Metric("prefill_sent_bytes", "bytes", "what a device gives to them", head="KiB", form=",.0f", factor=2**-10),
    Metric("step_sent_bytes", "bytes", head="KiB", form=",.0f", factor=2**-10),
)
"""Of tokens, predicted or measured."""

MICRO = (
    Metric(
        "collective",
        "",
        "its name in HLO, the program that it is part of, and what each device gives to it",
        head="collective",
        words=True,
    ),
    Metric("program", head="program", words=True),
    Metric("size_bytes", "bytes", head="size", words=True),
    Metric(
        "made_of_it",
        "",
        "in words, what the compiler made of the collectives; their `kinds`, how many transfers these are, and how many of "
        "them asynchronous",
        head="made of it",
        words=True,
    ),
    Metric("kinds"),
    Metric("transfers"),
    Metric("asynchronous"),
    Metric("compute_us", "µs", "of the whole program, as [of a layer](#overlap)", head="compute us", digits=3),
    Metric("communication_us", "µs", head="under way us", digits=3),
    Metric("hidden_us", "µs"),
    Metric("exposed_us", "µs", head="exposed us", digits=3),
    Metric("ring_us", "µs", "the α–β time of one such collective round a ring both ways; null of a permute"),
    Metric(
        "product_us",
        "µs",
        "measured: medians of runs in turns, of the parts alone and of both together",
        head="product us",
        digits=3,
    ),
    Metric("collective_us", "µs", head="collective us", digits=3),
    Metric("both_us", "µs", head="both us", digits=3),
    Metric(
        "hidden_share",
        "",
        "how much less both take than one after the other, of the collective's time",
        head="hidden",
        form=".0%",
    ),
    Metric("collectives", "", "measured: one, or two of `two`"),
    Metric("product_flops", "", "of the product on a device, and bytes that it reads and writes"),
    Metric("product_bytes", "bytes"),
    Metric(
        "memory_us",
        "µs",
        "in which a device adds two arrays as large as the collective's, and the bytes that pass memory: what `--calibrate` "
        "fits to",
    ),
    Metric("memory_bytes", "bytes"),
)
"""Of one collective beside a product, compiled or measured: `tilewright bench overlap --micro`."""
