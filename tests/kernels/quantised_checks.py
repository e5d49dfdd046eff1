"""Checks of 8-bit keys and values for every implementation and instruction set."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention_checks import attend_in_pages, heads_of
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.masks import causal_from
from tilewright.kernels.operations import UNMAPPED, Heads, KeyValuePages, PagedCache, Quantised
from tilewright.kernels.select import PLAIN

HEADS = 6
KV_HEADS = 2
SPARE = 3
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}

Run = Callable[[dict[str, Any], KeyValuePages, Any], tuple[Any, KeyValuePages]]
"""`attend_projected` of one implementation, of a case of `linear_checks.Appended`."""


@jax.jit
def by_cpu(case: dict[str, Any], pool: KeyValuePages, table: Any) -> tuple[Any, KeyValuePages]:
    rest = {name: x for name, x in case.items() if not name.endswith("cache")}
    return attend_in_pages(**rest, pool=pool, table=table)


@jax.jit
def by_xla(case: dict[str, Any], pool: KeyValuePages, table: Any) -> tuple[Any, KeyValuePages]:
    mask = causal_from(case["start"], case["count"])
    out, after = PLAIN.attend_projected(PLAIN, *projected(case), PagedCache(pool, jnp.asarray(table)), mask)
    return out, after.pool


def projected(case: dict[str, Any]) -> tuple[tuple[Any, ...], Heads]:
    """Returns a case's joined projection and its heads."""
    size = case["cos"].shape[2] * 2
    parts = jnp.split(case["qkv"], [HEADS * size, (HEADS + KV_HEADS) * size], axis=2)
    return tuple(parts), heads_of(case)


def drawn_pool(case: dict[str, Any], entries: int, seed: int) -> tuple[KeyValuePages, np.ndarray]:
    """Pages of which each row has those that it needs, in no order, with something in them; the scales of others are NaN."""
    rng = np.random.default_rng(seed)
    d = case["cos"].shape[2] * 2
    needed = np.where(np.asarray(case["count"]) > 0, np.asarray(case["start"] + case["count"]), 0)
    width = -(-case["k_cache"].shape[2] // entries)
    order = rng.permutation(len(needed) * width + SPARE)
    table = order[: len(needed) * width].reshape(-1, width)
    table = np.where(np.arange(width)[None] * entries < needed[:, None], table, UNMAPPED).astype(np.int32)

    def held() -> Quantised:
        values = rng.integers(-127, 128, (len(order), KV_HEADS, entries, d))
        scale = np.full(values.shape[:3], np.nan, np.float32)
        scale[table[table >= 0]] = rng.uniform(0.002, 0.02, (np.count_nonzero(table >= 0), KV_HEADS, entries))
        return Quantised(jnp.asarray(values, jnp.int8), jnp.asarray(scale))

    return KeyValuePages(held(), held()), table


def in_rows(held: Quantised, table: np.ndarray) -> np.ndarray:
    """What pages hold, dequantised, in float64, each row's entries side by side; NaN where a row has no page."""
    wide = np.asarray(held.values, np.float64) * np.asarray(held.scale, np.float64)[..., None]
    found = np.where((table < 0)[:, :, None, None, None], np.nan, wide[np.maximum(table, 0)])
    return found.swapaxes(1, 2).reshape(len(table), found.shape[2], -1, found.shape[4])


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int) -> np.ndarray:
    """One query over the first entries of its head, in float64."""
    scores = k[:length] @ q / math.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v[:length] / weights.sum()


def check(run: Run, case: dict[str, Any], entries: int, seed: int) -> tuple[Any, KeyValuePages, KeyValuePages, np.ndarray]:
    """Checks with float64 that written vectors are within half a step, and that attention uses the quantised entries."""
    pool, table = drawn_pool(case, entries, seed)
    out, after = run(case, pool, table)
    q, *new = (np.asarray(x.astype(jnp.float32), np.float64) for x in heads_xla.heads(*projected(case)))
    unit = UNIT[case["qkv"].dtype.name]
    d = case["cos"].shape[2] * 2
    start, count = (np.asarray(case[name]) for name in ("start", "count"))
    held = [in_rows(part, table) for part in after]
    for before, kept, vectors in zip(pool, held, new, strict=True):
        want = in_rows(before, table)
        for row, (first, counted) in enumerate(zip(start, count, strict=True)):
            written = slice(first, first + counted) if counted else slice(0)
            block_kv = vectors[row, :, :counted]
            found = kept[row, :, written]
            largest = np.max(np.abs(block_kv), axis=-1, keepdims=True)
            # Half a step, as far as the vector is known: norm and rotation round, too.
            assert (np.abs(found - block_kv) <= largest / 254 + 12 * unit * (1 + largest)).all()
            want[row, :, written] = found
            if counted:
                assert np.isfinite(kept[row, :, : first + counted]).all()
        np.testing.assert_array_equal(kept[~np.isnan(want)], want[~np.isnan(want)])
    found = np.asarray(out.astype(jnp.float32)).reshape(*q.shape)
    for row, at, head in np.ndindex(*q.shape[:3]):
        if at >= count[row]:
            assert (found[row, at, head] == 0).all()
            continue
        k, v = (part[row, head // (HEADS // KV_HEADS)] for part in held)
        want = attended(q[row, at, head], k, v, int(start[row]) + at + 1)
        # The query's own rounding moves each score by a unit of its size; values and the result are rounded, too.
        np.testing.assert_allclose(found[row, at, head], want, atol=24 * unit * math.sqrt(d) + 1e-5)
    return out, pool, after, table


def check_cpu(case: dict[str, Any], entries: int, seed: int = 0) -> None:
    """Runs `check`, and checks that single positions of single rows give and store the same bits."""
    out, pool, after, table = check(by_cpu, case, entries, seed)
    for row, count in enumerate(np.asarray(case["count"])):
        part: dict[str, Any] = {n: x if n.endswith("norm") else x[row : row + 1] for n, x in case.items()}
        for at in range(count):
            one = {name: x[:, at : at + 1] if name in ("qkv", "cos", "sin") else x for name, x in part.items()}
            one |= {"start": part["start"] + at, "count": jnp.ones(1, jnp.int32)}
            alone, pool = by_cpu(one, pool, table[row : row + 1])
            same(alone[0, 0], out[row, at])
    for one, other in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        same(one, other)


def same(x: Any, y: Any) -> None:
    np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))
