"""Files of `torch.save`, read without torch: what torch wrote, and what must not be run."""

import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models.torch_file import load_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "torch"
ROW = np.load(GOLDEN / "row.npy")


def test_what_torch_wrote():
    row, parameter, mapping = (load_tensors(GOLDEN / f"{name}.pt") for name in ("row", "parameter", "mapping"))
    assert (row.dtype, row.shape) == (np.float32, (1, 32))
    np.testing.assert_array_equal(row[0], ROW)
    np.testing.assert_array_equal(parameter, ROW.astype(np.float16))
    assert mapping["mask_token_id"] == 23
    assert mapping["embedding"].dtype.name == "bfloat16"
    np.testing.assert_allclose(mapping["embedding"].astype(np.float32), ROW, rtol=2**-8)


def archived(path: Path, description: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", description)
        for name, held in members.items():
            archive.writestr(f"archive/{name}", held)
    return path


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(os.system, "touch ran"), "a call of posix system"),
        (Call(eval, "open('ran', 'w')"), "a call of _*builtin"),
        ({"embedding": Call(os.mkdir, "ran")}, "a call of posix mkdir"),
        ([1, 2], "the instruction EMPTY_LIST"),
        (Path("x"), "a call of pathlib"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, message: str, protocol: int):
    monkeypatch.chdir(tmp_path)
    path = archived(tmp_path / "x.pt", pickle.dumps(value, protocol))
    with pytest.raises(ValueError, match=f"x.pt: expected plain tensors, found {message}"):
        load_tensors(path)
    assert os.listdir(tmp_path) == ["x.pt"]


def test_what_is_no_plain_tensor_is_named(tmp_path: Path):
    for name, message in (("columns", "a tensor that is not contiguous"), ("module", "the instruction NEWOBJ")):
        with pytest.raises(ValueError, match=f"{name}.pt: expected plain tensors, found {message}"):
            load_tensors(GOLDEN / f"{name}.pt")
    with pytest.raises(ValueError, match="a description of more than 1,048,576 bytes"):
        load_tensors(archived(tmp_path / "x.pt", bytes(1 << 21)))


def rewritten(path: Path, **changed: Any) -> Path:
    """The golden mapping with members changed: other bytes, or None for none."""
    with zipfile.ZipFile(GOLDEN / "mapping.pt") as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            held = changed.get(info.filename.rpartition("/")[2], old.read(info))
            if held is not None:
                new.writestr(info.filename, held, changed.get("compress", zipfile.ZIP_STORED))
    return path


def test_files_that_are_damaged(tmp_path: Path):
    whole = (GOLDEN / "mapping.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("no archive")
    for name in ("cut", "text", "absent"):
        with pytest.raises(ValueError, match=f"{name}.pt is not a readable file of torch.save"):
            load_tensors(tmp_path / f"{name}.pt")
    for number, (change, message) in enumerate(
        [
            ({"0": b"short"}, "not a readable"),
            ({"0": None}, "not a readable"),
            ({"byteorder": b"big"}, "big-endian numbers"),
            ({"compress": zipfile.ZIP_DEFLATED}, "numbers that are compressed"),
        ]
    ):
        with pytest.raises(ValueError, match=message):
            load_tensors(rewritten(tmp_path / f"{number}.pt", **change))


@given(st.binary(max_size=40))
def test_any_description_gives_a_value_or_a_value_error(text: bytes):
    with TemporaryDirectory() as folder, suppress(ValueError):
        load_tensors(archived(Path(folder) / "x.pt", text))
