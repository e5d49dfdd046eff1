"""The loop: optimisers, checkpoints that resume exactly, and what a run reports."""

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from rich.console import Console

from tilewright.train import checkpoint, loop
from tilewright.train.checkpoint import saved_steps
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.finite import FINITE, finite
from tilewright.train.lm import train_lm
from tilewright.train.log import WEIGHT, LogOptions, Metrics, mean_metrics
from tilewright.train.loop import Task, TrainingRun, TrainResult, keep_better, train
from tilewright.train.step import train_step
from tilewright.train.text import TextOptions, make_optimizer, text_metrics
from train.support import DRAFTER, TARGET, options, random_stream, silent, target_params

WANTED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def regression(task: str = "regression", seed: Any = 0, score: str | None = None, **changes: Any) -> Task:
    """Least squares: find the matrix and the offset behind `y = x @ WANTED + 1`."""
    chosen = options(**{"learning_rate": 0.05, **changes})
    optimizer = make_optimizer(chosen, is_matrix)

    def draw(frozen: Array, batch: Any, key: Array) -> tuple[Any, Any]:
        x, y = batch
        return x, y - 1e-3 * jax.random.normal(key, y.shape)

    def loss(params: Any, frozen: Array, drawn: Any) -> tuple[Array, Array]:
        x, y = drawn
        return jnp.mean((x @ params["w"] + params["b"] * frozen - y) ** 2), jnp.float32(len(x))

    def batch(n: int) -> Any:
        x = np.random.default_rng(n).normal(size=(8, 6)).astype(np.float32)
        return x, x @ WANTED + 1

    def evaluate(params: Any, step: int) -> dict[str, Array]:
        return {"held_out_loss": loss(params, jnp.float32(1), draw(jnp.float32(1), batch(999), jax.random.key(0)))[0]}

    def init() -> tuple[Any, Any]:
        params = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}
        return params, optimizer.init(params)

    step = train_step(loss, optimizer, jnp.float32(1), draw)
    sizes: dict[str, Any] = {"steps": chosen.steps, "evaluate_every": chosen.evaluate_every, "save_every": chosen.save_every}
    return Task(
        "regression",
        {**chosen.run_fingerprint(), "task": task},
        init,
        step,
        lambda first: map(batch, count(first)),
        evaluate,
        **sizes,
        seed=seed,
        progress=("rows", 8),
        score=score,
    )


def test_means_are_weighted_by_tokens():
    """A step without a token in the loss counts for nothing, and of such steps alone there is no mean."""
    rows = [{"loss": np.float32(2), WEIGHT: 30}, {"loss": np.float32(0), WEIGHT: 0}, {"loss": np.float32(8), WEIGHT: 10}]
    assert mean_metrics(rows) == {"loss": 3.5}
    assert np.isnan(mean_metrics(rows[1:2])["loss"])
    assert mean_metrics([{"loss": np.float32(2)}, rows[2]]) == {"loss": 5}, "rows of an earlier version have no weights"


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def fit(out: Path, task: Task | None = None, **changes: Any) -> TrainResult:
    return train(task or regression(**changes), silent(), out)


def stopping(task: Task, after: int) -> Task:
    """The task as an interruption after so many steps meets it."""

    def batches(first: int) -> Iterator[Any]:
        yield from islice(task.batches(first), after - first)
        raise KeyboardInterrupt

    return replace(task, batches=batches)


def assert_equal(a: TrainResult, b: TrainResult) -> None:
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, (a.params, a.curve), (b.params, b.curve))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("after", "save_every"), [(7, 1), (9, 4), (3, 4)])
def test_an_interrupted_run_resumes_exactly(tmp_path: Path, optimizer: str, after: int, save_every: int):
    """Also where the checkpoint falls between two evaluations, and where the run stopped before its first one."""
    settings = {"optimizer": optimizer, "steps": 16, "evaluate_every": 6, "save_every": save_every}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", stopping(regression(**settings), after))
    assert saved_steps(tmp_path / "parts") == ([after - after % save_every] if after >= save_every else [])
    resumed = fit(tmp_path / "parts", **settings)
    assert_equal(resumed, whole)
    assert whole.curve["step"].tolist() == [6, 12, 16]


def test_a_finished_run_is_not_trained_again(tmp_path: Path):
    first = fit(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}
    again = fit(tmp_path)
    assert_equal(again, first)
    assert again.rate == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")} == before


