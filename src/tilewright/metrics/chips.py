"""Figures of `tilewright chips`."""

from tilewright.metrics.metric import Metric

CHIPS = (
    Metric("bf16_tflop_per_s", "1e12/s", "peak of bfloat16 operations", head="TFLOP/s bf16", short="TFLOP/s\nbf16", digits=3),
    Metric("memory_gb", "1e9 bytes", "of device memory, and what passes it", head="memory GB", short="memory\nGB", digits=3),
    Metric("memory_gb_per_s", "GB/s", head="memory GB/s", short="memory\nGB/s", digits=3),
    Metric(
        "links_gb_per_s",
        "GB/s",
        "what passes all links, both directions together",
        head="links GB/s",
        short="links\nGB/s",
        digits=3,
    ),
    Metric(
        "flops_per_memory_byte",
        "",
        "`bf16_tflop_per_s` over the bytes that pass memory, or all links in both directions, in the same time",
        head="flop/byte memory",
        short="flop/byte\nmemory",
        digits=3,
    ),
    Metric("flops_per_link_byte", head="flop/byte links", short="flop/byte\nlinks", digits=3),
    Metric("fabric", "", "how chips are joined", head="fabric", words=True),
    Metric(
        "compute_ms",
        "ms",
        "of a piece of work: its operations, its bytes of memory, and its bytes sent in one direction, each at the peak",
    ),
    Metric("memory_ms", "ms"),
    Metric("link_ms", "ms"),
    Metric("least_ms", "ms", "the largest of them, and its name", head="least ms", short="least\nms", digits=3),
    Metric("limit", head="limit", words=True),
    Metric("ranges", "", "of the constants of Neuron chips that have a range: low end, value that is used, high end"),
)
"""Of a chip, and of a piece of work on it."""
