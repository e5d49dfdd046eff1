"""Compares chips of several makers and computes rooflines: lower bounds from compute, memory and link bandwidth."""

import re
from dataclasses import dataclass
from typing import Literal

from tilewright.hardware.neuron import GIB, NEURON_CHIPS, NeuronChip
from tilewright.hardware.ranged import refuse_name
from tilewright.hardware.tpu import CHIPS, KINDS, TpuChip

Maker = Literal["Neuron", "TPU", "GPU", "CPU"]


@dataclass(frozen=True)
class Roofline:
    """Lower bounds in seconds on the time of some work, one per limit of a chip; `link_s` is None for a chip without links."""

    compute_s: float
    memory_s: float
    link_s: float | None

    @property
    def seconds(self) -> float:
        """Lower bound in seconds when compute, memory and link traffic overlap fully."""
        return max(self.compute_s, self.memory_s, self.link_s or 0.0)

    @property
    def limit(self) -> str:
        """Name of the limit that takes longest: compute, memory or links."""
        found = {"compute": self.compute_s, "memory": self.memory_s, "links": self.link_s or 0.0}
        return max(found, key=lambda name: found[name])


@dataclass(frozen=True)
class Accelerator:
    """A chip with all its cores.

    Attributes:
        cores: NeuronCores, TensorCores, SMs or compute units, or CPU cores.
        matrix_units: tensor engines, matrix units, matrix cores, or vector units of a CPU, over all cores.
        bf16_tflop_per_s: peak for dense bfloat16 matmuls.
        memory_gb, memory_gb_per_s: size and bandwidth of the chip's memory, in 1e9 bytes.
        links: number of links to other chips or to a switch.
        link_gb_per_s: bandwidth of one link in one direction, in 1e9 bytes per second.
        fabric: topology that the links form.
    """

    name: str
    maker: Maker
    cores: int
    matrix_units: int
    bf16_tflop_per_s: float
    memory_gb: float
    memory_gb_per_s: float
    links: int
    link_gb_per_s: float
    fabric: str

    @property
    def links_gb_per_s(self) -> float:
        """Bandwidth of all links, both directions summed, as makers quote it, in 1e9 bytes per second."""
        return 2 * self.links * self.link_gb_per_s

    @property
    def flops_per_memory_byte(self) -> float:
        """Ridge point: operations per byte of memory traffic from which compute is the limit."""
        return 1e3 * self.bf16_tflop_per_s / self.memory_gb_per_s

    @property
    def flops_per_link_byte(self) -> float | None:
        """Peak bfloat16 operations per byte that passes the links in either direction; None without links."""
        return 1e3 * self.bf16_tflop_per_s / self.links_gb_per_s if self.links else None

    def roofline(self, flops: float, memory_bytes: float, link_bytes: float = 0.0) -> Roofline:
        """Returns the roofline of an amount of work.

        Args:
            flops: floating-point operations.
            memory_bytes: bytes moved to and from the chip's memory.
            link_bytes: bytes that the chip sends over its links, in one direction.

        Raises:
            ValueError: `link_bytes` on a chip without links.
        """
        if link_bytes and not self.links:
            raise ValueError(f"expected no link bytes, because {self.name} has no links; found {link_bytes:g}")
        sent = 1e9 * self.links * self.link_gb_per_s
        link_s = link_bytes / sent if self.links else None
        return Roofline(flops / (1e12 * self.bf16_tflop_per_s), memory_bytes / (1e9 * self.memory_gb_per_s), link_s)


def from_neuron_chip(chip: NeuronChip) -> Accelerator:
    sizes = (chip.cores, chip.cores, chip.bf16_tflop_per_s, chip.hbm_gib * GIB, chip.hbm_gb_per_s)
    fabric = {1: "switch", 2: "ring", 4: "2-D torus"}[chip.links]
    return Accelerator(chip.name, "Neuron", *sizes, chip.links, chip.link_gb_per_s, fabric)


def from_tpu_chip(chip: TpuChip) -> Accelerator:
    sizes = (chip.cores, chip.matrix_units, chip.bf16_tflop_per_s, chip.hbm_gb, chip.hbm_gb_per_s)
    return Accelerator(f"TPU {chip.name}", "TPU", *sizes, 2 * chip.ici_axes, chip.ici_gb_per_s, f"{chip.ici_axes}-D torus")


ACCELERATORS = {
    one.name: one
    for one in (
        *map(from_neuron_chip, NEURON_CHIPS.values()),
        *map(from_tpu_chip, CHIPS.values()),
        # docs.cloud.google.com/tpu/docs/v4 and jax-ml.github.io/scaling-book/tpus: 45 GB/s per link and direction; units: JAX's
        # pallas/mosaic/tpu_info.py. Nothing here compiles for v4 slices, so `hardware/tpu.py` has no row for it.
        Accelerator("TPU v4", "TPU", 2, 8, 275, 34.4, 1228, 6, 45, "3-D torus"),
        # Peak, memory and units: JAX's tpu_info.py. Links: 1,200 GB/s per chip, from memory and not verified.
        Accelerator("TPU 7x", "TPU", 2, 4, 2307, 206, 7400, 6, 100, "3-D torus"),
        # nvidia.com, A100 80 GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s: twelve links.
        Accelerator("A100", "GPU", 108, 432, 312, 80, 2039, 12, 25, "switch"),
        # nvidia.com, H100 SXM data sheet: 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s: eighteen links.
        Accelerator("H100", "GPU", 132, 528, 989, 80, 3350, 18, 25, "switch"),
        # nvidia.com, H200 data sheet: as H100, with 141 GB at 4.8 TB/s.
        Accelerator("H200", "GPU", 132, 528, 989, 141, 4800, 18, 25, "switch"),
        # amd.com, MI250X data sheet: both dies together, 383 TFLOP/s, 3.2 TB/s, eight Infinity Fabric links of 100 GB/s.
        Accelerator("MI250X", "GPU", 220, 880, 383, 128, 3277, 8, 50, "point to point"),
        # A server with 32 cores at 2.5 GHz, two AVX-512 bfloat16 units per core and eight channels of DDR5-4800: an assumption.
        Accelerator("CPU", "CPU", 32, 64, 32 * 2.5e9 * 2 * 64 / 1e12, 512, 307, 0, 0, "none"),
    )
}
"""Chips by name."""


def accelerator_of(name: str) -> Accelerator:
    """Returns the chip with this name, ignoring case.

    Raises:
        ValueError: unknown name.
    """
    found = next((one for key, one in ACCELERATORS.items() if key.lower() == name.lower()), None)
    return found or refuse_name("a chip", name, ACCELERATORS)


def accelerator_of_device(kind: str) -> Accelerator | None:
    """Returns the chip for JAX's `device_kind` ("TPU v5 lite", "NVIDIA H100 80GB HBM3"); None for CPUs and unlisted kinds."""
    names = {f"TPU {KINDS[kind]}"} if kind in KINDS else {kind, *re.split(r"[ -]", kind)}
    return next((one for name, one in ACCELERATORS.items() if name in names and one.maker != "CPU"), None)
