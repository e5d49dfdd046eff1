"""Reads request lengths and arrival times from a trace of served requests: CSV with a header, or JSONL."""

import csv
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from tilewright.models.records import Record, read_records, shortened

NAMES = (("prompt_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens"), ("ContextTokens", "GeneratedTokens"))
"""Field names of prompt and output lengths, in tokens: plain names, those of OpenAI's `usage`, and those of Azure's published
traces (https://github.com/Azure/AzurePublicDataset)."""
ARRIVALS = ("arrival_s", "TIMESTAMP")
"""Field names of arrival times: seconds since any moment, or a date and time as in Azure's traces."""


@dataclass(frozen=True)
class RequestTrace:
    """Requests of a trace in order of arrival, or in the file's order if the trace has no times.

    Attributes:
        prompts, outputs: numbers of tokens; outputs may be 0.
        arrivals_s: ascending arrival times in seconds after the first; None if the trace has no times.
    """

    prompts: Int[np.ndarray, " N"]
    outputs: Int[np.ndarray, " N"]
    arrivals_s: Float[np.ndarray, " N"] | None


def read_lengths(path: Path) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Returns the numbers of prompt and output tokens of each request, in the file's order.

    Raises:
        ValueError: The file cannot be read, is neither .csv nor .jsonl, has no request or no known fields, or a line has
            impossible lengths. The message names file and line.
    """
    return lengths(path, read_requests(path))


def read_trace(path: Path) -> RequestTrace:
    """Reads lengths, and arrival times if the trace has one of the fields `ARRIVALS`.

    Raises:
        ValueError: As `read_lengths`; or an arrival time is missing or invalid.
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
    """Returns line number and fields of each request of a trace, at least one."""
    readers = {".csv": csv_records, ".jsonl": read_records}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected a trace in .csv or .jsonl, found {path.suffix or 'no suffix'}")
    requests = list(readers[path.suffix.lower()](path))
    if not requests:
        raise ValueError(f"{path}: expected at least one request, found none")
    return requests


def csv_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yields line number and values of each non-empty line of a CSV file after its header."""
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
                column_names(f"{path}:{lines.line_num}", header)
            elif len(cells) != len(header):
                raise ValueError(f"{path}:{lines.line_num}: expected {len(header)} values, found {len(cells)}")
            else:
                yield (
                    lines.line_num,
                    dict(zip(header[::-1], cells[::-1], strict=True)),
                    # for repeated column names, the first column counts
                )
    except csv.Error as error:
        raise ValueError(f"{path}:{lines.line_num}: not CSV ({error})") from None


def arrival_name(found: Collection[str]) -> str | None:
    return next((name for name in ARRIVALS if name in found), None)


def column_names(location: str, found: Collection[str]) -> tuple[str, str]:
    """Returns the first pair of known names that are both present."""
    for names in NAMES:
        if all(name in found for name in names):
            return names
    choices = "; ".join(" and ".join(names) for names in NAMES)
    listed = ", ".join(map(shortened, list(found)[:8])) or "none"
    raise ValueError(f"{location}: expected the lengths of a request ({choices}), found {listed}")


def lengths(path: Path, requests: Sequence[tuple[int, Record]]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Returns the numbers of prompt and output tokens; outputs may be 0."""
    found = []
    for line, request in requests:
        prompt, output = column_names(f"{path}:{line}", request)
        found.append((length(f"{path}:{line}", request, prompt, 1), length(f"{path}:{line}", request, output, 0)))
    prompts, outputs = np.asarray(found, np.int64).T
    return prompts, outputs


def length(location: str, request: Record, name: str, least: int) -> int:
    """Returns a number of tokens, given as a number or as text."""
    value = request[name]
    whole = type(value) is int or (isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,15}", value.strip(), re.ASCII))
    number = int(value) if whole else -1
    if not whole or not least <= number < 2**31:
        raise ValueError(f"{location}: expected {name} of {least} to 2**31 - 1 tokens, found {shortened(value)}")
    return number


def seconds(location: str, request: Record, name: str) -> float:
    """Returns an arrival time in seconds. All requests use the first request's field; dates without a time zone are UTC."""
    found = arrival_name(request)
    if found != name:
        raise ValueError(f"{location}: expected {name} as the first request has it, found {found or 'no time of arrival'}")
    value = request[name]
    if name == "TIMESTAMP":
        try:
            moment = datetime.fromisoformat(value.strip() if isinstance(value, str) else "")
        except ValueError:
            raise ValueError(f"{location}: expected a date and time in {name}, found {shortened(value)}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{location}: expected a number of seconds in {name}, found {shortened(value)}")
    return number
