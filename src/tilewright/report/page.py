"""Offline HTML pages: one file with its style, scripts and data inside, which asks nothing of a network."""

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

DATA_ID = "data"
"""The id of the element that holds a page's data as JSON."""


@runtime_checkable
class Block(Protocol):
    """Protocol of what a section can hold: a table, a chart."""

    def html(self) -> str: ...


@dataclass(frozen=True)
class Cell:
    """A table cell that is more than its text.

    Attributes:
        text: what is shown.
        strong: the one to look at in its group.
        share: 0 to 1, drawn as a bar under the text; None draws none.
        colour: index of the bar's colour, see `series_class`.
    """

    text: str
    strong: bool = False
    share: float | None = None
    colour: int = 0

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"expected a cell's share from 0 to 1, found {self.share}")


@dataclass(frozen=True)
class HtmlTable:
    """A table whose first column names its rows.

    Attributes:
        columns: headers; the first is that of the row names.
        rows: as long as `columns`; None leaves a cell empty.
        note: below it.
        folded_columns, folded_rows: indexes of those that are hidden until a reader unfolds them.
        words: indexes of columns of names and remarks, which stand at the left and break.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell | None]]
    note: str = ""
    folded_columns: Collection[int] = ()
    folded_rows: Collection[int] = ()
    words: Collection[int] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: expected rows of {len(self.columns)} cells, found one of {len(row)}")

    def html(self) -> str:
        kinds = [class_attribute(folded=n in self.folded_columns, words=n in self.words) for n in range(len(self.columns))]
        head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(self.columns, kinds, strict=True))
        body = "".join(row_html(row, kinds, class_attribute(folded=n in self.folded_rows)) for n, row in enumerate(self.rows))
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        caption = f"<caption>{escape(self.title)}</caption>"
        whole = ((self.folded_columns, len(self.columns), "columns"), (self.folded_rows, len(self.rows), "rows"))
        names = " and ".join(f"{count} {name}" for some, count, name in whole if some)
        unfold = f'<label class="unfold"><input type="checkbox">all {names}</label>' if names else ""
        return (
            f'{unfold}<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}"><table>{caption}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
        )


def class_attribute(**classes: bool) -> str:
    """Attribute with the classes that an element has, a blank before it; nothing without any."""
    names = " ".join(name for name, has in classes.items() if has)
    return f' class="{names}"' if names else ""


def row_html(row: Sequence[str | Cell | None], kinds: Sequence[str], kind: str = "") -> str:
    """A row.

    Args:
        kinds: the class attribute of each cell; `kind` is that of the row.
    """
    first, *rest = row
    name = first.text if isinstance(first, Cell) else first or ""
    return f'<tr{kind}><th scope="row"{kinds[0]}>{escape(name)}</th>{"".join(map(cell_html, rest, kinds[1:]))}</tr>'


def cell_html(cell: str | Cell | None, kind: str = "") -> str:
    if cell is None:
        return f"<td{kind}></td>"
    if isinstance(cell, str):
        return f"<td{kind}>{escape(cell)}</td>"
    text = f"<strong>{escape(cell.text)}</strong>" if cell.strong else escape(cell.text)
    if cell.share is None:
        return f"<td{kind}>{text}</td>"
    bar = (
        '<svg class="share" viewBox="0 0 100 3" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{series_class(cell.colour)}" width="{100 * cell.share:.1f}" height="3"/></svg>'
    )
    return f"<td{kind}>{text}{bar}</td>"


def series_class(index: int) -> str:
    """The CSS class of a series' colour. There are six; charts tell series apart by more than colour."""
    return f"s{index % 6 + 1}"


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; `grid` sets them side by side where there is room."""

    title: str
    blocks: Sequence[Block]
    text: str = ""
    grid: bool = False

    def html(self) -> str:
        text = f"<p>{escape(self.text)}</p>" if self.text else ""
        kind = "grid" if self.grid else "stack"
        blocks = "".join(f'<div class="block">{block.html()}</div>' for block in self.blocks)
        return f'<section><h2>{escape(self.title)}</h2>{text}<div class="{kind}">{blocks}</div></section>'


def sentences(notes: Iterable[str]) -> str:
    """Notes as the text of a page, each once."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in dict.fromkeys(notes))


