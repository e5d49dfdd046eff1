"""Collectives by hops, and with products, against those of JAX and against sums in NumPy in the order that is stated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from tilewright.compiled.hlo import read_module
from tilewright.kernels.operations import Joined
from tilewright.kernels.select import PLAIN, operations
from tilewright.parallel import rings
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.rings import Route

ROWS = PartitionSpec("tp")
COLUMNS = PartitionSpec(None, "tp")
ROUTES = [Route(bidirectional, looped) for bidirectional in (True, False) for looped in (False, True)]
SIZES = [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)]


def divided(devices: int, inside: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mesh = make_mesh({"tp": devices})
    return jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def gathered_product(devices: int, route: Route, **more: Any) -> Callable[..., Any]:
    inside = partial(rings.all_gather_matmul, axis="tp", route=route, **more)
    return divided(devices, inside, (ROWS, COLUMNS), COLUMNS)


def scattered_product(devices: int, route: Route, **more: Any) -> Callable[..., Any]:
    inside = partial(rings.matmul_reduce_scatter, axis="tp", route=route, **more)
    return divided(devices, inside, (COLUMNS, ROWS), ROWS)


PRODUCTS = {"all-gather": gathered_product, "reduce-scatter": scattered_product}


def numbers(*shape: int, seed: int = 0) -> Float[np.ndarray, "..."]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(found: Any, wanted: np.ndarray, terms: int) -> None:
    """Within the rounding of a sum of so many products of normal numbers."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=16 * terms**0.5 * float(np.finfo(np.float32).eps))


def permutes(program: Any, *args: Any) -> int:
    """Transfers of the compiled program, in which there is no other collective."""
    ops = [op for each in read_module(program.lower(*args).compile().as_text()).computations.values() for op in each.ops]
    others = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
    assert not [op.name for op in ops if op.opcode.removesuffix("-start") in others]
    return sum(op.opcode in ("collective-permute", "collective-permute-start") for op in ops)


