"""Prometheus metrics: the engine's counters, read on each scrape, and histograms of request times.

`metrics/prometheus.py` declares the metrics; this module maps them to the engine's stats.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from tilewright.metrics.prometheus import COUNTERS, GAUGES, HISTOGRAMS
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import EndReason, EngineStats, Times

FINISHED: Mapping[EndReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "error": "error",
}
"""vLLM's finish reasons."""

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
    "tilewright_programs_ready": lambda f: f.programs,
    "tilewright_programs_declared": lambda f: f.programs_declared,
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
    "vllm:request_success": lambda f: count_by_finish(f.ended),
    "vllm:spec_decode_num_accepted_tokens_per_pos": lambda f: {str(place): n for place, n in enumerate(f.accepted_at)},
    "tilewright_xla_compilations": lambda f: {"warm": f.programs, "serving": f.compilations},
    "tilewright_rounds": lambda f: f.widths,
}
"""Values of gauges and counters from the engine's stats; for metrics with a label, one value per label value."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def share(part: float, total: float) -> float:
    return part / total if total else 0.0


def count_by_finish(ended: Mapping[str, int]) -> dict[str, int]:
    """Counts ended requests by vLLM's finish reasons."""
    counts = dict.fromkeys(FINISHED.values(), 0)
    for reason, word in FINISHED.items():
        counts[word] += ended.get(reason, 0)
    return counts


class EngineCollector(Collector):
    """Collects the engine's stats on each scrape."""

    def __init__(self, engine: Engine, model: str):
        self.engine = engine
        self.model = model

    def describe(self) -> Iterable[MetricFamily]:
        return ()  # otherwise the registry would call `collect` at registration

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
    """Histograms of request times in seconds."""

    def __init__(self, registry: CollectorRegistry, model: str):
        self.first, self.between, self.total, self.queue, self.prefill, self.decode = (
            Histogram(metric.name, metric.definition, ["model_name"], registry=registry, buckets=SECONDS).labels(model)
            for metric in HISTOGRAMS
        )

    def gap(self, seconds: float) -> None:
        """Observes the time between two updates of a request."""
        self.between.observe(seconds)

    def end(self, times: Times) -> None:
        """Observes all times of an ended request."""
        spans = (
            (self.first, times.submitted_at, times.first_token),
            (self.total, times.submitted_at, times.ended),
            (self.queue, times.submitted_at, times.admitted),
            (self.prefill, times.admitted, times.first_token),
            (self.decode, times.first_token, times.ended),
        )
        for histogram, begin, end in spans:
            if begin and end:
                histogram.observe(max(end - begin, 0.0))


def render_metrics(registry: CollectorRegistry) -> bytes:
    """Formats all metrics as Prometheus text."""
    return generate_latest(registry)