def facts_html(facts: Mapping[str, Any]) -> str:
    """Names and values, such as what was measured on and with; values that are None are left out."""
    items = (
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<dl class="facts">{"".join(items)}</dl>'


@dataclass(frozen=True)
class Report:
    """All that a page of figures shows. Plain data: `dataclasses.asdict` of it is JSON.

    Attributes:
        title: of the page.
        lead: a sentence under it: what was measured.
        records: rows of figures, named as in docs/metrics.md.
        environment: what the figures depend on, in the order shown.
        notes: what a reader must know.

    Raises:
        ValueError: there are no records.
    """

    title: str
    lead: str
    records: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError(f"{self.title}: expected at least one row of figures, found none")

    def write(self, path: Path, sections: Sequence[Section], ran: bool = True) -> None:
        """Writes a page of these sections as one HTML file that works offline, with all of this as JSON in it.

        Args:
            ran: whether the figures were measured.

        Raises:
            ValueError: records or environment hold something that JSON cannot.
        """
        write_sections(path, self.title, sections, lead=self.lead, facts=self.environment, data=asdict(self), ran=ran)


def write_sections(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    verdict: str = "",
    lead: str = "",
    facts: Mapping[str, Any] | None = None,
    data: Any = None,
    ran: bool = True,
) -> None:
    """Writes a page of titled tables and charts; a section without any is left out.

    Args:
        verdict: a sentence under the title that says what came out.
        lead: a sentence below it on what the figures are.
        facts: circumstances that the figures depend on, at the foot of the page.
        data: the figures themselves, JSON-able, embedded for programs that read the page.
        ran: whether the figures were measured; else the facts are settings of a prediction.

    Raises:
        ValueError: `data` holds something that JSON cannot.
    """
    heading = "Measured on and with" if ran else "Settings; nothing ran"
    foot = f"<footer><h2>{heading}</h2>{facts_html(facts)}</footer>" if facts else ""
    verdict = f'<p class="verdict">{escape(verdict)}</p>' if verdict else ""
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    header = f"<header><h1>{escape(title)}</h1>{verdict}{lead}</header>"
    shown = "".join(section.html() for section in sections if section.blocks)
    body = f'<main class="report">{header}{shown}{foot}</main>'
    Path(path).write_text(document(title, body, styles=("page.css",), data=data), encoding="utf-8")


def document(title: str, body: str, *, styles: Sequence[str], scripts: Sequence[str] = (), data: Any = None) -> str:
    """A whole page from its body.

    Args:
        styles, scripts: names of package files, inlined in this order; scripts run after the body and the data are there.
        data: JSON-able, found by scripts and other readers in the element with the id `DATA_ID`.
    """
    code = [asset(name) for name in scripts]
    # Only these scripts may run, and nothing may be fetched, whatever text finds its way into the page.
    hashes = " ".join(f"'sha256-{sha256(text)}'" for text in code) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    embedded = "" if data is None else f'<script type="application/json" id="{DATA_ID}">{embed_json(data)}</script>\n'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="generator" content="tilewright">\n'
        f"<title>{escape(title)}</title>\n<style>\n{''.join(map(asset, styles))}</style>\n</head>\n"
        f"<body>\n{body}\n{embedded}{''.join(f'<script>{text}</script>' for text in code)}\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """A text file of this package."""
    return resources.files("tilewright.report").joinpath(name).read_text(encoding="utf-8")


def sha256(text: str) -> str:
    """SHA-256 of a text, as a content security policy wants it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(data: Any) -> str:
    """JSON that can stand inside a script element: no `<`, so that neither `</script>` nor `<!--` can occur in it.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON has not, or an object of another kind.
    """
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"expected plain data for the page, found what JSON cannot hold: {error}") from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
