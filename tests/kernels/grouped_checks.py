"""Checks of grouped matmuls for every instruction set: a group's rows have the bits of a separate matmul."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.grouped_linear import cpu as grouped
from tilewright.kernels.linear import cpu

FORMATS: tuple[cpu.Format, ...] = ("float32", "bfloat16", "q4_1", "q8_0")
ROWS = 40


def check_groups(seed: int, sizes: list[int], dims: tuple[int, int], kind: cpu.Format, gated: bool, dtype: Any) -> None:
    """Checks that results equal `linear` for each group bit for bit, with zeros behind the last group's rows."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((ROWS, dims[0]), np.float32), dtype)
    weights = [rng.standard_normal((len(sizes), *dims), np.float32) for _ in range(2 if gated else 1)]
    of_each = [
        cpu.pack(weights[0][n], kind) if not gated else cpu.pack_gated(weights[0][n], weights[1][n], kind)
        for n in range(len(sizes))
    ]

    @jax.jit
    def run(x: jax.Array, w: grouped.PackedMatrices, sizes: jax.Array, of_each: list[cpu.PackedMatrix]) -> Any:
        return grouped.grouped_linear(x, w, sizes, jnp.float32), [cpu.linear(x, one, jnp.float32) for one in of_each]

    found, each = run(x, grouped.pack(weights, len(sizes), kind), jnp.asarray(sizes, jnp.int32), of_each)
    group = np.repeat(np.arange(len(sizes)), sizes)
    want = np.zeros((ROWS, dims[1]), np.float32)
    want[: len(group)] = np.stack(each)[group, np.arange(len(group))]
    np.testing.assert_array_equal(found, want)
