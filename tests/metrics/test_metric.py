"""How a value reads: its format, its unit in a table, and what is not known."""

import pytest

from tilewright.metrics.metric import Metric, select_metrics, significant


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0"),
        (0.01234, 3, "0.0123"),
        (1.284, 3, "1.28"),
        (-12.84, 3, "-12.8"),
        (128.4, 3, "128"),
        (1284.3, 3, "1,284"),
        (1284.3, 4, "1,284"),
        (1284.3, 5, "1,284.3"),
        (12843210.0, 4, "12,843,210"),
        (float("nan"), 3, "nan"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str):
    assert significant(value, digits) == text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        (Metric("share", form=".0%"), 0.256, "26%"),
        (Metric("bytes", form=",.2f", factor=1e-6), 3_210_000, "3.21"),
        (Metric("rate", digits=3), 1284.3, "1,284"),
        (Metric("count", form=","), 1234, "1,234"),
        (Metric("name"), "gsm8k", "gsm8k"),
        (Metric("speedup", form=".2f"), None, None),
        (Metric("loaded"), True, "yes"),
    ],
)
def test_values_as_tables_show_them(metric: Metric, value: float | str | None, text: str | None):
    assert metric.row_text({metric.name: value, "other": 1}) == text


def test_metrics_are_chosen_by_name_in_the_order_asked_for():
    group = (Metric("a"), Metric("b"), Metric("c"))
    assert select_metrics(group, "c a") == (group[2], group[0])
    with pytest.raises(KeyError, match="d"):
        select_metrics(group, "a d")
