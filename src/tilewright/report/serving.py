"""Terminal output of `tilewright bench serving`."""

from collections.abc import Sequence

from tilewright.metrics.metric import Metric, select_metrics
from tilewright.metrics.serving import LATENCIES, SERVING
from tilewright.metrics.tables import UNKNOWN, FigureTable, Row

REQUESTS, OUTPUT, TOTAL, GOODPUT = select_metrics(
    SERVING, "requests_per_s output_tokens_per_s total_tokens_per_s goodput_requests_per_s"
)


def summary(figures: Row, facts: Row) -> list[str]:
    """Returns sentences with the single figures of a run. The first sentence describes the workload."""
    lines = [f"{facts['model']} at {facts['url']}: {workload_text(figures, facts)}"]
    summary = f"{figures['completed']:,} completed in {figures['duration_s']:,.2f} s"
    if figures["failed"]:
        summary += f", {figures['failed']:,} failed"
        summary += f" ({figures['rejected']:,} rejected by an overloaded server)" if figures["rejected"] else ""
    lines.append(f"{summary}; peak concurrency {figures['peak_concurrency']:,}")
    for row in figures["failures"]:
        lines.append(f"  {row['requests']:,} × {row['kind'].replace('_', ' ')}: {row['first_message']}")
    if figures["completed"]:
        rates = [
            f"{REQUESTS.row_text(figures) or UNKNOWN} requests/s",
            f"{OUTPUT.row_text(figures) or UNKNOWN} output tokens/s",
        ]
        if figures["total_tokens_per_s"] is not None:
            rates.append(f"{TOTAL.row_text(figures)} tokens/s including prompts")
        lines.append(", ".join(rates))
    if figures["goodput_requests_per_s"] is not None:
        objectives = ", ".join(f"{name.upper()} {most:g} ms" for name, most in figures["goodput"].items())
        met = f"{figures['requests_within_goodput']:,} of {figures['requests']:,} requests"
        lines.append(f"goodput: {GOODPUT.row_text(figures)} requests/s ({met} within {objectives})")
    drafts = figures["speculative_decoding"]
    if drafts is not None:
        tau = drafts["mean_acceptance_length"]
        rate = drafts["draft_acceptance_rate"]
        lines.append(f"τ {tau:.2f}: {rate:.0%} of drafts accepted, in {drafts['num_spec_steps']:,} rounds with drafts")
    return lines


def workload_text(figures: Row, facts: Row) -> str:
    count = f"{figures['requests']:,} request{'s' if figures['requests'] > 1 else ''}"
    source = facts["trace"] or facts["prompt_file"] or "held-out code"
    if facts["rate_per_s"] is not None:
        arrivals = f"{facts['rate_per_s']:g} per second (Poisson)"
    elif facts["arrivals"] == "burst":
        arrivals = "all at once" if facts["concurrency"] is None else "sent as slots become free"
    else:
        arrivals = "at the trace's times" if facts["arrivals"] == "real" else f"{facts['arrivals']} times as fast as the trace"
    limit = "" if facts["concurrency"] is None else f", at most {facts['concurrency']:,} concurrent"
    return f"{count} of {source}, {arrivals}{limit}"


def latency_table(figures: Row, percentiles: Sequence[float]) -> FigureTable:
    """Returns a table with a line for each measured latency; `held` is left out if no request was held."""
    columns = ["mean", *(f"p{each:g}" for each in percentiles)]
    rows = []
    for latency in LATENCIES:
        values = {column: figures[f"{latency.name}_{column}_ms"] for column in columns}
        if values["mean"] is not None and (latency.name != "held" or any(values.values())):
            rows.append({"name": latency.head, **values})
    return FigureTable("milliseconds", "latency", {"": rows}, [Metric(name, "ms", head=name, digits=3) for name in columns])


def notes(figures: Row, facts: Row, late_requests: int) -> list[str]:
    """Returns notes on how to read the figures. `late_requests` counts requests that this client sent over 10 ms late."""
    remarks = []
    scale = facts["length_scale"]
    source = facts["characters_per_token_source"]
    if scale is not None and scale < 1:
        remarks.append(
            f"the trace's lengths are scaled by {scale:.3g}, so that all requests fit {facts['context']:,} positions"
        )
    if source is not None:
        remarks.append(f"prompts are text cut at {facts['characters_per_token']:.3g} characters per token ({source})")
    if facts["records"] is not None and figures["requests"] + facts["warmup"] > facts["records"]:
        remarks.append(f"the file's {facts['records']:,} records were sent more than once; the server may cache them")
    if facts["warmup"]:
        failed = f" ({figures['warmup_failed']} failed)" if figures["warmup_failed"] else ""
        remarks.append(f"the figures exclude {facts['warmup']:,} warm-up requests{failed}")
    if figures["cached_prompt_tokens"] and figures["prompt_tokens"]:
        share = figures["cached_prompt_tokens"] / figures["prompt_tokens"]
        remarks.append(f"{share:.0%} of the prompt tokens were in the server's prefix cache")
    if figures["output_tokens_counted_by"] in ("chunks", "both"):
        remarks.append("the server sends no usage: each chunk counts as one token, too few for chunks of several tokens")
    elif figures["completed"] and figures["token_itl_mean_ms"] is None and figures["itl_mean_ms"] is not None:
        remarks.append("the server sends no token counts per chunk: no time between tokens")
    if late_requests:
        remarks.append(f"this client sent {late_requests:,} requests over 10 ms late: it was too slow for this load")
    return remarks
