"""Bundles in which XLA computes everything, on any chip."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
from jax import Array

from tilewright.kernels.linear import scaled
from tilewright.kernels.linear.scaled import ScaledFormat, ScaledMatrix
from tilewright.kernels.operations import Joined, Operations, Transposed
from tilewright.kernels.registry import operations_for


def unchanged(weight: Any, *named: Any, **options: Any) -> Any:
    return weight


def restore(weight: Any, outputs: Array | None = None) -> Array:
    w = weight.w.T if isinstance(weight, Transposed) else weight
    whole = w.dequantised(jnp.float32) if isinstance(w, ScaledMatrix) else w
    return whole if outputs is None else whole[:, outputs]


@cache
def in_few_bits(ops: Operations, kind: ScaledFormat) -> Operations:
    """Returns a bundle of XLA's operations on quantised weights; output head and embeddings have 8 bits."""

    def prepare_matrix(w: Any, name: str, largest: Any = None, head: bool = False, exact: bool = False) -> Any:
        return w if exact else scaled.prepared(w, "int8" if head else kind, name, largest)

    def prepare_joined(joined: Joined, name: str) -> Joined:
        return replace(joined, parts=tuple(scaled.prepared(w, kind, name) for w in joined.parts))

    def bytes_of(role: str, shape: tuple[int, ...], stored: str) -> int | None:
        if role == "embedding":
            return scaled.bytes_of_table(shape[0], shape[1])
        if role not in ("matrix", "head"):
            return None
        keeps = stored == "fp8" if kind == "fp8" else kind == "int4" and stored not in ("", "fp8")
        return scaled.bytes_of(shape[0], shape[1], stored if keeps else kind if role == "matrix" else "int8")

    return replace(
        ops,
        bytes_of=bytes_of,
        prepare_matrix=prepare_matrix,
        prepare_joined=prepare_joined,
        prepare_table=scaled.prepared_table,
        prepares=True,
        separate_head=False,
        weights=kind,
        keeps_blocks=kind == "int4",
        keeps_fp8=kind == "fp8",
        scales_tables=True,
    )


PLAIN = Operations(
    name="xla",
    **operations_for(None),
    prepare_matrix=unchanged,
    prepare_joined=unchanged,
    prepare_groups=unchanged,
    prepare_table=unchanged,
    bytes_of=lambda kind, shape, stored: None,
    restore=restore,
)
"""Plain `jnp`, compiled by XLA for any chip: the bundle that all others are tested against."""

CPU_XLA = replace(PLAIN, separate_head=True)
"""`PLAIN` for a CPU, whose matmuls read `[in, out]` up to twice as fast as the transposed embedding."""
