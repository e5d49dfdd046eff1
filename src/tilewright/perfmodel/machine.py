"""The machine that programs run on: an instance, how its cores make a mesh, and the settings of its runtime.

The constants of this file are the runtime's; those of the hardware are in `hardware/neuron.py`.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tilewright.hardware.collectives import CollectiveCosts
from tilewright.hardware.neuron import NeuronInstance
from tilewright.hardware.ranged import Ranged, ranged, refuse_name
from tilewright.perfmodel.collectives import Mesh, steps_of
from tilewright.perfmodel.program import COMPUTE, DMA, Collective

Resource = Hashable

DMA_PACKET_BYTES = 4096
CC_PACKET_BYTES = 65536
"""Packets of compute's transfers and of collectives' unless set otherwise: the first can be raised, the second lowered
(NEURON_RT_DBG_DMA_PACKETIZATION_SIZE, NEURON_RT_DBG_CC_DMA_PACKET_SIZE; neuron-runtime/explore/compute-comm-overlap)."""

HOP_US = Ranged(1.5, 1.0, 2.0, 27.0)
"""Latency of a hop: 1 to 2 us (neuron-runtime/explore/intranode-collective-comm), of which the middle is used; 27 is what AWS's
published curve of its collective tester fits (`calibration_neuron.py`)."""

PASS_US = 0.2
"""Latency that each further chip on the way adds: a working figure; routed writes are said to be O(1) "to a first degree"
(there)."""

SIGNAL_US = 1.3
"""From a semaphore to the start of what waits for it elsewhere (nki/deep-dives/nki-dma-bandwidth-guide)."""

DESCRIPTOR_NS = 10.0
"""Time of each descriptor in an engine beside its bytes: a working figure, by which 2 KiB reach 90 % of the rate and 4 KiB
95 %, as that guide's `approaches peak` and `saturates`."""


@dataclass(frozen=True)
class Limits:
    """Bandwidths that transfers share.

    Attributes:
        dma_bytes_per_s: of one engine.
        engines: of a core.
        others: bandwidth of whatever else, in bytes a second.
        strict_priority: how engines choose among rings.
    """

    dma_bytes_per_s: float
    engines: int
    others: Mapping[Resource, float] = field(default_factory=dict)
    strict_priority: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings of the runtime that a user can change, and its latencies.

    Attributes:
        dma_packet_bytes: of compute's transfers.
        cc_packet_bytes: of collectives' copies, for each stream; the last stands for all further ones.
        streams: queues of collectives.
        hop_us, pass_us: latency of a hop to a neighbour, and of each further chip on the way.
        signal_us: of a trigger, and of a completion, between engines.
        skew_us: by how much ranks are apart when a collective begins; no source gives it.
        throttle: whether the tensor engine begins cold.
    """

    dma_packet_bytes: int = DMA_PACKET_BYTES
    cc_packet_bytes: tuple[int, ...] = (CC_PACKET_BYTES,)
    streams: int = 1
    hop_us: float = HOP_US
    pass_us: float = PASS_US
    signal_us: float = SIGNAL_US
    skew_us: float = 0.0
    throttle: bool = True

    def __post_init__(self) -> None:
        if self.dma_packet_bytes < DMA_PACKET_BYTES:
            raise ValueError(f"expected packets of at least {DMA_PACKET_BYTES} bytes for DMA, found {self.dma_packet_bytes}")
        for size in self.cc_packet_bytes or (0,):
            if not 1 <= size <= CC_PACKET_BYTES:
                raise ValueError(f"expected packets of 1 to {CC_PACKET_BYTES} bytes for collectives, found {size}")
        if self.streams < 1:
            raise ValueError(f"expected at least one stream, found {self.streams}")

    @property
    def costs(self) -> CollectiveCosts:
        """Of every collective, and of every hop that a program makes of its own."""
        return CollectiveCosts(self.signal_us, self.signal_us, self.hop_us, self.pass_us, self.skew_us)

    def cc_packet(self, stream: int) -> int:
        return self.cc_packet_bytes[min(stream, len(self.cc_packet_bytes) - 1)]


@dataclass(frozen=True)
class Machine:
    """An instance under a mesh and settings.

    Attributes:
        instance: with its specs.
        mesh: which cores are used, and how.
        settings: of the runtime.
    """

    instance: NeuronInstance
    mesh: Mesh
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.settings.streams > self.cc_cores:
            said = f"the {self.cc_cores} collective cores of a core of {self.instance.name}"
            raise ValueError(f"expected at most as many streams as {said}, found {self.settings.streams}")

    @property
    def width(self) -> int:
        """Physical cores of a logical one."""
        return self.instance.physical_per_logical

    @property
    def cc_cores(self) -> int:
        """Of a logical core: of Trainium2's two for each physical one, of Inferentia2's three."""
        return int(self.instance.chip.cc_cores) // self.instance.chip.cores * self.width

    def channels(self, stream: int) -> int:
        """Collective cores of a stream: one each, and for the first all that are left."""
        return self.cc_cores - self.settings.streams + 1 if stream == 0 else 1

    def engine_hz(self, engine: str) -> float:
        """Cycles a second of one of the engines that compute, those of a logical core together."""
        return 1e9 * self.width * getattr(self.instance.chip.core, f"{engine}_ghz")

    @property
    def tensor_flop_per_s(self) -> float:
        return 1e12 * self.width * self.instance.chip.core.bf16_tflop_per_s

    @property
    def dma_bytes_per_s(self) -> float:
        """Of all DMA engines of a logical core."""
        core = self.instance.chip.core
        return 1e9 * self.width * core.dma_engines * core.dma_gb_per_s

    @property
    def hbm_bytes_per_s(self) -> float:
        """A logical core's share of the bandwidth of its chip."""
        return 1e9 * self.instance.chip.hbm_gb_per_s / self.instance.cores_per_chip

    @property
    def hbm_bytes(self) -> float:
        """A logical core's share of the memory of its chip."""
        return 2**30 * self.instance.chip.hbm_gib / self.instance.cores_per_chip

    @property
    def sbuf_bytes(self) -> float:
        return 2**20 * self.width * self.instance.chip.core.sbuf_mib

    @property
    def psum_bytes(self) -> float:
        return 2**20 * self.width * self.instance.chip.core.psum_mib

    def collective_s(self, collective: Collective) -> float:
        """A collective by itself, from the end of what it waits for to the start of what waits for it."""
        rates = (self.channels(collective.stream), self.dma_bytes_per_s, self.hbm_bytes_per_s)
        return self.settings.costs.seconds(steps_of(self.mesh, collective), *rates)

    def limits(self, ranks: int) -> Limits:
        """Limits that transfers share, for so many simulated ranks. Links and channels are told in seconds a second."""
        core = self.instance.chip.core
        others = {}
        for rank in range(ranks):
            others["hbm", rank] = self.hbm_bytes_per_s
            others["link", rank] = 1.0
            others |= {("channel", rank, stream): 1.0 for stream in range(self.settings.streams)}
        return Limits(1e9 * core.dma_gb_per_s, core.dma_engines * self.width, others, core.strict_priority)


