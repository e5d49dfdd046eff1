"""The operation on a CPU's vector or tile unit, over weights that were packed once. The kernel is that of `linear/cpu.cc`.

It reads the matrices of groups that have rows, and no others. A row's result is the same bit for bit whatever other rows there
are.
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
from tilewright.kernels.native import or_nothing


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["groups", "outputs"])
@dataclass(frozen=True)
class PackedMatrices:
    """Weights `[G, I, O]` in the kernel's layout.

    Attributes:
        matrix: the panels of all groups, one group's behind another's, as those of one matrix; gate and up may alternate.
        groups: G.
        outputs: O.
    """

    matrix: PackedMatrix
    groups: int
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, inputs with the zeros that follow them, and outputs."""
        return self.groups, self.matrix.shape[0], self.outputs


def group_of(w: Any, group: int, groups: int) -> Any:
    """One group's matrix `[I, O]`, of an array `[G, I, O]` or of blocks whose outputs are those of all groups."""
    if not isinstance(w, QuantisedMatrix):
        return np.asarray(w)[group]
    outputs = w.shape[1] // groups
    part = {name: values[group * outputs : (group + 1) * outputs] for name, values in w.arrays.items()}
    return QuantisedMatrix(w.kind, **part)


def pack(weights: Sequence[Any], groups: int, kind: Format | None = None, name: str = "weights") -> PackedMatrices:
    """Packs the matrices of all groups; a gate and an up matrix for each group, if there are two.

    Args:
        weights: float32 or bfloat16 `[G, I, O]`, or blocks whose outputs are those of all groups.
        kind: the format to pack into; None keeps the dtype, or the blocks.

    Raises:
        ValueError: these are no such matrices; see `linear.cpu.pack`.
    """

    def one(group: int) -> PackedMatrix:
        matrices = [group_of(w, group, groups) for w in weights]
        return cpu.pack(matrices[0], kind, name) if len(matrices) == 1 else cpu.pack_gated(matrices[0], matrices[1], kind, name)

    for w in weights:
        if not isinstance(w, QuantisedMatrix) and (getattr(w, "ndim", 0) != 3 or len(w) != groups):
            raise ValueError(f"{name}: expected {groups} matrices [groups, inputs, outputs], found {getattr(w, 'shape', None)}")
    first = one(0)
    panels = cpu.huge_pages((groups * len(first.panels), *first.panels.shape[1:]), first.panels.dtype)
    for group in range(groups):
        packed = first if group == 0 else one(group)
        size = len(packed.panels)
        panels[group * size : (group + 1) * size] = np.asarray(packed.panels)
    outputs = len(panels) * cpu.LANES // (2 if first.gated else 1)
    return PackedMatrices(replace(first, panels=jax.device_put(panels), outputs=outputs), groups, first.outputs)


def unpack(w: PackedMatrices) -> Float[Array, "G I O"]:
    """The matrices that `pack` was given, rounded to the format; zeros may follow their inputs."""
    wide = np.asarray(cpu.unpack(w.matrix))
    return jnp.asarray(wide.reshape(len(wide), w.groups, -1).transpose(1, 0, 2)[..., : w.outputs])


def grouped_linear(
    x: Float[Array, "R I"], w: PackedMatrices, sizes: Int32[Array, " G"], out_dtype: DTypeLike | None = None
) -> Float[Array, "R O"]:
    """The product of each row with the matrix of its group (see `reference.py`); `silu(x @ gate) * (x @ up)` for gated ones.

    Formats and sums are those of `linear.cpu.linear`.
    """
    out = jax.ShapeDtypeStruct((len(x), w.outputs), jnp.dtype(out_dtype or x.dtype))
    call: Any = jax.ffi.ffi_call("tilewright_grouped_linear", out)
    return cast(Array, call(x, w.matrix.panels, or_nothing(None, x.dtype), sizes, gated=w.matrix.gated))
