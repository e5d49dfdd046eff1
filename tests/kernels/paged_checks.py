"""Helpers for tests of pages: splitting caches into shuffled pages and back, and checks for each instruction set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention_checks import attend_in_pages, attend_in_rows, by_lengths, over_pages
from tilewright.kernels.attention import cpu as attention
from tilewright.kernels.operations import UNMAPPED, KeyValuePages

SPARE = 3
"""Pages that no row has. They hold NaN, so that reads of them are detected."""


def cut(seed: int, caches: tuple[Any, Any], entries: int, needed: Any = None) -> tuple[KeyValuePages, np.ndarray]:
    """Caches `[B, K, S, D]` in pages that lie in no order, and the table.

    Args:
        needed: how many entries of each row have pages, `[B]`; by default all.
    """
    b, k, s, d = caches[0].shape
    width = s // entries
    order = np.random.default_rng(seed).permutation(b * width + SPARE)
    table = order[: b * width].reshape(b, width).astype(np.int32)
    pools = []
    for cache in caches:
        pool = np.full((len(order), k, entries, d), np.nan, np.float32)
        pool[table] = np.asarray(cache.astype(jnp.float32)).reshape(b, k, width, entries, d).transpose(0, 2, 1, 3, 4)
        pools.append(pool)
    if needed is not None:
        kept = np.arange(width)[None] * entries < np.asarray(needed)[:, None]
        for pool in pools:
            pool[table[~kept]] = np.nan
        table = np.where(kept, table, UNMAPPED).astype(np.int32)
    return KeyValuePages(*(jnp.asarray(pool, caches[0].dtype) for pool in pools)), table


def together(pages: Any, table: np.ndarray) -> np.ndarray:
    """The rows' entries side by side, `[B, K, S, D]`, in float32; NaN where a row has no page."""
    found = np.asarray(pages.astype(jnp.float32))[table]
    found[table < 0] = np.nan
    b, m, k, e, d = found.shape
    return found.transpose(0, 2, 1, 3, 4).reshape(b, k, m * e, d)


def spare(pages: Any, table: np.ndarray) -> np.ndarray:
    """The pages that no row has."""
    return np.asarray(pages.astype(jnp.float32))[np.setdiff1d(np.arange(pages.shape[0]), table)]


def same_bits(pool: KeyValuePages, table: np.ndarray, caches: tuple[Any, Any]) -> None:
    """Checks that pages hold the entries of caches, and that unmapped pages are unchanged."""
    for pages, cache in zip(pool, caches, strict=True):
        wide = np.asarray(cache.astype(jnp.float32))
        held = together(pages, table)
        mapped = np.repeat(table >= 0, pages.shape[2], axis=1)[:, None, :, None]
        np.testing.assert_array_equal(held[np.broadcast_to(mapped, held.shape)], wide[np.broadcast_to(mapped, wide.shape)])
        assert np.isnan(spare(pages, table)).all()


def check_appended(case: dict[str, Any], entries: int, seed: int = 0) -> None:
    """Checks that `attend_projected` over as few pages as possible gives the bits that it gives over contiguous caches."""
    want, *caches = jax.jit(attend_in_rows)(**case)
    needed = np.where(np.asarray(case["count"]) > 0, np.asarray(case["start"] + case["count"]), 0)
    pool, table = cut(seed, (case["k_cache"], case["v_cache"]), entries, needed)
    rest = {name: x for name, x in case.items() if not name.endswith("cache")}
    out, after = jax.jit(attend_in_pages)(**rest, pool=pool, table=table)
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), np.asarray(want.astype(jnp.float32)))
    same_bits(after, table, tuple(caches))


def check_attention(dtype: Any, entries: int, extras: int, seed: int = 0) -> None:
    """Checks `attend` likewise, for queries that see any number of entries and have `block_kv` keys."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q = draw(3, 5, 6, 48)
    k = draw(3, 2, 3 * entries, 48)
    v = draw(3, 2, 3 * entries, 48)
    lengths = rng.integers(0, 3 * entries + 1, (3, 5)).astype(np.int32)
    lengths[1] = 0
    extra = (draw(3, 2, extras, 48), draw(3, 2, extras, 48)) if extras else None
    pool, table = cut(seed, (k, v), entries, lengths.max(axis=1))
    found = jax.jit(over_pages(attention.attend))(q, pool, table, lengths, extra)
    want = jax.jit(by_lengths(attention.attend))(q, k, v, lengths, extra)
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), np.asarray(want.astype(jnp.float32)))
