"""Sums of messages that are gathered already: each implementation against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import select
from tilewright.kernels.scatter_add import cases, reference, xla

IMPLEMENTATIONS = [
    pytest.param(jax.jit(reference.scatter_add), id="reference"),
    pytest.param(jax.jit(xla.scatter_add), id="xla"),
    pytest.param(jax.jit(select.scatter_add), id="select"),
]
SIZES = [(1, 1, 1), (3, 5, 7), (8, 2, 128), (2, 33, 5), (0, 4, 3)]
"""Rows, slots, features."""


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(seed=st.integers(0, 2**31 - 1), sizes=st.sampled_from(SIZES))
def test_sums_what_counts(run, dtype, seed: int, sizes: tuple[int, int, int]):
    """Slots that do not count hold NaN."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, sizes[1] + 1, sizes[0]).astype(np.int32)
    messages = jnp.asarray(rng.normal(size=sizes), dtype)
    exact = np.asarray(messages, np.float64)
    counts = np.arange(sizes[1])[None, :, None] < degrees[:, None, None]
    actual = run(jnp.where(counts, messages, jnp.nan), jnp.asarray(degrees))
    assert actual.dtype == dtype
    bound = float(jnp.finfo(dtype).eps) + sizes[1] * float(jnp.finfo(jnp.float32).eps)
    error = np.abs(np.asarray(actual, np.float64) - np.where(counts, exact, 0).sum(1))
    assert (error <= bound * np.where(counts, np.abs(exact), 0).sum(1) + 1e-12).all()


def test_the_case_is_that_of_the_gather():
    case = cases.CASES["trainium"]
    messages = jax.ShapeDtypeStruct((case.nodes, case.slots, case.features), jnp.float32)
    out = jax.eval_shape(select.scatter_add, messages, jax.ShapeDtypeStruct((case.nodes,), jnp.int32))
    assert out.shape == (2048, 128)
