"""Figures of `tilewright shapes suggest`."""

from tilewright.metrics.metric import Metric

SHAPES = (
    Metric("requests", "", "in the trace, and how many of these are longer than the context and left out of what follows"),
    Metric("requests_beyond_context"),
    Metric("prompt_tokens", "tokens", "of all requests: `median`, `p99`, `max`"),
    Metric("output_tokens", "tokens"),
    Metric("longest_request_positions", "positions", "of those that count: prompt and output"),
    Metric(
        "needed_positions",
        "positions",
        "what the requests have: prompt and output (`capacities`), or all of the prompt but its last token (`chunks`)",
    ),
    Metric(
        "computed_positions",
        "positions",
        "the capacities that hold the requests, or the chunks of their prefill plans, summed",
    ),
    Metric("padding_share", "", "1 − `needed_positions` / `computed_positions`", head="padding", form=".1%"),
    Metric("runs", "", "chunks in all plans; for capacities the requests"),
    Metric(
        "work_positions",
        "positions",
        "what choices are judged by: `computed_positions`, for chunks with `chunk_overhead_positions` more for each run",
    ),
    Metric(
        "saved_share",
        "",
        "of the work of the choice before; null for the first",
        head="work saved",
        short="work\nsaved",
        form=".1%",
    ),
    Metric(
        "programs",
        "",
        "of the whole table, for requests up to the longest: with this choice, and with the recommended one of the other list",
        head="programs",
        form=",",
    ),
    Metric(
        "compile_seconds",
        "s",
        "an estimate: the programs one after another, each as long as `compile_seconds_per_program` says; null "
        "where that is unknown",
        head="compile",
    ),
    Metric(
        "compile_seconds_source",
        "",
        "`given` by `--compile-seconds`, `measured` here on one program of each name, or null; "
        "`compile_programs_loaded` of those measured came from JAX's cache on disk",
    ),
    Metric(
        "requests_without_shape",
        "",
        "of those that count: longer than the largest capacity of `present`, and left out of its figures",
    ),
)
"""Of a trace, and of tables of shapes for it."""
