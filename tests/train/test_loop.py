"""The loop: optimisers, checkpoints that resume exactly, and what a run reports."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tilewright.train import loop
from tilewright.train.drafter import DrafterOptions, train_drafter
from tilewright.train.lm import train_lm
from tilewright.train.loop import Run, Task, TrainOptions, TrainResult, load_state, make_optimizer, save_state, train
from train.support import DRAFTER, TARGET, options, random_stream, silent, target_params

WANTED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def regression(identity: str = "regression") -> Task:
    """Least squares: find the matrix and the offset behind `y = x @ WANTED + 1`."""

    def loss(params: Any, frozen: Array, batch: Any, key: Array) -> tuple[Array, Array]:
        x, y = batch
        noise = 1e-3 * jax.random.normal(key, y.shape)
        return jnp.mean((x @ params["w"] + params["b"] * frozen + noise - y) ** 2), jnp.float32(len(x))

    def batches(epoch: int) -> Iterator[Any]:
        rng = np.random.default_rng(epoch)
        for _ in range(5):
            x = rng.normal(size=(8, 6)).astype(np.float32)
            yield x, x @ WANTED + 1

    return Task(loss, jnp.float32(1), batches, list(batches(999)), 8, {"task": identity})


def start() -> dict[str, Array]:
    return {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def fit(out: Path, task: Task | None = None, **changes: Any) -> TrainResult:
    chosen = options(**{"learning_rate": 0.05, **changes})
    return train(task or regression(), start, chosen, make_optimizer(chosen, is_matrix), out, silent(), "regression")


def stopping(task: Task, after: int) -> Task:
    """The task as an interruption after so many steps meets it."""

    def batches(epoch: int) -> Iterator[Any]:
        for n, batch in enumerate(task.batches(epoch)):
            if 5 * epoch + n == after:
                raise KeyboardInterrupt
            yield batch

    return replace(task, batches=batches)


def assert_equal(a: TrainResult, b: TrainResult) -> None:
    """Bit for bit."""
    assert a.curve == b.curve
    assert (a.steps, a.loss, a.held_out_loss) == (b.steps, b.loss, b.held_out_loss)
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("after", "save_every"), [(7, 1), (9, 4), (3, 4)])
def test_an_interrupted_run_resumes_exactly(tmp_path: Path, optimizer: str, after: int, save_every: int):
    """Also where the checkpoint falls between two evaluations, and where the run stopped before its first one."""
    settings = {"optimizer": optimizer, "steps": 16, "evaluate_every": 6, "save_every": save_every}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", stopping(regression(), after), **settings)
    assert (tmp_path / "parts" / "state.safetensors").exists() == (after >= save_every)
    resumed = fit(tmp_path / "parts", **settings)
    assert_equal(resumed, whole)
    assert [point["step"] for point in whole.curve] == [6, 12, 16]


def test_a_point_of_the_curve_beyond_the_checkpoint_is_dropped(tmp_path: Path):
    """The curve is written before the state; a run may die in between."""
    whole = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", stopping(regression(), 5))
    (tmp_path / "parts" / "curve.json").write_text(json.dumps([{"step": 6, "loss": 9.0, "held_out_loss": 9.0}]))
    assert_equal(fit(tmp_path / "parts"), whole)


def test_a_finished_run_is_not_trained_again(tmp_path: Path):
    first = fit(tmp_path)
    before = (tmp_path / "state.safetensors").read_bytes()
    again = fit(tmp_path)
    assert_equal(again, first)
    assert again.tokens_per_s == 0
    assert (tmp_path / "state.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["lm", "drafter"])
def test_models_resume_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    text, held_out = random_stream(400), random_stream(120, seed=9)
    chosen = options(steps=7, evaluate_every=3, save_every=2)

    def run(out: Path) -> TrainResult:
        if kind == "lm":
            return train_lm(TARGET, text, held_out, chosen, out, silent())
        anchors = DrafterOptions(anchors=3)
        return train_drafter(TARGET, target_params(), DRAFTER, text, held_out, chosen, anchors, out, silent())

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        advance = Run.advance

        def dies(self: Run, batch: Any) -> None:
            if self.step == 5:
                raise KeyboardInterrupt
            advance(self, batch)

        patched.setattr(Run, "advance", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
    assert_equal(run(tmp_path / "parts"), whole)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    fit(tmp_path)
    with pytest.raises(ValueError, match="belongs to another run") as refused:
        fit(tmp_path, regression("another"), learning_rate=0.07, seed=3)
    message = str(refused.value)
    for told in ("learning_rate: checkpoint 0.05, now 0.07", "seed: checkpoint 0, now 3", "'regression', now 'another'"):
        assert told in message
    assert "batch_size" not in message
    assert "\n" not in message


def test_how_often_to_save_and_evaluate_may_change(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stopping(regression(), 6))
    assert [p["step"] for p in fit(tmp_path, evaluate_every=4, save_every=3).curve] == [8, 12]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    fit(tmp_path)
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"state\.safetensors is not a readable checkpoint"):
        fit(tmp_path)


def test_a_state_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, identity = tmp_path / "new" / "state.safetensors", {"run": 1}
    old = {"w": jnp.arange(3, dtype=jnp.float32)}
    save_state(path, old, 4, identity, [0.5, 0.25])

    def half(arrays: Any, target: Path, **_: Any) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(loop, "save_file", half)
    with pytest.raises(OSError, match="disk full"):
        save_state(path, {"w": jnp.ones(3)}, 5, identity)
    state, step, recent = load_state(path, {"w": jnp.zeros(3)}, identity)
    np.testing.assert_array_equal(state["w"], old["w"])
    assert (step, recent) == (4, [0.5, 0.25])
    with pytest.raises(OSError, match="disk full"):
        save_state(tmp_path / "first.safetensors", old, 1, identity)
    assert not (tmp_path / "first.safetensors").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_goes_down(tmp_path: Path, optimizer: str):
    result = fit(tmp_path, optimizer=optimizer, learning_rate=0.1, muon_learning_rate=0.1, steps=120, evaluate_every=20)
    losses = [point["held_out_loss"] for point in result.curve]
    start_loss = float(np.mean(WANTED**2) * 6 + 1)  # of the parameters 0, about
    assert losses[0] < 0.5 * start_loss
    assert losses[-1] < 0.02 * start_loss
    assert result.held_out_loss == losses[-1]
    assert result.tokens_per_s > 0
    np.testing.assert_allclose(result.params["w"], WANTED, atol=0.4)


def update(optimizer: str, gradient: dict[str, Array], weight_decay: float = 0.0) -> dict[str, np.ndarray]:
    """The second update of parameters that are all 1 (the first has rate 0)."""
    rates = {"learning_rate": 1.0, "muon_learning_rate": 1.0, "steps": 100, "warmup": 0.01}
    chosen = options(optimizer=optimizer, weight_decay=weight_decay, clip=1e9, **rates)
    optimiser = make_optimizer(chosen, is_matrix)
    params = jax.tree.map(jnp.ones_like, gradient)
    _, state = optimiser.update(gradient, optimiser.init(params), params)
    change, _ = optimiser.update(gradient, state, params)
    return jax.tree.map(np.asarray, change)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    rng = np.random.default_rng(0)
    gradient = {"w": jnp.asarray(rng.normal(size=(6, 6)), jnp.float32), "b": jnp.asarray(rng.normal(size=4), jnp.float32)}
    muon, adamw = update("muon", gradient), update("adamw", gradient)
    np.testing.assert_allclose(muon["b"], adamw["b"], rtol=1e-6)
    np.testing.assert_allclose(np.abs(adamw["w"]), 1, atol=1e-3)
    # Muon's step is nearly orthogonal: five Newton-Schulz steps bring singular values near 1.
    values = np.linalg.svd(muon["w"], compute_uv=False)
    assert values.max() / values.min() < 3 < np.linalg.cond(np.asarray(gradient["w"]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_matrices_decay(optimizer: str):
    gradient = {"w": jnp.ones((6, 6)), "b": jnp.ones(4)}
    without, decayed = update(optimizer, gradient), update(optimizer, gradient, weight_decay=0.25)
    np.testing.assert_allclose(decayed["w"] - without["w"], -0.25, atol=1e-5)
    np.testing.assert_array_equal(decayed["b"], without["b"])


def test_a_step_count_of_one_trains(tmp_path: Path):
    result = fit(tmp_path, steps=1)
    assert np.abs(result.params["w"]).max() > 0, "a single step must not be a warm-up step of rate 0"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps": 0}, "steps must be positive, found 0"),
        ({"batch_size": -1}, "batch_size must be positive"),
        ({"sequence_length": 0}, "sequence_length must be positive"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"muon_learning_rate": -0.1}, "muon_learning_rate must be positive"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"evaluate_every": 0}, "evaluate_every must be positive"),
        ({"save_every": 0}, "save_every must be positive"),
        ({"warmup": 1.0}, "a warmup from 0 to below 1, found 1.0"),
        ({"weight_decay": -1.0}, "a weight_decay of 0 or more, found -1.0"),
        ({"optimizer": "sgd"}, "adamw or muon, found 'sgd'"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], problem: str):
    make: Callable[..., TrainOptions] = TrainOptions
    with pytest.raises(ValueError, match=problem):
        make(**change)


def test_figures_are_plain_data(tmp_path: Path):
    figures = fit(tmp_path).figures()
    assert set(figures) == {"steps", "loss", "held_out_loss", "tokens_per_s", "seconds", "curve"}
    assert json.loads(json.dumps(figures)) == figures
