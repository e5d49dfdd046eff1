"""docs/metrics.md and CSV files say what the declarations say."""

from pathlib import Path

import pytest

from tilewright.metrics.document import TABLES, cells, table, with_tables
from tilewright.metrics.metric import Metric

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_document_is_what_is_declared():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tilewright.metrics.document docs/metrics.md"


@pytest.mark.parametrize("name", TABLES)
def test_a_group_declares_each_metric_once_and_defines_all(name: str):
    names = [metric.name for metric in TABLES[name]]
    assert len(set(names)) == len(names)
    assert TABLES[name][0].definition


def test_a_place_that_is_missing_or_unknown_is_an_error():
    text = DOCUMENT.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"otherwise: tau$"):
        with_tables(text.replace("metrics: tau", "figures: tau"))
    with pytest.raises(ValueError, match=r"otherwise: tau, theta$"):
        with_tables(text.replace("metrics: tau", "metrics: theta"))
    with pytest.raises(ValueError, match=r"otherwise: tau$"):
        with_tables(f"{text}\n<!-- metrics: tau -->\n\n")


def test_metrics_that_are_defined_together_share_a_line():
    both = (Metric("a", "s", "how long"), Metric("b"), Metric("c", "1/s", "how often", head="rate", csv=True))
    assert table(both).splitlines() == [
        "| field | unit | definition |",
        "|---|---|---|",
        "| `a`, `b` | s, | how long |",
        "| `c` | 1/s | how often |",
    ]
    assert table((Metric("a", "", "how long"),)).startswith("| field | definition |\n")
    assert cells([Metric("n", "", "x", label="kind")])[0] == "`n{kind}`"
