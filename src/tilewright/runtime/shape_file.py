"""Shape table as a JSON file: an object with the fields of `ShapeTable`; missing fields have their defaults."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tilewright.runtime.shapes import ShapeTable

FIELDS = tuple(field.name for field in fields(ShapeTable))


def table_text(table: ShapeTable) -> str:
    """Formats a shape table as `read_table` reads it, one field a line."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(table).items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_table(path: Path) -> ShapeTable:
    """Reads the table in a file.

    Raises:
        ValueError: the file cannot be read or is no JSON object; a field is unknown, or its value is invalid.
    """
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start + 1})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {json.dumps(found)[:60]}")
    if unknown := [name for name in found if name not in FIELDS]:
        raise ValueError(f"{path}: expected the fields {', '.join(FIELDS)}, found {unknown[0]!a}")
    try:
        return ShapeTable(**{name: field_value(name, value) for name, value in found.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def field_value(name: str, value: Any) -> Any:
    """Converts a field's JSON value to a tuple of integers."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise ValueError(f"{name}: expected a list of integers, found {json.dumps(value)[:60]}")
    return tuple(value)
