"""The compiler's estimates of a program for a TPU that is not here, with what it knows nothing of: Pallas kernels."""

from dataclasses import dataclass, fields

from tilewright.compiled.aot import Compiled
from tilewright.compiled.hlo import execution, read_module
from tilewright.hardware.tpu import TpuChip

KERNEL = "tpu_custom_call"
"""The custom-call target of a Pallas kernel."""


@dataclass(frozen=True)
class CompilerEstimate:
    """The compiler's estimates of a program: cycles, memory traffic and peak memory.

    Attributes:
        cycles: its estimated cycles, and `kernel_cycles`.
        kernel_cycles: for Pallas kernels, of which it knows nothing: the roofline of the bytes and flops that they declare.
        memory_cycles: the least number of cycles in which all its bytes can pass to and from device memory. Copies that run
            beside the compute are here and not in `cycles`, so that a program takes at least the larger of the two.
        read_bytes, written_bytes: of device memory.
        peak_bytes: of device memory, at once.
    """

    cycles: float
    kernel_cycles: float
    memory_cycles: float
    read_bytes: float
    written_bytes: float
    peak_bytes: float

    def combined(self, other: "CompilerEstimate", weight: float) -> "CompilerEstimate":
        """This, and `weight` times the other."""
        return CompilerEstimate(*(getattr(self, one.name) + weight * getattr(other, one.name) for one in fields(self)))

    def beyond(self, fewer: "CompilerEstimate") -> "CompilerEstimate":
        """Difference to an estimate of fewer layers: never less than nothing, however XLA placed the two."""
        return CompilerEstimate(*(max(0, getattr(self, one.name) - getattr(fewer, one.name)) for one in fields(self)))

    @property
    def bound_cycles(self) -> float:
        """The larger of compute and memory."""
        return max(self.cycles, self.memory_cycles)

    def record(self) -> dict[str, float]:
        return {**{one.name: round(getattr(self, one.name)) for one in fields(self)}, "bound_cycles": round(self.bound_cycles)}


def estimate(chip: TpuChip, compiled: Compiled) -> CompilerEstimate:
    """Reads the estimate of a compiled program."""
    traffic = compiled.traffic()
    kernels = kernel_cycles(chip, compiled.hlo)
    memory = chip.roofline_cycles(traffic.total, 0)
    return CompilerEstimate(compiled.cycles + kernels, kernels, memory, traffic.read, traffic.written, compiled.peak_bytes)


def kernel_cycles(chip: TpuChip, hlo: str) -> float:
    """The roofline of all Pallas kernels in a program, from the cost that each declares.

    Raises:
        ValueError: one declares none.
    """
    total = 0.0
    for step in execution(read_module(hlo), lambda op, _: op.number("bytes_accessed") or 0).steps:
        if step.op.custom_call_target == KERNEL:
            moved = step.op.number("bytes_accessed")
            flops = step.op.number("flops")
            if moved is None or flops is None:
                raise ValueError(f"expected a kernel that declares its cost, found {step.op.name} without it")
            total += step.times * chip.roofline_cycles(moved, flops)
    return total
