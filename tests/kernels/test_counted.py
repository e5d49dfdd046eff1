"""Matmuls of a counted number of rows, and of some joined matrices, as sparse denoising needs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear_checks
from kernels.linear_checks import normal
from tilewright.kernels import native, select
from tilewright.kernels.linear import cpu
from tilewright.kernels.operations import Heads, Joined, Norm, Operations

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
formats = pytest.mark.parametrize("kind", linear_checks.FORMATS)
BUNDLES = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: select.operations("cpu"), id="cpu", marks=needs_native),
        pytest.param(lambda: select.operations("cpu", kernels="xla"), id="xla"),
    ],
)
ROWS = 40
HIDDEN = 48
DIM = 16
PARTS = (4 * DIM, 2 * DIM, 2 * DIM)


@needs_native
@formats
@settings(max_examples=10)
@given(st.integers(0, 2**31 - 1), st.integers(0, 60), st.booleans(), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_the_rows_that_count_have_the_bits_that_all_would_give(
    kind: cpu.Format, seed: int, count: int, gated: bool, dtype: Any
):
    """Counts beyond the rows mean all of them."""
    rng = np.random.default_rng(seed)
    x, norm = (jnp.asarray(normal(rng, *shape), dtype) for shape in ((ROWS, 33), (33,)))
    matrices = [jnp.asarray(normal(rng, 33, 50)) for _ in range(2)]
    w = cpu.pack_gated(matrices[0], matrices[1], kind) if gated else cpu.pack(matrices[0], kind)

    @jax.jit
    def run(x: jax.Array, w: cpu.PackedMatrix, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cpu.linear(x, w, norm=Norm(norm, 1e-5)), cpu.linear(x, w, norm=Norm(norm, 1e-5), count=count)

    whole, counted = run(x, w, jnp.int32(count))
    np.testing.assert_array_equal(counted[:count].astype(jnp.float32), whole[:count].astype(jnp.float32))


@needs_native
@pytest.mark.parametrize("count", [0, -3])
def test_no_row_may_count(count: int):
    x = jnp.ones((5, 33))
    w = cpu.pack(jnp.ones((33, 50)))
    assert jax.jit(cpu.linear)(x, w, count=jnp.int32(count)).shape == (5, 50)


@needs_native
def test_one_count_at_most():
    x = jnp.ones((5, 33))
    w = cpu.pack(jnp.ones((33, 50)))
    none = [jnp.zeros(0), jnp.zeros(0)]
    call = jax.ffi.ffi_call("tilewright_linear", jax.ShapeDtypeStruct((5, 50), jnp.float32))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="expected one number of rows"):
        counts = jnp.asarray([1, 2])
        options: dict[str, Any] = {"gated": False, "eps": np.float32(0), "first": np.int64(0)}
        found: Any = call(x, w.panels, *none, counts, **options)
        jax.block_until_ready(found)


def drawn(ops: Operations, dtype: Any, biased: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(normal(rng, *shape), dtype)

    angles = jnp.asarray(rng.uniform(0, 6, (2, ROWS // 2, DIM // 2)), jnp.float32)
    return {
        "x": draw(2, ROWS // 2, HIDDEN),
        "joined": ops.prepare_joined(Joined(tuple(draw(HIDDEN, size) for size in PARTS)), "qkv"),
        "norm": draw(HIDDEN),
        "bias": tuple(draw(size) for size in PARTS) if biased else None,
        "rope": (jnp.cos(angles), jnp.sin(angles)),
    }


def heads(ops: Operations, case: dict[str, Any], dtype: Any, **which: Any) -> Any:
    @jax.jit
    def run(case: dict[str, Any], given: dict[str, Any]) -> Any:
        norm = Norm(case["norm"], 1e-5)
        static = {name: which[name] for name in ("first", "last") if name in which}
        projection = ops.project(case["x"], case["joined"], norm, bias=case["bias"], **static, **given)
        head_norm = Norm(jnp.ones(DIM, dtype), 1e-5)
        return ops.heads(projection, Heads(DIM, head_norm, head_norm, case["rope"]))

    return run(case, {name: x for name, x in which.items() if name == "count"})


@BUNDLES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_queries_alone_and_keys_and_values_alone_are_those_of_all(make: Any, biased: bool, dtype: Any):
    ops = make()
    case = drawn(ops, dtype, biased)
    q, k, v = heads(ops, case, dtype)
    alone = heads(ops, case, dtype, last=1)
    rest = heads(ops, case, dtype, first=1)
    assert alone[1:] == (None, None)
    assert rest[0] is None
    # A bundle may rotate queries by another way than keys: a rounding apart.
    unit = 2.0**-7 if dtype == jnp.bfloat16 else 1e-6
    for one, other in ((alone[0], q), (rest[1], k), (rest[2], v)):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=4 * unit, rtol=unit)


@BUNDLES
@pytest.mark.parametrize("biased", [False, True])
def test_counted_keys_and_values_are_those_of_all(make: Any, biased: bool):
    """Uses a batch of one, like gathered rows."""
    ops = make()
    case = drawn(ops, jnp.float32, biased)
    case |= {"x": case["x"].reshape(1, ROWS, -1), "rope": tuple(x.reshape(1, ROWS, -1) for x in case["rope"])}
    _, k, v = heads(ops, case, jnp.float32, first=1)
    for count in (0, 1, 17, ROWS):
        _, some_k, some_v = heads(ops, case, jnp.float32, first=1, count=jnp.int32(count))
        np.testing.assert_array_equal(some_k[:, :, :count], k[:, :, :count])
        np.testing.assert_array_equal(some_v[:, :, :count], v[:, :, :count])


@BUNDLES
def test_biases_are_added_to_their_own_matrices(make: Any):
    ops = make()
    with_bias = drawn(ops, jnp.float32, True)
    without = drawn(ops, jnp.float32, True) | {"bias": None}

    def products(case: dict[str, Any], **which: Any) -> np.ndarray:
        projection = ops.project(case["x"], case["joined"], bias=case["bias"], **which)
        parts = projection.split() if hasattr(projection, "split") else projection
        return np.concatenate([np.asarray(part) for part in parts], axis=-1)

    bias = np.concatenate(with_bias["bias"])
    begin = PARTS[0]
    for which, part in (({}, slice(None)), ({"last": 1}, slice(0, begin)), ({"first": 1}, slice(begin, None))):
        difference = products(with_bias, **which) - products(without, **which)
        np.testing.assert_allclose(difference, np.broadcast_to(bias[part], difference.shape), atol=1e-5)
