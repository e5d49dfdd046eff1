"""Attention whose rows and heads devices share in a partitioned program, against one device: outputs and gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, KeyValueRows, Operations, Scores
from tilewright.kernels.select import PLAIN
from tilewright.kernels.self_attention import splash
from tilewright.parallel.attention import with_sharded_attention
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import grouped_mesh

HEADS = 8
KV_HEADS = 4


def splash_operations() -> Operations:
    """XLA's operations with the TPU kernel, interpreted."""

    def attend(q: Any, cache: Any, mask: AttentionMask, block_kv: Any = None, scores: Scores = PLAIN_SCORES) -> Any:
        return splash.attend_block(q, mask, block_kv, scores, interpret=True)

    return replace(PLAIN, attend=attend)


def outcomes(ops: Operations, mask: AttentionMask, sinks: Any, t: int) -> list[Any]:
    """Returns the outputs, and the gradients of queries, keys, values and sinks."""
    rng = np.random.default_rng(0)
    shapes = (4, t, HEADS, 8), (4, KV_HEADS, t, 8), (4, KV_HEADS, t, 8)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = ops.attend(q, None, mask, (k, v), Scores(scale=0.3, sinks=sinks))
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3) if sinks is not None else (0, 1, 2), has_aux=True))(
        q, k, v, sinks
    )
    return [out, *gradients]


def causal(t: int, **more: Any) -> AttentionMask:
    return AttentionMask(jnp.zeros((4, 1), jnp.int32), "causal", **more)


def grouped(devices: int) -> Mesh:
    """A mesh in which devices share key/value heads, if there are more than these."""
    return grouped_mesh(make_mesh({"tp": devices}), "tp", heads=HEADS, kv_heads=KV_HEADS)


MESHES: dict[str, Any] = {
    "rows": partial(make_mesh, {"fsdp": 4, "tp": 1}),
    "replicas, rows and heads": partial(make_mesh, {"dp": 2, "fsdp": 2, "tp": 2}),
    "shared key/value heads": partial(grouped, 8),
    "heads that do not divide": partial(make_mesh, {"fsdp": 2, "tp": 3}),
}


@pytest.mark.parametrize("name", MESHES)
def test_results_are_those_of_one_device(name: str):
    mesh = MESHES[name]()
    data = [axis for axis in mesh.shape if axis in ("dp", "fsdp")]
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (4, 12))), jnp.int32)
    mask = causal(12, segment_ids=segments)
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    found = outcomes(with_sharded_attention(PLAIN, mesh, data), mask, sinks, 12)
    for one, expected in zip(found, outcomes(PLAIN, mask, sinks, 12), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_kernel_runs_on_each_devices_rows():
    mesh = make_mesh({"fsdp": 2, "tp": 2})
    mask = causal(128, window=40)
    found = outcomes(with_sharded_attention(splash_operations(), mesh, ["fsdp"]), mask, None, 128)
    for one, expected in zip(found, outcomes(PLAIN, mask, None, 128), strict=True):
        np.testing.assert_allclose(one, expected, rtol=2e-4, atol=2e-4)


def test_attention_over_a_cache_stays():
    ops = with_sharded_attention(PLAIN, make_mesh({"fsdp": 2}), ["fsdp"])
    rng = np.random.default_rng(0)
    q, new = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 2, HEADS, 8), (4, KV_HEADS, 2, 8)))
    cache = KeyValueRows(*(jnp.asarray(rng.standard_normal((2, 4, KV_HEADS, 6, 8)), jnp.float32)))
    mask = AttentionMask(jnp.full((4, 1), 5), "full")
    np.testing.assert_array_equal(ops.attend(q, cache, mask, (new, new)), PLAIN.attend(q, cache, mask, (new, new)))
