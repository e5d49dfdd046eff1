"""Checkpoints: on another mesh, written while training goes on, whole or not at all, and only what was saved."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.parallel.mesh import make_mesh
from tilewright.train import checkpoint
from tilewright.train.checkpoint import CHECKPOINTS, Checkpoint, Checkpoints, checkpoint_folder, saved_steps
from tilewright.train.finite import FINITE, finite
from tilewright.train.loop import Task, train
from train.support import silent
from train.test_loop import assert_equal, regression, stopping

SPREAD = {"w": PartitionSpec("fsdp", "tp"), "half": PartitionSpec("tp"), "count": PartitionSpec()}
FIGURES = {"curve.loss": np.array([1.5, np.nan, 1 / 3], np.float32), "curve.step": np.array([2, 4, 6])}
RUN = {"config": {"layers": (1, 2)}, "start": None}


def state(axes: dict[str, int | None] | None, value: float) -> Any:
    """Arrays over a mesh; None for one device without a mesh."""
    values = {"w": value * np.arange(24576.0, dtype=np.float32).reshape(256, 96), "half": np.full(8, value, jnp.bfloat16)}
    values["count"] = np.int32(value)
    if axes is None:
        return jax.tree.map(jnp.asarray, values)
    mesh = make_mesh(axes)
    return {name: jax.device_put(values[name], NamedSharding(mesh, spec)) for name, spec in SPREAD.items()}


def write(out: Path, state: Any, *steps: int, keep: int = 1, position: Any = None) -> None:
    checkpoints = Checkpoints(checkpoint_folder(out), keep)
    for step in steps:
        checkpoints.save(state, step, FIGURES, RUN, position)
    checkpoints.close()


def read(out: Path, like: Any, run: Any = RUN) -> Checkpoint:
    checkpoints = Checkpoints(checkpoint_folder(out))
    try:
        return checkpoints.load(saved_steps(out)[-1], like, run)
    finally:
        checkpoints.close()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"fsdp": 4, "tp": 2}, {"fsdp": 8, "tp": 1}),
        ({"fsdp": 4, "tp": 2}, {"fsdp": 2, "tp": 2}),
        ({"fsdp": 4, "tp": 2}, None),
        (None, {"fsdp": 2, "tp": 2}),
        (None, None),
    ],
)
def test_a_state_is_read_on_another_mesh(tmp_path: Path, saved: Any, loaded: Any):
    written = state(saved, 3.0)
    like = state(loaded, 0.0)
    write(tmp_path, written, 7, 9)
    found = read(tmp_path, like)
    assert (found.step, found.position) == (9, None)
    for name, leaf in like.items():
        assert (found.state[name].sharding, found.state[name].dtype) == (leaf.sharding, leaf.dtype)
        np.testing.assert_array_equal(found.state[name], written[name])
    assert found.metrics.keys() == FIGURES.keys()
    for name, values in FIGURES.items():
        np.testing.assert_array_equal(found.metrics[name], values)
        assert found.metrics[name].dtype == values.dtype


@pytest.mark.parametrize(("keep", "kept"), [(1, [9]), (2, [7, 9]), (5, [3, 5, 7, 9])])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int, kept: list[int]):
    assert saved_steps(tmp_path) == []
    assert not list(tmp_path.iterdir()), "a look writes nothing"
    write(tmp_path, state(None, 1.0), 3, 5, 7, 9, keep=keep)
    assert saved_steps(tmp_path) == kept


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    kept = state({"fsdp": 4, "tp": 1}, 1.0)
    write(tmp_path, kept, 3)
    with pytest.raises(ValueError, match=r"belongs to another run .*start: checkpoint None, now 'x'"):
        read(tmp_path, kept, {**RUN, "start": "x"})


@pytest.mark.parametrize("name", ["state.safetensors", "sharded/4/state/manifest.ocdbt"])
def test_a_checkpoint_of_an_earlier_version_is_an_error_with_its_reader(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"earlier")
    with pytest.raises(ValueError, match=rf"found .*{name.split('/')[0]}, which the development version of 2026-11-30 .* read"):
        train(regression(), silent(), tmp_path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds back the end of every save until the event is set."""
    opened = threading.Event()
    finalize = ocp.StandardCheckpointHandler.finalize

    def held(self: Any, directory: Any) -> None:
        assert opened.wait(60)
        finalize(self, directory)

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "finalize", held)
    yield opened
    opened.set()