@pytest.mark.parametrize("kind", ["lm", pytest.param("drafter", marks=pytest.mark.slow)])
def test_models_resume_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    text = random_stream(400)
    held_out = random_stream(120, seed=9)
    chosen = options(steps=7, evaluate_every=3, save_every=2)

    def run(out: Path) -> TrainResult:
        if kind == "lm":
            return train_lm(TARGET, text, held_out, chosen, out, silent())
        anchors = DFlashOptions(anchors=3)
        return train_drafter(TARGET, target_params(), DRAFTER, text, held_out, chosen, anchors, out, silent())

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        advance = TrainingRun.advance

        def dies(self: TrainingRun, batch: Any) -> None:
            if self.step == 5:
                raise KeyboardInterrupt
            advance(self, batch)

        patched.setattr(TrainingRun, "advance", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
    assert_equal(run(tmp_path / "parts"), whole)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    fit(tmp_path)
    with pytest.raises(ValueError, match="belongs to another run") as refused:
        fit(tmp_path, regression("another", learning_rate=0.07, weight_decay=0.5))
    message = str(refused.value)
    for part in (
        "learning_rate: checkpoint 0.05, now 0.07",
        "weight_decay: checkpoint 0.01, now 0.5",
        "'regression', now 'another'",
    ):
        assert part in message
    assert "batch_size" not in message
    assert "\n" not in message


def test_what_differs_inside_a_setting_is_named_alone():
    saved = {"config": {"layers": 2, "rope": {"theta": 1.0, "kind": "plain"}}, "sizes": {"a": 1}, "steps": 3}
    now = {"config": {"layers": 2, "rope": {"theta": 5.0, "kind": "plain"}, "heads": 4}, "sizes": None, "steps": 3}
    message = (
        r"\(config.heads: checkpoint None, now 4; config.rope.theta: checkpoint 1.0, now 5.0; sizes: .*{'a': 1}, now None\)"
    )
    with pytest.raises(ValueError, match=message):
        checkpoint.require_same_run("run", saved, now)


def test_how_often_to_save_and_evaluate_may_change(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stopping(regression(), 6))
    assert fit(tmp_path, evaluate_every=4, save_every=3).curve["step"].tolist() == [8, 12]


def lines_of(task: Task) -> list[str]:
    written = io.StringIO()
    train(task, Console(file=written, width=200))
    return written.getvalue().splitlines()


def test_a_run_without_a_terminal_shows_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch):
    assert len(lines_of(regression())) == 1, "the last step, where a minute has not passed"
    monkeypatch.setattr(loop, "LINE_S", 0.0)
    lines = lines_of(regression())
    assert len(lines) == regression().steps
    number = r"[\d,.]+"
    losses = rf"loss {number}  gradient norm {number}  learning rate {number}"
    speed = rf"{number} s/step  {number} rows/s  {number}% waiting for data"
    assert re.fullmatch(rf"regression: step 1 of 12  {losses}", lines[0]), "the first step compiles"
    assert re.fullmatch(rf"regression: step 2 of 12  {losses}  {speed}", lines[1])
    assert re.fullmatch(rf"regression: step 12 of 12  loss {number}  held out loss .*{speed}", lines[-1])


def test_a_run_without_a_terminal_shows_a_line_for_so_many_steps():
    lines = lines_of(replace(regression(steps=30, evaluate_every=30), log=LogOptions(every=7)))
    assert [line.split()[2] for line in lines] == ["7", "14", "21", "28", "30"], "the last row is that of the last step"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_goes_down(tmp_path: Path, optimizer: str):
    result = fit(tmp_path, optimizer=optimizer, learning_rate=0.1, muon_learning_rate=0.1, steps=120, evaluate_every=20)
    losses = result.curve["held_out_loss"].tolist()
    start_loss = float(np.mean(WANTED**2) * 6 + 1)  # of the parameters 0, about
    assert losses[0] < 0.5 * start_loss
    assert losses[-1] < 0.02 * start_loss
    assert result.last("held_out_loss") == losses[-1]
    assert result.rate > 0
    np.testing.assert_allclose(result.params["w"], WANTED, atol=0.4)


