"""Compares figures of documents with fields of committed results, which `docs/figures.toml` maps."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

UNITS = (
    r"%|×|times\b|(?:milli|micro)?seconds\b|ms\b|µs\b|[kKMG]i?B\b|(?:new )?tokens\b|requests\b|problems\b|steps\b|nats\b|"
    r"GFLOP/s|TFLOP/s"
)
"""Units after which a whole number in prose is a figure. Numbers with a decimal point or thousands comma always are."""

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


def blocks(text: str) -> Iterator[str]:
    """Yields paragraphs without code; a table belongs to the paragraph before it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\n\n(?=\|)", "\n", text)
    return (block for block in re.split(r"\n{2,}", text) if block.strip())


def figures(block: str) -> list[str]:
    """Returns the measured, counted or estimated numbers of a block, without those of names, versions, dates and code."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", block)
    text = re.sub(r"\b(?:Python|arXiv|Apache) [\d.]+|\b\d{4}-\d\d-\d\d\b", " ", text)
    text = re.sub(r"\b[A-Za-z][\w.-]*\d[\w.-]*", " ", text)  # Qwen3-0.6B, v5e
    found = []
    for part in re.split(r"[|\n]", text):
        if re.fullmatch(r"[\d.,/*×%± –-]+", part):  # a cell of nothing but figures
            found += re.findall(NUMBER, part)
        else:
            # In "13 to 30 times" and "6, 8 and 10 times" all are figures.
            last = rf"{NUMBER} ?(?:{UNITS})"
            text = re.sub(rf"({NUMBER}), (?=(?:{NUMBER}, )*{NUMBER} (?:and|or) {last})", r"\1 times ", part)
            text = re.sub(rf"({NUMBER}) (?:and|or|to) (?={last})", r"\1 times ", text)
            found += [m[1] for m in re.finditer(rf"({NUMBER})( ?(?:{UNITS}))?", text) if m[2] or re.search(r"[.,]\d", m[1])]
    return found


@dataclass(frozen=True)
class Source:
    """Sources of the figures of a block.

    Attributes:
        document: path from the root of the repository.
        begins: first words of the block.
        files: results in `benchmarks/results`, by their short names in fields.
        fields: each figure of the block, in order, with an expression (see `value`).
    """

    document: str
    begins: str
    files: Mapping[str, str]
    fields: tuple[tuple[str, str], ...]


def read_sources(text: str) -> list[Source]:
    """Parses `docs/figures.toml`, whose head describes the format."""
    found = []
    for document, entries in tomllib.loads(text).items():
        for entry in entries:
            lines = (line.split(maxsplit=1) for line in entry["figures"].strip().splitlines())
            found.append(Source(document, entry["begins"], entry["files"], tuple((figure, field) for figure, field in lines)))
    return found


@cache
def result(name: str) -> Any:
    """Reads a committed result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def value(expression: str, files: Mapping[str, str]) -> float:
    """Returns the value of an expression.

    `file:path` is a field, whose path has names with dots between them and, for a list, an index `[0]` or a selection
    `[drafter=auto,batch_size=1]`; `min`, `max` and `mean` take a path that selects several. ` * ` and ` / ` stand between
    fields and numbers.

    Raises:
        ValueError: the expression has no number, or a path does not select exactly one.
    """
    first, *more = re.split(r" ([*/]) ", expression)
    factors = [term(first, files)]
    for sign, text in zip(more[::2], more[1::2], strict=True):
        factors.append(term(text, files) if sign == "*" else 1 / term(text, files))
    return prod(factors)


def term(text: str, files: Mapping[str, str]) -> float:
    """Returns the value of a number, a field, or an aggregate of fields.

    Raises:
        ValueError: see `value`.
    """
    if re.fullmatch(NUMBER, text):
        return float(text)
    made = re.fullmatch(r"(?:(min|max|mean)\()?(\w+):(.+?)(?(1)\))", text)
    if made is None or made[2] not in files:
        raise ValueError(f"expected a number, or FILE:PATH with a file of {', '.join(files)}, found {text!r}")
    found = selected([result(files[made[2]])], made[3])
    if not found or not all(isinstance(one, int | float) and not isinstance(one, bool) for one in found):
        raise ValueError(f"expected numbers at {text}, found {found}")
    if made[1]:
        return {"min": min, "max": max, "mean": lambda all: sum(all) / len(all)}[made[1]](found)
    if len(found) > 1:
        raise ValueError(f"expected one number at {text}, found {len(found)}")
    return found[0]


def selected(values: list[Any], path: str) -> list[Any]:
    """Returns the values that a path selects."""
    for name, inside in re.findall(r"([^.\[\]]+)|\[([^\]]+)\]", path):
        if name:
            values = [one[name] for one in values if isinstance(one, dict) and name in one]
        elif inside.isdecimal():
            values = [one[int(inside)] for one in values]
        else:
            wanted = [part.split("=", 1) for part in inside.split(",")]
            values = [row for rows in values for row in rows if all(str(row.get(key)) == text for key, text in wanted)]
    return values


def rounds_to(found: float, figure: str) -> bool:
    """Returns True if a number rounds to a figure with the digits of the figure."""
    shown = float(figure.replace(",", ""))
    digits = len(figure.partition(".")[2])
    return abs(found - shown) <= 0.5000001 * 10**-digits


def problems(documents: Mapping[str, str], sources: list[Source], whole: tuple[str, ...] = ()) -> list[str]:
    """Lists figures without a field, and figures that differ from their field.

    Args:
        documents: texts by name.
        sources: sources of blocks.
        whole: documents in which every block with a figure needs a source.
    """
    wrong = []
    used = []
    for document, text in documents.items():
        for block in blocks(text):
            matching = [one for one in sources if one.document == document and block.startswith(one.begins)]
            used += matching
            found = figures(block)
            if len(matching) > 1:
                wrong.append(f"{document}: {len(matching)} entries for {block[:60]!r}")
            elif matching:
                wrong += block_problems(found, matching[0])
            elif found and document in whole:
                wrong.append(f"{document}: {', '.join(found)}: no entry for {block[:60]!r}")
    return wrong + [f"{one.document}: no block begins with {one.begins!r}" for one in sources if one not in used]


def block_problems(found: list[str], source: Source) -> list[str]:
    """Lists the problems of one block."""
    named = [figure for figure, _ in source.fields]
    if found != named:
        return [f"{source.document}, {source.begins!r}: figures {found}, fields for {named}"]
    wrong = []
    for figure, field in source.fields:
        if not rounds_to(got := value(field, source.files), figure):
            wrong.append(f"{source.document}, {source.begins!r}: {figure}, but {field} is {got:g}")
    return wrong
