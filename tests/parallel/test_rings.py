"""Rings and gatherings against sums over all shards, in NumPy, and their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from tilewright.parallel import rings
from tilewright.parallel.mesh import make_mesh

SPEC = PartitionSpec("blocks")


def on_devices(count: int, inside: Callable[..., Any]) -> Any:
    mesh = make_mesh({"blocks": count})
    return jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))


def numbers(*shape: int, seed: int = 0) -> Float[np.ndarray, "..."]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def product(hops: list[int] | None, x: Array, w: Array) -> Array:
    """`w @ x`, where a device has some rows of both."""
    rows = x.shape[0]

    def visit(hop: int, visiting: Array, total: Array) -> Array:
        owner = (jax.lax.axis_index("blocks") + hop) % jax.lax.axis_size("blocks")
        return total + jax.lax.dynamic_slice_in_dim(w, owner * rows, rows, 1) @ visiting

    return rings.ring(visit, x, jnp.zeros((w.shape[0], x.shape[1])), "blocks", hops)


def gathered_product(x: Array, w: Array) -> Array:
    def visit(hop: int, visiting: Array, total: Array) -> Array:
        return total + w @ visiting

    return rings.gathered(visit, x, jnp.zeros((w.shape[0], x.shape[1])), "blocks")


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("inside", [partial(product, None), gathered_product])
def test_every_shard_visits_every_device(devices: int, inside: Callable[..., Array]):
    x = numbers(2 * devices, 3)
    w = numbers(2 * devices, 2 * devices, seed=1)
    np.testing.assert_allclose(on_devices(devices, inside)(x, w), w @ x, atol=1e-5)


@pytest.mark.parametrize("inside", [partial(product, None), gathered_product])
def test_the_gradient_travels_back(inside: Callable[..., Array]):
    x = numbers(8, 3)
    w = numbers(8, 8, seed=1)
    due = numbers(8, 3, seed=2)
    by_x, by_w = jax.grad(lambda x, w: jnp.sum(on_devices(4, inside)(x, w) * due), (0, 1))(x, w)
    np.testing.assert_allclose(by_x, w.T @ due, atol=1e-5)
    np.testing.assert_allclose(by_w, due @ x.T, atol=1e-5)


@pytest.mark.parametrize("hops", [[0], [1, 3], [0, 2, 3]])
def test_hops_without_a_visit_are_skipped(hops: list[int]):
    x = numbers(4, 3)
    w = numbers(4, 4, seed=1)
    kept = np.array([[(j - i) % 4 in hops for j in range(4)] for i in range(4)])
    found = on_devices(4, partial(product, hops))(x, w)
    np.testing.assert_allclose(found, np.where(kept, w, 0) @ x, atol=1e-5)
    text = on_devices(4, partial(product, hops)).lower(x, w).as_text()
    assert text.count("collective_permute") == len([hop for hop in hops if hop])


def transposed_product(hops: list[int] | None, x: Array, w: Array) -> tuple[Array, Array]:
    """`w @ x`, and `w.T` times ones, which every device makes for the others."""
    rows = x.shape[0]

    def visit(hop: int, visiting: Array, total: Array) -> tuple[Array, Array]:
        owner = (jax.lax.axis_index("blocks") + hop) % jax.lax.axis_size("blocks")
        block = jax.lax.dynamic_slice_in_dim(w, owner * rows, rows, 1)
        return total + block @ visiting, block.sum(0)[:, None]

    return rings.ring_collect(visit, x, jnp.zeros((w.shape[0], x.shape[1])), "blocks", hops)


def gathered_transposed(x: Array, w: Array) -> tuple[Array, Array]:
    def visit(hop: int, visiting: Array, total: Array) -> tuple[Array, Array]:
        return total + w @ visiting, w.sum(0)[:, None]

    return rings.gathered_collect(visit, x, jnp.zeros((w.shape[0], x.shape[1])), "blocks")


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("inside", [partial(transposed_product, None), gathered_transposed])
def test_what_is_given_comes_home(devices: int, inside: Callable[..., Any]):
    x = numbers(2 * devices, 3)
    w = numbers(2 * devices, 2 * devices, seed=1)
    total, given = on_devices(devices, inside)(x, w)
    np.testing.assert_allclose(total, w @ x, atol=1e-5)
    np.testing.assert_allclose(given[:, 0], w.sum(0), atol=1e-5)


@pytest.mark.parametrize("hops", [[0], [1, 3], [2]])
def test_what_is_given_at_some_hops_comes_home(hops: list[int]):
    x = numbers(4, 3)
    w = numbers(4, 4, seed=1)
    kept = np.array([[(j - i) % 4 in hops for j in range(4)] for i in range(4)])
    total, given = on_devices(4, partial(transposed_product, hops))(x, w)
    np.testing.assert_allclose(total, np.where(kept, w, 0) @ x, atol=1e-5)
    np.testing.assert_allclose(given[:, 0], np.where(kept, w, 0).sum(0), atol=1e-5)


@pytest.mark.parametrize("hops", [[], [1, 0], [0, 0], [4], [-1]])
def test_wrong_hops_are_refused(hops: list[int]):
    with pytest.raises(ValueError, match=r"expected ascending hops from 0 to below the 4 devices of 'blocks'"):
        on_devices(4, partial(product, hops))(numbers(4, 3), numbers(4, 4))
