"""Offline HTML pages: one file with style, scripts and data, without network requests."""

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
"""Id of the element with a page's data as JSON."""


@runtime_checkable
class Block(Protocol):
    """Protocol of the contents of a section: tables and charts."""

    def html(self) -> str: ...


@dataclass(frozen=True)
class Cell:
    """Table cell with formatting.

    Attributes:
        text: displayed text.
        strong: True for the best value of a group.
        share: 0 to 1, drawn as a bar under the text; None for no bar.
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
    """Table whose first column names its rows.

    Attributes:
        columns: headers; the first is that of the row names.
        rows: rows with an entry for each column; None for an empty cell.
        note: text below the table.
        folded_columns, folded_rows: indices of columns and rows that are hidden until unfolded.
        words: indices of left-aligned text columns, which wrap.
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
        folded = ((self.folded_columns, len(self.columns), "columns"), (self.folded_rows, len(self.rows), "rows"))
        names = " and ".join(f"{count} {name}" for some, count, name in folded if some)
        unfold = f'<label class="unfold"><input type="checkbox">all {names}</label>' if names else ""
        return (
            f'{unfold}<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}"><table>{caption}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
        )


def class_attribute(**classes: bool) -> str:
    """Returns a class attribute with a leading space; empty without classes."""
    names = " ".join(name for name, is_set in classes.items() if is_set)
    return f' class="{names}"' if names else ""


def row_html(row: Sequence[str | Cell | None], kinds: Sequence[str], kind: str = "") -> str:
    """Returns the HTML of a row.

    Args:
        kinds: class attribute of each cell; `kind` is that of the row.
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
    """Returns the CSS class of a series' colour. There are six colours; charts also distinguish series by other means."""
    return f"s{index % 6 + 1}"


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; `grid` places them side by side if there is room."""

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
    """Joins notes to a text of sentences, without duplicates."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in dict.fromkeys(notes))


def facts_html(facts: Mapping[str, Any]) -> str:
    """Returns names and values, such as the settings of a measurement; None values are left out."""
    items = (
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<dl class="facts">{"".join(items)}</dl>'


@dataclass(frozen=True)
class Report:
    """Data of a page of figures. Plain data: `dataclasses.asdict` gives JSON.

    Attributes:
        title: title of the page.
        lead: sentence below the title on what was measured.
        records: rows of figures of docs/metrics.md.
        environment: settings of the figures, in display order.
        notes: notes for the reader.

    Raises:
        ValueError: There are no records.
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
        """Writes a page of these sections as one HTML file that works offline, with the report as JSON.

        Args:
            ran: True if the figures were measured.

        Raises:
            ValueError: Records or environment hold values that JSON cannot represent.
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
    """Writes a page of sections with tables and charts; empty sections are left out.

    Args:
        verdict: sentence below the title with the result.
        lead: sentence below the verdict on what the figures are.
        facts: settings of the figures, at the end of the page.
        data: figures, JSON-able, embedded for programs that read the page.
        ran: True if the figures were measured; otherwise the facts are settings of a prediction.

    Raises:
        ValueError: `data` holds values that JSON cannot represent.
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
    """Returns a whole page from its body.

    Args:
        styles, scripts: names of package files, inlined in this order; scripts run after body and data are loaded.
        data: JSON-able data in the element with the id `DATA_ID`.
    """
    code = [asset(name) for name in scripts]
    # Only these scripts may run, and nothing may be fetched, even if injected text reaches the page.
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
    """Returns a text file of this package."""
    return resources.files("tilewright.report").joinpath(name).read_text(encoding="utf-8")


def sha256(text: str) -> str:
    """Returns the SHA-256 of a text in the format of a content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(data: Any) -> str:
    """Returns JSON for a script element: without `<`, so that neither `</script>` nor `<!--` can occur.

    Raises:
        ValueError: The data holds NaN, an infinity, or an object that JSON cannot represent.
    """
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"expected plain data for the page, found what JSON cannot hold: {error}") from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
