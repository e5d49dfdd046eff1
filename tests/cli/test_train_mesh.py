"""`tilewright train lm --mesh`: over several devices as over one, on over another mesh, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.conftest import Run as Command
from cli.conftest import interrupt_at

OPTIONS = [
    "--vocab-size", 264, "--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--head-dim", 8,
    "--intermediate-size", 32, "--context", 32, "--sequence-length", 16, "--batch-size", 8, "--held-out", 0.3,
    "--evaluate-every", 3, "--save-every", 1, "--steps", 3, "--products", "float32", "--learning-rate", 0.01,
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(10):
        (folder / f"{n}.txt").write_text(f"one two three {n} four five six " * 12)
    return folder


def curve(file: Path) -> list[list[float]]:
    points = json.loads(file.read_text())["curve"]
    return [[point["loss_nats_per_token"], point["held_out_loss_nats_per_token"]] for point in points]


def test_a_run_goes_on_over_another_mesh_and_gives_what_one_device_gives(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = run("train", "lm", text, "--out", tmp_path / "alone", *OPTIONS, "--json", tmp_path / "alone.json")
    assert alone.status == 0, alone.err
    command = ["train", "lm", text, "--out", tmp_path / "mesh", *OPTIONS, "--json", tmp_path / "mesh.json"]
    with monkeypatch.context() as patched:
        interrupt_at(2, patched)
        assert run(*command, "--mesh", "fsdp=4,tp=2").status != 0
    ran = run(*command, "--mesh", "fsdp=8", "--early", "0,2", "--no-remat")
    assert ran.status == 0, ran.err
    assert "resuming language model at step 2 of 3" in ran.out
    np.testing.assert_allclose(curve(tmp_path / "mesh.json"), curve(tmp_path / "alone.json"), rtol=1e-4)
    assert json.loads((tmp_path / "mesh.json").read_text())["devices"] == 8
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("mesh", "alone"))
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].shape == tensor.shape


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--mesh", "fsdp:4"], "expected --mesh as fsdp=4,tp=2, found 'fsdp:4'"),
        (["--mesh", "fsdp=2,fsdp=4"], "expected --mesh as fsdp=4,tp=2"),
        (["--mesh", "fsdp=4,tp=4"], "expected from 1 to 8 devices"),
        (["--mesh", "tp=4"], "expected devices that divide 2 heads"),
        (["--mesh", "fsdp=4", "--early", "3"], "expected the shift early of attention from 0 to the 2 layers, found 3"),
        (["--mesh", "fsdp=4", "--late", "x"], "expected --late as a number of layers, or two for attention and MLP, found 'x'"),
        (["--mesh", "fsdp=4", "--accumulate", 3], "that fsdp=4 × 3 parts divide, found 8"),
        (["--early", "0", "--rings"], "expected --mesh with --early, --rings, found none"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(
    run: Command, text: Path, tmp_path: Path, more: list[Any], expected: str
):
    ran = run("train", "lm", text, "--out", tmp_path / "out", *OPTIONS, *more)
    assert ran.status == 2
    assert expected in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()
