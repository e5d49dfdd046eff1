"""Heads of GGUF files: as llama.cpp's own library reads them, and refused wherever they are cut."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tilewright.models.gguf_head import read_head

VALUES: dict[str, tuple[str, Any]] = {
    "a.u8": ("uint8", 200),
    "a.i8": ("int8", -3),
    "a.u16": ("uint16", 60000),
    "a.i16": ("int16", -300),
    "a.u32": ("uint32", 2**31),
    "a.i32": ("int32", -5),
    "a.u64": ("uint64", 2**40),
    "a.i64": ("int64", -(2**40)),
    "a.f32": ("float32", 0.5),
    "a.f64": ("float64", 0.1),
    "a.yes": ("bool", True),
    "a.text": ("string", "grüße"),
    "a.words": ("array", ["a", "", "ü"]),
    "a.numbers": ("array", [1, -2, 3]),
    "a.floats": ("array", [0.5, -1.5]),
    "a.flags": ("array", [True, False]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "head.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor("plain", rng.standard_normal((3, 5), np.float32))
    writer.add_tensor("narrow", rng.standard_normal((2, 3, 4), np.float32).astype(np.float16))
    writer.add_tensor("vector", rng.standard_normal(7, np.float32))
    writer.add_tensor("blocks", rng.integers(0, 256, (6, 2 * 34), np.uint8), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_head_is_read_as_by_llama_cpps_library(file: Path):
    fields, tensors = read_head(file)
    reader = gguf.GGUFReader(file)
    assert fields == {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: fields[name] for name in VALUES} == {name: value for name, (_, value) in VALUES.items()}
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        found = (ours.shape, ours.tensor_type, ours.n_bytes, ours.data_offset)
        assert found == (tuple(theirs.shape), theirs.tensor_type, theirs.n_bytes, theirs.data_offset)
        np.testing.assert_array_equal(ours.data, theirs.data)
        assert ours.data.dtype == theirs.data.dtype


def test_a_head_is_refused_wherever_it_is_cut(file: Path):
    whole = file.read_bytes()
    begin = min(tensor.data_offset for tensor in read_head(file)[1].values())
    for length in range(1, begin - 32, 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"bytes are missing at byte"):
            read_head(file)


@pytest.mark.parametrize(
    ("at", "value", "said"), [(0, b"GGML", "found b'GGML' of 3"), (4, bytes([1, 0, 0, 0]), "found b'GGUF' of 1")]
)
def test_other_formats_and_versions_are_refused(file: Path, at: int, value: bytes, said: str):
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + value + whole[at + len(value) :])
    with pytest.raises(ValueError, match=said):
        read_head(file)
