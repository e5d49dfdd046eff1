"""Figures of `tilewright inspect diff`."""

from tilewright.metrics.metric import Metric

DIFF = (
    Metric(
        "read_bytes",
        "bytes",
        "of HBM, [by the account of the compiled program](#functions-side-by-side). `--fail-above` goes by them and by "
        "`estimated_cycles`",
        form=",",
    ),
    Metric("written_bytes", "bytes", form=","),
    Metric("estimated_cycles", "cycles", "the sum of the compiler's own estimates; operations that have none", form=","),
    Metric("without_estimate", form=","),
    Metric("temp_bytes", "bytes", "device memory between arguments and results", form=","),
    Metric(
        "asynchronous",
        "",
        "collectives that are begun at one place and waited for at another; that the core waits for at once; that run on a "
        "SparseCore",
        form=",",
    ),
    Metric("synchronous", form=","),
    Metric("sparse_core", form=","),
    Metric("asynchronous_bytes", "bytes", "that a device gives to them; those on a SparseCore are among the former", form=","),
    Metric("synchronous_bytes", "bytes", form=","),
    Metric("fusions", "", "fused operations", form=","),
    Metric("copies", "", "copies on the core, and their reads and writes of HBM", form=","),
    Metric("copied_bytes", "bytes", form=","),
    Metric("prefetches", "", "copies between HBM and VMEM beside the core", form=","),
    Metric("prefetched_bytes", "bytes", form=","),
)
"""Of a program as one compiler made it."""

CHANGES = (
    Metric(
        "ways",
        "",
        "by `kind` and `place` (JAX's name stack): how many collectives went which way, where that differs; other operations "
        "too that came to a SparseCore or left it",
    ),
    Metric("operations", "", "by `kind` and `place`: number and HBM bytes of other operations, where they differ"),
)
"""Fields of `inspect diff`: differences between the programs of two compilers."""
