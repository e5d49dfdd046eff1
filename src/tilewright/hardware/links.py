"""Links between the chips of a TPU slice, and transfer times: latency (α) plus bytes over bandwidth (β).

A collective over a group runs round a ring of the group's chips, in one or two directions, as compilers implement it. A permute
takes the shortest route between two chips, one axis after another. Every link has the same bandwidth in each direction at the
same time. `collectives.py` gives steps, starts, completions and memory traffic.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tilewright.hardware.collectives import GATHER_TOUCHES, CollectiveCosts, ring_share, ring_steps, touched_share
from tilewright.hardware.ranged import Ranged
from tilewright.hardware.tpu import TpuChip, chip_of

HOP_US = Ranged(1.0, 0.5, 2.7)
"""Default latency of a hop to a neighbour, in microseconds: the value that jax-ml.github.io/scaling-book/sharding uses for a
hop of a collective on TPU, an assumption and no specification. The range ends at that book's 0.5 us for v5e (tpus, question 5)
and at a third of the 8 us that it measured for three hops of 32 kB on v5e (sharding, pop quiz 2)."""

Place = tuple[int, ...]
"""Position of a chip: a coordinate per axis."""

Link = tuple[Place, Place]
"""A directed link, from a chip to its neighbour."""


@dataclass(frozen=True)
class Torus:
    """A slice: a grid of chips, each linked with its neighbours.

    Attributes:
        sizes: chips along each axis.
        wrapped: for each axis, True if its last chip is linked with its first.
    """

    sizes: tuple[int, ...]
    wrapped: tuple[bool, ...]

    @property
    def fewest_links(self) -> int:
        """Number of links of the chip with the fewest neighbours (a corner, where nothing wraps)."""
        # An axis of two chips has a single link, as has the end of an axis that does not wrap.
        return sum(
            0 if size == 1 else 2 if wrap and size > 2 else 1 for size, wrap in zip(self.sizes, self.wrapped, strict=True)
        )

    def path(self, start: Place, end: Place) -> list[Link]:
        """Returns the links of the shortest route from `start` to `end`, one axis after another."""
        links = []
        at = start
        for axis, (size, wrap) in enumerate(zip(self.sizes, self.wrapped, strict=True)):
            ahead = end[axis] - start[axis]
            if wrap and 2 * abs(ahead) > size:
                ahead -= size if ahead > 0 else -size
            for _ in range(abs(ahead)):
                after = (*at[:axis], (at[axis] + (1 if ahead > 0 else -1)) % size, *at[axis + 1 :])
                links.append((at, after))
                at = after
        return links


def torus_of(chip: TpuChip, sizes: Sequence[int]) -> Torus:
    """Returns the slice of this size, with the wrap-around links that the chip's kind has."""
    multiples = tuple(size % chip.wrap_multiple == 0 for size in sizes)
    return Torus(tuple(sizes), tuple(each and (all(multiples) or not chip.wraps_whole) for each in multiples))


def ring_of(places: Iterable[Place]) -> list[Place]:
    """Orders chips in a ring of neighbours where they fill a box with an even number of chips; else sorts them.

    A single row has no such ring and stays sorted: its last chip is a neighbour of the first where the axis wraps.
    """
    chips = sorted(set(places))
    axes = [sorted({chip[axis] for chip in chips}) for axis in range(len(chips[0]))]
    if prod(map(len, axes)) != len(chips):
        return chips
    return [tuple(axes[axis][at] for axis, at in enumerate(chip)) for chip in grid_ring([len(axis) for axis in axes])]


def grid_ring(sizes: Sequence[int]) -> list[Place]:
    """Returns all points of a grid, each next to its predecessor, the last next to the first where possible."""
    if len(sizes) == 1:
        return [(at,) for at in range(sizes[0])]
    rows = sizes[0]
    rest = grid_path(sizes[1:])
    if rows == 1:
        return [(0, *point) for point in grid_ring(sizes[1:])]
    if len(rest) == 1:
        return [(row, *rest[0]) for row in range(rows)]
    flipped = rows % 2 == 1
    down, across = (len(rest), rows) if flipped else (rows, len(rest))
    # A serpentine down the grid that leaves the first column free, and back up this column.
    order = [(at, column) for at in range(down) for column in range(1, across)[:: 1 if at % 2 == 0 else -1]]
    order += [(at, 0) for at in reversed(range(down))]
    return [(column, *rest[at]) if flipped else (at, *rest[column]) for at, column in order]


