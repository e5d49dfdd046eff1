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
from tilewright.kernels.attention.xla import prefix_attention as attend_rows
from tilewright.kernels.heads.xla import heads, rotate_by_product
from tilewright.kernels.operations import Heads, Joined, Operations, Scores
from tilewright.kernels.paged import pallas_tpu
from tilewright.kernels.paged import reference as paged_reference
from tilewright.kernels.paged import xla as paged_xla
from tilewright.kernels.select import PLAIN, operations, training_operations

SINKS = np.linspace(-2, 3, 6)
RULES = {
    "plain": Scores(),
    "window": Scores(window=5),
    "scale": Scores(scale=0.37),
    "softcap": Scores(softcap=1.5),
    "sinks": Scores(sinks=jnp.asarray(SINKS, jnp.float32)),
    "all": Scores(7, 0.4, 2.0, jnp.asarray(SINKS, jnp.float32)),
}


def expected(q: Any, k: Any, v: Any, lengths: Any, extra: Any, rule: Scores) -> np.ndarray:
    """Query by query and head by head, from the definition."""
    (b, t, n, d), heads = q.shape, k.shape[1]
    sinks = None if rule.sinks is None else np.asarray(rule.sinks, np.float64)
    out = np.zeros((b, t, n, d))
    for row, at, head in np.ndindex(b, t, n):
        own = head // (n // heads)
        first = 0 if rule.window is None else max(0, lengths[row, at] - rule.window)
        cached = (k[row, own, first : lengths[row, at]], v[row, own, first : lengths[row, at]])
        beside = ((), ()) if extra is None else ([extra[0][row, own]], [extra[1][row, own]])
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


def over_pages(q: Any, k: Any, v: Any, lengths: Any, extra: Any, rule: Scores, attend: Any) -> Any:
    pool, table = cut(0, (k, v), 16, np.asarray(lengths).max(axis=1))
    return attend(q, pool, jnp.asarray(table), lengths, extra, rule)


def tpu_over_pages(q: Any, pool: Any, table: Any, lengths: Any, extra: Any, rule: Scores) -> Any:
    pairs = paired(pool)
    sizes = pairs.kv_heads, pairs.page_size
    return paged_xla.attention_over_blocks(
        q, partial(pallas_tpu.in_rows, pairs), sizes, table, lengths, extra, attend_rows, rule
    )


def xla_over_pages(q: Any, pool: Any, table: Any, lengths: Any, extra: Any, rule: Scores) -> Any:
    return paged_xla.prefix_attention(q, pool, table, lengths, extra, rule=rule)


IMPLEMENTATIONS = {
    "reference": reference.prefix_attention,
    "xla": xla.prefix_attention,
    "paged reference": partial(over_pages, attend=paged_reference.prefix_attention),
    "paged xla": partial(over_pages, attend=xla_over_pages),
    "paged tpu": partial(over_pages, attend=tpu_over_pages),
}


@pytest.mark.parametrize(("rule", "extras"), [*((rule, 0) for rule in RULES), ("all", 3)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_rule_by_every_implementation(name: str, rule: str, extras: int, monkeypatch: pytest.MonkeyPatch):
    """Over one block of a table and over several, and beside keys of the queries' own."""
    if name.startswith("paged"):
        monkeypatch.setattr(paged_xla, "BLOCK_ENTRIES", 32)
    rng = np.random.default_rng(0)
    q = normal(rng, 2, 3, 6, 8) * 2
    k = normal(rng, 2, 2, 64, 8)
    v = normal(rng, 2, 2, 64, 8)
    extra = (normal(rng, 2, 2, extras, 8), normal(rng, 2, 2, extras, 8)) if extras else None
    lengths = np.asarray([[0, 1, 9], [40, 41, 64]], np.int32)
    given = [jnp.asarray(x) for x in (q, k, v, lengths)]
    own = None if extra is None else (jnp.asarray(extra[0]), jnp.asarray(extra[1]))
    out = IMPLEMENTATIONS[name](*given, own, rule=RULES[rule])
    np.testing.assert_allclose(out, expected(q, k, v, lengths, extra, RULES[rule]), rtol=0, atol=2e-5)


def projection_of(ops: Operations, rng: np.random.Generator, dtype: Any, d: int) -> tuple[Any, Any]:
    """What 6 query heads and 2 key heads of size `d` come of; as these operations have it, and as plain ones have it."""
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
    spec = Heads(d, None, None, (jnp.cos(angles), jnp.sin(angles)), RULES[rule])
    start = jnp.asarray([0, 37])
    count = jnp.asarray([5, 4])
    k, v = (jnp.asarray(rng.standard_normal((2, 2, 64, d)), dtype) for _ in range(2))
    want, *_ = PLAIN.append_attend(plain, spec, k, v, start, count)
    out, *_ = ops.append_attend(projection, spec, k, v, start, count)
    pool, table = cut(0, (k, v), 16, np.asarray(start + count))
    paged, _ = ops.paged_append_attend(projection, spec, pool, jnp.asarray(table), start, count)
    seen = np.arange(5)[None] < np.asarray(count)[:, None]
    tolerance = 2e-5 if dtype == "float32" else 0.03
    for found in (out, paged):
        np.testing.assert_allclose(
            np.asarray(found, np.float32)[seen], np.asarray(want, np.float32)[seen], rtol=0, atol=tolerance
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
    """By the operations for training, on whatever they run."""
    ops = training_operations("float32")
    rng = np.random.default_rng(3)
    d = 16
    matrices = tuple(jnp.asarray(rng.standard_normal((24, n * d)) * 0.2, jnp.float32) for n in (6, 2, 2))
    x = jnp.asarray(normal(rng, 2, 9, 24))
    due = jnp.asarray(normal(rng, 2, 9, 6 * d))
    angles = jnp.asarray(rng.uniform(0, 6, (2, 9, rotated // 2)), jnp.float32)
    spec = Heads(d, None, None, (jnp.cos(angles), jnp.sin(angles)), RULES[rule])

    def run(ops: Operations, x: jax.Array) -> jax.Array:
        return jnp.sum(due * ops.causal_attention(ops.project(x, ops.prepare_joined(Joined(matrices), "qkv")), spec))

    (value, grad), (want, want_grad) = (jax.value_and_grad(partial(run, each))(x) for each in (ops, PLAIN))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=0, atol=2e-5)
