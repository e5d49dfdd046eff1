"""Cleans source code for training: removes licence headers, rulers, generated tables and duplicated stretches.

Removed lines are counted by reason.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby, islice

STRETCH = 8
"""Non-blank lines that a duplicated stretch has at least."""
TABLE_LINES = 8
"""Consecutive lines of literals that count as a table."""
LONGEST_LINE = 240
"""Characters of the longest line that is kept; longer lines are data or generated code."""

LICENCE = re.compile(r"copyright|licen[cs]ed? (?:under|to|this)|spdx-|all rights reserved|permission is hereby", re.IGNORECASE)
GENERATED = re.compile(
    r"auto-?generated|generated (?:by|from|automatically)|do not edit|don't (?:manually )?edit", re.IGNORECASE
)
RULER = re.compile(r"\s*(?:[#;]|//)?\s*([-=*#~_+.^])(?:\s*\1){3,}\s*#?\s*")
FRAME = (re.compile(r"^(\s*)#*\s*([-=*#~_+.])\2{3,}\{?"), re.compile(r"\s*\}?([-=*#~_+.])\1{3,}\s*#?\s*$"))
"""Rulers before and after the words of a comment."""
LITERAL = re.compile(r"""[rbuRBU]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\b\d[\w.]*|\b(?:None|True|False)\b""")
BETWEEN_LITERALS = frozenset(" \t,:()[]{}|=*+-.\\")


def is_generated(source: str) -> bool:
    """Returns True if the first lines of a file say that the file is generated."""
    return any(line.lstrip().startswith(("#", '"')) and GENERATED.search(line) for line in source.split("\n")[:12])


def blocks(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yields alternating blocks of comment lines and other lines, as (is a comment, lines)."""
    for comment, part in groupby(lines, lambda line: line.lstrip().startswith("#")):
        yield comment, list(part)


def without_licences(lines: Sequence[str], left_out: Counter[str]) -> list[str]:
    """Removes comment blocks about copyright or licence."""
    kept: list[str] = []
    for comment, part in blocks(lines):
        if comment and LICENCE.search("\n".join(part)):
            left_out["licence"] += len(part)
        else:
            kept += part
    return kept


def without_rulers(lines: Sequence[str], left_out: Counter[str]) -> list[str]:
    """Removes lines of one repeated character, and such characters around the words of a comment."""
    kept = []
    for line in lines:
        if RULER.fullmatch(line):
            left_out["ruler"] += 1
        elif line.lstrip().startswith("#"):
            kept.append(FRAME[1].sub("", FRAME[0].sub(r"\1#", line)))
        else:
            kept.append(line)
    return kept


def is_table_line(line: str) -> bool:
    """Returns True if a line is too long, or has only literals and brackets (and perhaps a comment)."""
    if not line.strip() or line.lstrip().startswith("#"):
        return False
    return len(line) > LONGEST_LINE or BETWEEN_LITERALS.issuperset(LITERAL.sub("", line).partition("#")[0])


def without_tables(lines: Sequence[str], left_out: Counter[str]) -> list[str]:
    """Removes lines that are too long, and runs of lines of literals."""
    kept: list[str] = []
    for table, part in groupby(lines, is_table_line):
        run = list(part)
        if table and len(run) >= TABLE_LINES:
            left_out["table"] += len(run)
        else:
            short = [line for line in run if len(line) <= LONGEST_LINE]
            left_out["long line"] += len(run) - len(short)
            kept += short
    return kept


def without_wide_gaps(lines: Sequence[str]) -> list[str]:
    """Removes trailing blanks, leading blank lines and every third consecutive blank line."""
    kept: list[str] = []
    for line in (line.rstrip() for line in lines):
        if line or (kept and any(kept[-2:])):
            kept.append(line)
    return kept


class Cleaner:
    """Cleans sources one after another, and removes stretches that an earlier source or part has.

    Attributes:
        left_out: removed lines by reason; "file, generated" counts files.
        kept: number of lines that remain.
        digests: digests of all stretches so far.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.kept = 0
        self.digests: set[bytes] = set()

    def clean(self, source: str) -> str:
        """Returns the cleaned source; "" for a generated file."""
        if is_generated(source):
            self.left_out["file, generated"] += 1
            return ""
        lines = source.expandtabs().replace("\f", "").split("\n")
        for step in (without_licences, without_rulers, without_tables, self.without_duplicates):
            lines = step(lines, self.left_out)
        text = "\n".join(without_wide_gaps(lines)).strip("\n")
        self.kept += text.count("\n") + 1 if text else 0
        return text + "\n" if text else ""

    def without_duplicates(self, lines: Sequence[str], left_out: Counter[str]) -> list[str]:
        """Removes the lines of every stretch that occurred before."""
        filled = [n for n, line in enumerate(lines) if line.strip()]
        duplicated: set[int] = set()
        for first in range(len(filled) - STRETCH + 1):
            numbers = list(islice(filled, first, first + STRETCH))
            stretch = "\n".join(lines[n].strip() for n in numbers)
            digest = blake2b(stretch.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            if digest in self.digests:
                duplicated.update(numbers)
            self.digests.add(digest)
        left_out["duplicate"] += len(duplicated)
        return [line for n, line in enumerate(lines) if n not in duplicated]