def summed(parts: np.ndarray, to: int, bidirectional: bool) -> np.ndarray:
    """The devices' rows `parts[i]` for device `to`, in the order that `matmul_reduce_scatter` states."""
    n = len(parts)
    if not bidirectional:
        order = [(to + 1 + k) % n for k in range(n - 1)]
        chains = [order] if order else []
    else:
        chains = [[(to - k) % n for k in range(n // 2, 0, -1)], [(to + k) % n for k in range((n - 1) // 2, 0, -1)]]
    totals = [sum((parts[i] for i in chain[1:]), start=parts[chain[0]]) for chain in chains if chain]
    return sum(totals[1:], start=totals[0]) + parts[to] if totals else parts[to]


@pytest.mark.parametrize("devices", SIZES)
@pytest.mark.parametrize("route", ROUTES)
def test_collectives_equal_those_of_jax(devices: int, route: Route):
    """Gathered rows are the same; sums have the stated order, to the bit, and the same bits wherever they are asked for."""
    x = numbers(devices, 2 * devices, 3)

    def inside(part: Array) -> tuple[Array, ...]:
        mine = part[0]
        rows = mine[:2]
        return (
            rings.all_gather(rows, "tp", route),
            jax.lax.all_gather(rows, "tp", tiled=True),
            rings.reduce_scatter(mine, "tp", route),
            jax.lax.psum_scatter(mine, "tp", tiled=True),
            rings.all_reduce(mine, "tp", route),
        )

    gathered, wanted_rows, sums, wanted_sums, all_sums = divided(devices, inside, ROWS, ROWS)(x)
    np.testing.assert_array_equal(gathered, wanted_rows)
    wanted = np.concatenate([summed(x[:, 2 * d : 2 * d + 2], d, route.bidirectional) for d in range(devices)])
    np.testing.assert_array_equal(sums, wanted)
    close(sums, np.asarray(wanted_sums), devices)
    np.testing.assert_array_equal(all_sums, np.tile(wanted, (devices, 1)))


@pytest.mark.parametrize("devices", SIZES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("made", PRODUCTS.values(), ids=PRODUCTS)
def test_products_and_gradients_are_those_of_whole_matrices(made: Callable[..., Any], route: Route, devices: int):
    x = numbers(2 * devices, 5 * devices)
    w = numbers(5 * devices, 3 * devices, seed=1)
    due = numbers(2 * devices, 3 * devices, seed=2)

    @jax.jit
    def both(x: Array, w: Array, due: Array) -> Any:
        y, back = jax.vjp(made(devices, route), x, w)
        return y, back(due)

    y, (by_x, by_w) = both(x, w, due)
    close(y, x @ w, x.shape[1])
    close(by_x, due @ w.T, w.shape[1])
    close(by_w, x.T @ due, len(x))


@pytest.mark.parametrize("axis", ["fsdp", "tp"])
def test_a_ring_goes_along_one_axis_of_several(axis: str):
    other = {"fsdp": "tp", "tp": "fsdp"}[axis]
    x = numbers(6, 2, 6)
    mesh = make_mesh({"fsdp": 2, "tp": 3})
    inside = partial(rings.all_gather, axis=axis)
    spec = PartitionSpec(None, None, other)
    run = jax.shard_map(inside, mesh=mesh, in_specs=PartitionSpec(axis, None, other), out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(x), x)


@settings(max_examples=12)
@given(
    devices=st.sampled_from([1, 2, 3, 4]),
    per_chunk=st.integers(1, 3),
    chunks=st.integers(1, 3),
    inner=st.integers(1, 4),
    outer=st.integers(1, 4),
    bidirectional=st.booleans(),
    looped=st.booleans(),
)
def test_any_shapes_and_chunks(
    devices: int, per_chunk: int, chunks: int, inner: int, outer: int, bidirectional: bool, looped: bool
):
    route = Route(bidirectional, looped, per_chunk)
    x = numbers(per_chunk * chunks * devices, inner * devices)
    w = numbers(inner * devices, outer * devices, seed=1)
    for made in PRODUCTS.values():
        close(made(devices, route)(x, w), x @ w, x.shape[1])


@pytest.mark.parametrize("devices", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("made", PRODUCTS.values(), ids=PRODUCTS)
def test_a_hop_is_a_transfer_and_nothing_else_is_exchanged(made: Callable[..., Any], chunk: int | None, devices: int):
    x = numbers(2 * devices, devices)
    w = numbers(devices, devices)
    hops = (devices - 1) * (1 if chunk is None else 2)
    for bidirectional in (True, False):
        program = made(devices, Route(bidirectional, chunk=chunk))
        assert permutes(program, x, w) == hops
        by_x = jax.jit(lambda x, w, program=program: jax.vjp(lambda x: program(x, w), x)[1](program(x, w)))
        # Those of the products, and as many for their gradient.
        assert permutes(by_x, x, w) == 2 * hops


def test_the_weights_of_gathered_rows_have_their_gradient_in_one_product():
    x = numbers(8, 8)
    w = numbers(8, 8)
    program = gathered_product(4, Route())
    gradient = jax.jit(lambda x, w, due: jax.vjp(program, x, w)[1](due))
    assert gradient.lower(x, w, x).as_text().count("stablehlo.dot_general") == 4 + 1  # by x for each hop, and by w


def test_a_loop_has_as_many_transfers_whatever_the_number_of_devices():
    x = numbers(8, 8)
    w = numbers(8, 8)
    for made in PRODUCTS.values():
        assert permutes(made(8, Route(False, looped=True)), x, w) == 2
        assert permutes(made(8, Route(True, looped=True)), x, w) == 5  # four of two ways, and the odd one
    assert Route().looped_hops(rings.UNROLLED) == 0 < Route().looped_hops(rings.UNROLLED + 1)


def test_any_product_can_stand_in_for_the_plain_one():
    """Several matrices at once, and 8-bit weights where the CPU kernels run: each row gets the bits that it gets alone."""
    x = numbers(8, 64)
    parts = tuple(numbers(64, size, seed=size) for size in (16, 8))
    bundles = [PLAIN] if operations().name == "xla" else [PLAIN, operations(weights="int8")]
    for ops in bundles:
        joined = ops.prepare_joined(Joined(tuple(map(jnp.asarray, parts))), "parts")
        run = partial(rings.all_gather_matmul, axis="tp", product=ops.project)
        found = divided(4, run, (ROWS, PartitionSpec()), PartitionSpec())(x, joined)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(ops.project)(x, joined)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if ops is not PLAIN else 1e-4)


def test_wider_products_are_rounded_as_they_travel():
    x = jnp.asarray(numbers(8, 64), jnp.bfloat16)
    w = jnp.asarray(numbers(64, 8, seed=1), jnp.bfloat16)
    wide = partial(jnp.matmul, preferred_element_type=jnp.float32)
    program = scattered_product(4, Route(), product=wide, dtype=jnp.bfloat16)
    assert program(x, w).dtype == jnp.bfloat16
    exact = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_allclose(np.asarray(program(x, w), np.float32), exact, atol=4 * 2.0**-8 * np.abs(exact).max())
    types = {found.dtype for found in jax.tree.leaves(jax.eval_shape(scattered_product(4, Route(), product=wide), x, w))}
    assert types == {jnp.dtype(jnp.float32)}, "of the products, unless another one is asked for"


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="expected rows that the 4 devices of 'tp' divide, found 6"):
        scattered_product(4, Route())(numbers(6, 4), numbers(4, 4))
    with pytest.raises(ValueError, match="expected a chunk of at least one row, found 0"):
        Route(chunk=0)


@pytest.mark.parametrize("rows, chunk", [(3, 3), (4, 2), (6, 3), (5, 1), (2, 2), (1, 1)])
def test_a_chunk_is_the_most_rows_that_divide_a_shard(rows: int, chunk: int):
    """One route serves shards of every size: here three rows at most."""
    assert Route(chunk=3).chunk_of(rows) == chunk
    assert Route().chunk_of(rows) == rows
