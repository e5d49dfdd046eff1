"""Reference of paged writes and reads, entry by entry and row by row.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, K key/value heads, D head size.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Int32, Shaped


def write(
    pages: Shaped[Array, "P K E D"],
    table: Int32[Array, "B M"],
    new: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Shaped[Array, "P K E D"]:
    """Writes the first `count` of each row's new entries at its positions from `start` on.

    Position p of row b is entry `p % E` of page `table[b, p // E]`. Without such a page nothing is written.
    """
    size = pages.shape[2]
    for row in range(new.shape[0]):
        for at in range(new.shape[2]):
            position = start[row] + at
            column = jnp.clip(position // size, 0, table.shape[1] - 1)
            page = table[row, column]
            written = (at < count[row]) & (position >= 0) & (position < table.shape[1] * size) & (page >= 0)
            page = jnp.maximum(page, 0)
            old = pages[page, :, position % size]
            pages = pages.at[page, :, position % size].set(jnp.where(written, new[row, :, at], old))
    return pages


def in_rows(pages: Shaped[Array, "P K E D"], table: Int32[Array, "B M"]) -> Shaped[Array, "B K S D"]:
    """Returns each row's entries in order, `S = M * E`; zeros for missing pages."""
    rows = []
    for row in range(table.shape[0]):
        entries = [jnp.where(page >= 0, pages[jnp.maximum(page, 0)], 0) for page in table[row]]
        rows.append(jnp.concatenate(entries, axis=1))
    return jnp.stack(rows)
