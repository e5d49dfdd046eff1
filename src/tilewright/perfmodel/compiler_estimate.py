"""Compiler estimates of a program for an absent TPU, completed by rooflines of Pallas kernels."""

from dataclasses import dataclass, fields

from tilewright.compiled.aot import Compiled
from tilewright.compiled.hlo import execution, read_module
from tilewright.hardware.tpu import TpuChip
from tilewright.perfmodel.kernel_cost import KERNEL, kernel_cost


@dataclass(frozen=True)
class CompilerEstimate:
    """Estimates of a program: cycles, memory traffic and peak memory.

    Attributes:
        cycles: the compiler's estimated cycles plus `kernel_cycles`.
        kernel_cycles: roofline cycles of Pallas kernels, by their bytes and flops (`kernel_cost.py`); the compiler has no
            estimate of kernels.
        memory_cycles: minimum cycles to move all bytes to and from device memory. Copies beside the compute count here and not
            in `cycles`; a program takes at least the larger of the two.
        read_bytes, written_bytes: bytes read from and written to device memory.
        peak_bytes: peak use of device memory.
    """

    cycles: float
    kernel_cycles: float
    memory_cycles: float
    read_bytes: float
    written_bytes: float
    peak_bytes: float

    def combined(self, other: "CompilerEstimate", weight: float) -> "CompilerEstimate":
        """Adds `weight` times another estimate."""
        return CompilerEstimate(*(getattr(self, one.name) + weight * getattr(other, one.name) for one in fields(self)))

    def beyond(self, fewer: "CompilerEstimate") -> "CompilerEstimate":
        """Subtracts an estimate of fewer layers; differences are at least 0."""
        return CompilerEstimate(*(max(0, getattr(self, one.name) - getattr(fewer, one.name)) for one in fields(self)))

    @property
    def bound_cycles(self) -> float:
        """The larger of `cycles` and `memory_cycles`."""
        return max(self.cycles, self.memory_cycles)

    def record(self) -> dict[str, float]:
        return {**{one.name: round(getattr(self, one.name)) for one in fields(self)}, "bound_cycles": round(self.bound_cycles)}


def estimate(chip: TpuChip, compiled: Compiled) -> CompilerEstimate:
    """Computes the estimate of a compiled program."""
    traffic = compiled.traffic()
    kernels = kernel_cycles(chip, compiled.hlo)
    memory = chip.roofline_cycles(traffic.total, 0)
    return CompilerEstimate(compiled.cycles + kernels, kernels, memory, traffic.read, traffic.written, compiled.peak_bytes)


def kernel_cycles(chip: TpuChip, hlo: str) -> float:
    """Sums the roofline cycles of all Pallas kernels in a program, from their costs (`kernel_cost.py`).

    Raises:
        ValueError: the cost of a kernel is unknown.
    """
    total = 0.0
    module = read_module(hlo)
    for step in execution(module, lambda op, _: op.number("bytes_accessed") or 0).steps:
        if step.op.custom_call_target == KERNEL:
            cost = kernel_cost(module, step.computation, step.op)
            if cost is None:
                raise ValueError(f"expected a Pallas kernel with a cost estimate, found {step.op.name} without one")
            total += step.times * chip.roofline_cycles(*cost)
    return total
