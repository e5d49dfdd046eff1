"""The sharded step against a single device: loss, every gradient, steps, and what is refused."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from products import cases
from tilewright.kernels.select import PLAIN
from tilewright.models.experts import Mixture
from tilewright.parallel.exchanges import FullyShardedPlan, Sublayers
from tilewright.train.finite import FINITE, NotFiniteTraining, require_finite
from tilewright.train.lm import hidden_matrices, language_model
from tilewright.train.log import WEIGHT
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import ONE_DEVICE, TrainingPlacement, initial_state, train_step, training_mesh
from tilewright.train.text import TextOptions, make_optimizer
from train.sharded_support import CONFIGS, alone, batch, drawn, equal, gradient, over_devices, placed
from train.support import HYBRID

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
SHIFTS = list(product(range(3), repeat=2))
QUICK = {
    ((4, 2), (1, 1), False, True),
    ((1, 8), (2, 0), False, False),
    ((2, 4), (1, 1), True, True),
}
"""Mesh, shifts (prefetch distance, scatter delay), scanned, remat."""

EVERY = list(cases(QUICK, MESHES, SHIFTS, (False, True), (False, True)))


@pytest.mark.parametrize("mesh, shifts, scan, remat", EVERY)
def test_loss_and_every_gradient_equal_those_of_one_device(
    mesh: tuple[int, int], shifts: tuple[int, int], scan: bool, remat: bool
):
    plan = FullyShardedPlan(
        prefetch_distance=Sublayers(shifts[0], shifts[0]), scatter_delay=Sublayers(shifts[1], shifts[1]), scan=scan, remat=remat
    )
    family = ("short" if shifts == (1, 1) else "looped") if scan else "llama"
    equal(over_devices(placed(family, *mesh, plan), family), family)


RINGS = FullyShardedPlan(weights="ring", gradients="ring", activations="ring")
OTHERS = {
    "rings, tied head": ("qwen3", (2, 4), RINGS, 1),
    "halves of their own shifts, biases": (
        "qwen2",
        (4, 2),
        FullyShardedPlan(prefetch_distance=Sublayers(2, 0), scatter_delay=Sublayers(0, 1)),
        1,
    ),
    "rings in a loop": ("looped", (4, 2), replace(RINGS, scan=True), 1),
    "rings of weights alone, kept": ("qwen2", (8, 1), FullyShardedPlan(weights="ring", gradients="ring", remat=False), 1),
    "rings of rows alone, kept": ("llama", (1, 8), FullyShardedPlan(activations="ring", remat=False), 1),
    "parts of a batch": ("qwen3", (4, 2), FullyShardedPlan(), 4),
    "no tokens": ("qwen3", (2, 4), FullyShardedPlan(threaded=False), 1),
    "no tokens, in a loop": ("looped", (2, 4), FullyShardedPlan(threaded=False, scan=True), 1),
    "experts, balanced, kept": ("qwen3_moe", (4, 2), FullyShardedPlan(remat=False), 1),
    "a hybrid": ("hybrid", (2, 4), FullyShardedPlan(), 1),
    "a hybrid in rings": ("unbalanced hybrid", (2, 4), RINGS, 1),
    "kinds in turns, in a loop": ("in turns", (4, 2), FullyShardedPlan(scan=True), 1),
    "kinds in turns, in a loop, shifted, kept": (
        "in turns",
        (2, 4),
        FullyShardedPlan(scan=True, remat=False, prefetch_distance=Sublayers(1, 0), scatter_delay=Sublayers(0, 1)),
        1,
    ),
    "norms behind sums, capped": ("gemma2", (4, 2), FullyShardedPlan(), 1),
    "norms behind sums, capped, in rings, kept": ("gemma2", (2, 4), replace(RINGS, remat=False), 1),
    "two bases of rotation, norms of heads": ("gemma3", (2, 4), FullyShardedPlan(), 1),
    "biases behind sums, sinks, experts": ("gpt_oss", (2, 4), FullyShardedPlan(), 1),
    "shifts of all layers": (
        "qwen2",
        (2, 4),
        FullyShardedPlan(prefetch_distance=Sublayers(2, 2), scatter_delay=Sublayers(2, 2)),
        1,
    ),
}
FIRST = ("rings, tied head", "halves of their own shifts, biases", "parts of a batch", "a hybrid", "norms behind sums, capped")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in OTHERS])
def test_other_plans_families_and_parts_of_a_batch_give_the_same(name: str):
    family, mesh, plan, accumulate = OTHERS[name]
    equal(over_devices(placed(family, *mesh, plan), family, accumulate), family)


REPLICATED = {
    "parts of a batch": ("qwen3", {"dp": 2, "fsdp": 2, "tp": 2}, FullyShardedPlan(), 2),
    "replicas of whole weights": ("qwen2", {"dp": 8}, FullyShardedPlan(), 1),
    "rings, in a loop": ("looped", {"dp": 2, "fsdp": 4}, replace(RINGS, scan=True), 1),
    "experts, balanced, kept": ("qwen3_moe", {"dp": 4, "tp": 2}, FullyShardedPlan(remat=False), 1),
    "auto-sharded": ("qwen2", {"dp": 2, "fsdp": 2, "tp": 2}, None, 1),
}
"""Family, mesh, plan and parts of a batch."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "parts of a batch" else pytest.mark.slow) for name in REPLICATED]
)
def test_replicas_of_the_weights_give_the_same(name: str):
    family, axes, plan, parts = REPLICATED[name]
    equal(over_devices(TrainingPlacement(training_mesh(axes, CONFIGS[family]), plan), family, parts), family)


