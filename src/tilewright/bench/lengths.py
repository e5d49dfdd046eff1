"""Lengths of requests and when they came, out of a trace of what was served: CSV with a line of names, or JSONL."""

import csv
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from tilewright.train.data import Record, read_records, shortened

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
    return lengths(path, read_requests(path))


def read_trace(path: Path) -> RequestTrace:
    """Lengths, and times of arrival where the trace has one of the fields `ARRIVALS`.

    Raises:
        ValueError: as `read_lengths`; a time is missing or is none.
    """
    requests = read_requests(path)
    prompts, outputs = lengths(path, requests)
    timed = arrival_name(requests[0][1])
    if timed is None:
        return RequestTrace(prompts, outputs, None)
    times = np.asarray([seconds(f"{path}:{line}", request, timed) for line, request in requests])
    order = np.argsort(times, kind="stable")
    return RequestTrace(prompts[order], outputs[order], times[order] - times[order[0]])


def read_requests(path: Path) -> list[tuple[int, Record]]:
    """Line number and fields of each of a trace's requests, at least one."""
    readers = {".csv": csv_records, ".jsonl": read_records}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected a trace in .csv or .jsonl, found {path.suffix or 'no suffix'}")
    requests = list(readers[path.suffix.lower()](path))
    if not requests:
        raise ValueError(f"{path}: expected at least one request, found none")
    return requests


def csv_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Line number and values of each line of a CSV file under its line of names; empty lines are passed over."""
    try:
        lines = csv.reader(path.read_bytes().decode("utf-8-sig").splitlines())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start + 1})") from None
    header: list[str] = []
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                known_names(f"{path}:{lines.line_num}", header)
            elif len(cells) != len(header):
                raise ValueError(f"{path}:{lines.line_num}: expected {len(header)} values, found {len(cells)}")
            else:
                yield lines.line_num, dict(zip(header[::-1], cells[::-1], strict=True))  # of two columns of a name the first
    except csv.Error as error:
        raise ValueError(f"{path}:{lines.line_num}: not CSV ({error})") from None


def arrival_name(found: Collection[str]) -> str | None:
    return next((name for name in ARRIVALS if name in found), None)


def known_names(where: str, found: Collection[str]) -> tuple[str, str]:
    """The first pair of known names that are both there."""
    for names in NAMES:
        if all(name in found for name in names):
            return names
    known = "; ".join(" and ".join(names) for names in NAMES)
    listed = ", ".join(map(shortened, list(found)[:8])) or "none"
    raise ValueError(f"{where}: expected the lengths of a request ({known}), found {listed}")


def lengths(path: Path, requests: Sequence[tuple[int, Record]]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Tokens of prompts and of outputs; these may be 0."""
    found = []
    for line, request in requests:
        prompt, output = known_names(f"{path}:{line}", request)
        found.append((length(f"{path}:{line}", request, prompt, 1), length(f"{path}:{line}", request, output, 0)))
    prompts, outputs = np.asarray(found, np.int64).T
    return prompts, outputs


def length(where: str, request: Record, name: str, least: int) -> int:
    """A number of tokens, given as a number or as text."""
    value = request[name]
    whole = type(value) is int or (isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,15}", value.strip(), re.ASCII))
    number = int(value) if whole else -1
    if not whole or not least <= number < 2**31:
        raise ValueError(f"{where}: expected {name} of {least} to 2**31 - 1 tokens, found {shortened(value)}")
    return number


def seconds(where: str, request: Record, name: str) -> float:
    """A time of arrival of the first request's kind: a number of seconds, or a date and time (UTC unless it says)."""
    found = arrival_name(request)
    if found != name:
        raise ValueError(f"{where}: expected {name} as the first request has it, found {found or 'no time of arrival'}")
    value = request[name]
    if name == "TIMESTAMP":
        try:
            moment = datetime.fromisoformat(value.strip() if isinstance(value, str) else "")
        except ValueError:
            raise ValueError(f"{where}: expected a date and time in {name}, found {shortened(value)}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a number of seconds in {name}, found {shortened(value)}")
    return number