@pytest.mark.parametrize("axes", [None, {"fsdp": 4, "tp": 2}])
def test_steps_that_donate_their_state_go_on_while_it_is_written(tmp_path: Path, gate: threading.Event, axes: Any):
    """The files get the state of the save, whatever later steps write to its memory."""
    now = state(axes, 1.0)
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + leaf, state), donate_argnums=0)
    checkpoints = Checkpoints(checkpoint_folder(tmp_path))
    checkpoints.save(now, 1, FIGURES, RUN)
    for _ in range(3):
        now = advance(now)
    assert int(now["count"]) == 8
    assert saved_steps(tmp_path) == []
    gate.set()
    checkpoints.close()
    found = read(tmp_path, state(axes, 0.0))
    jax.tree.map(np.testing.assert_array_equal, found.state, state(axes, 1.0))


def test_a_save_that_fails_is_an_error_of_the_next_one_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = state(None, 1.0)
    write(tmp_path, kept, 1)

    def full(self: Any, directory: Any) -> None:
        raise OSError("disk full")

    for after in ("save", "close"):
        checkpoints = Checkpoints(checkpoint_folder(tmp_path))
        with monkeypatch.context() as patched:
            patched.setattr(ocp.StandardCheckpointHandler, "finalize", full)
            checkpoints.save(state(None, 2.0), 2, {}, RUN)
            with pytest.raises(OSError, match="disk full"):
                checkpoints.save(kept, 3, {}, RUN) if after == "save" else checkpoints.close()
    assert saved_steps(tmp_path) == [1]
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path, kept).state, kept)


class Numbers:
    """Batches of a source with a position, which only `restore` moves to another place."""

    def __init__(self) -> None:
        self.next = 0

    def batches(self, first: int) -> Iterator[Any]:
        while True:
            x = np.random.default_rng(self.next).normal(size=(8, 6)).astype(np.float32)
            self.next += 3
            yield x, np.ones((8, 4), np.float32)

    def state(self) -> dict[str, Any]:
        return {"next": self.next, "shard": {"of": [1, 2]}}

    def restore(self, state: dict[str, Any]) -> None:
        assert state["shard"] == {"of": [1, 2]}
        self.next = state["next"]


def test_a_run_resumes_at_its_position_in_the_data(tmp_path: Path):
    def task() -> Task:
        source = Numbers()
        return replace(regression(steps=9, save_every=2), batches=source.batches, position=source)

    whole = train(task(), silent(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task(), 7), silent(), tmp_path / "parts")
    assert_equal(train(task(), silent(), tmp_path / "parts"), whole)
    with pytest.raises(ValueError, match="expected a run with a position in the data, found one without it"):
        train(replace(task(), position=None), silent(), tmp_path / "parts")


def test_checkpoints_may_lie_elsewhere(tmp_path: Path):
    task = replace(regression(steps=9, save_every=2), keep=3, checkpoints=str(tmp_path / "store" / "run"))
    whole = train(task, silent())
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task, 7), silent(), tmp_path / "out")
    assert saved_steps(tmp_path / "out", task.checkpoints) == [2, 4, 6]
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert_equal(train(task, silent(), tmp_path / "out"), whole)


def read_each(folder: Path) -> None:
    """Reads each copy below a folder, and prints the result."""
    kept = state({"fsdp": 4, "tp": 2}, 3.0)
    for copy in sorted(folder.iterdir()):
        try:
            found = read(copy, kept)
        except ValueError as error:
            print(json.dumps([copy.name, str(error)]))
            continue
        jax.tree.map(np.testing.assert_array_equal, found.state, kept)
        assert found.metrics.keys() == FIGURES.keys()
        print(json.dumps([copy.name, ""]))


