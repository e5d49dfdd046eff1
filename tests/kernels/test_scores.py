"""Windows, scales, capped scores, sinks and rotations of a part of each head, against NumPy in float64."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.paged_checks import cut
from kernels.test_attention import normal
from kernels.test_paged import paired
from tilewright.kernels.attention import reference, xla
from tilewright.kernels.heads.xla import heads, rotate_by_product
from tilewright.kernels.masks import AttentionMask, causal_from
from tilewright.kernels.operations import Heads, Joined, KeyValueRows, Operations, PagedCache, Scores
from tilewright.kernels.select import PLAIN, operations, training_operations

SINKS = np.linspace(-2, 3, 6)
RULES = {
    "plain": (Scores(), None),
    "window": (Scores(), 5),
    "scale": (Scores(scale=0.37), None),
    "softcap": (Scores(softcap=1.5), None),
    "sinks": (Scores(sinks=jnp.asarray(SINKS, jnp.float32)), None),
    "all": (Scores(0.4, 2.0, jnp.asarray(SINKS, jnp.float32)), 7),
}
"""Scores and windows."""


def expected(q: Any, k: Any, v: Any, lengths: Any, extra: Any, rule: Scores, window: int | None) -> np.ndarray:
    """Computes attention by its definition, query by query and head by head."""
    (b, t, n, d), heads = q.shape, k.shape[1]
    sinks = None if rule.sinks is None else np.asarray(rule.sinks, np.float64)
    out = np.zeros((b, t, n, d))
    for row, at, head in np.ndindex(b, t, n):
        block_kv = head // (n // heads)
        here = lengths[row, at] + (-1 if extra is None else at)
        first = 0 if window is None else max(0, here - window + 1)
        cached = (k[row, block_kv, first : lengths[row, at]], v[row, block_kv, first : lengths[row, at]])
        beside = ((), ()) if extra is None else ([extra[0][row, block_kv]], [extra[1][row, block_kv]])
        keys, values = (np.concatenate([part, *more]) for part, more in zip(cached, beside, strict=True))
        if not len(keys):
            continue
        scores = keys.astype(np.float64) @ q[row, at, head].astype(np.float64)
        scores *= 1 / math.sqrt(d) if rule.scale is None else rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * np.tanh(scores / rule.softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        out[row, at, head] = weights @ values.astype(np.float64) / total
    return out


def in_pages(q: Any, cache: KeyValueRows, mask: AttentionMask, *rest: Any, attend: Any, layout: Any = None) -> Any:
    pool, table = cut(0, (cache.k, cache.v), 16, np.asarray(mask.context_lengths).max(axis=1))
    return attend(q, PagedCache(pool if layout is None else layout(pool), jnp.asarray(table)), mask, *rest)


IMPLEMENTATIONS = {
    "reference": reference.attend,
    "xla": xla.attend,
    "paged reference": partial(in_pages, attend=reference.attend),
    "paged xla": partial(in_pages, attend=xla.attend),
    "paged tpu": partial(in_pages, attend=xla.attend, layout=paired),
}


@pytest.mark.parametrize(("rule", "extras"), [*((rule, 0) for rule in RULES), ("all", 3)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_rule_by_every_implementation(name: str, rule: str, extras: int, monkeypatch: pytest.MonkeyPatch):
    """Over one block of a table and over several, and beside keys of the queries' own."""
    if name.startswith("paged"):
        monkeypatch.setattr(xla, "BLOCK_ENTRIES", 32)
    rng = np.random.default_rng(0)
    q = normal(rng, 2, 3, 6, 8) * 2
    k = normal(rng, 2, 2, 64, 8)
    v = normal(rng, 2, 2, 64, 8)
    extra = (normal(rng, 2, 2, extras, 8), normal(rng, 2, 2, extras, 8)) if extras else None
    lengths = np.asarray([[0, 1, 9], [40, 41, 64]], np.int32)
    scores, window = RULES[rule]
    block_kv = None if extra is None else (jnp.asarray(extra[0]), jnp.asarray(extra[1]))
    mask = AttentionMask(jnp.asarray(lengths), None if block_kv is None else "full", window=window)
    out = IMPLEMENTATIONS[name](jnp.asarray(q), KeyValueRows(jnp.asarray(k), jnp.asarray(v)), mask, block_kv, scores)
    np.testing.assert_allclose(out, expected(q, k, v, lengths, extra, scores, window), rtol=0, atol=2e-5)


