"""Lengths of requests and when they came, out of a trace of what was served: CSV with a line of names, or JSONL."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from tilewright.train.data import read_records, shortened

NAMES = (("prompt_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens"), ("ContextTokens", "GeneratedTokens"))
"""The fields of prompt and output lengths, in tokens: plain ones, those of OpenAI's `usage`, those of Azure's published traces
(https://github.com/Azure/AzurePublicDataset)."""
ARRIVALS = ("arrival_s", "TIMESTAMP")
"""The fields of times of arrival: seconds since any moment, or a date and time as Azure's traces have it."""


@dataclass(frozen=True)
class RequestTrace:
    """The requests of a trace in the order in which they came, or in the file's where it does not say when.

    Attributes:
        prompts, outputs: tokens, as in `read_lengths`.
        arrivals_s: ascending, in seconds after the first; None where the trace has no times.
    """

    prompts: Int[np.ndarray, " N"]
    outputs: Int[np.ndarray, " N"]
    arrivals_s: Float[np.ndarray, " N"] | None


def read_lengths(path: Path) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """The tokens of each request's prompt and of its output, in the file's order.

    Raises:
        ValueError: the file cannot be read, has another suffix than .csv and .jsonl, no request or no known fields; or a line
            has lengths that no request can have. The message names file and line.
    """
    requests = [lengths(path, line) for line in read_lines(path)]
    prompts, outputs = np.asarray(requests, np.int64).T
    return prompts, outputs


def read_trace(path: Path) -> RequestTrace:
    """Lengths, and times of arrival where the trace has one of the fields `ARRIVALS`.

    Raises:
        ValueError: as `read_lengths`; a time is missing or is none.
    """
    lines = read_lines(path)
    prompts, outputs = np.asarray([lengths(path, line) for line in lines], np.int64).T
    if lines[0].arrival is None:
        return RequestTrace(prompts, outputs, None)
    times = np.asarray([seconds(path, line, lines[0].arrival[0]) for line in lines])
    order = np.argsort(times, kind="stable")
    return RequestTrace(prompts[order], outputs[order], times[order] - times[order[0]])


@dataclass(frozen=True)
class Line:
    """A line's number, names and values of its two lengths, and name and value of its time where it has one."""

    number: int
    names: tuple[str, str]
    values: tuple[object, object]
    arrival: tuple[str, object] | None


def read_lines(path: Path) -> list[Line]:
    """All of a trace's lines, at least one."""
    readers = {".csv": csv_lines, ".jsonl": jsonl_lines}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected a trace in .csv or .jsonl, found {path.suffix or 'no suffix'}")
    lines = list(readers[path.suffix.lower()](path))
    if not lines:
        raise ValueError(f"{path}: expected at least one request, found none")
    return lines


def lengths(path: Path, line: Line) -> tuple[int, int]:
    prompt, output = (
        length(path, line.number, name, value, least)
        for name, value, least in zip(line.names, line.values, (1, 0), strict=True)
    )
    return prompt, output


def csv_lines(path: Path) -> Iterator[Line]:
    try:
        lines = csv.reader(path.read_bytes().decode("utf-8-sig").splitlines())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start + 1})") from None
    header: list[str] = []
    names, places, timed = NAMES[0], (0, 0), None
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                names = known_names(header, f"{path}:{lines.line_num}")
                places = header.index(names[0]), header.index(names[1])
                timed = arrival_name(header)
            elif len(cells) != len(header):
                raise ValueError(f"{path}:{lines.line_num}: expected {len(header)} values, found {len(cells)}")
            else:
                arrival = (timed, cells[header.index(timed)]) if timed else None
                yield Line(lines.line_num, names, (cells[places[0]], cells[places[1]]), arrival)
    except csv.Error as error:
        raise ValueError(f"{path}:{lines.line_num}: not CSV ({error})") from None


def jsonl_lines(path: Path) -> Iterator[Line]:
    for line, record in read_records(path):
        names = known_names(list(record), f"{path}:{line}")
        timed = arrival_name(list(record))
        yield Line(line, names, (record[names[0]], record[names[1]]), (timed, record[timed]) if timed else None)


def arrival_name(found: Sequence[str]) -> str | None:
    return next((name for name in ARRIVALS if name in found), None)


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


def seconds(path: Path, line: Line, name: str) -> float:
    """A time of arrival of the kind that the first line has: a number of seconds, or a date and time (UTC unless it says)."""
    found, value = line.arrival or (None, None)
    where = f"{path}:{line.number}"
    if found != name:
        raise ValueError(f"{where}: expected {name} as the first request has it, found {found or 'no time of arrival'}")
    if name == "TIMESTAMP":
        try:
            moment = datetime.fromisoformat(value.strip() if isinstance(value, str) else "")
        except ValueError:
            raise ValueError(f"{where}: expected a date and time in {name}, found {shortened(value)}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a number of seconds in {name}, found {shortened(value)}")
    return number
