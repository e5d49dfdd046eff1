"""Denoising over several devices, under every schedule: the tokens of one, and the same salient positions in every layer of
every step."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

from diffusion.support import REPAIRED, asking, build, needs_native
from products import cases
from reference.diffusion_cases import PROMPT
from tilewright.diffusion.programs import DiffusionTable
from tilewright.diffusion.state import DiffusionState
from tilewright.diffusion.steps import block_logits
from tilewright.llm.diffusion_model import DenoisingStream, DiffusionModel
from tilewright.models.decoder import DecoderParams
from tilewright.parallel.auto import AUTO, STRATEGIES
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.placement import WHOLE

TABLE = DiffusionTable(batches=(2,), positions=(32,), responses=(16,), blocks=(4,), buckets=(12,))
PROMPTS = [PROMPT, PROMPT[:3]]
WAYS: dict[str, dict[str, Any]] = {
    "sparse": {"mode": "sparse", "saliency": REPAIRED},
    "dual": {"mode": "dual"},
    "dense": {"mode": "dense"},
    "guided": {"mode": "sparse", "saliency": REPAIRED, "threshold": 0.3, "guidance": 1.0},
}
QUICK = [
    ("llada", "dense", "ring", 4),
    ("llada", "sparse", "sync", 4),
    ("dream", "dense", "domino", 2),
    ("dream", "sparse", "ring", 4),
    ("llada", "dense", "exact", 2),
]
"""Of the product of families, modes, schedules and devices. Of Dream's two key/value heads four devices share each."""


@cache
def made(family: str, kernels: str = "xla", schedule: str | None = None, devices: int = 1) -> DiffusionModel:
    mesh = None if devices == 1 else make_mesh({"tp": devices})
    return build(family, kernels, TABLE, mesh=mesh, schedule=schedule)


def ran(model: DiffusionModel, way: str) -> DenoisingStream:
    session = model.start(PROMPTS, asking(**WAYS[way]))
    while not session.finished:
        session.advance()
    return session


@cache
def alone(family: str, way: str) -> DenoisingStream:
    return ran(made(family), way)


def same(one: DenoisingStream, other: DenoisingStream) -> None:
    """Tokens, spans and salient sets; margins between choices are wide beside the rounding of sums in another order."""
    assert one.tokens() == other.tokens()
    assert len(one.reports) == len(other.reports) > 3
    for ours, theirs in zip(one.reports, other.reports, strict=True):
        assert ours.span == theirs.span
        np.testing.assert_array_equal(ours.salient, theirs.salient)


EVERY = list(cases(QUICK, ("llada", "dream"), WAYS, (*STRATEGIES, AUTO), (2, 4)))


@pytest.mark.parametrize("family, way, schedule, devices", EVERY)
def test_several_devices_give_what_one_does(family: str, way: str, schedule: str, devices: int):
    session = ran(made(family, "xla", schedule, devices), way)
    same(alone(family, way), session)
    if way == "dense":
        return
    programs = session.engine.decoding.programs
    layer = programs.get(programs.allocate_key)()[0][0][0]
    heads = 4 if family == "llada" else 2
    share = max(1, heads // devices) / heads
    assert layer.k.sharding.shard_shape(layer.k.shape)[2] == layer.k.shape[2] * share, "each device holds its own heads' keys"
    assert layer.context.sharding.shard_shape(layer.context.shape)[2] == layer.context.shape[2] // devices


@needs_native
@pytest.mark.parametrize(
    "family, way, schedule, devices",
    [("dream", "sparse", "ring", 4), pytest.param("llada", "dual", "sync", 2, marks=pytest.mark.slow)],
)
def test_so_do_the_cpu_kernels(family: str, way: str, schedule: str, devices: int):
    same(alone(family, way), ran(made(family, "auto", schedule, devices), way))


def logits_of(model: DiffusionModel) -> np.ndarray:
    """Of a dense step over both prompts, with all masks."""
    asked = [asking(mode="dense")] * len(PROMPTS)
    shape = model.table.shape(len(PROMPTS), [len(prompt) for prompt in PROMPTS], asked)
    programs = model.programs_of(shape)
    state = programs.batch(shape, PROMPTS, asked)
    how = programs.denoiser(shape)
    assert model.target.mesh is not None

    def run(params: DecoderParams, state: DiffusionState) -> Array:
        return block_logits(how, "whole", params, state).logits

    parts = jax.tree.map(lambda x: x.sharding.spec, model.params)
    run = jax.shard_map(run, mesh=model.target.mesh, in_specs=(parts, WHOLE), out_specs=WHOLE, check_vma=False)
    return np.asarray(jax.jit(run)(model.params, state))


@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])
def test_exact_sums_of_a_dense_step_have_the_same_bits_on_any_number_of_devices(family: str):
    """Of one device too, if it runs under this schedule; without it, it sums in another order, and rounds otherwise."""
    logits = {devices: logits_of(mesh_model(family, devices)) for devices in (1, 2, 4)}
    np.testing.assert_array_equal(logits[2], logits[4])
    np.testing.assert_array_equal(logits[1], logits[4])


def mesh_model(family: str, devices: int) -> DiffusionModel:
    return build(family, "xla", TABLE, mesh=make_mesh({"tp": devices}), schedule="exact")


@pytest.mark.parametrize(
    ("devices", "settings", "said"),
    [
        (
            3,
            {},
            "expected devices that divide 4 heads, 40 tokens of the vocabulary, 48 MLP columns, and that divide 4 key/value",
        ),
        (8, {}, "1, 2, 4; found 8"),
        (4, {"schedule": "star"}, "expected a schedule among sync, sequence, ring, domino, column, exact, auto, found 'star'"),
    ],
)
def test_a_mesh_that_does_not_fit(devices: int, settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        build("llada", mesh=make_mesh({"tp": devices}), **settings)


def test_schedules_that_cannot_run():
    with pytest.raises(ValueError, match="expected a mesh of one axis, found 2: rows, tp"):
        build("llada", mesh=make_mesh({"rows": 2, "tp": 2}))
    with pytest.raises(ValueError, match="expected a mesh of several devices for the schedule 'ring', found none"):
        build("llada", schedule="ring")
    single = build("llada", "xla", DiffusionTable((1,), (32,), (16,), (4,)), mesh=make_mesh({"tp": 2}), schedule="domino")
    with pytest.raises(ValueError, match="expected a batch that 2 micro-batches divide, found 1 rows"):
        single.generate([PROMPT], asking())


@needs_native
def test_exact_sums_want_matrices_as_they_are():
    model = build("llada", "auto", TABLE, mesh=make_mesh({"tp": 2}), schedule="exact")
    for way in ("dense", "sparse"):
        with pytest.raises(ValueError, match="expected operations on matrices as they are, kernels 'xla'"):
            ran(model, way)
