"""Grouped matmuls on a CPU's vector or tile unit, with packed weights. The kernel is in `linear/cpu.cc`.

It reads only the matrices of groups with rows. A row's result is bitwise independent of the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tilewright.kernels.linear import cpu
from tilewright.kernels.linear.blocks import QuantisedMatrix
from tilewright.kernels.linear.cpu import Format, PackedMatrix
from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import Joined


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["groups", "outputs"])
@dataclass(frozen=True)
class PackedMatrices:
    """Weights `[G, I, O]` in the kernel's layout.

    Attributes:
        matrix: the panels of all groups in sequence, as of one matrix; panels of gate and up may alternate.
        groups: G.
        outputs: O.
    """

    matrix: PackedMatrix
    groups: int
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, inputs including zero padding, and outputs."""
        return self.groups, self.matrix.shape[0], self.outputs


def group_of(w: Any, group: int, groups: int) -> Any:
    """Returns a group's matrix `[I, O]`, from an array `[G, I, O]` or from blocks with the outputs of all groups."""
    if not isinstance(w, QuantisedMatrix):
        return np.asarray(w)[group]
    outputs = w.shape[1] // groups
    part = {name: values[group * outputs : (group + 1) * outputs] for name, values in w.arrays.items()}
    return QuantisedMatrix(w.kind, **part)


def pack(weights: Sequence[Any], groups: int, kind: Format | None = None, name: str = "weights") -> PackedMatrices:
    """Packs the matrices of all groups; for two weights, a gate and an up matrix per group.

    Args:
        weights: float32 or bfloat16 `[G, I, O]`, or blocks with the outputs of all groups.
        kind: format to pack into; None keeps the dtype or the blocks.

    Raises:
        ValueError: invalid matrices; see `linear.cpu.pack`.
    """

    def one(group: int) -> PackedMatrix:
        matrices = [group_of(w, group, groups) for w in weights]
        return cpu.pack(matrices[0], kind, name) if len(matrices) == 1 else cpu.pack_gated(matrices[0], matrices[1], kind, name)

    for w in weights:
        if not isinstance(w, QuantisedMatrix) and (getattr(w, "ndim", 0) != 3 or len(w) != groups):
            raise ValueError(f"{name}: expected {groups} matrices [groups, inputs, outputs], found {getattr(w, 'shape', None)}")
    first = one(0)
    panels = cpu.huge_pages.allocate((groups * len(first.panels), *first.panels.shape[1:]), first.panels.dtype)
    for group in range(groups):
        packed = first if group == 0 else one(group)
        size = len(packed.panels)
        panels[group * size : (group + 1) * size] = np.asarray(packed.panels)
    outputs = len(panels) * cpu.LANES // (2 if first.gated else 1)
    return PackedMatrices(replace(first, panels=jax.device_put(panels), outputs=outputs), groups, first.outputs)


def unpack(w: PackedMatrices) -> Float[Array, "G I O"]:
    """Inverts `pack`, up to rounding to the format; zeros may follow the inputs."""
    wide = np.asarray(cpu.unpack(w.matrix))
    return jnp.asarray(wide.reshape(len(wide), w.groups, -1).transpose(1, 0, 2)[..., : w.outputs])


def grouped_linear(
    x: Float[Array, "R I"], w: PackedMatrices, sizes: Int32[Array, " G"], out_dtype: DTypeLike | None = None
) -> Float[Array, "R O"]:
    """Multiplies each row by its group's matrix (see `reference.py`); `silu(x @ gate) * (x @ up)` for gated matrices.

    Formats and sums are those of `linear.cpu.linear`.
    """
    out = jax.ShapeDtypeStruct((len(x), w.outputs), jnp.dtype(out_dtype or x.dtype))
    call: Any = jax.ffi.ffi_call("tilewright_grouped_linear", out)
    return cast(Array, call(x, w.matrix.panels, or_empty(None, x.dtype), sizes, gated=w.matrix.gated))


def grouped_gated(x: Float[Array, "R I"], joined: Any, sizes: Int32[Array, " G"]) -> Float[Array, "R O"]:
    """Computes `silu(x @ gate) * (x @ up)` with each row's group; see `Operations.grouped_gated`."""
    if not isinstance(joined, Joined):
        return grouped_linear(x, joined, sizes)
    gated, up = (grouped_linear(x, w, sizes, jnp.float32) for w in joined.parts)
    return (jax.nn.silu(gated) * up).astype(x.dtype)
