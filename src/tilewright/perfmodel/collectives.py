"""Algorithms of collectives (ring, mesh, recursive halving and doubling, KangaRing) over the ranks of a mesh of Neuron cores.

The algorithms are those of the Neuron runtime (neuron-runtime/explore/intranode-collective-comm), with N ranks, chunks of C
bytes and an all-gather of N C bytes in total; and a bidirectional ring, which a program of permutes can form. A step sends
along all edges of its pattern in all groups of the mesh at once. `hardware/links.py` counts the load of each link, and the
busiest link sets the time of the step. `hardware/collectives.py` has the costs of steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tilewright.hardware.collectives import GATHER_TOUCHES, REDUCE_TOUCHES, CollectiveStep, ring_chunks
from tilewright.hardware.links import Place, ring_of
from tilewright.hardware.neuron import NeuronInstance
from tilewright.perfmodel.program import ALGORITHMS, Collective

KANGARING_TOUCHES = {"all-gather": 3, "reduce-scatter": 4}
"""Reads and writes of device memory per chunk and two ranks; 4 and 6 for a ring (same source)."""

MESH_BELOW = 1e6
RDH_BELOW = 56e6
"""Bytes from which the runtime uses recursive doubling instead of mesh, and KangaRing instead of recursive doubling (`< 1MB`,
`1-56MB` in the source)."""


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks on the logical cores of an instance, the last axis over neighbouring cores, chips in ring order.

    Attributes:
        instance: instance with the cores.
        axes: name and number of ranks of each axis; the product is the number of cores.
    """

    instance: NeuronInstance
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"expected at least one core along {name}, found {size}")
        if self.cores > self.instance.cores:
            raise ValueError(
                f"expected a mesh of at most the {self.instance.cores} cores of {self.instance.name}, found {self.cores}: "
                + ", ".join(f"{name}={size}" for name, size in self.axes)
            )

    @property
    def cores(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Chip of each rank."""
        every = [tuple(at) for at in grid(self.instance.sizes)]
        chips = ring_of(every)
        return tuple(chips[rank // self.instance.cores_per_chip] for rank in range(self.cores))

    def size(self, axis: str) -> int:
        """Returns the ranks along an axis; raises ValueError for an unknown axis."""
        found = dict(self.axes)
        if axis not in found:
            raise ValueError(f"expected an axis of {', '.join(found)}, found {axis!r}")
        return found[axis]

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Returns groups of ranks that differ along this axis only."""
        self.size(axis)
        names = [name for name, _ in self.axes]
        sizes = [size for _, size in self.axes]
        at = names.index(axis)
        stride = prod(sizes[at + 1 :])
        length = sizes[at]
        firsts = [rank for rank in range(self.cores) if rank // stride % length == 0]
        return [tuple(first + stride * n for n in range(length)) for first in firsts]

    def per_chip(self, axis: str) -> int:
        """Number of a group's ranks per chip; 1 if the number differs between chips."""
        counts = {count for group in self.groups(axis) for count in Counter(self.places[rank] for rank in group).values()}
        return counts.pop() if len(counts) == 1 else 1

    def link_rate(self, start: Place, end: Place) -> float:
        """Bytes per second of the link from a chip to its neighbour."""
        slow = any(start[axis] != end[axis] for axis in self.instance.slow_axes)
        return 1e9 * (self.instance.slow_link_gb_per_s if slow else self.instance.chip.link_gb_per_s)

    def pattern(self, edges: Sequence[tuple[int, int]]) -> tuple[int, tuple[float, ...]]:
        """Returns the hops of the longest path, and seconds per byte on the busiest link by number of channels.

        Args:
            edges: sending and receiving rank of all concurrent transfers.
        """
        if self.instance.topology == "switched":
            out = Counter(self.places[a] for a, b in edges if self.places[a] != self.places[b])
            rate = 1e9 * self.instance.chip.link_gb_per_s
            return 1, (max(out.values(), default=0) / rate,)
        ahead: Counter[tuple[Place, Place]] = Counter()
        longest = 1
        for a, b in edges:
            path = self.instance.torus.path(self.places[a], self.places[b])
            longest = max(longest, len(path))
            ahead.update(path)
        if not ahead:
            return 1, (0.0,)
        one = max(count / self.link_rate(*link) for link, count in ahead.items())
        # With several channels, half of the bytes go in each direction; a full torus has as many rings as axes.
        both = max((ahead[link] + ahead[link[1], link[0]]) / 2 / self.link_rate(*link) for link in ahead)
        rings = self.rings(ahead)
        slowest = max(1 / self.link_rate(*link) for link in ahead)
        spread = [max(slowest / channels, both / rings) for channels in range(1, 2 * rings + 1)]
        return longest, tuple(min(one, each) for each in spread)

    def rings(self, links: Mapping[tuple[Place, Place], int]) -> int:
        """Number of link-disjoint rings through the participating chips: the number of axes of a full torus, else 1."""
        chips = {place for link in links for place in link}
        full = len(chips) == self.instance.chips and len(self.instance.sizes) > 1 and not self.instance.slow_axes
        return len(self.instance.sizes) if full else 1


def grid(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all points of a grid."""
    points: list[tuple[int, ...]] = [()]
    for size in sizes:
        points = [(*point, at) for point in points for at in range(size)]
    return points


def chosen_algorithm(mesh: Mesh, collective: Collective) -> str:
    """Returns the algorithm of a collective: the one it names, else the runtime's choice for its size.

    The source describes the choice for a 4 x 4 torus. On a ring of chips, and where an algorithm does not fit the group, a ring
    is used.
    """
    if collective.algorithm != "auto":
        return collective.algorithm
    if mesh.size(collective.axis) <= 2 or collective.bytes < MESH_BELOW:
        return "mesh" if mesh.instance.topology != "ring" else "ring"
    if mesh.instance.topology == "ring":
        return "ring"
    if collective.bytes < RDH_BELOW and rdh_fits(mesh, collective.axis):
        return "rdh"
    return "kangaring" if mesh.per_chip(collective.axis) % 2 == 0 else "ring"


def rdh_fits(mesh: Mesh, axis: str) -> bool:
    chips = mesh.size(axis) // mesh.per_chip(axis)
    return chips & (chips - 1) == 0


def fits(mesh: Mesh, axis: str, algorithm: str) -> bool:
    """Returns True if an algorithm can run over the groups of an axis.

    Mesh sends from every chip to every other chip. On a ring of chips, whose runtime sends to neighbours, it fits only groups
    of neighbours.
    """
    if algorithm == "rdh":
        return rdh_fits(mesh, axis)
    if algorithm == "kangaring":
        return mesh.per_chip(axis) % 2 == 0
    if algorithm == "mesh" and mesh.instance.topology == "ring":
        pairs = ((mesh.places[a], mesh.places[b]) for group in mesh.groups(axis) for a in group for b in group)
        return all(len(mesh.instance.torus.path(*pair)) <= 1 for pair in pairs)
    return algorithm in ALGORITHMS


def algorithms(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """Returns the algorithms that fit the groups of an axis."""
    return tuple(name for name in ALGORITHMS if fits(mesh, axis, name))


def steps_of(mesh: Mesh, collective: Collective) -> list[CollectiveStep]:
    """Returns the steps of a collective in order; a permute is one step of a ring.

    Raises:
        ValueError: the algorithm is unknown or does not fit the group.
    """
    axis = collective.axis
    ranks = mesh.size(axis)
    name = chosen_algorithm(mesh, collective)
    if collective.kind == "permute":
        return [ring_step(mesh, axis, collective.bytes, collective.directions, collective.reduces)]
    if ranks == 1:
        return []
    if name not in ALGORITHMS:
        raise ValueError(f"expected an algorithm of {', '.join(ALGORITHMS)}, found {name!r}")
    if not fits(mesh, axis, name):
        raise ValueError(f"expected one of {', '.join(algorithms(mesh, axis))} over {ranks} ranks of {axis}, found {name}")
    build = {"ring": ring, "bidirectional": both_ways, "mesh": all_to_all, "rdh": doubling, "kangaring": kangaring}[name]
    gather = build(mesh, axis, collective.bytes / ranks, False)
    scatter = build(mesh, axis, collective.bytes / ranks, True)[::-1]
    return {"all-gather": gather, "reduce-scatter": scatter, "all-reduce": scatter + gather}[collective.kind]


def ring_edges(mesh: Mesh, axis: str, every: int = 1) -> list[tuple[int, int]]:
    """Returns the edges of each group's ring, from each rank to the next, with one of `every` ranks."""
    rings = [folded(mesh, group)[::every] for group in mesh.groups(axis)]
    return [(ring[n], ring[(n + 1) % len(ring)]) for ring in rings for n in range(len(ring))]


def folded(mesh: Mesh, group: Sequence[int]) -> list[int]:
    """Orders ranks into a ring; chips that do not close a ring go out by every second chip, and back."""
    chips: dict[Place, list[int]] = {}
    for rank in group:
        chips.setdefault(mesh.places[rank], []).append(rank)
    places = list(chips)
    closes = mesh.instance.topology == "switched" or len(mesh.instance.torus.path(places[-1], places[0])) <= 2
    order = places if closes else places[::2] + places[1::2][::-1]
    return [rank for place in order for rank in chips[place]]


def touches_of(reduces: bool) -> int:
    return REDUCE_TOUCHES if reduces else GATHER_TOUCHES


def ring_step(mesh: Mesh, axis: str, sent: float, directions: int, reduces: bool) -> CollectiveStep:
    """Returns a step that sends bytes to the next rank of the ring, or half of the bytes to each neighbour."""
    hops, links = mesh.pattern(ring_edges(mesh, axis))
    return CollectiveStep(sent, hops, links[:directions], touches_of(reduces), reduces)


def ring(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Returns N - 1 steps of a chunk to the next rank; with several channels, part of a chunk goes in the other direction."""
    hops, links = mesh.pattern(ring_edges(mesh, axis))
    return [CollectiveStep(chunk, hops, links, touches_of(reduces), reduces)] * (mesh.size(axis) - 1)


def both_ways(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Returns the steps of a bidirectional ring: half as many, each with a chunk to each neighbour."""
    return [ring_step(mesh, axis, count * chunk, 2, reduces) for count in ring_chunks(mesh.size(axis), 2)]


def kangaring(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Returns the steps of KangaRing: a ring of every second rank, which also moves the chunks of its neighbour on the chip.

    The ring has N / 2 - 1 steps of two chunks. Ranks alternate between cycles, so that each moves one chunk per step on
    average. One read feeds two writes, or three reads feed one write.
    """
    hops, links = mesh.pattern(ring_edges(mesh, axis, 2))
    touches = KANGARING_TOUCHES["reduce-scatter" if reduces else "all-gather"]
    links = tuple(2 * each for each in links)  # a link carries two chunks; each of the two ranks moves one on average
    steps = [CollectiveStep(chunk, hops, links, touches, reduces)] * (mesh.size(axis) // 2 - 1)
    # The neighbours on a chip exchange their own chunks.
    return [*steps, CollectiveStep(chunk, 1, (0.0,), touches, reduces)]


def all_to_all(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Returns the steps of mesh: each chip sends to all others, divided among its ranks; then ranks of a chip exchange."""
    local = mesh.per_chip(axis)
    chips = mesh.size(axis) // local
    touches = touches_of(reduces)
    steps = []
    if chips > 1:
        # A rank reads the chunks of its chip and writes them to its share of the other chips.
        edges = [(a, b) for group in mesh.groups(axis) for a in group for b in group[group.index(a) % local :: local]]
        edges = [(a, b) for a, b in edges if mesh.places[a] != mesh.places[b]]
        hops, links = mesh.pattern(edges)
        steps.append(CollectiveStep(chunk * (chips - 1), hops, (links[-1] / (chips - 1),), touches, reduces))
    if local > 1:
        steps.append(CollectiveStep(chunk * chips * (local - 1), 1, (0.0,), touches, reduces))
    return steps


def doubling(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Returns the steps of recursive doubling over chips, one distance along an axis at a time; then ranks of a chip exchange.

    On a full torus, the ranks of a chip are assumed to begin with different axes, so that all links are in use. The source says
    only "partial over-subscription".
    """
    local = mesh.per_chip(axis)
    chips = mesh.size(axis) // local
    touches = touches_of(reduces)
    steps = []
    for bit in range(chips.bit_length() - 1):
        edges = []
        for group in mesh.groups(axis):
            order = by_axis(mesh, group)
            partners = {rank: order[gray_partner(at // local, bit) * local + at % local] for at, rank in enumerate(order)}
            edges += list(partners.items())
        hops, links = mesh.pattern(edges)
        steps.append(CollectiveStep(chunk * 2**bit, hops, links[:1], touches, reduces))
    if local > 1:
        steps.append(CollectiveStep(chunk * chips * (local - 1), 1, (0.0,), touches, reduces))
    return steps


def by_axis(mesh: Mesh, group: Sequence[int]) -> list[int]:
    """Orders ranks so that the bits of a chip's number, in Gray code, are steps along the axes of the grid."""
    sizes = [len({mesh.places[rank][axis] for rank in group}) for axis in range(len(mesh.instance.sizes))]
    if prod(sizes) != len({mesh.places[rank] for rank in group}):
        return list(group)
    return sorted(group, key=lambda rank: (gray_number(mesh.places[rank], sizes), rank))


def gray_number(place: Place, sizes: Sequence[int]) -> int:
    """Returns the number with a Gray code that concatenates the Gray codes of the coordinates."""
    code = 0
    for at, size in zip(place, sizes, strict=True):
        code = code * size + (at ^ (at >> 1))
    return from_gray(code)


def gray_partner(number: int, bit: int) -> int:
    """Returns the number with a Gray code that differs in one bit; a neighbour on a ring of four."""
    return from_gray((number ^ (number >> 1)) ^ (1 << bit))


def from_gray(code: int) -> int:
    number = 0
    while code:
        number ^= code
        code >>= 1
    return number
