"""Shape tables as files: what is written is read again, and what is wrong is named."""

import re
from pathlib import Path

import pytest

from tilewright.runtime.shape_file import read_table, table_text
from tilewright.runtime.shapes import ShapeTable


@pytest.mark.parametrize("table", [ShapeTable(), ShapeTable((1, 3), (128, 512), (32, 128), ())])
def test_what_is_written_is_read_again(tmp_path: Path, table: ShapeTable):
    path = tmp_path / "shapes.json"
    path.write_text(table_text(table), encoding="utf-8")
    assert read_table(path) == table
    assert len(path.read_text().splitlines()) == 2 + 4, "a field a line"


def test_a_field_that_is_left_out_has_its_default(tmp_path: Path):
    path = tmp_path / "shapes.json"
    path.write_text('{"capacities": [256, 768]}')
    assert read_table(path) == ShapeTable(capacities=(256, 768))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "not JSON (Expecting property name"),
        (b'{"\xff": 1}', "not UTF-8 (byte 3)"),
        (b"[1]", "expected a JSON object, found [1]"),
        (b'{"capacity": [256]}', "expected the fields batches, capacities, chunks, widths, found 'capacity'"),
        (b'{"batches": 4}', "batches: expected a list of integers, found 4"),
        (b'{"batches": [1, 2.0]}', "batches: expected a list of integers, found [1, 2.0]"),
        (b'{"batches": [true]}', "batches: expected a list of integers, found [true]"),
        (b'{"widths": null}', "widths: expected a list of integers, found null"),
        (b'{"batches": [2, 1]}', "expected batches that are increasing positive numbers, found (2, 1)"),
        (b'{"widths": [1]}', "expected widths that are increasing numbers from 2 on, found (1,)"),
        (b'{"capacities": [300]}', "expected capacities that are multiples of the largest chunk 256, found 300"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: bytes, problem: str):
    path = tmp_path / "shapes.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {problem}")):
        read_table(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"absent\.json cannot be read: No such file or directory"):
        read_table(tmp_path / "absent.json")