def update(optimizer: str, gradient: dict[str, Array], weight_decay: float = 0.0) -> dict[str, np.ndarray]:
    """The second update of parameters that are all 1 (the first has rate 0)."""
    rates = {"learning_rate": 1.0, "muon_learning_rate": 1.0, "steps": 100, "warmup": 0.01}
    chosen = options(optimizer=optimizer, weight_decay=weight_decay, clip=1e9, **rates)
    optimiser = make_optimizer(chosen, is_matrix)
    params = jax.tree.map(jnp.ones_like, gradient)
    with jax.numpy_dtype_promotion("standard"):
        _, state = optimiser.update(gradient, optimiser.init(params), params)
        change, _ = optimiser.update(gradient, state, params)
    return jax.tree.map(np.asarray, change)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    rng = np.random.default_rng(0)
    gradient = {"w": jnp.asarray(rng.normal(size=(6, 6)), jnp.float32), "b": jnp.asarray(rng.normal(size=4), jnp.float32)}
    muon = update("muon", gradient)
    adamw = update("adamw", gradient)
    np.testing.assert_allclose(muon["b"], adamw["b"], rtol=1e-6)
    np.testing.assert_allclose(np.abs(adamw["w"]), 1, atol=1e-3)
    # Muon's step is nearly orthogonal: five Newton-Schulz steps bring singular values near 1.
    values = np.linalg.svd(muon["w"], compute_uv=False)
    assert values.max() / values.min() < 3 < np.linalg.cond(np.asarray(gradient["w"]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_matrices_decay(optimizer: str):
    gradient = {"w": jnp.ones((6, 6)), "b": jnp.ones(4)}
    without = update(optimizer, gradient)
    decayed = update(optimizer, gradient, weight_decay=0.25)
    np.testing.assert_allclose(decayed["w"] - without["w"], -0.25, atol=1e-5)
    np.testing.assert_array_equal(decayed["b"], without["b"])


def test_a_step_count_of_one_trains(tmp_path: Path):
    result = fit(tmp_path, steps=1)
    assert np.abs(result.params["w"]).max() > 0, "a single step must not be a warm-up step of rate 0"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps": 0}, "expected steps above 0"),
        ({"batch_size": -1}, "expected batch_size above 0"),
        ({"sequence_length": 0}, "expected sequence_length above 0"),
        ({"learning_rate": 0.0}, "expected learning_rate above 0"),
        ({"learning_rate": float("nan")}, "expected learning_rate above 0"),
        ({"muon_learning_rate": -0.1}, "expected muon_learning_rate above 0"),
        ({"clip": 0.0}, "expected clip above 0"),
        ({"evaluate_every": 0}, "expected evaluate_every above 0"),
        ({"save_every": 0}, "expected save_every above 0"),
        ({"seed": -1}, "expected seed of at least 0, found -1"),
        ({"seed": 2**31}, "expected a seed below 2147483648, found 2147483648"),
        ({"warmup": 1.0}, "a warmup from 0 to below 1, found 1.0"),
        ({"weight_decay": -1.0}, "expected weight_decay of at least 0, found -1.0"),
        ({"optimizer": "sgd"}, "adamw or muon, found 'sgd'"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], problem: str):
    make: Callable[..., TextOptions] = TextOptions
    with pytest.raises(ValueError, match=problem):
        make(**change)


def test_figures_are_plain_data(tmp_path: Path):
    figures = text_metrics(fit(tmp_path))
    losses = {"loss_nats_per_token", "held_out_loss_nats_per_token"}
    compiling = {"compilations", "programs_loaded", "compile_seconds"}
    assert figures.keys() == {"steps", "tokens_per_s", "seconds", "curve", *losses, *compiling}
    assert [point.keys() for point in figures["curve"]] == 2 * [{"step", *losses}]
    assert json.loads(json.dumps(figures)) == figures


def falling_then_rising(score: str | None) -> Task:
    """Two runs whose parameter is the step; one is best at step 4, the other one at the end."""

    def step(params: Array, opt_state: Any, batch: Any, key: Array) -> tuple[Array, Any, Metrics]:
        return params + 1, opt_state, {"loss": params, FINITE: finite(params, {})}

    def evaluate(params: Array, step: int) -> dict[str, Array]:
        return {"score": jnp.array([1.0, -1.0]) * -((params - 4.0) ** 2), "nothing": jnp.full(2, jnp.nan)}

    return Task(
        "runs",
        {"a": 1},
        lambda: (jnp.zeros(2), ()),
        step,
        lambda first: count(first),
        evaluate,
        steps=9,
        evaluate_every=2,
        save_every=1,
        seed=np.arange(2),
        progress=("steps", 1),
        score=score,
    )


@pytest.mark.parametrize(("score", "kept"), [("score", [4.0, 9.0]), ("nothing", [9.0, 9.0]), (None, [9.0, 9.0])])
def test_the_best_parameters_of_each_run_are_kept(tmp_path: Path, score: str | None, kept: list[float]):
    task = falling_then_rising(score)
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task, 7), silent(), tmp_path)
    result = train(task, silent(), tmp_path)
    assert result.params.tolist() == kept
    assert result.curve["step"].tolist() == [2, 4, 6, 8, 9]
    assert result.curve["loss"][:, 0].tolist() == [0.5, 2.5, 4.5, 6.5, 8.0]


