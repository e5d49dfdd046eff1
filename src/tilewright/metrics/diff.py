"""Figures of `tilewright inspect diff`."""

from tilewright.metrics.metric import Metric

DIFF = (
    Metric(
        "read_bytes",
        "bytes",
        "HBM traffic by the compiled program; checked by `--fail-above`, as are `estimated_cycles`",
        form=",",
    ),
    Metric("written_bytes", "bytes", form=","),
    Metric("estimated_cycles", "cycles", "sum of the compiler's estimates; operations without one", form=","),
    Metric("without_estimate", form=","),
    Metric("temp_bytes", "bytes", "memory of temporaries", form=","),
    Metric(
        "asynchronous",
        "",
        "collectives started and awaited separately; awaited at once; run on a SparseCore",
        form=",",
    ),
    Metric("synchronous", form=","),
    Metric("sparse_core", form=","),
    Metric("asynchronous_bytes", "bytes", "bytes that a device sends in them", form=","),
    Metric("synchronous_bytes", "bytes", form=","),
    Metric("fusions", "", "fused operations", form=","),
    Metric("copies", "", "copies on the core, and their HBM traffic", form=","),
    Metric("copied_bytes", "bytes", form=","),
    Metric("prefetches", "", "copies between HBM and VMEM beside the core", form=","),
    Metric("prefetched_bytes", "bytes", form=","),
)
"""Figures of a program from one compiler."""

CHANGES = (
    Metric(
        "ways",
        "",
        "changed numbers of collectives by `kind` and `place` (JAX's name stack), and operations moved to or from a SparseCore",
    ),
    Metric("operations", "", "changed numbers and HBM bytes of other operations"),
)
"""Fields of `inspect diff`: differences between the programs of two compilers."""
