"""One model of collectives for every chip: the steps of an algorithm, and what a step and the whole transfer cost.

A collective is steps that all devices take together. A step takes its latency, and then its bytes by the slowest of what they
pass: the most loaded link, the engines that move them, the device memory that is read and written. Around the steps there is a
start, from what the transfer waits for to its first byte, and a completion, from the last byte to what waits for it. A hop of a
ring that a program makes of single permutes is one such step with a start and a completion of its own, so that cutting a
collective into hops costs what it costs, whatever is hidden under compute then.

The closed form of a layer (`layers.py`), the timeline of compiled TPU programs and the simulator of Neuron chips (`perfmodel/`)
take their figures from here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import inf

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
"""Kinds of collectives over a group of devices."""

GATHER_TOUCHES = 2
REDUCE_TOUCHES = 3
"""Bytes of device memory read or written for each byte that a step sends: it is read, and written where it arrives; to be added
up there, it is read again beside what it is added to (neuron-runtime/explore/intranode-collective-comm: 4 and 6 for two)."""


@dataclass(frozen=True)
class CollectiveStep:
    """A step of a collective: what each rank sends at a time.

    Attributes:
        bytes: on average over ranks, that pass its DMA engines.
        hops: chips that it passes.
        link_s_per_byte: seconds that the most loaded link takes for each of those bytes: over one channel, two, and so on, up
            to as many as there are rings and directions.
        hbm_touches: bytes of device memory read or written for each of them.
        reduces: whether what arrives is added up; else it is copied.
    """

    bytes: float
    hops: int
    link_s_per_byte: tuple[float, ...]
    hbm_touches: float
    reduces: bool

    def link_seconds(self, channels: int) -> float:
        """Seconds for which a byte of each rank occupies the most loaded link, over so many channels."""
        return self.link_s_per_byte[min(channels, len(self.link_s_per_byte)) - 1]


@dataclass(frozen=True)
class CollectiveCosts:
    """Time of a transfer between devices beside its bytes: the same rules for a collective and for a hop that compute feeds.

    Attributes:
        start_us: from the end of what it waits for to its first step.
        completion_us: from its last byte to the start of what waits for it.
        hop_us, pass_us: latency of a step to a neighbour, and of each further chip on its way.
        skew_us: by how much devices are apart where they meet: a transfer begins with the last of them.

    Raises:
        ValueError: a time below 0.
    """

    start_us: float = 0.0
    completion_us: float = 0.0
    hop_us: float = 0.0
    pass_us: float = 0.0
    skew_us: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 0:
                raise ValueError(f"expected {one.name} of 0 or more, found {getattr(self, one.name):g}")

    @property
    def begin_s(self) -> float:
        """Before the first step."""
        return 1e-6 * (self.start_us + self.skew_us)

    @property
    def end_s(self) -> float:
        """After the last step."""
        return 1e-6 * self.completion_us

    def latency_s(self, hops: int) -> float:
        """Of a step whose bytes pass so many links; none where nothing is sent."""
        return 1e-6 * (self.hop_us + self.pass_us * (hops - 1)) if hops else 0.0

    def seconds(
        self,
        steps: Iterable[CollectiveStep],
        channels: int = 1,
        dma_bytes_per_s: float = inf,
        hbm_bytes_per_s: float = inf,
    ) -> float:
        """A transfer by itself, from the end of what it waits for to the start of what waits for it; 0 without any step.

        Args:
            channels: over which its bytes go at the same time.
            dma_bytes_per_s: of the engines that move a rank's bytes.
            hbm_bytes_per_s: of a rank's device memory.
        """
        taken = [
            self.latency_s(step.hops)
            + step.bytes * max(1 / dma_bytes_per_s, step.hbm_touches / hbm_bytes_per_s, step.link_seconds(channels))
            for step in steps
        ]
        return self.begin_s + sum(taken) + self.end_s if taken else 0.0


def ring_chunks(ranks: int, directions: int = 1) -> tuple[int, ...]:
    """Chunks that a rank sends in each step of a ring's all-gather or reduce-scatter, a chunk being its part of the array.

    Both ways round, a step sends one chunk to each neighbour; what is left for the last step goes in halves.

    Raises:
        ValueError: fewer than one rank, or another number of directions than 1 or 2.
    """
    if ranks < 1 or directions not in (1, 2):
        raise ValueError(f"expected a ring of at least one rank in 1 or 2 directions, found {ranks} in {directions}")
    full, rest = divmod(ranks - 1, directions)
    return (directions,) * full + (rest,) * (rest > 0)


def ring_share(kind: str, chips: int, directions: int = 2) -> float:
    """Part of the whole array that passes each link of a ring, in each direction that is used.

    Raises:
        ValueError: another kind than those of `COLLECTIVES`.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"expected a collective of {', '.join(COLLECTIVES)}, found {kind!r}")
    if kind == "all-to-all":  # a chip sends 1/n of it to each other one, over as many links as that is away
        pairs = chips**2 // 4 if directions == 2 else chips * (chips - 1)
        return pairs / (2 * chips)
    return (2 if kind == "all-reduce" else 1) * sum(ring_chunks(chips, directions)) / (chips * directions)


def ring_steps(kind: str, chips: int, directions: int = 2) -> int:
    """Number of hops of a ring collective, one after another."""
    return (2 if kind == "all-reduce" else 1) * len(ring_chunks(chips, directions))


def touched_share(kind: str, chips: int) -> float:
    """Bytes of a chip's memory that a collective over so many reads and writes, as a part of the whole array."""
    touches = {"all-reduce": GATHER_TOUCHES + REDUCE_TOUCHES, "reduce-scatter": REDUCE_TOUCHES}.get(kind, GATHER_TOUCHES)
    return touches * (chips - 1) / chips