def projection_of(ops: Operations, rng: np.random.Generator, dtype: Any, d: int) -> tuple[Any, Any]:
    """Returns a projection of 6 query heads and 2 key heads of size `d`, for these operations and for the plain ones."""
    matrices = [jnp.asarray(rng.standard_normal((24, n * d)), dtype) for n in (6, 2, 2)]
    x = jnp.asarray(rng.standard_normal((2, 5, 24)) * 0.1, dtype)
    return tuple(each.project(x, each.prepare_joined(Joined(tuple(matrices)), "qkv")) for each in (ops, PLAIN))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rotated", "rule", "dtype"),
    [
        (0, "plain", "float32"),
        (12, "window", "float32"),
        (12, "all", "float32"),
        (16, "scale", "bfloat16"),
        (12, "window", "bfloat16"),
    ],
)
def test_appending_and_attending_by_the_chosen_operations(rotated: int, rule: str, dtype: str):
    """Over pages and over a cache in one block, with a part of each head rotated: as the plain operations do it."""
    ops = operations()
    rng = np.random.default_rng(1)
    d = 16
    projection, plain = projection_of(ops, rng, dtype, d)
    angles = jnp.asarray(rng.uniform(0, 6, (2, 5, rotated // 2)), jnp.float32)
    scores, window = RULES[rule]
    spec = Heads(d, None, None, (jnp.cos(angles), jnp.sin(angles)), scores, window)
    start = jnp.asarray([0, 37])
    count = jnp.asarray([5, 4])
    k, v = (jnp.asarray(rng.standard_normal((2, 2, 64, d)), dtype) for _ in range(2))
    mask = causal_from(start, count, window)
    want, _ = PLAIN.attend_projected(PLAIN, plain, spec, KeyValueRows(k, v), mask)
    out, _ = ops.attend_projected(ops, projection, spec, KeyValueRows(k, v), mask)
    pool, table = cut(0, (k, v), 16, np.asarray(start + count))
    paged, _ = ops.attend_projected(ops, projection, spec, PagedCache(pool, jnp.asarray(table)), mask)
    is_visible = np.arange(5)[None] < np.asarray(count)[:, None]
    tolerance = 2e-5 if dtype == "float32" else 0.03
    for found in (out, paged):
        np.testing.assert_allclose(
            np.asarray(found, np.float32)[is_visible], np.asarray(want, np.float32)[is_visible], rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("rotated", [0, 12, 16])
def test_a_rotation_by_products_is_a_rotation(rotated: int):
    rng = np.random.default_rng(2)
    x = jnp.asarray(normal(rng, 2, 3, 16 * 4))
    angles = jnp.asarray(rng.uniform(0, 6, (2, 3, rotated // 2)), jnp.float32)
    spec = Heads(16, None, None, (jnp.cos(angles), jnp.sin(angles)))
    want, _, _ = heads((x,), spec)
    found, _, _ = heads((x,), spec, rotate_by_product)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found[..., rotated:], x.reshape(2, 3, 4, 16)[..., rotated:])


@pytest.mark.parametrize(("rule", "rotated"), [("plain", 12), ("window", 0)])
def test_training_takes_every_rule_and_its_gradient(rule: str, rotated: int):
    """Tests the operations for training on the default device."""
    ops = training_operations("float32")
    rng = np.random.default_rng(3)
    d = 16
    matrices = tuple(jnp.asarray(rng.standard_normal((24, n * d)) * 0.2, jnp.float32) for n in (6, 2, 2))
    x = jnp.asarray(normal(rng, 2, 9, 24))
    due = jnp.asarray(normal(rng, 2, 9, 6 * d))
    angles = jnp.asarray(rng.uniform(0, 6, (2, 9, rotated // 2)), jnp.float32)
    scores, window = RULES[rule]
    spec = Heads(d, None, None, (jnp.cos(angles), jnp.sin(angles)), scores, window)
    mask = causal_from(jnp.zeros(2, jnp.int32), window=window)

    def run(ops: Operations, x: jax.Array) -> jax.Array:
        projection = ops.project(x, ops.prepare_joined(Joined(matrices), "qkv"))
        return jnp.sum(due * ops.attend_projected(ops, projection, spec, None, mask)[0])

    (value, grad), (want, want_grad) = (jax.value_and_grad(partial(run, each))(x) for each in (ops, PLAIN))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=0, atol=2e-5)