def test_damage_is_seen_whatever_the_file(tmp_path: Path):
    """A file that is gone, or cut: an error, or, where nothing needs it, the state that was saved.

    They are read in a process of its own: where Orbax fails, what it began to read besides is heard of later.
    """
    write(tmp_path / "whole", state({"fsdp": 4, "tp": 2}, 3.0), 3)
    place = tmp_path / "whole" / "checkpoints" / "3"
    files = [path.relative_to(tmp_path / "whole") for path in place.rglob("*") if path.is_file()]
    for n, file in enumerate(files):
        for damage in ("gone", "cut"):
            copy = tmp_path / "copies" / f"{n} {damage}"
            shutil.copytree(tmp_path / "whole", copy)
            path = copy / file
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            if damage == "gone":
                path.unlink()
    code = "import sys, pathlib, train.test_checkpoint as tests\ntests.read_each(pathlib.Path(sys.argv[1]))"
    ran = python(code, tmp_path / "copies")
    assert ran.returncode == 0, ran.stderr
    said = dict(map(json.loads, ran.stdout.splitlines()))
    assert len(said) == 2 * len(files)
    assert all("expected a readable checkpoint" in error for error in said.values() if error)
    seen = {
        (files[int(n)].parts[-2], damage)
        for (n, damage), error in ((name.split(), error) for name, error in said.items())
        if error
    }
    assert seen >= {(part, damage) for part in ("d", "metadata", "state") for damage in ("gone", "cut")}


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs code that imports the package and the tests."""
    found = [str(Path(checkpoint.__file__).parents[2]), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(found)}, capture_output=True, text=True, timeout=240
    )


WIDE = 1 << 21
"""Numbers of an array that takes a while to write."""


def wide_task(devices: int) -> Task:
    """A run of 400 steps whose array is the sum of the steps so far, over some devices, saved after every second step."""
    sharding = NamedSharding(make_mesh({"fsdp": devices}), PartitionSpec("fsdp"))

    @partial(jax.jit, donate_argnums=0)
    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        return params + batch, opt_state, {"loss": params[0], FINITE: finite(params[0], {})}

    return replace(
        regression(steps=400, evaluate_every=1000, save_every=2),
        run_fingerprint={"wide": True},
        init=lambda: (jax.device_put(np.zeros(WIDE, np.float32), sharding), ()),
        step=step,
        batches=lambda first: (np.float32(n + 1) for n in count(first)),
        evaluate=lambda params, step: {"held_out_loss": params[-1]},
    )


def run_until_killed(folder: Path, devices: int) -> None:
    """Trains, and kills this process in the middle of the third save, while steps go on."""
    finalize = ocp.StandardCheckpointHandler.finalize
    saves = count(1)

    def killing(self: Any, directory: Any) -> None:
        if next(saves) == 3:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        finalize(self, directory)

    setattr(ocp.StandardCheckpointHandler, "finalize", killing)  # noqa: B010 (pyright takes an assignment for a mistake)
    train(wide_task(devices), silent(), folder)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_is_killed_while_it_saves_resumes_from_the_last_whole_checkpoint(tmp_path: Path, devices: int):
    code = "import sys, pathlib, train.test_checkpoint as tests\ntests.run_until_killed(pathlib.Path(sys.argv[1]), {})"
    ended = python(code.format(devices), tmp_path)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert saved_steps(tmp_path) == [4], "only the steps after the last whole checkpoint are lost"
    assert [path.name.partition(".")[0] for path in (tmp_path / CHECKPOINTS).glob("*tmp*")] == ["6"]
    task = replace(wide_task(3 - devices), steps=11)
    result = train(task, silent(), tmp_path)
    np.testing.assert_array_equal(result.params, np.full(WIDE, 11 * 12 / 2, np.float32))
    assert result.curve["loss"].tolist() == [np.mean(np.cumsum(np.arange(12))[:11])], "the loss before each step, each once"
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["11"], "what was left is removed"


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "az://container/run"])
def test_other_stores_are_refused(url: str, tmp_path: Path):
    """Before anything is written, for example to a local folder of the URL's name."""
    with pytest.raises(ValueError, match=f"expected a folder, or a URL that begins with gs://, found {url}"):
        saved_steps(tmp_path, url)