SWEPT = ("dma_gb_per_s", "hbm_gb_per_s", "link_gb_per_s", "hop_us")
"""Constants that a sweep draws. Others with a range, peaks and numbers of collective cores, move no simulated time."""


def machine_constants(machine: Machine) -> dict[str, Ranged]:
    """The constants of a machine that a sweep draws, by name."""
    chip = machine.instance.chip
    found = ranged(chip.core) | ranged(chip) | ranged(machine.settings)
    return {name: found[name] for name in SWEPT if name in found}


def with_figures(machine: Machine, changes: Mapping[str, float]) -> Machine:
    """The machine with other figures, named as in the specs (`dma_gb_per_s`) or in the settings (`hop_us`).

    Raises:
        ValueError: a figure that nothing has.
    """
    instance = machine.instance
    parts: dict[str, Any] = {"core": instance.chip.core, "chip": instance.chip, "settings": machine.settings}
    for name, value in changes.items():
        known = {key: [one.name for one in fields(part)] for key, part in parts.items()}
        owner = next((key for key, names in known.items() if name in names), None)
        if owner is None:
            refuse_name("a figure", name, [each for names in known.values() for each in names])
        parts[owner] = replace(parts[owner], **{name: value})
    chip = replace(parts["chip"], core=parts["core"])
    changed = replace(instance, chip=chip)
    return Machine(changed, Mesh(changed, machine.mesh.axes), parts["settings"])


def machine_of(instance: NeuronInstance, settings: Settings = Settings(), **axes: int) -> Machine:
    """A machine whose mesh has these axes, the last one over neighbouring cores."""
    return Machine(instance, Mesh(instance, tuple(axes.items())), settings)


def engine_names(machine: Machine) -> tuple[str, ...]:
    """Names of the engines that are reported: those that compute, DMA, and each stream of collectives."""
    return (*COMPUTE, DMA, *(f"cc{stream}" for stream in range(machine.settings.streams)))
