"""Blocks of GGUF files: any bits of a block are read as llama.cpp's own library reads them, and kept."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native
from tilewright.kernels.linear import blocks
from tilewright.kernels.select import operations
from tilewright.models.checkpoint import log_converted
from tilewright.models.gguf_blocks import READERS, read_blocks

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}
"""Where a block has its numbers in half precision; others have one, at the beginning."""


def file_of(rng: np.random.Generator, count: int, outputs: int, kind: str) -> np.ndarray:
    """Rows of a file, of any bits but for halves, which are finite, some of them subnormal or zero."""
    size, _ = READERS[kind]
    parts = rng.integers(0, 256, (outputs, count, size), np.uint8)
    for at in HALVES.get(kind, (0,)):
        shape = (outputs, count, 1)
        drawn = rng.standard_normal(shape, np.float32) * rng.choice(np.asarray([1, 1e-3, 1e-6, 0], np.float32), shape)
        parts[..., at : at + 2] = drawn.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        parts[..., 0] = rng.integers(104, 144, (outputs, count))
    return parts.reshape(outputs, -1)


@pytest.mark.parametrize("kind", READERS)
@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.integers(1, 9))
def test_any_bits_are_read_as_by_llama_cpps_library(kind: str, seed: int, count: int, outputs: int):
    rows = file_of(np.random.default_rng(seed), count, outputs, kind)
    found = read_blocks(rows, kind)
    assert found is not None
    np.testing.assert_array_equal(blocks.dequantise(found), gguf.quants.dequantize(rows, Kind[kind]).T)
    whole = blocks.blocks_of(blocks.panels_of(found), outputs)
    np.testing.assert_array_equal(blocks.dequantise(whole)[: found.shape[0]], blocks.dequantise(found))


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS", "F16"])
def test_types_that_products_do_not_hold_are_left_to_dequantising(kind: str):
    assert read_blocks(np.zeros((3, 512), np.uint8), kind) is None


def test_mxfp4_whose_scales_half_precision_does_not_hold_is_dequantised():
    rows = np.zeros((2, 17), np.uint8)
    assert read_blocks(rows, "MXFP4") is None


KEPT = "matrices. Use --weights int4 to keep them quantised."


@pytest.mark.parametrize(
    ("formats", "weights", "said"),
    [
        ([("Q4_1", "q4_1")], "auto", f"dequantising to bfloat16: 1 Q4_1 {KEPT}"),
        ([("Q4_1", "q4_1")], "int8", "converting to int8: 1 Q4_1 matrices. Use --weights int4 to keep their bits."),
        ([*[("Q4_K", "q4_z")] * 2, ("Q6_K", "q6_k")], "auto", f"dequantising to bfloat16: 2 Q4_K, 1 Q6_K {KEPT}"),
        ([("FP8", "fp8")], "auto", "dequantising to bfloat16: 1 FP8 matrices. Use --weights fp8 to keep them quantised."),
        ([("IQ2_XS", "")], "auto", "dequantising to bfloat16: 1 IQ2_XS matrices."),
        ([("IQ2_XS", "")], "int4", "quantising again, because no matmul reads their format"),
    ],
)
def test_a_file_whose_bits_are_not_kept_says_what_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, formats: list[tuple[str, str]], weights: Any, said: str
):
    (file := tmp_path / "model.gguf").touch()
    log_converted(file, Counter(formats), operations(weights=weights, kernels="xla"), "bfloat16")
    assert f"{file}: {said}" in caplog.text


def test_dequantising_on_request_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for ops in (None, operations(weights="dequantised")):
        log_converted(tmp_path, Counter([("Q4_1", "q4_1")]), ops, "bfloat16")
    assert all(record.levelno < logging.WARNING for record in caplog.records)  # another test may have set the level
    with caplog.at_level("INFO", "tilewright.models"):
        log_converted(tmp_path, Counter([("Q4_1", "q4_1")]), None, "bfloat16")
    assert "dequantising to bfloat16: 1 Q4_1 matrices" in caplog.text


@pytest.mark.skipif(native.kernels().isa is None, reason="needs the CPU kernels")
def test_what_the_cpu_kernels_cannot_keep_names_other_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log_converted(tmp_path, Counter([("Q2_K", "")]), operations(), "bfloat16")
    assert "dequantising to bfloat16, because no CPU kernel reads their format" in caplog.text
    assert "1 Q2_K matrices. Use --weights int8 or int4 to quantise them again." in caplog.text
    caplog.clear()
    log_converted(tmp_path, Counter([("Q4_1", "q4_1")]), operations(weights="int8"), "bfloat16")
    assert "converting to int8: 1 Q4_1 matrices. Use --weights auto to keep their bits." in caplog.text
