"""Declaration of a metric: field, unit, definition and table format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Any


@dataclass(frozen=True)
class Metric:
    """Declaration of a figure.

    Attributes:
        name: field in `--json`, or name in Prometheus' format.
        unit: unit of the value; "" for counts, shares and names.
        definition: definition in Markdown; "" if the previous metric of the group defines both.
        head: column header in tables; "" for metrics that no table shows.
        short: narrower header for terminals; "" for `head`.
        form: format specification of values.
        digits: number of significant digits, instead of `form`.
        factor: factor applied to displayed values, such as 1e-6 for bytes in MB.
        words: True for names and remarks, which tables left-align.
        csv: True for columns of `--csv`.
        par: reference value; a best value that is not above it is no gain.
        label: label of a counter's series in Prometheus' format, besides the model's name.
    """

    name: str
    unit: str = ""
    definition: str = ""
    head: str = ""
    short: str = ""
    form: str = ""
    digits: int = 0
    factor: float = 1
    words: bool = False
    csv: bool = False
    label: str = ""
    par: float | None = None

    def text(self, value: float | str | None) -> str | None:
        """Formats a value for tables; None stays None."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.digits:
            return significant(value * self.factor, self.digits)
        return format(value if self.factor == 1 else value * self.factor, self.form)

    def row_text(self, row: Mapping[str, Any]) -> str | None:
        """Formats the metric's value in a row of figures."""
        return self.text(row[self.name])


def significant(value: float, digits: int = 3) -> str:
    """Formats a number with at least this many significant digits, and all before the point: 0.0123, 1.23, 12.3, 1,230."""
    places = digits - 1 - floor(log10(abs(value))) if value and isfinite(value) else 0
    return f"{value:,.{max(places, 0)}f}"


def select_metrics(group: Iterable[Metric], names: str) -> tuple[Metric, ...]:
    """Returns metrics of a group by their names, separated by spaces, in that order.

    Raises:
        KeyError: The group has no metric of this name.
    """
    named = {metric.name: metric for metric in group}
    return tuple(named[name] for name in names.split())
