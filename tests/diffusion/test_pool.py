"""Slots on the device: rows go out and come back as they were, and every batch of requests has a program of the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.denoising import TABLE
from diffusion.support import build
from tilewright.diffusion.model import DiffusionModel
from tilewright.diffusion.options import MODES, Denoising
from tilewright.diffusion.pool import Pool, PoolPrograms, put_back, taken
from tilewright.diffusion.programs import DiffusionKey, DiffusionTable

pytestmark = pytest.mark.usefixtures("quick_compiles")

SLOTS = 5
POSITIONS = 8


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build("tiny")


def pool_of(seed: int, slots: int, positions: int) -> Pool:
    """Random values of every field, caches of different kinds among them."""
    rng = np.random.default_rng(seed)
    numbers = [jnp.asarray(rng.integers(0, 99, slots), jnp.int32) for _ in range(3)]
    return Pool(
        tokens=jnp.asarray(rng.integers(0, 99, (slots, positions)), jnp.int32),
        changed=jnp.asarray(rng.random((slots, positions)) < 0.5),
        step=numbers[0],
        block_step=numbers[1],
        block_start=numbers[2],
        done=jnp.asarray(rng.random(slots) < 0.5),
        caches=[{"k": jnp.asarray(rng.random((slots, positions, 2, 3)), dtype)} for dtype in (jnp.float32, jnp.bfloat16)],
    )


def check_equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


take = jax.jit(taken, static_argnums=2)
put = jax.jit(put_back)


def rows_of(pool: Pool, slots: list[int], begin: int = 0, end: int | None = None) -> Pool:
    """What NumPy takes of these slots, and of these positions where there are any."""
    return jax.tree.map(lambda x: np.asarray(x)[slots, begin:end] if x.ndim > 1 else np.asarray(x)[slots], pool)


@given(
    order=st.permutations(range(SLOTS)),
    rows=st.sampled_from([1, 3]),
    positions=st.sampled_from([3, POSITIONS]),
    seed=st.integers(0, 99),
)
def test_rows_go_out_and_come_back_to_their_slots(order: list[int], rows: int, positions: int, seed: int):
    pool = pool_of(seed, SLOTS, POSITIONS)
    own = order[:rows]
    others = order[rows:]
    slots = jnp.asarray(own, jnp.int32)
    out = take(pool, slots, positions)
    check_equal(out, rows_of(pool, own, end=positions))
    check_equal(put(pool, out, slots), pool)
    new = pool_of(seed + 100, rows, positions)
    after = put(pool, new, slots)
    check_equal(rows_of(after, own, end=positions), new)
    check_equal(rows_of(after, others), rows_of(pool, others))
    check_equal(rows_of(after, own, positions).caches, rows_of(pool, own, positions).caches)
    check_equal(rows_of(after, own, positions).tokens, rows_of(pool, own, positions).tokens)


@pytest.mark.parametrize("modes", [("dense",), ("dense", "sparse"), ("prefix",), MODES])
@pytest.mark.parametrize("context", [24, 40, 100])
def test_whatever_is_asked_together_has_a_program_that_is_ready(model: DiffusionModel, modes: tuple[str, ...], context: int):
    table = DiffusionTable(batches=(1, 2, 4), positions=(20, 32, 64), responses=(4, 12, 19), blocks=(2, 8), buckets=())
    programs = PoolPrograms(model, table, modes, min(context, 64))
    ready = {key.shape for key in programs.every if key.name == "turn"}
    rng = np.random.default_rng(0)
    sizes = [size for size in (2, 4, 6, 8, 12, 16, 18) if size < context]
    for _ in range(300):
        asked = [Denoising(int(rng.choice(sizes)), block_length=2) for _ in range(rng.integers(1, 5))]
        lengths = [int(rng.integers(1, programs.context - each.new_tokens + 1)) for each in asked]
        assert programs.shape(lengths, asked) in ready
    assert max(shape.batch for shape in ready) == programs.whole.batch == 4
    assert max(shape.positions for shape in ready) == programs.whole.positions


def test_what_modes_need_is_what_programs_hold(model: DiffusionModel):
    """Dense steps alone take no caches; only "dual" looks at a block by itself."""
    found = {modes: PoolPrograms(model, TABLE, modes, 32) for modes in (("dense",), ("dense", "sparse"), MODES)}
    whole = [programs.whole for programs in found.values()]
    assert [(shape.dense, shape.narrow, shape.guided) for shape in whole] == [
        (True, False, False),
        (False, False, False),
        (False, True, False),
    ]
    caches = [len(programs.allocate(programs.whole)) for programs in found.values()]
    assert caches == [0, 1, 1]


def test_a_pool_is_given_to_each_dispatch_and_comes_back_in_its_place(model: DiffusionModel):
    programs = PoolPrograms(model, TABLE, ("dense", "sparse"), 32)
    pool = programs.get(DiffusionKey("pool", programs.whole))()
    size = sum(x.nbytes for x in jax.tree.leaves(pool))
    for shape in programs.sizes:
        compiled = programs.get(DiffusionKey("turn", shape))
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= size, shape
