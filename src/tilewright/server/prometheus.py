"""Prometheus' view of the server: the engine's counts when they are asked for, and how long requests took.

`metrics/prometheus.py` declares the metrics; what each reads stands here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from tilewright.metrics.prometheus import COUNTERS, GAUGES, HISTOGRAMS
from tilewright.runtime.request import EndReason, EngineStats, Times
from tilewright.runtime.service import Service

FINISHED: Mapping[EndReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "error": "error",
}
"""vLLM's words for how requests end."""

READ: Mapping[str, Callable[[EngineStats], float | Mapping[str, int]]] = {
    "vllm:num_requests_running": lambda f: f.running,
    "vllm:num_requests_waiting": lambda f: f.waiting,
    "vllm:kv_cache_usage_perc": lambda f: share(f.pages_used, f.pages),
    "tilewright_waiting_tokens": lambda f: f.waiting_tokens,
    "tilewright_slots": lambda f: f.slots,
    "tilewright_pages": lambda f: f.pages,
    "tilewright_prefix_pages": lambda f: f.pages_cached,
    "tilewright_engine_step_age_seconds": lambda f: f.step_age_s,
    "tilewright_warm_seconds": lambda f: f.warm_seconds,
    "tilewright_padding_ratio": lambda f: share(f.padding_rows, f.row_rounds + f.padding_rows),
    "tilewright_prefill_padding_ratio": lambda f: share(f.prefill_padding, f.prefill_tokens + f.prefill_padding),
    "vllm:prompt_tokens": lambda f: f.prompt_tokens,
    "vllm:generation_tokens": lambda f: f.generated_tokens,
    "vllm:prefix_cache_queries": lambda f: f.prefix_queries,
    "vllm:prefix_cache_hits": lambda f: f.prefix_hits,
    "vllm:num_preemptions": lambda f: f.preemptions,
    "vllm:admission_rejections": lambda f: f.rejected,
    "vllm:spec_decode_num_drafts": lambda f: f.drafts,
    "vllm:spec_decode_num_draft_tokens": lambda f: f.drafted,
    "vllm:spec_decode_num_accepted_tokens": lambda f: f.accepted,
    "tilewright_dispatches": lambda f: f.dispatches,
    "tilewright_automaton_rounds": lambda f: f.automaton_rounds,
    "tilewright_constrained_rounds": lambda f: f.constrained_rounds,
    "tilewright_row_rounds": lambda f: f.row_rounds,
    "tilewright_padding_rows": lambda f: f.padding_rows,
    "tilewright_prefill_tokens": lambda f: f.prefill_tokens,
    "tilewright_prefill_padding": lambda f: f.prefill_padding,
    "vllm:request_success": lambda f: by_finish(f.ended),
    "vllm:spec_decode_num_accepted_tokens_per_pos": lambda f: {str(place): n for place, n in enumerate(f.accepted_at)},
    "tilewright_xla_compilations": lambda f: {"warm": f.programs, "serving": f.compilations},
    "tilewright_rounds": lambda f: f.widths,
}
"""Values of gauges and counters, from the engine's stats; of those with a label a value for each that it has."""

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
        self.engine = engine
        self.model = model

    def describe(self) -> Iterable[MetricFamily]:
        return ()  # else a registry would ask the engine when this is registered

    def collect(self) -> Iterator[MetricFamily]:
        stats: EngineStats = self.engine.stats()
        for kind, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for metric in metrics:
                family = kind(metric.name, metric.definition, labels=["model_name", *filter(None, [metric.label])])
                found = READ[metric.name](stats)
                for key, value in found.items() if isinstance(found, Mapping) else [(None, found)]:
                    family.add_metric([self.model, *filter(None, [key])], value)
                yield family


class Timings:
    """Histograms of requests' times, in seconds, from what the engine noted of them."""

    def __init__(self, registry: CollectorRegistry, model: str):
        self.first, self.between, self.whole, self.queue, self.prefill, self.decode = (
            Histogram(metric.name, metric.definition, ["model_name"], registry=registry, buckets=SECONDS).labels(model)
            for metric in HISTOGRAMS
        )

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
