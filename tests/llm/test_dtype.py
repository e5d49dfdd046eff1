"""The dtype that models run in, and weights that nothing can be computed with."""

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reference.dflash_numpy import as_folders, random_pair
from reference.diffusion_folder import write_folder
from tilewright.kernels import native
from tilewright.llm import diffusion_model as diffusion
from tilewright.llm.language_model import load
from tilewright.models.checkpoint import chosen_dtype, stored_dtype
from tilewright.models.stored import is_finite

FAST = native.kernels().isa is not None


@pytest.mark.parametrize(
    ("option", "stored", "bfloat16", "chosen"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float16", True, "bfloat16"),
        ("auto", "float16", False, "float32"),
        ("auto", "float32", True, "float32"),
        ("float32", "bfloat16", True, "float32"),
        ("bfloat16", "float32", False, "bfloat16"),
    ],
)
def test_auto_is_the_checkpoints_dtype_where_that_is_fast(option: str, stored: str, bfloat16: bool, chosen: str):
    assert chosen_dtype(option, stored, bfloat16) == chosen


def written(folder: Path, tensor_dtype: Any, **fields: str) -> Path:
    """A small model whose tensors have this dtype, and whose configuration these fields besides."""
    target, _ = as_folders(folder, random_pair(0, vocab_size=24, target_layers=1, drafter_layers=1, taps=[0]))
    tensors = {name: value.astype(tensor_dtype) for name, value in load_file(target / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_the_configuration_says_it_else_the_tensors_do(tmp_path: Path):
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)):
        assert stored_dtype(written(tmp_path / name, dtype)) == name
    assert stored_dtype(written(tmp_path / "said", np.float32, torch_dtype="bfloat16")) == "bfloat16"
    assert stored_dtype(written(tmp_path / "newer", np.float32, dtype="torch.float16")) == "float16"


def test_a_model_runs_in_its_checkpoints_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found = {name: load(written(tmp_path / name, name)).dtype for name in ("float32", "bfloat16")}
    assert found == {"float32": "float32", "bfloat16": "bfloat16" if FAST else "float32"}
    assert load(tmp_path / "bfloat16" / "target", kernels="xla").dtype == "float32"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert load(written(tmp_path / "half", np.float16)).dtype == ("bfloat16" if FAST else "float32")
    assert bool(caplog.records) is FAST


def test_a_diffusion_model_does_too(tmp_path: Path):
    folder = write_folder(tmp_path)
    assert diffusion.load(folder).dtype == "float32"
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert diffusion.load(folder).dtype == ("bfloat16" if FAST else "float32")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_none_is_found(dtype: type, value: float):
    values = np.full((3, 5), ml_dtypes.finfo(dtype).max, dtype)
    values[1] = -values[1]
    assert is_finite(values)
    values[2, 4] = value
    assert not is_finite(values)


def test_weights_with_nan_are_refused_by_name(tmp_path: Path):
    target = written(tmp_path, np.float32)
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected finite numbers, found infinity or NaN"):
        load(target)