def grid_path(sizes: Sequence[int]) -> list[Place]:
    """Returns all points of a grid, each next to its predecessor."""
    points: list[Place] = [()]
    for size in reversed(sizes):
        points = [(at, *point) for at in range(size) for point in (points if at % 2 == 0 else points[::-1])]
    return points


@dataclass(frozen=True)
class LinkOccupancy:
    """Occupancy of links and memory by a transfer.

    Attributes:
        busy_s: seconds that the transfer's bytes occupy each link.
        latency_s: seconds of hops, start and completion.
        memory_s: seconds that a chip's memory needs for the bytes read and written.
    """

    busy_s: Mapping[Link, float]
    latency_s: float
    memory_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the transfer takes alone."""
        return max((self.memory_s, *self.busy_s.values())) + self.latency_s


@dataclass(frozen=True)
class Fabric:
    """Links of a slice under a program.

    Attributes:
        places: position of each device of the program, in the order of its mesh.
        hop_us: latency of a hop, in microseconds.
        start_us, completion_us, skew_us: latencies of every collective and permute; see `CollectiveCosts`. No source gives
            values for a TPU; 0 is a lower bound.
    """

    chip: TpuChip
    torus: Torus
    places: tuple[Place, ...]
    hop_us: float = HOP_US
    start_us: float = 0.0
    completion_us: float = 0.0
    skew_us: float = 0.0

    @property
    def costs(self) -> CollectiveCosts:
        """Latencies of a transfer; each chip on the way costs one hop."""
        return CollectiveCosts(self.start_us, self.completion_us, self.hop_us, self.hop_us, self.skew_us)

    def occupancy(self, passes: Mapping[Link, float], hops: int, touched_bytes: float) -> LinkOccupancy:
        """Returns the occupancy by a transfer.

        Args:
            passes: bytes over each link.
            hops: sequential hops.
            touched_bytes: bytes that a chip's memory reads or writes.
        """
        rate = 1e9 * self.chip.ici_gb_per_s
        costs = self.costs
        latency = costs.begin_s + costs.latency_s(hops) + costs.end_s if hops else 0.0
        memory = touched_bytes / (1e9 * self.chip.hbm_gb_per_s)
        return LinkOccupancy({link: sent / rate for link, sent in passes.items()}, latency, memory)

    def permute(self, pairs: Iterable[tuple[int, int]], sent_bytes: float) -> LinkOccupancy:
        """Returns the occupancy by a permute in which each source device sends `sent_bytes` to its target device."""
        passes: Counter[Link] = Counter()
        sends: Counter[int] = Counter()
        farthest = 0
        for source, target in pairs:
            path = self.torus.path(self.places[source], self.places[target])
            passes.update(path)
            sends[source] += len(path) > 0
            farthest = max(farthest, len(path))
        touched = GATHER_TOUCHES * sent_bytes * max(sends.values(), default=0)
        return self.occupancy({link: sent_bytes * count for link, count in passes.items()}, farthest, touched)

    def collective(
        self, kind: str, groups: Iterable[Sequence[int]], whole_bytes: float, directions: int = 2, by_axis: bool = False
    ) -> LinkOccupancy:
        """Returns the occupancy by a collective that runs in all groups at the same time.

        Args:
            kind: a kind of `COLLECTIVES`.
            groups: device numbers of each group.
            whole_bytes: bytes of the whole array: a device's array before an all-reduce, a reduce-scatter or an all-to-all, and
                after an all-gather.
            directions: 2 to send half of the data each way round at the same time, else 1.
            by_axis: run along the axes of the slice, a part beginning with each axis (see `ring_seconds`), instead of one ring
                through all chips of a group.
        """
        passes: Counter[Link] = Counter()
        hops = 0
        touched = 0.0
        for group in groups:
            chips = [self.places[device] for device in group]
            touched = max(touched, whole_bytes * touched_share(kind, len(group)))
            axes = lines(chips) if by_axis else [[ring_of(chips)]]
            followed = 0
            for rings in axes:
                length = len(rings[0])
                over = length if kind == "all-to-all" else len(group)
                sent = whole_bytes * ring_share(kind, over, directions) / (1 if kind == "all-to-all" else len(axes))
                links = [link for ring in rings for step in (1, -1)[:directions] for link in self.round(ring, step)]
                for link in links:
                    passes[link] += sent  # type: ignore[assignment]
                longest = max(len(self.torus.path(ring[at - 1], chip)) for ring in rings for at, chip in enumerate(ring))
                followed += ring_steps(kind, length, directions) * longest
            hops = max(hops, followed)
        return self.occupancy(passes, hops, touched)

    def round(self, ring: Sequence[Place], step: int) -> list[Link]:
        """Returns the links by which each chip of a ring sends to the chip `step` places further."""
        pairs = ((chip, ring[(at + step) % len(ring)]) for at, chip in enumerate(ring))
        return [link for start, end in pairs for link in self.torus.path(start, end)]


def lines(chips: Sequence[Place]) -> list[list[list[Place]]]:
    """Groups chips into rows along each axis on which they differ; the chips of a row differ on that axis alone."""
    found = []
    for axis in range(len(chips[0])):
        rows: dict[Place, list[Place]] = {}
        for chip in sorted(set(chips)):
            rows.setdefault((*chip[:axis], *chip[axis + 1 :]), []).append(chip)
        if max(map(len, rows.values())) > 1:
            found.append(list(rows.values()))
    return found or [[list(chips)]]


def ring_seconds(
    chip: TpuChip, kind: str, whole_bytes: float, sizes: Sequence[int], directions: int = 2, hop_us: float = HOP_US
) -> float:
    """Returns the α–β time of a collective over the chips of one or more axes, each of which is a ring.

    Over k axes the array splits into k parts, each of which takes the axes in another order, so that all links are busy.
    Source: jax-ml.github.io/scaling-book/sharding, whose times for all-gathers (bytes over bandwidth times axes) these are,
        with the
    fraction (n - 1) / n that leaves a chip, and with the hops' latency added instead of used as a bound.

    Args:
        whole_bytes: see `Fabric.collective`.
        sizes: chips along each axis.
        directions: 1 or 2.
        hop_us: latency of a hop.
    """
    chips = prod(sizes)
    rings = [size for size in sizes if size > 1]
    if not rings:
        return 0.0
    if kind == "all-to-all":  # an axis carries the chunks whose source and target differ on it
        share = max(ring_share(kind, size, directions) for size in rings)
    else:
        share = ring_share(kind, chips, directions) / len(rings)
    hops = sum(ring_steps(kind, size, directions) for size in rings)
    return whole_bytes * share / (1e9 * chip.ici_gb_per_s) + 1e-6 * hop_us * hops


def least_seconds(chip: TpuChip, torus: Torus, kind: str, whole_bytes: float) -> float:
    """Returns the lower bound of a collective over a whole slice: every chip sends its share over all its links."""
    chips = prod(torus.sizes)
    if chips == 1:
        return 0.0
    sent = whole_bytes * (1 if kind == "all-to-all" else ring_share(kind, chips, 1) * chips / (chips - 1)) * (chips - 1) / chips
    return sent / (1e9 * chip.ici_gb_per_s * torus.fewest_links)


def slice_fabric(topology: str, hop_us: float = HOP_US) -> Fabric:
    """Returns the links of a slice such as `v6e:4x2`, for a program whose devices form a ring of neighbours (see `ring_of`).

    Raises:
        ValueError: an unknown chip, or a wrong number of axes.
    """
    chip = chip_of(topology)
    dims = topology.partition(":")[2]
    sizes = [int(size) for size in dims.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", dims) else []
    if len(sizes) != chip.ici_axes:
        wanted = "x".join("ABC"[: chip.ici_axes])
        raise ValueError(f"expected a topology as {chip.name}:{wanted}, found {topology!r}")
    return Fabric(chip, torus_of(chip, sizes), tuple(ring_of(product(*map(range, sizes)))), hop_us)
