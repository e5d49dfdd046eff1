"""Decoding over pages in no order gives the tokens, the rounds and the entries that it gives over contiguous caches."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import prompts
from tilewright.kernels.operations import UNMAPPED
from tilewright.kernels.select import PLAIN
from tilewright.parallel.rows import rows_of, with_rows
from tilewright.runtime import cache
from tilewright.runtime.cache import Paged

NEW = 24
PROMPTS = prompts(0, [1, 7, 29])
"""Three rows, so that the batch of four has one of padding, and that prompts and blocks cross from page to page."""


def in_pages(
    layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: Any, ops: Any = PLAIN, spare: int = 2
) -> tuple[Paged, ...]:
    """Caches of so many rows in shuffled pages of 16, of which `spare` are nobody's."""
    width = capacity // 16
    pages = batch * width + spare
    table = np.random.default_rng(layers).permutation(pages)[: batch * width].reshape(batch, width)
    return cache.allocate_paged(ops, layers, table, pages, kv_heads, 16, head_dim, dtype)


def test_rows_of_pages_take_turns_on_one_pool():
    """Two groups of rows, each taken out of what the one before put back, write what all rows at once write."""
    (held,) = in_pages(1, 4, 2, 32, 3, jnp.float32)
    new = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 5, 3)), jnp.float32)
    start = jnp.array([0, 12, 3, 27], jnp.int32)
    count = jnp.array([5, 5, 0, 5], jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def turns(held: Any, new: Any, start: Any, count: Any) -> Any:
        for first in (0, 2):
            rows = rows_of(held, first, 2)
            part = slice(first, first + 2)
            held = with_rows(held, first, rows.append(PLAIN, new[part], -new[part], start[part], count[part]))
        return held

    whole = jax.jit(lambda held: held.append(PLAIN, new, -new, start, count))(held)
    found = turns(held, new, start, count)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert int(jnp.sum(jnp.any(whole.pool.k != 0, axis=(1, 3)))) == 15


def test_a_row_sees_no_more_than_it_has_pages_for():
    table = np.asarray([[3, 1, 0], [2, UNMAPPED, UNMAPPED], [UNMAPPED] * 3, [UNMAPPED, 4, 5]])
    (held,) = cache.allocate_paged(PLAIN, 1, table, 6, 1, 16, 4, jnp.float32)
    assert held.visible(jnp.array([50, 50, 50, 50])).tolist() == [48, 16, 0, 0]
    assert held.visible(jnp.array([7, 7, 7, 7])).tolist() == [7, 7, 0, 0]


def test_allocated_pages_have_a_table_for_each_layer():
    """So that all of them can be donated."""
    made = in_pages(3, 2, 4, 64, 8, jnp.bfloat16)
    assert [(one.pool.k.shape, one.pool.v.dtype.name, one.table.dtype.name) for one in made] == [
        ((10, 4, 16, 8), "bfloat16", "int32")
    ] * 3
    assert len({one.table.unsafe_buffer_pointer() for one in made}) == 3


@pytest.mark.parametrize(
    ("table", "page_size", "complaint"),
    [
        (np.zeros((1, 2), np.int32), 24, "expected a page size that is a multiple of 16, found 24"),
        (np.zeros((1, 2), np.int32), 0, "expected a page size that is a multiple of 16, found 0"),
        (np.zeros(2, np.int32), 16, r"expected a table of integers \[rows, pages\], found int32 \[2\]"),
        (np.zeros((1, 2), np.float32), 16, r"expected a table of integers \[rows, pages\], found float32 \[1, 2\]"),
        (np.asarray([[0, 4]]), 16, "expected pages from 0 to 3, or -1 for none, found 4"),
        (np.asarray([[-2, 0]]), 16, "expected pages from 0 to 3, or -1 for none, found -2"),
    ],
)
def test_pages_that_cannot_be(table: np.ndarray, page_size: int, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        cache.allocate_paged(PLAIN, 1, table, 4, 1, page_size, 4, jnp.float32)