def test_gradients_are_summed_over_replicas_once_for_each_array():
    """Weights are gathered within a replica; each scattered gradient is then summed over both, and norms with all others."""
    placement = TrainingPlacement(training_mesh({"dp": 2, "fsdp": 4}, CONFIGS["qwen2"]), FullyShardedPlan())
    program = str(jax.make_jaxpr(gradient(placement, "qwen2"))(drawn("qwen2"), *batch()))
    assert "all_gather" in program
    assert not re.findall(r"(?:all_gather|reduce_scatter)\[[^]]*?axis_name=\(?[^)\]]*'dp'", program)
    assert len(re.findall(r"axes=\('dp',\)", program)) == 2 * 7 + 2


def test_bfloat16_is_near_and_its_gradients_are_float32():
    """Weights, products and the stream in bfloat16, gradients summed in float32, of masters that are float32."""
    loss, gradient = over_devices(placed("qwen2", 4, 2, FullyShardedPlan(dtype="bfloat16")), "qwen2")
    wanted_loss, wanted = alone("qwen2")
    assert float(loss) == pytest.approx(float(wanted_loss), rel=2e-2)
    for ours, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == jnp.float32
        one = np.asarray(ours).ravel()
        other = np.asarray(plain).ravel()
        assert float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) > 0.99


def collectives(plan: FullyShardedPlan) -> Counter[tuple[str, str]]:
    """How many of each kind a program of 2 layers has over each axis."""
    program = str(jax.make_jaxpr(gradient(placed("qwen2", 4, 2, plan), "qwen2"))(drawn("qwen2"), *batch()))
    return Counter(re.findall(r"(all_gather|reduce_scatter)\[[^]]*?axis_name=\(?'(\w+)'", program))


def test_remat_gathers_again_and_nothing_else_is_added():
    """Seven matrices a layer, embedding and head, each scattered once; rows are gathered for each half and for its gradient."""
    kept = collectives(FullyShardedPlan(remat=False))
    again = collectives(FullyShardedPlan())
    assert kept["all_gather", "fsdp"] == 2 * 7 + 2
    assert again["all_gather", "fsdp"] == 2 * 7 * 2 + 2
    assert kept["reduce_scatter", "fsdp"] == again["reduce_scatter", "fsdp"] == 2 * 7 + 2
    assert again["all_gather", "kv"] == kept["all_gather", "kv"] + 2 * 2


def test_a_scanned_step_has_a_loop_for_each_pass_and_an_unrolled_one_none():
    """Beside that over blocks of the loss."""

    def loops(plan: FullyShardedPlan, family: str) -> int:
        return str(jax.make_jaxpr(gradient(placed(family, 4, 2, plan), family))(drawn(family), *batch())).count(" scan[")

    assert loops(FullyShardedPlan(), "short") == 1
    assert loops(FullyShardedPlan(scan=True), "short") == loops(FullyShardedPlan(scan=True), "in turns") == 3
    assert loops(FullyShardedPlan(scan=True), "qwen2") == 1  # too few layers


def loss_over(family: str, plan: FullyShardedPlan) -> Any:
    return prediction_loss(language_model(CONFIGS[family]), PLAIN, placed(family, 4, 2, plan))


OPTIONS = TextOptions(steps=50, learning_rate=3e-3, warmup=0.1, clip=0.5, weight_decay=0.1)


