"""The exporter reads exactly what is declared."""

from tilewright.metrics.prometheus import COUNTERS, GAUGES, HISTOGRAMS
from tilewright.server.prometheus import READ


def test_each_declared_count_is_read_and_no_other():
    assert list(READ) == [metric.name for metric in (*GAUGES, *COUNTERS)]


def test_histograms_are_of_seconds():
    assert all(metric.unit == "s" and metric.name.endswith("_seconds") for metric in HISTOGRAMS)
