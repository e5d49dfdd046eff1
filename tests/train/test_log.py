"""The log of a run: rows, what they say of speed, and where they go."""

import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tilewright.train import log as logs
from tilewright.train.log import WEIGHT, LogOptions, TrainingLog, read_log
from tilewright.train.loop import Task, train
from tilewright.train.text import make_optimizer, rate
from train.support import options, silent
from train.test_finite import poisoned
from train.test_loop import WANTED, regression, stopping

MEASURED = {"time", "step_seconds", "rows_per_s", "data_wait_share"}


def rows_of(out: Path, *names: str) -> list[dict[str, float]]:
    """The rows without what is measured, or with these metrics alone."""
    rows = read_log(out / logs.METRICS)
    return [{name: row[name] for name in row if (name in names if names else name not in MEASURED)} for row in rows]


def test_a_run_leaves_rows_of_its_steps_and_evaluations(tmp_path: Path):
    task = regression(steps=25, evaluate_every=12, save_every=100, clip=0.5)
    result = train(task, silent(), tmp_path)
    steps = [row for row in read_log(tmp_path / logs.METRICS) if "loss" in row]
    assert [row["step"] for row in steps] == [10, 12, 20, 24, 25], "every ten, and before each evaluation"
    schedule = rate(options(learning_rate=0.05, steps=25), 0.05)
    spans = (range(10), range(10, 12), range(12, 20), range(20, 24))
    with jax.numpy_dtype_promotion("standard"):
        wanted = [np.mean([float(np.asarray(schedule(n))) for n in span]) for span in spans]
    np.testing.assert_allclose([row["learning_rate"] for row in steps[:4]], wanted, rtol=1e-5)
    assert steps[1].keys() >= MEASURED
    held_out = [row for row in read_log(tmp_path / logs.METRICS) if "held_out_loss" in row]
    assert [row["step"] for row in held_out] == result.curve["step"].tolist() == [12, 24, 25]
    np.testing.assert_allclose([row["held_out_loss"] for row in held_out], result.curve["held_out_loss"], rtol=1e-6)
    assert "learning_rate" not in result.curve


def test_the_norm_of_a_gradient_is_that_before_clipping(tmp_path: Path):
    """Of the first step, against NumPy: the parameters are 0, and the noise of the labels is a thousandth."""
    task = replace(regression(steps=2, clip=1e-3), log=LogOptions(every=1))
    train(task, silent(), tmp_path)
    x, y = next(task.batches(0))
    error = -(x @ WANTED + 1) * 2 / y.size
    wanted = np.sqrt(np.sum((x.T @ error) ** 2) + np.sum(error.sum(0) ** 2))
    assert rows_of(tmp_path, "gradient_norm")[0]["gradient_norm"] == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_computes_the_norm_once(optimizer: str):
    """Squares of each gradient are summed once in the compiled step, whether the norm is an output or not."""
    chosen = options(optimizer=optimizer)
    made = make_optimizer(chosen, lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params))
    params = {"w": np.ones((6, 4), np.float32), "b": np.ones(4, np.float32)}
    state = made.init(params)

    def update(params: Any, state: Any, gradient: Any, keep: bool) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            update, after = made.update(gradient, state, params)
        return (update, after) if keep else (update, jax.tree.map(lambda leaf: leaf if leaf.ndim else 0 * leaf, after))

    kept, dropped = (
        str(jax.jit(update, static_argnums=3).lower(params, state, params, keep).compile().as_text()) for keep in (True, False)
    )
    assert kept.count(" reduce(") == dropped.count(" reduce(") > 0


