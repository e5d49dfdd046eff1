"""Figures of `tilewright bench round`."""

from tilewright.metrics.metric import Metric

ROUND = (
    Metric("context", "positions", "before the block", head="context"),
    Metric("block_size", "tokens", "in the block, the known one included", head="block"),
    Metric("capacity", "positions", "of the caches"),
    Metric("base_block_size", "tokens", "of the record that ratios refer to: 16, or the smallest"),
    Metric("step_ms", "ms", "of a plain decoding step", head="step", digits=3),
    Metric("weight_gb", "1e9 bytes", "that a plain step reads of the target's weights, and that verifying the block does"),
    Metric("verify_weight_gb", "1e9 bytes"),
    Metric("bandwidth_gb_per_s", "GB/s", "of memory, in the same turns: read on a CPU, elsewhere a copy, read plus written"),
    Metric("step_share_of_bandwidth", "", "`weight_gb` / `step_ms` over that"),
    Metric("layers_compiled", "layers", "of the target in the programs that were compiled; are the others extrapolated"),
    Metric("extrapolated"),
)
"""Of a round with one block size, at one context."""

PARTS = (
    Metric("ms", "ms", "measured: median of the repetitions, in turns"),
    Metric("range_ms", "ms", "the least and the most of them"),
    Metric("ms_ratio", "", "`ms` over that at `base_block_size`"),
    Metric(
        "cycles",
        "cycles",
        "compiled: the sum over all operations, and for Pallas kernels, which carry no estimate, the roofline of the bytes and "
        "flops that they declare",
        head="cycles",
        form=",.0f",
        factor=1e-3,
    ),
    Metric("memory_cycles", "cycles", "the least for all bytes to and from memory", head="HBM", form=",.0f", factor=1e-3),
    Metric("bound_cycles", "cycles", "the larger of both", head="larger", form=",.0f", factor=1e-3),
    Metric("bound_cycles_ratio", "", "`bound_cycles` over those at `base_block_size`", head="×", form=".2f"),
    Metric("read_bytes", "bytes", "of memory", head="MB read", form=",.0f", factor=1e-6),
    Metric("written_bytes", "bytes", head="written", form=",.1f", factor=1e-6),
    Metric("peak_bytes", "bytes", "the most memory at once", head="GB", form=".1f", factor=1e-9),
)
"""Of a part of it, `draft_ms` say: `draft`, `draft_head`, `draft_top_k`, `verify`, `verify_head`, `extend`, `round`, `step`."""
