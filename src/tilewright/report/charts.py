"""Charts as inline SVG. The page's style sets the colours of its light and dark schemes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from tilewright.metrics.metric import significant
from tilewright.metrics.tables import Row, grouped
from tilewright.report.page import HtmlTable, series_class

WIDTH = 340
HEIGHT = 190
"""Size of a line chart in SVG units; on the page the chart scales to the available width."""
LEFT = 38
RIGHT = 8
TOP = 22
BOTTOM = 34
"""Margins for the numbers and names of the axes."""
DIGIT = 6.5
"""Width of a digit of the axes' numbers."""
DASHES = ("", "6 4", "2 4", "9 3 2 3", "4 2", "1 3")


@dataclass(frozen=True)
class Series:
    """A line: points in ascending x."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(records: Iterable[Row], name: Callable[[Row], str], x: str, y: str) -> list[Series]:
    """Returns a line of field `y` over field `x` for each name that `name` gives to records."""
    return [Series(line, sorted((one[x], one[y]) for one in group)) for line, group in grouped(records, name).items()]


@dataclass(frozen=True)
class LineChart:
    """Lines over one pair of axes. The y axis starts at 0, or close to the values if all are far above 0.

    Attributes:
        x_label, y_label: names of the axes with units.
        percent: True if y is a share, shown in percent; the y axis then ends at 100 %.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    percent: bool = False

    def __post_init__(self) -> None:
        points = [point for series in self.series for point in series.points]
        if not points:
            raise ValueError(f"chart {self.title!r}: expected at least one point, found none")
        for x, y in points:
            if not math.isfinite(x) or not 0 <= y < math.inf or (self.percent and y > 1):
                expected = "shares from 0 to 1" if self.percent else "values of 0 or more"
                raise ValueError(f"chart {self.title!r}: expected {expected}, found {y} at {x}")

    def number(self, y: float) -> str:
        return f"{100 * y:.1f} %" if self.percent else compact(y)

    def html(self) -> str:
        xs = [x for series in self.series for x, _ in series.points]
        low = min(xs)
        high = max(xs)
        ys = [y for series in self.series for _, y in series.points]
        y_ticks = ticks(1.0) if self.percent else ticks(max(ys) or 1.0, least=min(ys))
        bottom = y_ticks[0]
        top = y_ticks[-1]

        def point(x: float, y: float) -> tuple[float, float]:
            across = (x - low) / (high - low) if high > low else 0.5
            up = (y - bottom) / (top - bottom)
            return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - up) * (HEIGHT - TOP - BOTTOM)

        tick_text = "{:.0%}" if self.percent else "{:,.10g}"
        parts = []
        for tick in y_ticks:
            _, height = point(low, tick)
            kind = "rule" if tick > bottom else "axis"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{height + 3.5:.1f}" text-anchor="end">{tick_text.format(tick)}</text>')
        for tick in x_ticks(sorted({*xs}), WIDTH - LEFT - RIGHT):
            across, _ = point(tick, bottom)
            parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:,.10g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="ink" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(self.x_label)}</text>')
        parts.append(f'<text class="ink" x="0" y="10">{escape(self.y_label)}</text>')
        for index, series in enumerate(self.series):
            parts.append(self.line(index, series, [(point(x, y), x, y) for x, y in series.points]))
        names = [series.name for series in self.series]
        label = escape(f"{self.title}: {self.y_label} by {self.x_label}, a line for each of {', '.join(names)}")
        drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        return figure(self.title, drawing, line_key(names), self.table())

    def line(self, index: int, series: Series, points: Sequence[tuple[tuple[float, float], float, float]]) -> str:
        kind = series_class(index)
        dash = DASHES[index % len(DASHES)]
        place = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _, _ in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        marks = "".join(
            f'<circle class="mark {kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="{3.2 if len(points) <= 24 else 1.6}">'
            f"<title>{escape(series.name)}, {escape(self.x_label)} {compact(x)}: {self.number(y)}</title></circle>"
            for (cx, cy), x, y in points
        )
        return f'<polyline class="curve {kind}" points="{place}"{dashed}/>{marks}'

    def table(self) -> HtmlTable:
        """Table of the chart's figures."""
        xs = sorted({x for series in self.series for x, _ in series.points})
        found = [dict(series.points) for series in self.series]
        rows = [[compact(x), *(None if (y := values.get(x)) is None else self.number(y) for values in found)] for x in xs]
        return HtmlTable(f"{self.title}: {self.y_label}", [self.x_label, *(s.name for s in self.series)], rows)


