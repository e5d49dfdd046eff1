"""Files of text and of JSON records."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected UTF-8 text, found other bytes") from None


def read_records(path: Path) -> list[tuple[int, Record]]:
    """Reads the records of a file, with the number of each line (JSONL, empty lines skipped) or element (JSON array).

    A `.json` file may be JSONL, an array, or a single object.

    Raises:
        ValueError: the file cannot be read, or a line (named in the message) is not UTF-8, not JSON or not an object.
    """
    try:
        return parse_records(path, path.read_bytes(), path.suffix.lower())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def parse_records(path: Path, content: bytes, suffix: str) -> list[tuple[int, Record]]:
    """Parses the content of a file with this suffix in lower case; see `read_records`."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    problem: Exception | None = None
    if suffix == ".json":
        try:
            value = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            problem = error
        else:
            records = list(enumerate(value if isinstance(value, list) else [value], 1))
            for number, record in records:
                if not isinstance(record, dict):
                    raise ValueError(f"{path}, record {number}: expected a JSON object, found {shortened(record)}")
            return records
    try:
        return line_records(path, content)
    except ValueError as error:
        if problem is None:
            raise
        raise ValueError(f"{path}: neither JSON ({problem}) nor a JSON object to a line ({error})") from None


def line_records(path: Path, content: bytes) -> list[tuple[int, Record]]:
    """Parses the lines of a JSONL file, with line numbers; see `read_records`."""
    lines = enumerate(content.split(b"\n"), 1)  # other line breaks do not end a record
    return [(number, parse_record(line, f"{path}:{number}")) for number, line in lines if line.strip()]


def parse_record(line: bytes, location: str) -> Record:
    """Parses a line of a JSONL file. Raises a `ValueError`, beginning with `location`, if the line is no JSON object."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{location}: expected a JSON object, found {shortened(record)}")
    return record


def read_jsonl(path: Path) -> list[Record]:
    """Reads the records of a file; see `read_records` for errors."""
    return [record for _, record in read_records(path)]


def shortened(value: object) -> str:
    """Formats a value in at most 60 characters, for error messages."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
