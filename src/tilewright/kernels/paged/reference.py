"""The operations on pages as they are defined, entry by entry and row by row.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, U extra keys.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Int32, Shaped

from tilewright.kernels.attention import reference
from tilewright.kernels.operations import PLAIN_SCORES, KeyValuePages, Scores


def append(
    pages: Shaped[Array, "P K E D"],
    table: Int32[Array, "B M"],
    new: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Shaped[Array, "P K E D"]:
    """Writes the first `count` of each row's new entries at its positions from `start` on, and nothing else.

    Position p of row b lies in entry `p % E` of page `table[b, p // E]`. Without such a page nothing is written.
    """
    size = pages.shape[2]
    for row in range(new.shape[0]):
        for at in range(new.shape[2]):
            position = start[row] + at
            column = jnp.clip(position // size, 0, table.shape[1] - 1)
            page = table[row, column]
            written = (at < count[row]) & (position >= 0) & (position < table.shape[1] * size) & (page >= 0)
            page = jnp.maximum(page, 0)
            kept = pages[page, :, position % size]
            pages = pages.at[page, :, position % size].set(jnp.where(written, new[row, :, at], kept))
    return pages


def in_rows(pages: Shaped[Array, "P K E D"], table: Int32[Array, "B M"]) -> Shaped[Array, "B K S D"]:
    """Each row's entries side by side, `S = M * E`; zeros where it has no page."""
    rows = []
    for row in range(table.shape[0]):
        entries = [jnp.where(page >= 0, pages[jnp.maximum(page, 0)], 0) for page in table[row]]
        rows.append(jnp.concatenate(entries, axis=1))
    return jnp.stack(rows)


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of its row, and over all of `extra`."""
    return reference.prefix_attention(q, in_rows(pool.k, table), in_rows(pool.v, table), lengths, extra, rule)
