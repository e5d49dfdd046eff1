"""Slots on the device: rows go out and come back as they were, and every batch of requests has a program of the table."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.denoising import TABLE
from diffusion.support import build
from tilewright.diffusion.options import MODES, Denoising
from tilewright.diffusion.programs import DiffusionTable, RequestKinds, gather_pages, scatter_pages
from tilewright.llm.diffusion_model import DiffusionModel

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGES = 8
SIZE = 4


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build("tiny")


@given(
    order=st.permutations(range(PAGES)),
    positions=st.sampled_from([3, 8, 10]),
    missing=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 99),
)
def test_rows_go_out_of_their_pages_and_come_back(order: list[int], positions: int, missing: bool, dtype: Any, seed: int):
    """Two rows of three pages of four positions; the last page of a row may be missing."""
    rng = np.random.default_rng(seed)
    bits = jnp.uint32 if dtype == jnp.float32 else jnp.uint16
    pages = jax.lax.bitcast_convert_type(jnp.asarray(rng.random((PAGES, SIZE, 6)), dtype), bits)
    table = np.asarray(order[:6], np.int32).reshape(2, 3)
    table[1, 2] = -1 if missing else table[1, 2]
    like = jax.ShapeDtypeStruct((2, positions, 2, 3), dtype)
    out = gather_pages(pages, jnp.asarray(table), positions, like)
    assert (out.shape, out.dtype) == (like.shape, like.dtype)
    values = np.asarray(jax.lax.bitcast_convert_type(pages, dtype))
    for row, at in product(range(2), range(positions)):
        if table[row, at // SIZE] >= 0:
            np.testing.assert_array_equal(out[row, at].reshape(-1), values[table[row, at // SIZE], at % SIZE])
    new = jnp.asarray(rng.random(like.shape), dtype)
    after = np.asarray(jax.lax.bitcast_convert_type(scatter_pages(pages, jnp.asarray(table), new), dtype))
    for row, at in product(range(2), range(positions)):
        if table[row, at // SIZE] >= 0:
            np.testing.assert_array_equal(after[table[row, at // SIZE], at % SIZE], np.asarray(new[row, at]).reshape(-1))
    others = sorted(set(range(PAGES)) - set(table.ravel().tolist()))
    np.testing.assert_array_equal(after[others], values[others])


@pytest.mark.parametrize("modes", [("dense",), ("dense", "sparse"), ("prefix",), MODES])
@pytest.mark.parametrize("context", [24, 40, 100])
def test_whatever_is_asked_together_has_a_program_that_is_ready(model: DiffusionModel, modes: tuple[str, ...], context: int):
    table = DiffusionTable(batches=(1, 2, 4), positions=(20, 32, 64), responses=(4, 12, 19), blocks=(2, 8), buckets=())
    programs = model.programs_for(table, RequestKinds({*modes} == {"dense"}, "dual" in modes), min(context, 64))
    ready = {key.shape for key in programs.keys if key.shape is not None}
    rng = np.random.default_rng(0)
    sizes = [size for size in (2, 4, 6, 8, 12, 16, 18) if size < context]
    for _ in range(300):
        asked = [Denoising(int(rng.choice(sizes)), block_length=2) for _ in range(rng.integers(1, 5))]
        lengths = [int(rng.integers(1, programs.context - each.new_tokens + 1)) for each in asked]
        assert programs.shape(lengths, asked) in ready
    assert max(shape.batch for shape in ready) == programs.layout.batch == 4
    assert max(shape.positions for shape in ready) <= programs.layout.capacity


def test_what_modes_need_is_what_programs_hold(model: DiffusionModel):
    """Dense steps alone take no caches; only "dual" looks at a block by itself; guided rows have pages of their own group."""
    found = [
        model.programs_for(TABLE, RequestKinds(*kind), 32) for kind in ((True, False), (False, False), (False, True, True))
    ]
    assert [len(programs.allocate(model.target)[0]) for programs in found] == [0, 1, 2]
    assert [programs.layout.groups for programs in found] == [1, 1, 2]
    assert {shape.narrow for shape in found[2].shapes} == {True}


def test_slots_are_given_to_each_dispatch_and_come_back_in_their_place(model: DiffusionModel):
    programs = model.programs_for(TABLE, RequestKinds(dense=False, narrow=False), 32, page_size=8)
    size = sum(x.nbytes for x in jax.tree.leaves(programs.get(programs.allocate_key)()))
    assert size > 0
    for key in programs.keys[1:]:
        memory = programs.get(key).memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= size, key
