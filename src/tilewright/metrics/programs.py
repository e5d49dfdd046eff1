"""Figures of compared functions: `tilewright.compare`, `tilewright bench graph`."""

from tilewright.metrics.metric import Metric

PROGRAMS = (
    Metric("name", "", "function, and device or TPU topology"),
    Metric("place"),
    Metric("measured", "", "false for estimates"),
    Metric(
        "median_ms",
        "ms",
        "time of a call: median of alternating runs of about 50 ms",
        head="ms",
        digits=4,
    ),
    Metric("range_ms", "ms", "minimum and maximum of the runs"),
    Metric(
        "speedup",
        "",
        "the first function's `median_ms` over this one's",
        head="speedup",
        short="speed-\nup",
        form=".2f",
        par=1.0,
    ),
    Metric("speedup_range", "", "minimum and maximum of the quotients of one repetition"),
    Metric(
        "compile_s",
        "s",
        "time to trace and compile, or to load from the disk cache (`loaded`)",
        head="compile s",
        short="compile\ns",
        form=".2f",
    ),
    Metric("loaded", head="loaded"),
    Metric(
        "read_bytes",
        "bytes",
        "device memory traffic by the compiled program: each operation reads its operands and writes its results once",
        head="MB read",
        short="MB\nread",
        form=",.2f",
        factor=1e-6,
    ),
    Metric("written_bytes", "bytes", head="MB written", short="MB\nwrit-\nten", form=",.2f", factor=1e-6),
    Metric(
        "round_trips",
        "",
        "[arrays written to memory and read back](#round-trips), and their bytes",
        head="round trips",
        short="round\ntrips",
        form=",",
    ),
    Metric("round_trip_bytes", "bytes", head="MB in them", short="MB in\nthem", form=",.2f", factor=1e-6),
    Metric(
        "peak_bytes",
        "bytes",
        "device memory of arguments, results and temporaries at once",
        head="peak MB",
        short="peak\nMB",
        form=",.2f",
        factor=1e-6,
    ),
    Metric(
        "share_of_bandwidth",
        "",
        "(`read_bytes` + `written_bytes`) / `bandwidth_gb_per_s` / time. Above 1 if caches serve part",
        head="of bandwidth",
        short="band-\nwidth",
        form=".0%",
    ),
    Metric(
        "largest_difference",
        "",
        "largest difference of an element from the first function's result; whether all differences are within the tolerance",
        head="differs by",
        short="differs\nby",
        form=".2g",
    ),
    Metric("agrees"),
    Metric(
        "estimated_cycles",
        "cycles",
        "the compiler's estimate; `without_estimate` counts operations without one (gathers, scatters, Pallas kernels)",
        head="kilocycles",
        short="kilo-\ncycles",
        form=",.1f",
        factor=0.001,
    ),
    Metric("without_estimate", head="left out", short="left\nout", form=","),
    Metric(
        "memory_cycles",
        "cycles",
        "minimum for all bytes at the chip's specified bandwidth",
        head="of memory",
        short="of\nmemory",
        form=",.1f",
        factor=0.001,
    ),
    Metric("notes", "", "assumptions of the traffic count"),
)
"""Figures of one function on one device or topology."""

GRAPH = (
    Metric("experiment", "", "name"),
    Metric("compared_with", "", "reference of `speedup` and `largest_difference`"),
    Metric(
        "tpu_dma_descriptors",
        "",
        "copies of the TPU kernel, contiguous runs of the NKI kernel's DMAs, counted from the kernels' "
        "structure; null without such a kernel",
        head="TPU DMAs",
        short="TPU\nDMAs",
        form=",",
    ),
    Metric("nki_dma_descriptors", head="NKI DMAs", short="NKI\nDMAs", form=","),
    Metric(
        "tpu_gathered_bytes",
        "bytes",
        "neighbour rows that the TPU kernel fetches",
    ),
    Metric(
        "tpu_read_bytes",
        "bytes",
        "all DMA traffic of these kernels, with indices; each access to a neighbour's row counts",
        head="TPU MB read",
        form=",.2f",
        factor=1e-6,
    ),
    Metric("tpu_written_bytes", "bytes", head="TPU MB written", form=",.2f", factor=1e-6),
    Metric("nki_read_bytes", "bytes", head="NKI MB read", form=",.2f", factor=1e-6),
    Metric("nki_written_bytes", "bytes", head="NKI MB written", form=",.2f", factor=1e-6),
)
"""Further fields of `tilewright bench graph`."""

MEASURED = "median_ms speedup share_of_bandwidth"
ESTIMATED = "estimated_cycles without_estimate memory_cycles"
"""Times of programs that ran, and of programs compiled for absent chips."""
