"""Lengths of requests, out of a trace of what was served: CSV with a line of names, or JSONL."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from tilewright.bench.datasets import read_records, shortened

NAMES = (("prompt_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens"), ("ContextTokens", "GeneratedTokens"))
"""The fields of prompt and output lengths, in tokens: plain ones, those of OpenAI's `usage`, those of Azure's published traces
(https://github.com/Azure/AzurePublicDataset)."""


def read_lengths(path: Path) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """The tokens of each request's prompt and of its output, in the file's order.

    Raises:
        ValueError: the file cannot be read, has another suffix than .csv and .jsonl, no request or no known fields; or a line
            has lengths that no request can have. The message names file and line.
    """
    readers = {".csv": csv_lines, ".jsonl": jsonl_lines}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected a trace in .csv or .jsonl, found {path.suffix or 'no suffix'}")
    requests = [
        (length(path, line, names[0], values[0], 1), length(path, line, names[1], values[1], 0))
        for line, names, values in readers[path.suffix.lower()](path)
    ]
    if not requests:
        raise ValueError(f"{path}: expected at least one request, found none")
    prompts, outputs = np.asarray(requests, np.int64).T
    return prompts, outputs


Line = tuple[int, tuple[str, str], tuple[object, object]]
"""Number of a line, and names and values of its two lengths."""


def csv_lines(path: Path) -> Iterator[Line]:
    try:
        lines = csv.reader(path.read_bytes().decode("utf-8-sig").splitlines())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start + 1})") from None
    header: list[str] = []
    names, places = NAMES[0], (0, 0)
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                names = known_names(header, f"{path}:{lines.line_num}")
                places = header.index(names[0]), header.index(names[1])
            elif len(cells) != len(header):
                raise ValueError(f"{path}:{lines.line_num}: expected {len(header)} values, found {len(cells)}")
            else:
                yield lines.line_num, names, (cells[places[0]], cells[places[1]])
    except csv.Error as error:
        raise ValueError(f"{path}:{lines.line_num}: not CSV ({error})") from None


def jsonl_lines(path: Path) -> Iterator[Line]:
    for line, record in read_records(path):
        names = known_names(list(record), f"{path}:{line}")
        yield line, names, (record[names[0]], record[names[1]])


def known_names(found: Sequence[str], where: str) -> tuple[str, str]:
    """The first pair of known names that are both there."""
    for names in NAMES:
        if all(name in found for name in names):
            return names
    known = "; ".join(" and ".join(names) for names in NAMES)
    listed = ", ".join(map(shortened, found[:8])) or "none"
    raise ValueError(f"{where}: expected the lengths of a request ({known}), found {listed}")


def length(path: Path, line: int, name: str, value: object, least: int) -> int:
    """A number of tokens, given as a number or as text."""
    whole = type(value) is int or (isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,15}", value.strip(), re.ASCII))
    number = int(value) if whole and isinstance(value, int | str) else -1
    if not whole or not least <= number < 2**31:
        raise ValueError(f"{path}:{line}: expected {name} of {least} to 2**31 - 1 tokens, found {shortened(value)}")
    return number
