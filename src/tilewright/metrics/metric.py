"""A metric: its field, its unit, its definition, and how it reads in a table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A figure, declared once.

    Attributes:
        name: its field in `--json`, or its name in Prometheus' format.
        unit: of the field's value; "" for counts, shares and names.
        definition: in Markdown; "" where the metric before it in its group defines both.
        head: of its column in tables; "" for one that no table shows.
        short: the same on a terminal, where columns are narrow; "" for `head`.
        form: how a value reads, as `format` takes it.
        digits: significant digits, in the place of `form`.
        factor: what a value is multiplied with before it is shown: 1e-6 for bytes in MB.
        words: true of names and remarks, which tables set to the left.
        csv: true of a column of `--csv`.
        par: the value of whatever others are compared with; a best value that is not above it is no gain.
        label: of a counter in Prometheus' format, what tells its series apart besides the model's name.
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
        """A value of the metric as tables show it; None for none."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.digits:
            return significant(value * self.factor, self.digits)
        return format(value if self.factor == 1 else value * self.factor, self.form)

    def of(self, row: Mapping[str, Any]) -> str | None:
        """The text of the metric's value in a row of figures."""
        return self.text(row[self.name])


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, or with all before the point if these are more: 0.0123, 1.23, 12.3, 1,230."""
    places = digits - 1 - floor(log10(abs(value))) if value and isfinite(value) else 0
    return f"{value:,.{max(places, 0)}f}"


def chosen(group: Iterable[Metric], names: str) -> tuple[Metric, ...]:
    """The metrics of a group that a text names, blanks between them, in that order.

    Raises:
        KeyError: the group has no metric of a name.
    """
    named = {metric.name: metric for metric in group}
    return tuple(named[name] for name in names.split())
