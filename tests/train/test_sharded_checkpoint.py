"""Checkpoints of divided states: on another mesh, whole or not at all, and nothing but what was saved."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.parallel.mesh import make_mesh
from tilewright.train import checkpoint
from tilewright.train.checkpoint import SHARDED, WHOLE

SPREAD = {"w": PartitionSpec("fsdp", "tp"), "half": PartitionSpec("tp"), "count": PartitionSpec()}
FIGURES = {"curve.loss": np.array([1.5, np.nan, 1 / 3], np.float32), "curve.step": np.array([2, 4, 6])}
RUN = {"config": {"layers": (1, 2)}, "start": None}


def state(axes: dict[str, int | None], value: float) -> Any:
    mesh = make_mesh(axes)
    values = {"w": value * np.arange(24576.0, dtype=np.float32).reshape(256, 96), "half": np.full(8, value, jnp.bfloat16)}
    values["count"] = np.int32(value)
    return {name: jax.device_put(values[name], NamedSharding(mesh, spec)) for name, spec in SPREAD.items()}


@pytest.mark.parametrize("axes", [{"fsdp": 8, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 1}])
def test_a_state_is_read_on_another_mesh(tmp_path: Path, axes: dict[str, int | None]):
    saved = state({"fsdp": 4, "tp": 2}, 3.0)
    like = state(axes, 0.0)
    for step in (7, 9):
        checkpoint.write(tmp_path, saved, step, FIGURES, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [SHARDED]
    assert [path.name for path in (tmp_path / SHARDED).iterdir()] == ["9"], "the last one stays alone"
    read = checkpoint.read(tmp_path, like, RUN)
    found, step, figures = read
    assert step == 9
    for name, leaf in like.items():
        assert (found[name].sharding, found[name].dtype) == (leaf.sharding, leaf.dtype)
        np.testing.assert_array_equal(found[name], saved[name])
    assert figures.keys() == FIGURES.keys()
    for name, values in FIGURES.items():
        np.testing.assert_array_equal(figures[name], values)
        assert figures[name].dtype == values.dtype


def test_of_a_file_and_a_folder_the_later_counts(tmp_path: Path):
    divided = state({"fsdp": 2, "tp": 1}, 1.0)
    whole = state({"fsdp": 1, "tp": 1}, 2.0)
    assert not checkpoint.saved_steps(tmp_path)
    for kept, step in ((divided, 3), (whole, 5), (divided, 6)):
        checkpoint.write(tmp_path, kept, step, {}, RUN)
        read = checkpoint.read(tmp_path, whole, RUN)
        assert (read[1], int(read[0]["count"])) == (step, int(kept["count"]))
    assert checkpoint.saved_steps(tmp_path) == {tmp_path / WHOLE: 5, tmp_path / SHARDED / "6": 6}


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    kept = state({"fsdp": 4, "tp": 1}, 1.0)
    checkpoint.write(tmp_path, kept, 3, {}, RUN)
    with pytest.raises(ValueError, match=r"belongs to another run .*start: checkpoint None, now 'x'"):
        checkpoint.read(tmp_path, kept, {**RUN, "start": "x"})


def read_each(folder: Path) -> None:
    """Reads each copy below a folder, and prints what came of it."""
    kept = state({"fsdp": 4, "tp": 2}, 3.0)
    for copy in sorted(folder.iterdir()):
        try:
            read = checkpoint.read(copy, kept, RUN)
        except ValueError as error:
            print(json.dumps([copy.name, str(error)]))
            continue
        jax.tree.map(np.testing.assert_array_equal, read[0], kept)
        assert read[2].keys() == FIGURES.keys()
        print(json.dumps([copy.name, ""]))


def test_damage_is_seen_whatever_the_file(tmp_path: Path):
    """A file that is gone, or cut: an error, or, where nothing needs it, the state that was saved.

    They are read in a process of its own: where Orbax fails, what it began to read besides is heard of later.
    """
    checkpoint.write(tmp_path / "whole", state({"fsdp": 4, "tp": 2}, 3.0), 3, FIGURES, RUN)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    for n, file in enumerate(files):
        for damage in ("gone", "cut"):
            copy = tmp_path / "copies" / f"{n} {damage}"
            shutil.copytree(tmp_path / "whole", copy)
            path = copy / file
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            if damage == "gone":
                path.unlink()
    code = "import sys, pathlib, train.test_sharded_checkpoint as tests\ntests.read_each(pathlib.Path(sys.argv[1]))"
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
    assert seen >= {("d", "gone"), ("d", "cut"), ("told", "gone"), ("told", "cut"), ("state", "gone"), ("state", "cut")}


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs code that imports the package and the tests."""
    found = [str(Path(checkpoint.__file__).parents[2]), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(found)}, capture_output=True, text=True, timeout=240
    )


KILLED = """
import os, sys, threading
from pathlib import Path
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tilewright.parallel.mesh import make_mesh
from tilewright.train import checkpoint

folder, form = Path(sys.argv[1]), sys.argv[2]
mesh = make_mesh({"fsdp": 2 if form == "divided" else 1}, jax.devices()[: 2 if form == "divided" else 1])
state = {"w": jax.device_put(np.random.default_rng(0).normal(size=(2048, 2048)), NamedSharding(mesh, PartitionSpec("fsdp")))}
checkpoint.write(folder, state, 1, {}, {})

def kill():
    while not [path for path in folder.rglob("*tmp*") if path.is_dir() or path.stat().st_size]:
        pass
    os.kill(os.getpid(), 9)

threading.Thread(target=kill, daemon=True).start()
for step in range(2, 1000):
    checkpoint.write(folder, state, step, {}, {})
"""


@pytest.mark.parametrize("form", ["whole", "divided"])
def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path, form: str):
    ended = python(KILLED, tmp_path, form)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(tmp_path.rglob("*tmp*")), "it was in the middle of a save"
    wanted = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    read = checkpoint.read(tmp_path, {"w": jnp.zeros((2048, 2048), jnp.float32)}, {})
    np.testing.assert_array_equal(read[0]["w"], wanted)
    mesh = make_mesh({"fsdp": 2 if form == "divided" else 1})
    again = jax.device_put(wanted, NamedSharding(mesh, PartitionSpec("fsdp")))
    checkpoint.write(tmp_path, {"w": again}, read[1] + 1, {}, {})
    assert list(checkpoint.saved_steps(tmp_path).values()) == [read[1] + 1]
    assert not list(tmp_path.rglob("*tmp*")), "what was left is cleared away"
