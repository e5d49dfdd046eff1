"""Row lookup compiled by XLA, for any device."""

from jax import Array
from jaxtyping import Int, Shaped

from tilewright.kernels.linear.scaled import ScaledMatrix


def gather_rows(table: Shaped[Array, "V H"] | ScaledMatrix, index: Int[Array, "*rows"]) -> Shaped[Array, "*rows H"]:
    return table.rows(index) if isinstance(table, ScaledMatrix) else table[index]
