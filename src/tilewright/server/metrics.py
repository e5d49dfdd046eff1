"""Metrics for Prometheus: the engine's counts when they are asked for, and how long requests took.

Where a figure means what it means in vLLM it has vLLM's name; the others begin with `tilewright_`.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tilewright.runtime.request import EndReason, EngineStats, Times
from tilewright.runtime.service import Service

FINISHED: Mapping[EndReason, str] = {
    "eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error",
}  # fmt: skip
"""vLLM's words for how requests end."""

GAUGES = {
    "vllm:num_requests_running": ("Requests that are computed now.", lambda f: f.running),
    "vllm:num_requests_waiting": ("Requests that wait.", lambda f: f.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the pages that running requests hold.", lambda f: share(f.pages_used, f.pages)),
    "tilewright_waiting_tokens": ("Prompt tokens of the requests that wait.", lambda f: f.waiting_tokens),
    "tilewright_slots": ("Requests that can run at once.", lambda f: f.slots),
    "tilewright_pages": ("Pages in the pool.", lambda f: f.pages),
    "tilewright_prefix_pages": ("Pages that the prefix cache keeps.", lambda f: f.pages_cached),
    "tilewright_engine_step_age_seconds": ("Since the engine last went round.", lambda f: f.step_age_s),
    "tilewright_warm_seconds": ("What compiling before the engine was ready took.", lambda f: f.warm_seconds),
    "tilewright_padding_ratio": (
        "Share of padding in the rows of all rounds.", lambda f: share(f.padding_rows, f.row_rounds + f.padding_rows)
    ),
    "tilewright_prefill_padding_ratio": (
        "Share of padding in all prefilled positions.", lambda f: share(f.prefill_padding, f.prefill_tokens + f.prefill_padding)
    ),
}  # fmt: skip

COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of all requests.", lambda f: f.prompt_tokens),
    "vllm:generation_tokens": ("Generated tokens.", lambda f: f.generated_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda f: f.prefix_queries),
    "vllm:prefix_cache_hits": ("Prompt tokens found there.", lambda f: f.prefix_hits),
    "vllm:num_preemptions": ("Requests that gave up their pages and were computed anew.", lambda f: f.preemptions),
    "vllm:admission_rejections": ("Requests turned away since the queue was full.", lambda f: f.rejected),
    "vllm:spec_decode_num_drafts": ("Rounds of a request in which something was drafted.", lambda f: f.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens.", lambda f: f.drafted),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted draft tokens.", lambda f: f.accepted),
    "tilewright_dispatches": ("Dispatches of rounds.", lambda f: f.dispatches),
    "tilewright_automaton_rounds": (
        "Rounds under masks made on the device, for requests with a grammar.",
        lambda f: f.automaton_rounds,
    ),
    "tilewright_constrained_rounds": (
        "Rounds under masks made on the host, for a request with a grammar.",
        lambda f: f.constrained_rounds,
    ),
    "tilewright_row_rounds": ("Rows that rounds ran for requests.", lambda f: f.row_rounds),
    "tilewright_padding_rows": ("Rows that rounds ran to fill a shape.", lambda f: f.padding_rows),
    "tilewright_prefill_tokens": ("Positions that prefill computed for requests.", lambda f: f.prefill_tokens),
    "tilewright_prefill_padding": ("Positions that prefill computed to fill a chunk.", lambda f: f.prefill_padding),
}

FAMILIES = {
    "vllm:request_success": ("Requests that ended.", "finished_reason", lambda f: by_finish(f.ended)),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Accepted draft tokens by their place in the block, from 0.",
        "position",
        lambda f: {str(place): count for place, count in enumerate(f.accepted_at)},
    ),
    "tilewright_xla_compilations": (
        "Compiled programs; while serving there should be none.",
        "phase",
        lambda f: {"warm": f.programs, "serving": f.compilations},
    ),
    "tilewright_rounds": (
        "Rounds, by drafter and block width; denoising steps, by what they look at.",
        "choice",
        lambda f: f.widths,
    ),
}
"""Counters with a label besides the model's name."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def by_finish(ended: Mapping[str, int]) -> dict[str, int]:
    """Ends under vLLM's words for them."""
    counts = dict.fromkeys(FINISHED.values(), 0)
    for reason, word in FINISHED.items():
        counts[word] += ended.get(reason, 0)
    return counts


class EngineCollector(Collector):
    """Reads the engine's stats when Prometheus asks."""

    def __init__(self, engine: Service, model: str):
        self.engine, self.model = engine, model

    def describe(self) -> Iterable[Metric]:
        return ()  # else a registry would ask the engine when this is registered

    def collect(self) -> Iterator[Metric]:
        stats: EngineStats = self.engine.stats()
        for name, (said, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, said, labels=["model_name"])
            gauge.add_metric([self.model], value(stats))
            yield gauge
        for name, (said, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, said, labels=["model_name"])
            counter.add_metric([self.model], value(stats))
            yield counter
        for name, (said, label, values) in FAMILIES.items():
            counter = CounterMetricFamily(name, said, labels=["model_name", label])
            for key, count in values(stats).items():
                counter.add_metric([self.model, key], count)
            yield counter


class Timings:
    """Histograms of requests' times, in seconds, from what the engine noted of them."""

    def __init__(self, registry: CollectorRegistry, model: str):
        def histogram(name: str, said: str) -> Histogram:
            return Histogram(name, said, ["model_name"], registry=registry, buckets=SECONDS).labels(model)

        self.first = histogram("vllm:time_to_first_token_seconds", "From asking to the first token.")
        self.between = histogram("vllm:inter_token_latency_seconds", "Between two arrivals of tokens of a request.")
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From asking to the end.")
        self.queue = histogram("vllm:request_queue_time_seconds", "From asking to being admitted.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From being admitted to the first token.")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the end.")

    def gap(self, seconds: float) -> None:
        """Notes what lay between two arrivals of tokens of a request."""
        self.between.observe(seconds)

    def end(self, times: Times) -> None:
        """Notes all times of a request that has ended."""
        spans = (
            (self.first, times.asked, times.first_token),
            (self.whole, times.asked, times.ended),
            (self.queue, times.asked, times.admitted),
            (self.prefill, times.admitted, times.first_token),
            (self.decode, times.first_token, times.ended),
        )
        for histogram, begin, end in spans:
            if begin and end:
                histogram.observe(max(end - begin, 0.0))


def text_of(registry: CollectorRegistry) -> bytes:
    """All metrics in Prometheus' text format."""
    return generate_latest(registry)
