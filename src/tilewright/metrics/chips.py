"""Figures of `tilewright chips`."""

from tilewright.metrics.metric import Metric

CHIPS = (
    Metric("bf16_tflop_per_s", "1e12/s", "peak bfloat16 rate", head="TFLOP/s bf16", short="TFLOP/s\nbf16", digits=3),
    Metric("memory_gb", "1e9 bytes", "device memory and bandwidth", head="memory GB", short="memory\nGB", digits=3),
    Metric("memory_gb_per_s", "GB/s", head="memory GB/s", short="memory\nGB/s", digits=3),
    Metric(
        "links_gb_per_s",
        "GB/s",
        "all links, both directions",
        head="links GB/s",
        short="links\nGB/s",
        digits=3,
    ),
    Metric(
        "flops_per_memory_byte",
        "",
        "operations per byte of memory or link traffic at the peaks",
        head="flop/byte memory",
        short="flop/byte\nmemory",
        digits=3,
    ),
    Metric("flops_per_link_byte", head="flop/byte links", short="flop/byte\nlinks", digits=3),
    Metric("fabric", "", "topology", head="fabric", words=True),
    Metric(
        "compute_ms",
        "ms",
        "operations, memory bytes, sent bytes of a workload at the peaks",
    ),
    Metric("memory_ms", "ms"),
    Metric("link_ms", "ms"),
    Metric("least_ms", "ms", "the largest of these, and its name", head="least ms", short="least\nms", digits=3),
    Metric("limit", head="limit", words=True),
    Metric("ranges", "", "uncertain constants of Neuron chips: low, used, high"),
)
"""Figures of a chip, and of a workload on it."""