def curves(optimizer: str, steps: int, placement: TrainingPlacement) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Losses of steps on a few batches over the mesh and on one device; of each matrix of the state its size and a shard's."""
    made = make_optimizer(TextOptions(**{**vars(OPTIONS), "optimizer": optimizer}), hidden_matrices)
    tokens, in_loss = (np.asarray(each) for each in batch())
    start = drawn("qwen2")
    key = jax.random.key(0)
    model = language_model(CONFIGS["qwen2"])
    plain, ours = (
        train_step(
            prediction_loss(model, PLAIN, where),
            made,
            draw=lambda _, each, key: model.predict(each, key),
            placement=where,
            specs=model.specs,
        )
        for where in (ONE_DEVICE, placement)
    )
    params, state = initial_state(placement, model.specs, made, lambda: start)
    alone_params = jax.tree.map(jnp.copy, start)
    alone_state = made.init(alone_params)
    losses = []
    for step in range(steps):
        each = (np.roll(tokens, step % 4, axis=1), in_loss)
        params, state, figures = ours(params, state, each, key)
        alone_params, alone_state, wanted = plain(alone_params, alone_state, tuple(map(jnp.asarray, each)), key)
        losses.append((float(figures["loss"]), float(wanted["loss"])))
        assert float(figures[WEIGHT]) == float(wanted[WEIGHT]) == in_loss[:, 1:].sum()
    found = np.array(losses)
    divided = [(leaf.size, leaf.addressable_shards[0].data.size) for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(start)), "training donates its own"
    broken = replace(params, norm=params.norm.at[0].set(jnp.nan))
    with pytest.raises(NotFiniteTraining, match="step 9: the loss and every gradient"):
        require_finite(9, ours(broken, state, (tokens, in_loss), key)[2][FINITE])
    return found[:, 0], found[:, 1], divided


def test_steps_follow_those_of_one_device_and_the_state_stays_divided():
    ours, wanted, divided = curves("adamw", 3, placed("qwen2", 4, 2, FullyShardedPlan()))
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    assert len(divided) == 2 * (2 * 7 + 2)
    assert all(part * 8 == whole for whole, part in divided)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fifty_steps_follow_the_curve_of_one_device(optimizer: str):
    ours, wanted, _ = curves(optimizer, 50, placed("qwen2", 4, 2, FullyShardedPlan()))
    assert ours[-1] < 0.8 * ours[0]
    np.testing.assert_allclose(ours, wanted, rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: loss_over("qwen2", FullyShardedPlan(prefetch_distance=Sublayers(1, 3))),
            "prefetch distance of mlp from 0 to the 2 layers, found 3",
        ),
        (
            lambda: loss_over("qwen2", FullyShardedPlan(scatter_delay=Sublayers(-1, 0))),
            "expected the scatter delay of attention from 0 to the 2 layers",
        ),
        (lambda: TextOptions(accumulate=0), "expected accumulate above 0, found 0"),
        (lambda: ONE_DEVICE.check_batch(16, parts=3), "expected a batch that 3 parts divide, found 16"),
        (lambda: training_mesh({"fsdp": 3}, CONFIGS["qwen2"]), "expected fsdp that divides the hidden size 32, found 3"),
        (lambda: training_mesh({"tp": 5}, CONFIGS["qwen2"]), "expected devices that divide 8 heads"),
        (
            lambda: training_mesh({"tp": 8}, replace(CONFIGS["qwen3_moe"], mixture=Mixture(4, 2, 16))),
            "expected devices that divide 8 heads, 64 vocabulary, 4 experts",
        ),
        (
            lambda: loss_over("qwen3_moe", FullyShardedPlan(activations="ring")),
            "expected activations in whole form where experts have a balance loss",
        ),
        (
            lambda: training_mesh({"tp": 4}, HYBRID),
            "expected devices that divide 4 heads, 24 vocabulary, 32 MLP columns, 4 experts",
        ),
        (lambda: training_mesh({"pp": 2}, CONFIGS["qwen2"]), "expected the axes dp, fsdp and tp, found pp"),
        (lambda: placed("qwen2", 4, 2, FullyShardedPlan()).check_batch(16, 8, 3), "that fsdp=4 × 3 parts divide, found 16"),
        (
            lambda: TrainingPlacement(training_mesh({"dp": 2, "fsdp": 4}, CONFIGS["qwen2"])).check_batch(12),
            "expected a batch that dp=2 × fsdp=4 divide, found 12",
        ),
        (
            lambda: placed("qwen2", 1, 8, FullyShardedPlan()).check_batch(1, 9),
            "that tp=8 divides, found 9",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_step(make: Any, expected: str):
    with pytest.raises(ValueError, match=re.escape(expected)):
        make()
