"""`tilewright train lm --mesh`: over several devices as over one, on over another mesh, and what does not fit."""

import json
import time
from itertools import chain, pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.conftest import Run as Command
from cli.conftest import interrupt_at
from parallel.commands import run_together, started
from tilewright.cli import train_drafter as cli_drafter
from tilewright.cli.train import InitialModel, MeshOptions, ModelSizes
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.train import loop
from tilewright.train.data import Document, TokenStream, train_tokenizer
from tilewright.train.finite import NotFiniteTraining
from tilewright.train.lm import train_lm
from tilewright.train.text import TextOptions
from train.support import TARGET, silent

GOLDEN = Path(__file__).parents[1] / "golden" / "decoders"

OPTIONS = [
    "--sizes",
    "vocab_size=264,hidden_size=32,layers=2,heads=2,kv_heads=1,head_dim=8,intermediate_size=32,context=32",
    "--sequence-length",
    16,
    "--batch-size",
    8,
    "--held-out",
    0.3,
    "--evaluate-every",
    3,
    "--save",
    "every=1",
    "--steps",
    3,
    "--matmul-dtype",
    "float32",
    "--learning-rate",
    0.01,
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(10):
        (folder / f"{n}.txt").write_text(f"one two three {n} four five six " * 12)
    return folder


def curve(file: Path) -> list[list[float]]:
    points = json.loads(file.read_text())["curve"]
    return [[point["loss_nats_per_token"], point["held_out_loss_nats_per_token"]] for point in points]


@pytest.mark.slow
def test_a_run_goes_on_over_another_mesh_and_gives_what_one_device_gives(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = run("train", "lm", text, "--out", tmp_path / "alone", *OPTIONS, "--json", tmp_path / "alone.json")
    assert alone.status == 0, alone.err
    command = ["train", "lm", text, "--out", tmp_path / "mesh", *OPTIONS, "--json", tmp_path / "mesh.json"]
    with monkeypatch.context() as patched:
        interrupt_at(2, patched)
        assert run(*command, "--mesh", "fsdp=4,tp=2").status != 0
    ran = run(*command, "--mesh", "fsdp=8", "--sharding", "prefetch_distance=0,2", "--remat", "everything_saveable")
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
        (
            ["--mesh", "fsdp=4", "--sharding", "prefetch_distance=3"],
            "expected the prefetch distance of attention from 0 to the 2 layers, found 3",
        ),
        (
            ["--mesh", "fsdp=4", "--sharding", "scatter_delay=1,2,3"],
            "expected scatter_delay as one number of layers, or two for attention and MLP, found 3",
        ),
        (["--mesh", "fsdp=4", "--accumulate", 3], "that fsdp=4 × 3 parts divide, found 8"),
        (["--sharding", "rings=true"], "expected --mesh with --sharding, found none"),
        (["--mesh", "fsdp=4", "--remat", "dots_saveable"], "with explicit collectives, found dots_saveable"),
        (["--mesh", "fsdp=4", "--sharding", "rings=true,strategy=auto"], "without settings of the explicit strategy"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(
    run: Command, text: Path, tmp_path: Path, more: list[Any], expected: str
):
    ran = run("train", "lm", text, "--out", tmp_path / "out", *OPTIONS, *more)
    assert ran.status == 2
    assert expected in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama-scaled", "fsdp=2,tp=2"),
        pytest.param("qwen2-untied", "fsdp=4,tp=2", marks=pytest.mark.slow),
        pytest.param("qwen3-untied", "fsdp=8", marks=pytest.mark.slow),
    ],
)
def test_a_published_model_goes_on_and_is_saved_as_it_came(tmp_path: Path, name: str, axes: str):
    """One step that changes next to nothing: what is saved then has the logits that transformers gave for the model.

    Every device reads its shards and trains on them: nobody holds them a second time.
    """
    copytree(GOLDEN / name, tmp_path / "start")
    train_tokenizer([Document("one two")], 258).save(str(tmp_path / "start" / "tokenizer.json"))
    devices = MeshOptions(mesh=axes, remat="everything_saveable")
    options = TextOptions(steps=1, batch_size=8, sequence_length=8, learning_rate=1e-12)
    initial: Any = InitialModel.load(str(tmp_path / "start"), None, ModelSizes(), devices, silent())
    placement = devices.placement(initial.config, options)
    assert jax.tree.map(lambda leaf: leaf.sharding, initial.params) == placement.shardings(decoder.declare(initial.config))
    text = TokenStream(np.random.default_rng(0).integers(0, 96, 400).astype(np.int32), np.ones(400, bool))
    result = train_lm(initial.config, text, text, options, tmp_path / "training", silent(), initial.params, placement=placement)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(initial.params)), "their memory went into the step"
    config = initial.config
    save_params(tmp_path / "out", decoder.config_to_hf(config), decoder.declare(config), result.params, jnp.float32)
    found, params = load_decoder(tmp_path / "out", jnp.float32)
    assert found == config
    with np.load(GOLDEN / name / "outputs.npz") as outputs:
        tokens = jnp.asarray(outputs["tokens"])
        wanted = outputs["logits"]
    logits = jax.jit(lambda p: decoder.logits(config, PLAIN, p, decoder.forward_full(config, PLAIN, p, tokens).hidden))(params)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def test_a_run_that_went_wrong_ends_with_a_line_and_status_1(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: loop.TrainingRun, batch: Any) -> None:
        raise NotFiniteTraining("step 1: the loss is not finite")

    monkeypatch.setattr(loop.TrainingRun, "advance", broken)
    ran = run("train", "lm", text, "--out", tmp_path / "out", *OPTIONS)
    assert ran.status == 1
    assert " ".join(ran.err.split()) == "tilewright: language model: step 1: the loss is not finite; nothing was saved"


