"""The links between the chips of a TPU slice, and how long what passes them takes: latency (α) and bytes over bandwidth (β).

A collective over a group goes round a ring of its chips, as the compiler's own do, in one direction or in both. A permute sends
from chip to chip, over the shortest way, one axis after another. Every link carries as much in one direction as in the other at
the same time. Steps, starts, completions and memory are those of `collectives.py`.
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
"""Latency of a hop to a neighbour, in microseconds, where nothing else is said: what jax-ml.github.io/scaling-book/sharding
takes for a hop of a collective on TPU. A working figure and no specification. The ends are that book's half a microsecond for
v5e (tpus, question 5), and a third of the 8 us that it measured for three hops of 32 kB on v5e (sharding, pop quiz 2)."""

Place = tuple[int, ...]
"""Where a chip is: a coordinate on each axis."""

Link = tuple[Place, Place]
"""From a chip to its neighbour, one direction of a wire."""


@dataclass(frozen=True)
class Torus:
    """A slice: a grid of chips, each linked with its neighbours.

    Attributes:
        sizes: chips along each axis.
        wrapped: for each axis, whether its last chip is linked with its first.
    """

    sizes: tuple[int, ...]
    wrapped: tuple[bool, ...]

    @property
    def fewest_links(self) -> int:
        """Links of the chip that has fewest of them, to its neighbours: that of a corner where nothing wraps."""
        # An axis of two is one link, and so is the end of one that does not wrap.
        return sum(
            0 if size == 1 else 2 if wrap and size > 2 else 1 for size, wrap in zip(self.sizes, self.wrapped, strict=True)
        )

    def path(self, start: Place, end: Place) -> list[Link]:
        """The links from one chip to another, the shortest way along each axis, one axis after another."""
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
    """The slice of such a size."""
    multiples = tuple(size % chip.wrap_multiple == 0 for size in sizes)
    return Torus(tuple(sizes), tuple(each and (all(multiples) or not chip.wraps_whole) for each in multiples))


def ring_of(places: Iterable[Place]) -> list[Place]:
    """Chips in the order of a ring of neighbours where they fill a box with an even number of chips; else in sorted order.

    A row, which has no such ring, is in its order: its last chip is a neighbour of the first where the axis wraps.
    """
    chips = sorted(set(places))
    axes = [sorted({chip[axis] for chip in chips}) for axis in range(len(chips[0]))]
    if prod(map(len, axes)) != len(chips):
        return chips
    return [tuple(axes[axis][at] for axis, at in enumerate(chip)) for chip in grid_ring([len(axis) for axis in axes])]


def grid_ring(sizes: Sequence[int]) -> list[Place]:
    """Each point of a grid once, one beside the other, and the last beside the first if that can be."""
    if len(sizes) == 1:
        return [(at,) for at in range(sizes[0])]
    rows = sizes[0]
    rest = grid_path(sizes[1:])
    if rows == 1:
        return [(0, *point) for point in grid_ring(sizes[1:])]
    if len(rest) == 1:
        return [(row, *rest[0]) for row in range(rows)]
    turned = rows % 2 == 1
    down, across = (len(rest), rows) if turned else (rows, len(rest))
    # Down the grid in bends that leave the first column free, and back through this.
    order = [(at, column) for at in range(down) for column in range(1, across)[:: 1 if at % 2 == 0 else -1]]
    order += [(at, 0) for at in reversed(range(down))]
    return [(column, *rest[at]) if turned else (at, *rest[column]) for at, column in order]


def grid_path(sizes: Sequence[int]) -> list[Place]:
    """Each point of a grid once, one beside the other."""
    points: list[Place] = [()]
    for size in reversed(sizes):
        points = [(at, *point) for at in range(size) for point in (points if at % 2 == 0 else points[::-1])]
    return points


@dataclass(frozen=True)
class LinkOccupancy:
    """A transfer, as the links see it.

    Attributes:
        busy_s: how long each link is taken by its bytes.
        latency_s: what passes besides before who waits for them goes on: hops, start and completion.
        memory_s: how long a chip's memory needs for what is read and written.
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
    """The links of a slice under a program.

    Attributes:
        places: where each of the program's devices is, in the order of its mesh.
        hop_us: latency of a hop, in microseconds.
        start_us, completion_us, skew_us: of every transfer, collectives and permutes alike; see `CollectiveCosts`. No source
            gives them for a TPU, and 0 is the least that they can be.
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
        """Of a transfer beside its bytes; a chip on the way costs as much as a hop."""
        return CollectiveCosts(self.start_us, self.completion_us, self.hop_us, self.hop_us, self.skew_us)

    def occupancy(self, passes: Mapping[Link, float], hops: int, touched_bytes: float) -> LinkOccupancy:
        """A transfer that sends so many bytes over each link, waits for so many hops one after another, and has a chip's memory
        read or write so many bytes."""
        rate = 1e9 * self.chip.ici_gb_per_s
        costs = self.costs
        latency = costs.begin_s + costs.latency_s(hops) + costs.end_s if hops else 0.0
        memory = touched_bytes / (1e9 * self.chip.hbm_gb_per_s)
        return LinkOccupancy({link: sent / rate for link, sent in passes.items()}, latency, memory)

    def permute(self, pairs: Iterable[tuple[int, int]], sent_bytes: float) -> LinkOccupancy:
        """Occupancy of links by a permute in which each source sends so many bytes to its target; devices by number."""
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
        """Occupancy of links by a collective, in all groups at the same time.

        Args:
            kind: one of `COLLECTIVES`.
            groups: devices by number.
            whole_bytes: of the whole array: a device's before an all-reduce, a reduce-scatter or an all-to-all, and after an
                all-gather.
            directions: 2 if it goes round both ways at the same time, with half as much each.
            by_axis: whether it goes along the axes of the slice, a part of it beginning with each (see `ring_seconds`), in
                the place of one ring through all chips of a group.
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
        """The links by which each chip of a ring sends to the one `step` places on."""
        pairs = ((chip, ring[(at + step) % len(ring)]) for at, chip in enumerate(ring))
        return [link for start, end in pairs for link in self.torus.path(start, end)]