@dataclass(frozen=True)
class StackedBars:
    """Horizontal stacked bars.

    Attributes:
        parts: names of the parts in stacking order.
        bars: name of each bar, with a value for each part.
        unit: unit of the values.
    """

    title: str
    parts: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]
    unit: str

    def __post_init__(self) -> None:
        for name, values in self.bars:
            if len(values) != len(self.parts):
                raise ValueError(f"chart {self.title!r}: expected {len(self.parts)} parts of {name!r}, found {len(values)}")
            if not all(map(math.isfinite, values)):
                raise ValueError(f"chart {self.title!r}: expected finite parts of {name!r}, found {list(values)}")
        if not any(sum(values) > 0 for _, values in self.bars):
            raise ValueError(f"chart {self.title!r}: expected at least one bar above 0, found none")

    def html(self) -> str:
        longest = max(sum(drawn(values)) for _, values in self.bars)
        rows = []
        for name, values in self.bars:
            starts = [100 * start / longest for start in accumulate(drawn(values), initial=0.0)]
            rects = "".join(
                f'<rect class="{series_class(index)}" x="{start:.2f}" width="{100 * value / longest:.2f}" height="1">'
                f"<title>{escape(self.parts[index])}: {self.number(value)}</title></rect>"
                for index, (value, start) in enumerate(zip(drawn(values), starts, strict=False))
                if value > 0
            )
            label = f"{name}: " + ", ".join(f"{p} {self.number(v)}" for p, v in zip(self.parts, values, strict=True))
            rows.append(
                f'<span>{escape(name)}</span><svg viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
                f'aria-label="{escape(label)}">{rects}</svg><span>{self.number(sum(values))}</span>'
            )
        axis = f"<span></span>{tick_row(longest)}<span>{escape(self.unit)}</span>"
        return figure(self.title, f'<div class="bars">{"".join(rows)}{axis}</div>', bar_key(self.parts), self.table())

    def number(self, value: float) -> str:
        return f"{compact(value)} {escape(self.unit)}"

    def table(self) -> HtmlTable:
        """Table of the chart's figures."""
        rows = [[name, *map(compact, values), compact(sum(values))] for name, values in self.bars]
        return HtmlTable(f"{self.title}, {self.unit}", ["", *self.parts, "together"], rows)


def drawn(values: Sequence[float]) -> list[float]:
    """Returns the lengths of a bar's parts; negative values have no length."""
    return [max(value, 0.0) for value in values]


LANES_WIDTH = 1000
LANE = 12
LANE_GAP = 3
"""Sizes of a lane chart in SVG units: width, height of a lane, gaps."""


@dataclass(frozen=True)
class LaneRow:
    """Lanes of one program over time.

    Attributes:
        lanes: lanes of spans (begin, end, kind), from top to bottom.
        marks: times with a line through all lanes.
    """

    name: str
    lanes: Sequence[Sequence[tuple[float, float, str]]]
    marks: Sequence[float] = ()


@dataclass(frozen=True)
class LaneChart:
    """Chart of the activities of several programs over a common time axis.

    Attributes:
        kinds: names of the kinds of spans, in the order of the colours. Spans too short to see are left out.
        longest: end of the axis in milliseconds, the unit of all times.
        figures: table of the chart's figures.
    """

    title: str
    rows: Sequence[LaneRow]
    kinds: Mapping[str, str]
    longest: float
    figures: HtmlTable

    def html(self) -> str:
        scale = LANES_WIDTH / (self.longest or 1.0)
        colours = [*self.kinds]
        pictures = []
        for row in self.rows:
            height = len(row.lanes) * (LANE + LANE_GAP) - LANE_GAP
            parts = [
                f'<rect class="{series_class(colours.index(kind))}" x="{scale * begin:.2f}" y="{n * (LANE + LANE_GAP)}" '
                f'width="{scale * (end - begin):.2f}" height="{LANE}"/>'
                for n, spans in enumerate(row.lanes)
                for begin, end, kind in spans
                if scale * (end - begin) >= 0.02
            ]
            for mark in row.marks:
                parts.append(f'<line class="axis" x1="{scale * mark:.1f}" x2="{scale * mark:.1f}" y1="0" y2="{height}"/>')
            label = escape(f"{self.title}: {row.name} over {self.longest:,.3f} ms")
            box = f'viewBox="0 0 {LANES_WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{label}"'
            pictures.append(f"<div>{escape(row.name)}</div><svg {box}>{''.join(parts)}</svg>")
        drawing = f'<div class="lanes">{"".join(pictures)}{tick_row(self.longest, "ms", most=5)}</div>'
        return figure(self.title, drawing, bar_key([*self.kinds.values()]), self.figures)


