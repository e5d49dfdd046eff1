"""Attention without a cache on TPUs and GPUs: interpreted, or by JAX's operations, against XLA's; compiled for absent TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.compiled.aot import compile_for
from tilewright.kernels import registry, select
from tilewright.kernels.attention import xla
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, KeyValueRows, Scores
from tilewright.kernels.self_attention import cudnn, splash

SPLASH = partial(splash.attend_block, interpret=True)
CUDNN = partial(cudnn.attend_block, implementation="xla")
Case = tuple[Any, AttentionMask, Scores]


def case_of(t: int, form: str, d: int, segments: int, window: int | None, scores: Scores = PLAIN_SCORES) -> Case:
    """Two rows of 4 query heads over 2 key heads, with sorted segment ids if `segments` is above 1."""
    rng = np.random.default_rng(t)
    shapes = (2, t, 4, d), (2, 2, t, d), (2, 2, t, d)
    qkv = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    ids = np.sort(rng.integers(0, segments, (2, t))).astype(np.int32) if segments > 1 else None
    return qkv, AttentionMask(np.zeros((2, 1), np.int32), form, segment_ids=ids, window=window), scores


SINKS: Any = np.asarray([0.5, 1, -1, 2], np.float32)
CASES: dict[str, tuple[Any, Case]] = {
    "splash, packed and padded": (SPLASH, case_of(130, "causal", 16, 3, None)),
    "cuDNN, window": (CUDNN, case_of(20, "causal", 16, 1, 7)),
    "cuDNN, full": (CUDNN, case_of(20, "full", 16, 1, None, Scores(scale=0.3))),
}
SLOW: dict[str, tuple[Any, Case]] = {
    "splash, full and padded": (SPLASH, case_of(140, "full", 8, 1, None)),
    "splash, full and packed": (SPLASH, case_of(140, "full", 8, 3, None, Scores(scale=0.3))),
    "splash, window and softcap": (SPLASH, case_of(256, "causal", 128, 2, 50, Scores(softcap=5.0))),
    "splash, sinks": (SPLASH, case_of(128, "causal", 32, 1, None, Scores(sinks=SINKS))),
}


def on_device(tree: Any) -> Any:
    """Converts NumPy's arrays, which importing this file may make, to JAX's."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def check(run: Any, case: Case) -> None:
    """Compares outputs, and the gradients of queries, keys, values and sinks."""
    (q, k, v), mask, scores = on_device(case)
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def outcomes(attend: Any) -> list[jax.Array]:
        def out(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
            return attend(q, mask, (k, v), scores._replace(sinks=sinks))

        def loss(*operands: Any) -> jax.Array:
            return jnp.sum(out(*operands) * weights)

        both = jax.jit(lambda *operands: (out(*operands), jax.grad(loss, (0, 1, 2, 3))(*operands)))
        return jax.tree.leaves(both(q, k, v, scores.sinks))

    for found, expected in zip(outcomes(run), outcomes(xla.attend_block), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_those_of_xla(name: str):
    check(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_outputs_and_gradients_equal_those_of_xla_for_other_masks(name: str):
    check(*SLOW[name])


def operands(dtype: Any, t: int = 256, d: int = 128) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((1, t, 4, d), dtype), (jax.ShapeDtypeStruct((1, 2, t, d), dtype),) * 2


START = np.zeros((1, 1), np.int32)
CAUSAL = AttentionMask(START, "causal")
PACKED = AttentionMask(START, "causal", np.zeros((1, 256), np.int32))
BITS = AttentionMask(START, np.zeros((1, 256, 8), np.uint32))


@pytest.mark.parametrize(
    "chip, mask, q, scores, reason",
    [
        ("tpu", PACKED, operands(jnp.bfloat16), PLAIN_SCORES, ""),
        ("tpu", PACKED, operands(jnp.float32), PLAIN_SCORES, "needs bfloat16"),
        ("tpu", PACKED, operands(jnp.bfloat16, t=64), PLAIN_SCORES, "needs 128 positions or more"),
        ("tpu", BITS, operands(jnp.bfloat16), PLAIN_SCORES, "needs causal or full masks of whole sequences"),
        ("gpu", CAUSAL, operands(jnp.bfloat16), PLAIN_SCORES, ""),
        (
            "gpu",
            PACKED,
            operands(jnp.bfloat16),
            PLAIN_SCORES,
            "needs causal masks, or full ones without a window, of sequences",
        ),
        ("gpu", CAUSAL, operands(jnp.float32), PLAIN_SCORES, "needs bfloat16 or float16"),
        ("gpu", CAUSAL, operands(jnp.bfloat16, d=192), PLAIN_SCORES, "needs head sizes up to 128 that 8 divides"),
        ("gpu", CAUSAL, operands(jnp.bfloat16), Scores(softcap=30.0), "needs scores without softcap and sinks"),
    ],
)
def test_the_registry_says_why_a_kernel_is_not_used(chip: Any, mask: AttentionMask, q: Any, scores: Scores, reason: str):
    mask = on_device(mask)
    fastest, other = registry.for_chip("attend_block", chip)
    found = fastest.refuses("attend_block", q[0], mask, q[1], scores)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    chosen = registry.first("attend_block", chip, q[0], mask, q[1], scores)
    assert chosen is (other if reason else fastest).module


def trained(mixed: bool) -> Any:
    """The gradient of attention by the bundle that trains on a TPU."""
    ops = select.training_operations("auto", "float32" if mixed else "bfloat16", "tpu")
    return jax.grad(lambda q, kv: jnp.sum(ops.attend(q, None, on_device(PACKED), kv).astype(jnp.float32)), (0, 1))


@pytest.mark.tpu
@pytest.mark.parametrize("mixed, d", [(False, 64), (True, 128)])
def test_training_on_a_tpu_runs_the_kernel(mixed: bool, d: int):
    """Float32 operands are rounded for it, as for all products of the bundle with float32 weights."""
    hlo = compile_for("v5e:1x1", trained(mixed), *operands(jnp.float32 if mixed else jnp.bfloat16, d=d)).hlo
    for phase in ("fwd", "dq", "dkv"):
        assert f"splash_mha_{phase}" in hlo
    assert "256,256]" not in hlo


def test_attention_over_a_cache_has_a_gradient_on_a_tpu():
    """The kernel for caches has none, so that XLA's operations run."""
    ops = select.training_operations("auto", "bfloat16", "tpu")
    mask = AttentionMask(jnp.full((1, 1), 9, jnp.int32))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(ops.attend(q, KeyValueRows(k, v), mask).astype(jnp.float32))

    q, kv = operands(jnp.bfloat16)
    assert "pallas" not in str(jax.make_jaxpr(jax.grad(loss))(q, *kv))