def test_a_drafter_is_handed_its_mesh(run: Command, text: Path, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`tests/train/test_partitioned.py` has the training."""
    given: list[Any] = []

    def caught(*arguments: Any) -> Any:
        given.extend(arguments)
        raise ValueError("caught")

    monkeypatch.setattr(cli_drafter, "fit", caught)
    command = ["train", "drafter", text, "--target", folders[0], "--out", tmp_path / "out", "--batch-size", 4]
    ran = run(*command, "--mesh", "fsdp=2,tp=2", "--sequence-length", 128)
    assert "caught" in ran.err, ran.err
    (_, params), placement = given[2], given[-1]
    assert dict(placement.mesh.shape) == {"fsdp": 2, "tp": 2}
    assert params.layers[0].o.sharding.shard_shape(params.layers[0].o.shape) == tuple(n // 2 for n in params.layers[0].o.shape)
    for more, problem in (
        (["--mesh", "fsdp=8"], "expected a batch that fsdp=8 divides, found 4"),
        (["--mesh", "fsdp=2", "--regenerate", "count=4"], "expected --mesh or text by the target, found both"),
        (["--mesh", "pp=2"], "expected the axes dp, fsdp and tp, found pp"),
        (["--sequence-length", 129], "expected sequences of at most the model's context of 128 tokens, found 129"),
    ):
        ran = run(*command, *more)
        assert (ran.status, problem in " ".join(ran.err.split())) == (2, True), ran.err
    assert not (tmp_path / "out").exists()


def test_processes_without_a_mesh_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="expected --mesh for 2 processes, found none"):
        MeshOptions().build_mesh(TARGET)


@pytest.mark.slow
def test_two_processes_are_killed_and_one_goes_on_and_gives_what_one_gives(run: Command, text: Path, tmp_path: Path):
    """Two devices each. The first process alone prints and writes; what both wrote goes on over eight devices of one."""
    options = [12 if before == "--steps" else word for before, word in pairwise([None, *OPTIONS])]

    def command(name: str, *more: object) -> list[str]:
        words = ["train", "lm", text, "--out", tmp_path / name, *options, "--json", tmp_path / f"{name}.json", *more]
        return list(map(str, words))

    def two(name: str) -> list[str]:
        return command(name, "--mesh", "fsdp=2,tp=2")

    alone = run(*command("alone"))
    assert alone.status == 0, alone.err
    whole = run_together(*two("whole"))
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("nats/token") == 1
    with started(*two("parts")) as processes:
        while not list(tmp_path.glob("parts/training/checkpoints/[1-9]")) and processes[0].poll() is None:
            time.sleep(0.01)
        assert processes[0].poll() is None, processes[0].communicate()
    assert not list((tmp_path / "parts").glob("*.safetensors*"))
    ran = run(*command("parts", "--mesh", "fsdp=8"))
    assert ran.status == 0, ran.err
    assert "resuming language model at step" in ran.out
    wanted = load_file(tmp_path / "alone" / "model.safetensors")
    for name in ("whole", "parts"):
        np.testing.assert_allclose(curve(tmp_path / f"{name}.json"), curve(tmp_path / "alone.json"), rtol=1e-4)
        parts = list((tmp_path / name).glob("*.safetensors"))
        assert len(parts) == (2 if name == "whole" else 1), "each process writes a part"
        ours = dict(chain.from_iterable(load_file(part).items() for part in parts))
        assert ours.keys() == wanted.keys()
        for tensor, value in wanted.items():
            np.testing.assert_allclose(ours[tensor], value, atol=1e-3 * np.abs(value).max())