def lines(chips: Sequence[Place]) -> list[list[list[Place]]]:
    """For each axis along which chips differ, the rows of chips that differ on it alone."""
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
    """A collective over the chips of one or several axes, each of which is a ring: the α–β time.

    Over k axes the array goes in k parts, each of which takes the axes in another order, so that all links have something to
    carry. Source: jax-ml.github.io/scaling-book/sharding, whose times these are for all-gathers (bytes over bandwidth times
    axes), with the share (n - 1) / n that does not stay, and with the hops' latency added instead of taken as a bound.

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
    if kind == "all-to-all":  # each axis carries what differs on it
        share = max(ring_share(kind, size, directions) for size in rings)
    else:
        share = ring_share(kind, chips, directions) / len(rings)
    hops = sum(ring_steps(kind, size, directions) for size in rings)
    return whole_bytes * share / (1e9 * chip.ici_gb_per_s) + 1e-6 * hop_us * hops


def least_seconds(chip: TpuChip, torus: Torus, kind: str, whole_bytes: float) -> float:
    """The least time for a collective over a whole slice: every chip sends its share over all the links that each one has."""
    chips = prod(torus.sizes)
    if chips == 1:
        return 0.0
    sent = whole_bytes * (1 if kind == "all-to-all" else ring_share(kind, chips, 1) * chips / (chips - 1)) * (chips - 1) / chips
    return sent / (1e9 * chip.ici_gb_per_s * torus.fewest_links)


def slice_fabric(topology: str, hop_us: float = HOP_US) -> Fabric:
    """All links of a slice such as `v6e:4x2`, under a program whose devices go round a ring of neighbours (see `ring_of`).

    Raises:
        ValueError: it names no chip that is known, or not a size for each of its axes.
    """
    chip = chip_of(topology)
    dims = topology.partition(":")[2]
    sizes = [int(size) for size in dims.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", dims) else []
    if len(sizes) != chip.ici_axes:
        wanted = "x".join("ABC"[: chip.ici_axes])
        raise ValueError(f"expected a topology as {chip.name}:{wanted}, found {topology!r}")
    return Fabric(chip, torus_of(chip, sizes), tuple(ring_of(product(*map(range, sizes)))), hop_us)
