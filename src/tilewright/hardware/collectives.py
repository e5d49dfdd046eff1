"""Cost model of collectives for all chips: the steps of each algorithm, the time of a step and of a whole transfer.

A collective is a sequence of steps that all devices take together. A step costs its latency plus its bytes over the slowest
resource: the most loaded link, the DMA engines, or device memory. Every transfer also has a start (from its last dependency to
its first byte) and a completion (from its last byte to its first dependent). A hop of a ring that a program builds from single
permutes is a transfer of one step with its own start and completion, so splitting a collective into hops is never free.

The closed form of a layer (`layers.py`), the timeline of compiled TPU programs and the simulator of Neuron chips (`perfmodel/`)
use these costs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import inf

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
"""Kinds of collectives over a group of devices."""

GATHER_TOUCHES = 2
REDUCE_TOUCHES = 3
"""Bytes of device memory read or written per byte that a step sends: a gather reads at the source and writes at the target; a
reduction also reads the operand to add (neuron-runtime/explore/intranode-collective-comm: 4 and 6 per two bytes)."""


@dataclass(frozen=True)
class CollectiveStep:
    """A step of a collective, as one rank performs it.

    Attributes:
        bytes: bytes through the DMA engines of a rank, averaged over ranks.
        hops: chips that the data passes.
        link_s_per_byte: seconds per byte on the most loaded link, when the data is spread over 1, 2, ... channels (at most one
            per ring and direction).
        hbm_touches: bytes of device memory read or written per byte.
        reduces: True if the received data is added to local data, False if it is copied.
    """

    bytes: float
    hops: int
    link_s_per_byte: tuple[float, ...]
    hbm_touches: float
    reduces: bool

    def link_seconds(self, channels: int) -> float:
        """Returns the seconds per byte of each rank on the most loaded link, over this number of channels."""
        return self.link_s_per_byte[min(channels, len(self.link_s_per_byte)) - 1]


@dataclass(frozen=True)
class CollectiveCosts:
    """Latencies of a transfer between devices, for collectives and for hops that overlap with compute.

    Attributes:
        start_us: from the end of the last dependency to the first step.
        completion_us: from the last byte to the start of the first dependent.
        hop_us: latency of a step to a neighbour.
        pass_us: added latency of each further chip on the way.
        skew_us: time between the first and the last device to reach the transfer; it begins with the last.

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
        """Seconds before the first step."""
        return 1e-6 * (self.start_us + self.skew_us)

    @property
    def end_s(self) -> float:
        """Seconds after the last step."""
        return 1e-6 * self.completion_us

    def latency_s(self, hops: int) -> float:
        """Returns the latency of a step over this many links; 0 if it sends nothing."""
        return 1e-6 * (self.hop_us + self.pass_us * (hops - 1)) if hops else 0.0

    def seconds(
        self,
        steps: Iterable[CollectiveStep],
        channels: int = 1,
        dma_bytes_per_s: float = inf,
        hbm_bytes_per_s: float = inf,
    ) -> float:
        """Returns the time of a transfer that runs alone, with start and completion; 0 without steps.

        Args:
            channels: channels that share the bytes.
            dma_bytes_per_s: bandwidth of a rank's DMA engines.
            hbm_bytes_per_s: bandwidth of a rank's device memory.
        """
        step_seconds = [
            self.latency_s(step.hops)
            + step.bytes * max(1 / dma_bytes_per_s, step.hbm_touches / hbm_bytes_per_s, step.link_seconds(channels))
            for step in steps
        ]
        return self.begin_s + sum(step_seconds) + self.end_s if step_seconds else 0.0


def ring_chunks(ranks: int, directions: int = 1) -> tuple[int, ...]:
    """Returns the chunks that a rank sends in each step of a ring all-gather or reduce-scatter.

    A chunk is one rank's shard of the array. With two directions a step sends one chunk to each neighbour; if one chunk remains
    for the last step, half of it goes each way.

    Raises:
        ValueError: fewer than one rank, or a number of directions other than 1 or 2.
    """
    if ranks < 1 or directions not in (1, 2):
        raise ValueError(f"expected a ring of at least one rank in 1 or 2 directions, found {ranks} in {directions}")
    full, rest = divmod(ranks - 1, directions)
    return (directions,) * full + (rest,) * (rest > 0)


def ring_share(kind: str, chips: int, directions: int = 2) -> float:
    """Returns the fraction of the whole array that passes each link of a ring, per direction in use.

    Raises:
        ValueError: a kind that is not in `COLLECTIVES`.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"expected a collective of {', '.join(COLLECTIVES)}, found {kind!r}")
    if kind == "all-to-all":  # a chip sends 1/n of its array to each other chip, over one link per hop
        pairs = chips**2 // 4 if directions == 2 else chips * (chips - 1)
        return pairs / (2 * chips)
    return (2 if kind == "all-reduce" else 1) * sum(ring_chunks(chips, directions)) / (chips * directions)


def ring_steps(kind: str, chips: int, directions: int = 2) -> int:
    """Returns the number of sequential hops of a ring collective."""
    return (2 if kind == "all-reduce" else 1) * len(ring_chunks(chips, directions))


def touched_share(kind: str, chips: int) -> float:
    """Returns the bytes of a chip's memory that a collective reads and writes, as a fraction of the whole array."""
    touches = {"all-reduce": GATHER_TOUCHES + REDUCE_TOUCHES, "reduce-scatter": REDUCE_TOUCHES}.get(kind, GATHER_TOUCHES)
    return touches * (chips - 1) / chips
