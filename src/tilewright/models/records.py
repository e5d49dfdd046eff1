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
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    problem: Exception | None = None
    if path.suffix.lower() == ".json":
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
    records = []
    for number, line in enumerate(content.split(b"\n"), 1):  # other line breaks do not end a record
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, found {shortened(record)}")
        records.append((number, record))
    return records


def read_jsonl(path: Path) -> list[Record]:
    """Reads the records of a file; see `read_records` for errors."""
    return [record for _, record in read_records(path)]


def shortened(value: object) -> str:
    """Formats a value in at most 60 characters, for error messages."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
