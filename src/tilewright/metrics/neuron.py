"""Figures of simulated Neuron programs: `tilewright neuron simulate`, `plan inference`, `plan training`."""

from tilewright.metrics.metric import Metric

NEURON = (
    Metric("schedule", "", "of a plan's place: with the cores that share each layer, and rows", head="schedule", words=True),
    Metric("cores", head="cores"),
    Metric("batch_rows", head="batch"),
    Metric(
        "packets", "", "of a training setting: `default` sizes, or those that are `recommended`", head="packets", words=True
    ),
    Metric(
        "total_ms",
        "ms",
        "a program from its beginning to its last signal; of a training step; of a prefill with the first token; of "
        "a decoding step in the middle of the output",
    ),
    Metric("step_ms", "ms", head="step ms", short="step\nms", digits=3),
    Metric("ttft_ms", "ms", head="TTFT ms", short="TTFT\nms", digits=3),
    Metric("tpot_ms", "ms", head="TPOT ms", short="TPOT\nms", digits=3),
    Metric("compute_ms", "ms", "in which an engine that computes is busy"),
    Metric("loading_ms", "ms", "in which none is, but a transfer of compute's is under way"),
    Metric(
        "exposed_ms",
        "ms",
        "in which neither is, but a collective is under way",
        head="exposed ms",
        short="exposed\nms",
        digits=3,
    ),
    Metric("waiting_ms", "ms", "in which nothing is under way but signals; the four together are all of the time"),
    Metric(
        "busy_ms",
        "ms",
        "of each engine, of the DMA engines of compute, and of each stream of collectives",
        head="busy ms",
        digits=3,
    ),
    Metric("idle_ms", "ms", head="idle ms", digits=3),
    Metric(
        "exposed_layers_ms",
        "ms",
        "`exposed_ms` by layer, each moment with the collective that began first; of plans, what one more layer brings",
    ),
    Metric("layer_exposed_ms", "ms"),
    Metric(
        "dma_gb",
        "1e9 bytes",
        "what passes the DMA engines for compute and for each purpose of collectives",
        head="GB",
        digits=3,
    ),
    Metric("dma_share", head="share", form=".1%"),
    Metric(
        "tp_delay_ms",
        "ms",
        "how long tensor-parallel collectives stood ready behind others of their stream, summed up",
        head="TP delay ms",
        short="TP delay\nms",
        digits=3,
    ),
    Metric(
        "memory_gib",
        "GiB",
        "peak of a core's device memory: resident and held by the program; its share of the chip's; whether the "
        "first is at most the second",
        head="GiB",
        digits=3,
    ),
    Metric("memory_limit_gib", "GiB"),
    Metric("fits"),
    Metric("sbuf_peak_mib", "MiB", "most that was held at once"),
    Metric("psum_peak_mib", "MiB"),
    Metric("limit", "", "the resource that was busy longest, and for which share of the time", head="limit", words=True),
    Metric("limit_share"),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "`batch_rows` / `tpot_ms`; of training the tokens of all ranks over `step_ms`",
        head="tokens/s",
        digits=3,
    ),
    Metric(
        "tokens_per_s_gain",
        "",
        "against `sync` at the same cores, batch and input, with the algorithm that suits its sums best: by which share there "
        "are more tokens, or less time",
        head="gain",
        form="+.1%",
    ),
    Metric("ttft_gain", head="gain", form="+.1%"),
    Metric("tpot_gain", head="gain", form="+.1%"),
    Metric(
        "tokens_per_s_gain_over_sequence",
        "",
        "the same against `sequence`; null where that is not compared",
        head="over sequence",
        short="over\nseq.",
        form="+.1%",
    ),
    Metric("ttft_gain_over_sequence", head="over sequence", short="over\nseq.", form="+.1%"),
    Metric("tpot_gain_over_sequence", head="over sequence", short="over\nseq.", form="+.1%"),
    Metric(
        "gain",
        "",
        "of a training setting: by which share its step is shorter than in the compiler's order",
        head="gain",
        form="+.1%",
    ),
    Metric(
        "streams",
        "",
        "of a plan's phase: streams of collectives, the algorithm of those that the runtime runs (null where sums are hops "
        "of the program's own), weights loaded at a time, tiles of columns, whether weights are loaded before their input "
        "is there",
        head="streams",
    ),
    Metric("algorithm"),
    Metric("tile_kib"),
    Metric("tiles"),
    Metric("prefetch"),
    Metric(
        "early_layers",
        "layers",
        "shifts: prefetch distance and scatter delay; attention and MLP are half a layer each",
        head="prefetch layers",
        short="prefetch\nlayers",
        form="g",
    ),
    Metric("late_layers", "layers", head="delay layers", short="delay\nlayers", form="g"),
    Metric("ranges", "", "by figure or place, see [ranges](#ranges)"),
)
"""Of a program or of a plan."""
