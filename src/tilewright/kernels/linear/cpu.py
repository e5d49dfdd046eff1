"""The operation on a CPU's vector unit, over weights that were packed once. The kernel itself is `cpu.cc`.

A row's result is the same bit for bit whatever the number of rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

LANES = 16
"""Outputs in a panel."""


@partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["outputs", "gated"])
@dataclass(frozen=True)
class PackedMatrix:
    """A weight in the kernel's layout.

    Attributes:
        panels: float32 `[P, I, 16]`, or bfloat16 `[P, I / 2, 16, 2]` with I rounded up to even; P panels of 16 outputs, the
            last one padded with zeros.
        outputs: O.
        gated: panels of a gate and of an up matrix alternate.
    """

    panels: Any
    outputs: int
    gated: bool = False


def panels_of(w: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """A matrix `[I, O]` cut into panels (see `PackedMatrix`)."""
    inputs, outputs = w.shape
    count = -(-outputs // LANES)
    step = 2 if dtype == jnp.bfloat16 else 1
    padded = np.zeros((-(-inputs // step) * step, count * LANES), dtype)
    padded[:inputs, :outputs] = w
    if step == 1:
        return padded.reshape(-1, count, LANES).transpose(1, 0, 2)
    return padded.reshape(-1, 2, count, LANES).transpose(2, 0, 3, 1)


def pack(w: Float[Array, "I O"]) -> PackedMatrix:
    """Packs one matrix, float32 or bfloat16."""
    return PackedMatrix(jnp.asarray(np.ascontiguousarray(panels_of(np.asarray(w), w.dtype))), w.shape[1])


def pack_gated(gate: Float[Array, "I O"], up: Float[Array, "I O"]) -> PackedMatrix:
    """Packs gate and up for `gated_linear`, their panels in turn."""
    both = np.stack([panels_of(np.asarray(w), w.dtype) for w in (gate, up)], axis=1)
    return PackedMatrix(jnp.asarray(np.ascontiguousarray(both.reshape(-1, *both.shape[2:]))), gate.shape[1], gated=True)


def linear(x: Float[Array, "*rows I"], w: PackedMatrix, out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """`x @ w`, or `silu(x @ gate) * (x @ up)` for a gated matrix; float32 sums, whatever the weights."""
    out = jax.ShapeDtypeStruct((*x.shape[:-1], w.outputs), jnp.float32)
    call = jax.ffi.ffi_call("tilewright_linear", out)
    return call(x.astype(jnp.float32), w.panels, gated=w.gated).astype(out_dtype or x.dtype)