def figure(title: str, drawing: str, key: str, table: HtmlTable) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{key}"
        f"<details><summary>Figures</summary>{table.html()}</details></figure>"
    )


def line_key(names: Sequence[str]) -> str:
    """Returns a legend of lines."""
    items = []
    for index, name in enumerate(names):
        kind = series_class(index)
        dash = DASHES[index % len(DASHES)]
        drawn = f'<line class="curve {kind}" x1="1" x2="25" y1="6" y2="6" stroke-dasharray="{dash}"/>'
        items.append(f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{drawn}</svg>{escape(name)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def bar_key(names: Sequence[str]) -> str:
    """Returns a legend of bar colours."""
    box = '<svg viewBox="0 0 26 12" aria-hidden="true"><rect class="{}" width="26" height="12"/></svg>'
    items = (f"<li>{box.format(series_class(index))}{escape(name)}</li>" for index, name in enumerate(names))
    return f'<ul class="key">{"".join(items)}</ul>'


def compact(value: float) -> str:
    """Formats a number with about three digits; integers without a decimal point."""
    return f"{value:,.0f}" if value == round(value) else significant(value)


def tick_row(longest: float, unit: str = "", most: int = 3) -> str:
    """Returns an axis of round numbers below bars of width `longest`, with the unit at the last number.

    Args:
        most: maximum number of steps.
    """
    step = round_step((longest or 1.0) / most)
    marks = [step * n for n in range(math.floor((longest or 1.0) / step * (1 + 1e-9)) + 1)]
    texts = []
    for mark in marks:
        anchor = "start" if mark == 0 else "end" if mark > 0.97 * longest else "middle"
        name = f"{mark:,.10g} {unit}".rstrip() if mark == marks[-1] else f"{mark:,.10g}"
        texts.append(f'<text x="{100 * mark / (longest or 1.0):.2f}%" y="12" text-anchor="{anchor}">{escape(name)}</text>')
    return f'<svg class="ticks" aria-hidden="true">{"".join(texts)}</svg>'


def ticks(top: float, most: int = 5, least: float = 0.0) -> list[float]:
    """Returns round numbers up to at least `top` in at most `most` steps, from 0, or from just below `least` if `least` is
    close to `top`."""
    near = least > 0.6 * top and least < top
    step = round_step((top - least) / (most - 1) if near else top / most)
    first = math.floor(least / step + 1e-9) if near else 0
    return [step * n for n in range(first, math.ceil(top / step - 1e-9) + 1)]


def round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, ... (and their decimal fractions) that is at least `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def x_ticks(xs: Sequence[float], width: float) -> list[float]:
    """Returns the x values with a number on the axis: those of the points if few enough, else round numbers.

    Args:
        xs: ascending, distinct x values of the points.
        width: width of the axis in SVG units.
    """
    low = xs[0]
    high = xs[-1]
    if high == low:
        return [low]
    if len(xs) > 10:
        step = round_step((high - low) / 6)
        inside = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return inside if inside and inside[0] - low < 0.6 * step else [low, *inside]

    def fits_beside(one: float, other: float) -> bool:
        room = DIGIT * (2 + (len(f"{one:,.10g}") + len(f"{other:,.10g}")) / 2)
        return width * (other - one) / (high - low) >= room

    found = [low]
    for x in xs[1:-1]:
        if fits_beside(found[-1], x) and fits_beside(x, high):
            found.append(x)
    return [*found, high]
