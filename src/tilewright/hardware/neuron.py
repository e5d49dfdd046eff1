"""AWS's Neuron chips, from core to instance. Sources are pages of awsdocs-neuron.readthedocs-hosted.com unless stated
otherwise.

`NKI guides` are nki/guides/architecture/{trainium,trainium2,trainium3}_arch, `arch pages` about-neuron/arch/neuron-hardware.
Where pages disagree, the constant is `Ranged`: its first value is the one in use.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from tilewright.hardware.links import Torus
from tilewright.hardware.ranged import Ranged, refuse_name

GIB = 2**30 / 1e9
"""GiB in 1e9 bytes."""

Topology = Literal["ring", "torus", "switched"]


@dataclass(frozen=True)
class NeuronCore:
    """A physical NeuronCore.

    Attributes:
        tensor_ghz, vector_ghz, scalar_ghz, gpsimd_ghz: clocks of the engines.
        lanes: elements per cycle of the vector, scalar and GPSIMD engines; rows and columns of the tensor engine.
        sbuf_mib, psum_mib: on-chip memory (SBUF), and accumulators of the tensor engine (PSUM).
        dma_engines: number of DMA engines.
        dma_gb_per_s: bandwidth of one DMA engine, in 1e9 bytes per second.
        dma_rings: rings that a DMA engine serves round-robin.
        strict_priority: True if DMA engines serve the highest priority class first instead of rings round-robin.
        cold_share: fraction of its clock at which the tensor engine starts.
        warm_up_us: time until it runs at full clock. It is cold again after such a time in which it was busy for less than
            half.
    """

    name: str
    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    sbuf_mib: float
    psum_mib: float
    dma_gb_per_s: float
    strict_priority: bool
    cold_share: float
    warm_up_us: float
    lanes: int = 128
    dma_engines: int = 16
    dma_rings: int = 16

    @property
    def bf16_tflop_per_s(self) -> float:
        """Peak of the tensor engine: a multiply and an add per element of its array and cycle."""
        return 2 * self.lanes**2 * self.tensor_ghz / 1e3


@dataclass(frozen=True)
class NeuronChip:
    """A Neuron chip.

    Attributes:
        cores: physical cores.
        hbm_gib, hbm_gb_per_s: size and bandwidth of device memory.
        bf16_tflop_per_s: peak, as published for the chip.
        cc_cores: collective cores.
        links: number of links to other chips; 1, to the switch, in a switched fabric.
        link_gb_per_s: bandwidth of one link in one direction, in 1e9 bytes per second.
    """

    name: str
    core: NeuronCore
    cores: int
    hbm_gib: float
    hbm_gb_per_s: float
    bf16_tflop_per_s: float
    cc_cores: float
    links: int
    link_gb_per_s: float


@dataclass(frozen=True)
class NeuronInstance:
    """Chips that are linked with one another.

    Attributes:
        sizes: chips along each axis.
        slow_axes: axes whose links carry `slow_link_gb_per_s` in one direction instead of the chip's `link_gb_per_s`.
        physical_per_logical: physical cores per logical core (LNC).
    """

    name: str
    chip: NeuronChip
    topology: Topology
    sizes: tuple[int, ...]
    physical_per_logical: int
    slow_axes: tuple[int, ...] = ()
    slow_link_gb_per_s: float = 0.0

    @property
    def chips(self) -> int:
        return prod(self.sizes)

    @property
    def cores_per_chip(self) -> int:
        """Logical cores per chip."""
        return self.chip.cores // self.physical_per_logical

    @property
    def cores(self) -> int:
        """Logical cores of all chips."""
        return self.chips * self.cores_per_chip

    @property
    def torus(self) -> Torus:
        """Grid of the chips; every axis is a ring."""
        return Torus(self.sizes, tuple(True for _ in self.sizes))


LINK_SHARE = 0.75
"""Achieved fraction of the published link bandwidth: the collective tester's permute of 32 MiB over eight ranks reaches 37.5
GB/s (tools/neuron-sys-tools/nccom-test), of 48 to 51.5 GB/s per link."""


CORES = {
    core.name: core
    for core in (
        # Clocks, SBUF and PSUM, here and below: NKI guides. GPSIMD's clock is the scalar engine's.
        # DMA: 17 GB/s by nki/deep-dives/nki-dma-bandwidth-guide, 27.2 by nki/get-started/about/nki-dma-overview.
        # 3.8 is the fit to AWS's published curve of its collective tester (`perfmodel/calibration_neuron.py`).
        # No page describes a throttle for this core.
        NeuronCore("NeuronCore-v2", 2.8, 1.12, 1.4, 1.4, 24, 2, Ranged(17, 27.2, 3.8), False, 1.0, 0.0),
        # DMA: 23 and 27.2 GB/s by the pages above; a profile in the second shows 23.1. Throttle: NKI guide of Trainium2.
        NeuronCore("NeuronCore-v3", 2.4, 0.96, 1.2, 1.2, 28, 2, Ranged(23, 27.2), False, 0.5, 3.0),
        # DMA: 33 and 38.4 GB/s by the pages above; four QoS classes, NKI guide of Trainium3.
        NeuronCore("NeuronCore-v4", 2.4, 1.2, 1.2, 1.2, 32, 2, Ranged(33, 38.4), True, 0.5, 3.0),
    )
}
"""Cores by name."""

NEURON_CHIPS = {
    chip.name: chip
    for chip in (
        # arch pages: 190 TFLOP/s, 32 GiB at 820 GiB/s, six collective cores, NeuronLink-v2 with 192 GiB/s per chip: two links
        # of 96 GiB/s, half in each direction.
        NeuronChip("Inferentia2", CORES["NeuronCore-v2"], 2, 32, 820 * GIB, 190, 6, 2, Ranged(48 * GIB, LINK_SHARE * 48 * GIB)),
        # arch pages: as Inferentia2, with 384 GB/s over four links; Trn1n has twice that.
        NeuronChip("Trainium1", CORES["NeuronCore-v2"], 2, 32, 820 * GIB, 190, 6, 4, Ranged(48, LINK_SHARE * 48)),
        # arch pages: 667 TFLOP/s (eight cores of 79 are 632), 96 GiB at 2.9 TB/s (NKI guide: 3.0), 1,024 GB/s over the four
        # links inside an instance. Collective cores: 16 by the arch page, 20 by the NKI guide.
        NeuronChip(
            "Trainium2",
            CORES["NeuronCore-v3"],
            8,
            96,
            Ranged(2900, 3000),
            Ranged(667, 632),
            Ranged(16, 20),
            4,
            Ranged(128, LINK_SHARE * 128),
        ),
        # arch pages: 671 TFLOP/s, 144 GiB at 4.9 TB/s (NKI guide: 4.7), NeuronLink-v4 with 2,048 GiB/s per chip (elsewhere
        # 2,560 GB/s) to a switch, half in each direction.
        NeuronChip("Trainium3", CORES["NeuronCore-v4"], 8, 144, Ranged(4900, 4700), 671, 20, 1, Ranged(1024 * GIB, 1280)),
    )
}
"""Chips by name."""

INSTANCES = {
    instance.name: instance
    for instance in (
        # arch pages (inf2, trn1, trn2): 12 chips in a ring; 16 in a 4 x 4 torus; Trn2 combines two cores into one by default.
        NeuronInstance("inf2.48xlarge", NEURON_CHIPS["Inferentia2"], "ring", (12,), 1),
        NeuronInstance("trn1.32xlarge", NEURON_CHIPS["Trainium1"], "torus", (4, 4), 1),
        NeuronInstance("trn2.48xlarge", NEURON_CHIPS["Trainium2"], "torus", (4, 4), 2),
        # Four trn2.48xlarge; the links between them carry 256 GB/s per chip: two links in two directions.
        NeuronInstance("trn2-ultraserver", NEURON_CHIPS["Trainium2"], "torus", (4, 4, 4), 2, (0,), 64),
        # A switched group of the same size. The number of chips is an assumption, not that of a published instance.
        NeuronInstance("trn3-16", NEURON_CHIPS["Trainium3"], "switched", (16,), 2),
    )
}
"""Instances by name."""


def instance_of(name: str) -> NeuronInstance:
    """Returns the instance with this name.

    Raises:
        ValueError: unknown name.
    """
    return INSTANCES[name] if name in INSTANCES else refuse_name("an instance", name, INSTANCES)
