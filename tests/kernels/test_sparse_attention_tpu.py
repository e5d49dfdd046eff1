"""The TPU kernel for sparse attention: interpreted against the reference, and compiled for TPUs that are not there."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.compiled.aot import compile_for
from tilewright.kernels.sparse_attention import pallas_tpu, reference

SIZES = [(2, 128, 256, 4, 2, 1), (1, 256, 384, 2, 2, 2)]
"""Rows, queries, positions, query heads, key heads, changes: several blocks of queries, and of positions."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "QUERIES", 128)
    monkeypatch.setattr(pallas_tpu, "POSITIONS", 128)


def case_of(seed: int, sizes: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """A block of positions has no change, and one of queries no exact one."""
    b, w, s, n, heads, c = sizes
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    changes = normal(b, c, s, heads, 128) * (rng.random((b, c, s, 1, 1)) < 0.1)
    kinds = rng.integers(-2, c, (b, w))
    changes[:, :, :128] = 0
    kinds[:, :128] = np.maximum(kinds[:, :128], 0)
    floats = [normal(b, w, n, 128), normal(b, s, heads, 128), normal(b, s, heads, 128), changes]
    lengths = rng.integers(s // 2, s + 1, b)
    ints = [jnp.asarray(x, jnp.int32) for x in (lengths, kinds)]
    return (*(jnp.asarray(x, dtype) for x in floats), *ints, jnp.asarray(normal(b, w, n * 128), dtype))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 2e-6), (jnp.bfloat16, 0.02)])
def test_equals_the_reference(sizes: tuple[int, ...], dtype: Any, atol: float):
    case = case_of(0, sizes, dtype)
    after, statistics = jax.jit(partial(pallas_tpu.sparse_attention, interpret=True))(*case)
    want, sums = jax.jit(reference.sparse_attention)(*case)
    np.testing.assert_allclose(after.astype(jnp.float32), want.astype(jnp.float32), atol=atol, rtol=0)
    np.testing.assert_allclose(statistics, sums, rtol=100 * atol)


def test_what_fits():
    q, k, *_ = case_of(1, SIZES[0])
    assert not pallas_tpu.refuses(q, k)
    assert pallas_tpu.refuses(q[:, :100], k)
    assert pallas_tpu.refuses(q, k[:, :100])
    assert pallas_tpu.refuses(q[..., :64], k[..., :64])
    assert pallas_tpu.refuses(q.astype(jnp.bfloat16), k)


@pytest.mark.tpu
def test_on_a_tpu_scores_are_never_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, 256))]
    keys = [shaped((1, 1024, 32, 128))] * 2
    case = (shaped((1, 256, 32, 128)), *keys, shaped((1, 1, 1024, 32, 128)), *ints, shaped((1, 256, 4096)))
    compiled = compile_for("v5e:1x1", pallas_tpu.sparse_attention, *case)
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert not compiled.traffic().contains_shape((32, 256, 1024))