@pytest.mark.parametrize(("after", "every", "save_every"), [(13, 4, 5), (7, 10, 3), (3, 1, 100)])
def test_an_interrupted_run_leaves_the_rows_of_a_whole_one(tmp_path: Path, after: int, every: int, save_every: int):
    task = replace(regression(steps=16, evaluate_every=6, save_every=save_every), log=LogOptions(every=every))
    train(task, silent(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task, after), silent(), tmp_path / "parts")
    assert rows_of(tmp_path / "parts"), "what was measured before the interruption was written"
    with (tmp_path / "parts" / logs.METRICS).open("a") as file:
        file.write('{"step": 99, "lo')
    train(task, silent(), tmp_path / "parts")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_a_run_that_stops_leaves_its_last_rows(tmp_path: Path):
    with pytest.raises(FloatingPointError):
        train(poisoned(replace(regression(steps=30), log=LogOptions(every=1)), 5), silent(), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path, "step", "loss") if "loss" in row][:4] == [1, 2, 3, 4]
    assert "NaN" not in (tmp_path / logs.METRICS).read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loss 3\n{}\n", "line 1: expected JSON, found 'loss 3'"),
        ('{"step": 1}\n[2]\n', "line 2: expected an object with a step"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str, problem: str):
    (tmp_path / logs.METRICS).write_text(text)
    with pytest.raises(ValueError, match=problem):
        train(regression(), silent(), tmp_path)
    assert (tmp_path / logs.METRICS).read_text() == text


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"every": 0}, "expected every of at least 1, found 0"),
        ({"profile": "10"}, "expected profile as first and last step, such as 10:15, found '10'"),
        ({"profile": "0:3"}, "expected profile as first and last step"),
        ({"profile": "9:3"}, "expected profile as first and last step"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        LogOptions(**settings)


@pytest.mark.parametrize("settings", [{"tensorboard": True}, {"wandb": "project"}, {"profile": "1:2"}])
def test_files_need_a_folder(settings: Any):
    with pytest.raises(ValueError, match="expected a folder for tensorboard, wandb and profile of --log, found no --out"):
        train(replace(regression(), log=LogOptions(**settings)), silent())


def test_speeds_leave_out_the_first_step_and_evaluations(monkeypatch: pytest.MonkeyPatch):
    """Steps of 2 s, of which 0.5 s are for the data; the first one compiles for 100 s, and an evaluation takes 30 s."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(logs, "time", clock)
    log = TrainingLog(LogOptions(every=5), ("tokens", 100), flops=3e12, peak=1e13)

    def slow() -> Any:
        while True:
            clock.now += 0.5
            yield {"loss": np.float32(2), WEIGHT: np.float32(7)}

    found: dict[int, dict[str, float]] = {}
    log.writers.append(lambda step, row: found.update({step: row}))
    for step, metrics in enumerate(log.batches(slow()), 1):
        clock.now += 1.5 + 100 * (step == 1)
        log.note(step, metrics)
        if step == 14:
            log.flush()
            with log.apart():
                clock.now += 30
        if step == 20:
            break
    log.close()
    assert list(found) == [5, 10, 14, 15, 20]
    wanted = {"loss": 2, "step_seconds": 2, "tokens_per_s": 50, "data_wait_share": 0.25, "model_flops_utilization": 0.15}
    for row in found.values():
        assert row == pytest.approx(wanted)


events_module: Any = event_pb2
"""Its classes are made when it is imported, out of sight of pyright."""


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Values by name and step in TensorBoard's files, of which later ones replace the steps that they purge."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = events_module.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                for values in found.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def logged(**settings: Any) -> Task:
    return replace(regression(steps=12, evaluate_every=6, save_every=5), log=LogOptions(every=3, **settings))


def test_tensorboard_gets_the_rows(tmp_path: Path):
    task = logged(tensorboard=True)
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task, 8), silent(), tmp_path)
    train(task, silent(), tmp_path)
    found = events(tmp_path / logs.TENSORBOARD)
    for name in ("loss", "held_out_loss", "learning_rate", "gradient_norm"):
        wanted = {row["step"]: row[name] for row in rows_of(tmp_path) if name in row}
        assert found[name] == pytest.approx(wanted)
        assert list(found[name]) == list(wanted)


def test_weights_and_biases_gets_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a module in the place of its own, which takes seconds to start."""
    began: list[dict[str, Any]] = []
    rows: list[dict[str, float]] = []
    ended: list[bool] = []

    def init(**settings: Any) -> Any:
        began.append(settings)
        return SimpleNamespace(log=lambda row, step: rows.append({"step": step, **row}), finish=lambda: ended.append(True))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    task = logged(wandb="project")
    train(task, silent(), tmp_path)
    assert began[0]["project"] == "project"
    assert began[0]["config"] == task.run_fingerprint
    kept = read_log(tmp_path / logs.METRICS)
    assert rows == [{name: value for name, value in row.items() if name != "time"} for row in kept]
    train(replace(task, steps=12), silent(), tmp_path)
    assert began[1]["id"] == began[0]["id"] == (tmp_path / logs.WANDB_ID).read_text(), "the same run goes on"
    assert ended == [True, True]


def test_a_trace_of_some_steps(tmp_path: Path):
    for profile in ("2:3", "11:20"):  # the second one ends with the run
        out = tmp_path / profile.replace(":", "-")
        train(logged(profile=profile), silent(), out)
        assert list((out / logs.PROFILE).rglob("*.xplane.pb"))
    train(logged(profile="13:20"), silent(), tmp_path / "none")
    assert not (tmp_path / "none" / logs.PROFILE).exists()


class Running(jax.Array):
    """A metric that the device computes until the test ends it."""

    ended = False

    def __init__(self, value: float):
        self.value = value

    def is_ready(self) -> bool:
        return self.ended

    def block_until_ready(self) -> Any:
        assert self.ended, "nobody waits for a step"
        return self

    def copy_to_host_async(self) -> None:
        """Begins what reading ends."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self.value, np.float32)


def test_rows_are_written_when_their_steps_have_ended():
    log = TrainingLog(LogOptions(every=2), ("rows", 1))
    written: list[tuple[int, float]] = []
    log.writers.append(lambda step, row: written.append((step, row["loss"])))
    running = [Running(n) for n in range(1, 8)]
    for step, loss in enumerate(running, 1):
        if step == 6:
            for each in running[:3]:
                each.ended = True
        log.note(step, {"loss": loss})
        assert written == ([(2, 1.5)] if step >= 6 else [])