@pytest.mark.parametrize(("every", "curve"), [(2, [2, 4, 6, 7]), (100, [7])])
def test_a_run_that_stands_at_its_last_step_is_measured_there(tmp_path: Path, every: int, curve: list[int]):
    """Its checkpoint was written between two evaluations, or before the first, of a run that was to go on."""
    task = replace(falling_then_rising("score"), evaluate_every=every)
    with pytest.raises(KeyboardInterrupt):
        train(stopping(task, 7), silent(), tmp_path)
    result = train(replace(task, steps=7), silent(), tmp_path)
    assert result.curve["step"].tolist() == curve
    assert result.last("loss").tolist() == [6.0 if every == 2 else 3.0] * 2
    assert result.params.tolist() == ([4.0, 7.0] if every == 2 else [7.0, 7.0])
    gone_on = train(task, silent(), tmp_path)
    assert gone_on.curve["step"].tolist() == ([2, 4, 6, 8, 9] if every == 2 else [9])


def test_better_ones_replace_whole_arrays_of_a_run():
    new = {"w": jnp.ones((2, 3, 4)), "b": jnp.ones(2)}
    scores = jnp.array([0.1, 0.3])
    best, kept = keep_better((jnp.full(2, 0.2), jax.tree.map(jnp.zeros_like, new)), scores, new)
    np.testing.assert_array_equal(best, np.array([0.2, 0.3], np.float32))
    assert kept["b"].tolist() == [0, 1]
    np.testing.assert_array_equal(kept["w"], np.repeat([0.0, 1.0], 12).reshape(2, 3, 4))
    np.testing.assert_array_equal(keep_better((jnp.array(0.0), jnp.zeros(3)), jnp.array(0.1), jnp.ones(3))[1], np.ones(3))


class Figure:
    """An array that knows whether anybody has read it, for which one waits."""

    read = False

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.read = True
        return np.zeros(2, np.float32)


@pytest.mark.parametrize(("every", "read"), [(1, False), (2, True)])
def test_nobody_waits_for_a_step_between_two_evaluations(every: int, read: bool):
    """The host hands out one epoch after another; a mean over several steps is the host's work."""
    made = falling_then_rising("score")
    figures = [Figure() for _ in range(4)]
    upcoming = iter(figures)

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        return params + 1, opt_state, {"loss": next(upcoming), FINITE: finite(jnp.float32(0), {})}

    run = TrainingRun(replace(made, step=step), None)
    for n in range(1, 5):
        run.advance(None)
        if n % every == 0:
            run.evaluate()
    assert [figure.read for figure in figures] == [read] * 4


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path: Path):
    task = falling_then_rising(None)
    train(task, silent(), tmp_path)
    with pytest.raises(ValueError, match=r"expected at least the 9 steps of the checkpoint in .*, found 5"):
        train(replace(task, steps=5), silent(), tmp_path)


def test_a_fingerprint_tells_arrays_apart():
    tree = {"a": np.arange(4, dtype=np.float32), "b": np.array(1)}
    others = [
        tree | {"a": tree["a"].reshape(2, 2)},
        tree | {"a": tree["a"].astype(np.float64)},
        {"a": tree["a"], "c": tree["b"]},
        tree | {"a": np.array([0, 1, 2, 4], np.float32)},
        tree | {"b": np.array(2)},
    ]
    assert len({checkpoint.fingerprint(each) for each in [tree, *others]}) == 6
    assert checkpoint.fingerprint(jax.tree.map(np.copy, tree)) == checkpoint.fingerprint(tree)
