"""Terminal output of `tilewright bench serving`, and the notes above its page."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.metrics.metric import Metric, chosen
from tilewright.metrics.serving import LATENCIES, SERVING
from tilewright.metrics.tables import UNKNOWN, FigureTable

REQUESTS, OUTPUT, TOTAL, GOODPUT = chosen(
    SERVING, "requests_per_s output_tokens_per_s total_tokens_per_s goodput_requests_per_s"
)


def summary(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The figures that are one number, in sentences; the first says what was asked for."""
    lines = [f"{facts['model']} at {facts['url']}: {workload_text(figures, facts)}"]
    done = f"{figures['completed']:,} completed in {figures['duration_s']:,.2f} s"
    if figures["failed"]:
        done += f", {figures['failed']:,} failed"
        done += f" ({figures['rejected']:,} turned away as too many)" if figures["rejected"] else ""
    lines.append(f"{done}; at most {figures['peak_concurrency']:,} under way at once")
    for row in figures["failures"]:
        lines.append(f"  {row['requests']:,} × {row['kind'].replace('_', ' ')}: {row['first_message']}")
    if figures["completed"]:
        rates = [
            f"{REQUESTS.of(figures) or UNKNOWN} requests/s",
            f"{OUTPUT.of(figures) or UNKNOWN} output tokens/s",
        ]
        if figures["total_tokens_per_s"] is not None:
            rates.append(f"{TOTAL.of(figures)} tokens/s with prompts")
        lines.append(", ".join(rates))
    if figures["goodput_requests_per_s"] is not None:
        asked = ", ".join(f"{name.upper()} {most:g} ms" for name, most in figures["goodput"].items())
        met = f"{figures['requests_within_goodput']:,} of {figures['requests']:,} requests"
        lines.append(f"goodput: {GOODPUT.of(figures)} requests/s ({met} within {asked})")
    drafts = figures["speculative_decoding"]
    if drafts is not None:
        tau, rate = drafts["mean_acceptance_length"], drafts["draft_acceptance_rate"]
        lines.append(f"τ {tau:.2f}: {rate:.0%} of drafts accepted, in {drafts['num_spec_steps']:,} rounds that drafted")
    return lines


def workload_text(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    count = f"{figures['requests']:,} request{'s' if figures['requests'] > 1 else ''}"
    source = facts["trace"] or facts["prompt_file"] or "held-out code"
    if facts["rate_per_s"] is not None:
        when = f"{facts['rate_per_s']:g} a second at random"
    elif facts["arrivals"] == "burst":
        when = "all at once" if facts["concurrency"] is None else "as fast as possible"
    else:
        when = "in real time" if facts["arrivals"] == "real" else f"{facts['arrivals']} times as fast"
    limit = "" if facts["concurrency"] is None else f", at most {facts['concurrency']:,} at a time"
    return f"{count} of {source}, {when}{limit}"


def latency_table(figures: Mapping[str, Any], percentiles: Sequence[float]) -> FigureTable:
    """A line for each latency that there are values of; what held nothing back has none."""
    columns = ["mean", *(f"p{each:g}" for each in percentiles)]
    rows = []
    for latency in LATENCIES:
        values = {column: figures[f"{latency.name}_{column}_ms"] for column in columns}
        if values["mean"] is not None and (latency.name != "held" or any(values.values())):
            rows.append({"name": latency.head, **values})
    return FigureTable("milliseconds", "latency", {"": rows}, [Metric(name, "ms", head=name, digits=3) for name in columns])


def notes(figures: Mapping[str, Any], facts: Mapping[str, Any], late: int) -> list[str]:
    """Notes that a reader needs with the figures; `late` counts requests that this client sent more than 10 ms too late."""
    said = []
    scale, source = facts["length_scale"], facts["characters_per_token_source"]
    if scale is not None and scale < 1:
        said.append(f"lengths are the trace's times {scale:.3g}: its longest request then fits {facts['context']:,} positions")
    if source is not None:
        said.append(f"prompts are text cut at {facts['characters_per_token']:.3g} characters a token ({source})")
    if facts["records"] is not None and figures["requests"] + facts["warmup"] > facts["records"]:
        said.append(f"the {facts['records']:,} records of the file were sent more than once; a server may remember them")
    if facts["warmup"]:
        failed = f", of which {figures['warmup_failed']} failed" if figures["warmup_failed"] else ""
        said.append(f"{facts['warmup']:,} warm-up requests{failed} are in no figure")
    if figures["cached_prompt_tokens"] and figures["prompt_tokens"]:
        share = figures["cached_prompt_tokens"] / figures["prompt_tokens"]
        said.append(f"{share:.0%} of the prompts' tokens were in the server's prefix cache")
    if figures["output_tokens_counted_by"] in ("chunks", "both"):
        said.append("the server gives no usage: each chunk counts as one token, which is too few where it brings several")
    elif figures["completed"] and figures["token_itl_mean_ms"] is None and figures["itl_mean_ms"] is not None:
        said.append("the server does not say how many tokens a chunk brings: there is no time between tokens")
    if late:
        said.append(f"this client sent {late:,} requests more than 10 ms late: it was itself too slow for their times")
    return said
