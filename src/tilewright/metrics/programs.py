"""Figures of compiled functions side by side: `tilewright.compare`, `tilewright bench graph`."""

from tilewright.metrics.metric import Metric

PROGRAMS = (
    Metric("name", "", "the function; the device that it ran on, or the topology that it was compiled for"),
    Metric("place"),
    Metric("measured", "", "whether it ran; otherwise all is estimated"),
    Metric(
        "median_ms",
        "ms",
        "of a call: the median over `repetitions` runs. The functions run in turns, every second time in reverse; a "
        "run repeats the call for about 50 ms",
        head="ms",
        digits=4,
    ),
    Metric("range_ms", "ms", "the least and the most of these runs"),
    Metric(
        "speedup",
        "",
        "the first function's `median_ms` over this one's",
        head="speedup",
        short="speed-\nup",
        form=".2f",
        par=1.0,
    ),
    Metric("speedup_range", "", "the least and the most of the quotients within one repetition"),
    Metric(
        "compile_s",
        "s",
        "to trace the program, and to compile it or, where it is `loaded`, to read it from JAX's cache on disk. The "
        "other figures do not depend on which",
        head="compile s",
        short="compile\ns",
        form=".2f",
    ),
    Metric("loaded", head="loaded"),
    Metric(
        "read_bytes",
        "bytes",
        "to and from device memory, by the account of the compiled program: every operation reads its operands and "
        "writes its results once ([`compiled/traffic.py`](../src/tilewright/compiled/traffic.py))",
        head="MB read",
        short="MB\nread",
        form=",.2f",
        factor=1e-6,
    ),
    Metric("written_bytes", "bytes", head="MB written", short="MB\nwrit-\nten", form=",.2f", factor=1e-6),
    Metric("round_trips", "", "[below](#round-trips)", head="round trips", short="round\ntrips", form=","),
    Metric("round_trip_bytes", "bytes", head="MB in them", short="MB in\nthem", form=",.2f", factor=1e-6),
    Metric(
        "peak_bytes",
        "bytes",
        "of device memory at once: arguments, results, temporaries",
        head="peak MB",
        short="peak\nMB",
        form=",.2f",
        factor=1e-6,
    ),
    Metric(
        "share_of_bandwidth",
        "",
        "(`read_bytes` + `written_bytes`) / `bandwidth_gb_per_s` / time of a call: how near the program is to the "
        "limit that the memory sets for what it moves. A fused program can be faster and have a lower share",
        head="of bandwidth",
        short="band-\nwidth",
        form=".0%",
    ),
    Metric(
        "largest_difference",
        "",
        "from the first function's result, of any element; whether it is within `tolerance` times the largest "
        "element of that array, by default the square root of the coarser dtype's epsilon. Integers have to be "
        "equal, NaN only agrees with NaN",
        head="differs by",
        short="differs\nby",
        form=".2g",
    ),
    Metric("agrees"),
    Metric(
        "estimated_cycles",
        "cycles",
        "of the chip, by its compiler's cost model, which has no estimate for some operations (gathers, scatters, "
        "Pallas kernels): `without_estimate` counts these. Cycles of programs that leave out different things "
        "cannot be compared",
        head="kilocycles",
        short="kilo-\ncycles",
        form=",.1f",
        factor=0.001,
    ),
    Metric("without_estimate", head="left out", short="left\nout", form=","),
    Metric(
        "memory_cycles",
        "cycles",
        "the least in which all bytes can pass, at the chip's specified bandwidth",
        head="of memory",
        short="of\nmemory",
        form=",.1f",
        factor=0.001,
    ),
    Metric("notes", "", "what the account had to assume"),
)
"""Of one function in one place."""

GRAPH = (
    Metric("experiment", "", "its name"),
    Metric("compared_with", "", "the program that `speedup` and `largest_difference` refer to"),
    Metric(
        "tpu_dma_descriptors",
        "",
        "copies that the TPU kernel starts, and contiguous runs that the NKI kernel's DMAs move, in all reductions "
        "of the experiment: counted from the kernels' own structure (`transfers` in `kernels/gather_reduce`), "
        "whatever machine the benchmark runs on. Null where there is no such kernel: baselines, `csr`, attention",
        head="TPU DMAs",
        short="TPU\nDMAs",
        form=",",
    ),
    Metric("nki_dma_descriptors", head="NKI DMAs", short="NKI\nDMAs", form=","),
    Metric(
        "tpu_gathered_bytes",
        "bytes",
        "of neighbours' rows that the TPU kernel fetches: the graph's edges times a row, no padding",
    ),
    Metric(
        "tpu_read_bytes",
        "bytes",
        "all that these kernels' DMAs move, indices included. They count a neighbour's row each time, where the "
        "account counts `x` once",
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
"""The times of programs that ran, and of those that were compiled for a chip that is not here."""
