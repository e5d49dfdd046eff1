"""A loss or a gradient that is no finite number stops a run, and says where."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright.train.finite
from tilewright.models import decoder
from tilewright.models.params import initialise
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.checkpoint import saved_steps
from tilewright.train.finite import IN_FLIGHT, Finite, NotFiniteTraining, Watch, finite, require_finite
from tilewright.train.lm import train_lm
from tilewright.train.loop import Task, train
from tilewright.train.step import sharded_finite
from train.sharded_support import CONFIGS, drawn, placed
from train.support import TARGET, options, random_stream, silent
from train.test_loop import fit, regression


def poisoned(task: Task, step: int) -> Task:
    """The task with a batch, that of one step, in which a number is none."""

    def batches(first: int) -> Iterator[Any]:
        for n, (x, y) in enumerate(task.batches(first), first + 1):
            yield (x * np.float32(np.nan), y) if n == step else (x, y)

    return replace(task, batches=batches)


@pytest.mark.parametrize(("save_every", "kept"), [(2, "the checkpoint of step 4 stays"), (9, "nothing was saved")])
def test_a_run_stops_with_the_step_and_keeps_its_last_checkpoint(tmp_path: Path, save_every: int, kept: str):
    settings: dict[str, Any] = {"steps": 30, "evaluate_every": 30, "save_every": save_every}
    with pytest.raises(NotFiniteTraining, match=f"regression: step 5: the loss and every gradient are not finite; {kept}"):
        train(poisoned(regression(**settings), 5), silent(), tmp_path)
    assert saved_steps(tmp_path) == ([4] if save_every == 2 else [])
    assert fit(tmp_path, **settings).curve["step"].tolist() == [30]


def test_the_last_step_is_looked_at_though_nothing_is_saved():
    with pytest.raises(NotFiniteTraining, match=r"step 3: .*; nothing was saved"):
        train(poisoned(regression(steps=3), 3), silent())


def test_a_run_stops_soon_though_nothing_is_saved_meanwhile():
    drawn = []

    def counted(task: Task) -> Task:
        return replace(task, batches=lambda first: (drawn.append(batch) or batch for batch in task.batches(first)))

    with pytest.raises(NotFiniteTraining, match="step 5:"):
        train(counted(poisoned(regression(steps=100, save_every=100), 5)), silent())
    assert len(drawn) == 5 + IN_FLIGHT


def test_a_model_that_is_broken_is_refused_after_its_first_step(tmp_path: Path):
    params = initialise(decoder.declare(TARGET), jax.random.key(0))
    broken = replace(params, norm=params.norm.at[0].set(jnp.inf))
    text = random_stream()
    with pytest.raises(NotFiniteTraining, match="language model: step 1: the loss and every gradient are not finite"):
        train_lm(TARGET, text, text, options(save_every=1), tmp_path, silent(), broken)
    assert not saved_steps(tmp_path)


def ones(bad: dict[str, int]) -> Any:
    """A gradient for the tiny target; `bad` says of which array of which layer an entry is none."""
    params = jax.tree.map(lambda spec: jnp.ones(spec.shape), decoder.declare(TARGET))
    layers = list(params.layers)
    for name, n in bad.items():
        spoilt = jax.tree.map(lambda x: x.at[-1].set(jnp.nan), getattr(layers[n], name))
        layers[n] = replace(layers[n], **{name: spoilt})
    return replace(params, layers=tuple(layers))


@pytest.mark.parametrize(
    ("loss", "bad", "said"),
    [
        (1.0, {"gate_up": 1}, "step 3: the gradient of layers.1.gate_up is not finite"),
        (1.0, {"o": 0, "qkv": 1}, "step 3: the gradient of layers.0.o, layers.1.qkv is not finite"),
        (jnp.inf, {}, "step 3: the loss is not finite"),
        (jnp.nan, {"down": 0}, "step 3: the loss and the gradient of layers.0.down are not finite"),
    ],
)
def test_an_error_names_the_groups(loss: float, bad: dict[str, int], said: str):
    with pytest.raises(NotFiniteTraining) as stopped:
        require_finite(3, finite(jnp.float32(loss), ones(bad)))
    assert str(stopped.value) == said


def test_a_long_list_is_cut_and_runs_are_numbered():
    names = tuple(f"layers.{n}.o" for n in range(12))
    flags = np.ones((3, 13), bool)
    require_finite(1, Finite(jnp.asarray(flags), names))
    flags[1, 2:] = False
    with pytest.raises(
        NotFiniteTraining, match=r"step 1 of run 2: the gradient of layers\.1\.o, .*layers\.8\.o and 3 more groups is not"
    ):
        require_finite(1, Finite(jnp.asarray(flags), names))


def test_shards_are_looked_at_where_they_lie():
    """One entry, which one of eight devices holds."""
    shardings = placed("qwen2", 4, 2, FullyShardedPlan()).shardings(decoder.declare(CONFIGS["qwen2"]))
    gradient = drawn("qwen2")
    last = gradient.layers[1]
    spoilt = replace(last, down=last.down.at[-1, -1].set(jnp.inf))
    run = jax.jit(lambda loss, gradient: sharded_finite(shardings, loss, gradient))

    def found(gradient: Any) -> Finite:
        return run(jnp.float32(1), jax.device_put(gradient, shardings))

    require_finite(1, found(gradient))
    with pytest.raises(NotFiniteTraining, match=r"step 2: the gradient of layers\.1\.down is not finite"):
        require_finite(2, found(replace(gradient, layers=(gradient.layers[0], spoilt))))
    assert len(found(gradient).names) == len(set(found(gradient).names)) > 8 * CONFIGS["qwen2"].num_layers


def test_nobody_waits_for_the_last_steps(monkeypatch: pytest.MonkeyPatch):
    watch = Watch()
    read = []
    monkeypatch.setattr(tilewright.train.finite, "require_finite", lambda step, found: read.append(step))
    for step in range(1, IN_FLIGHT + 4):
        watch.note(step, Finite(jnp.ones(1, bool), ()))
    assert read == [1, 2, 3]
    watch.check_all()
    assert read == list(range(1, IN_FLIGHT + 4))
