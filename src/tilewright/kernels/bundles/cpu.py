"""Bundle of the CPU kernels with packed weights."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from tilewright.kernels.bundles import xla
from tilewright.kernels.grouped_linear import cpu as grouped_cpu
from tilewright.kernels.linear import cpu
from tilewright.kernels.operations import Joined, Operations, Weights
from tilewright.kernels.registry import operations_for


@cache
def cpu_operations(name: str, weights: Weights) -> Operations:
    """Returns the bundle of kernels for a CPU's vector or tile unit, with packed weights."""
    formats: dict[Weights, tuple[cpu.Format | None, cpu.Format | None]] = {"int8": ("q8_0", "q8_0"), "int4": ("q4_1", "q8_0")}
    kind, head_kind = formats.get(weights, (None, None))
    keeps_blocks = weights in ("auto", "int4")

    def prepare_matrix(w: Any, name: str, largest: Any = None, head: bool = False, exact: bool = False) -> Any:
        return cpu.pack(w, None if exact else head_kind if head else kind, name)

    def bytes_of(role: str, shape: tuple[int, ...], stored: str) -> int | None:
        chosen = (stored if keeps_blocks and stored != "fp8" else "") or (head_kind if role == "head" else kind)
        if not chosen or role not in ("matrix", "head", "experts"):
            return None
        return prod(shape[:-2]) * cpu.bytes_of(shape[-2], shape[-1], chosen)

    def prepare_joined(joined: Joined, name: str) -> Any:
        if not cpu.read_together(joined.parts, kind):
            return replace(joined, parts=tuple(cpu.pack(w, kind, name) for w in joined.parts))
        if not joined.gated:
            return cpu.pack_joined(joined.parts, kind, name)
        gate, up = joined.parts
        return cpu.pack_gated(gate, up, kind, name)

    def prepare_groups(weights: Any, groups: int, name: str) -> Any:
        if not isinstance(weights, Joined):
            return grouped_cpu.pack([weights], groups, kind, name)
        if cpu.read_together(weights.parts, kind):
            return grouped_cpu.pack(weights.parts, groups, kind, name)
        return replace(weights, parts=tuple(grouped_cpu.pack([w], groups, kind, name) for w in weights.parts))

    return Operations(
        name=name,
        **operations_for("cpu"),
        prepare_matrix=prepare_matrix,
        prepare_joined=prepare_joined,
        prepare_groups=prepare_groups,
        prepare_table=xla.unchanged,
        bytes_of=bytes_of,
        restore=cpu.unpack,
        prepares=True,
        weights=weights,
        packs=True,
        keeps_blocks=keeps_blocks,
        separate_head=True,
        skips_uncounted=True,
    )
