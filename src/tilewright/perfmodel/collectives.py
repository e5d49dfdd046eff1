"""Algorithms of collectives (ring, mesh, recursive halving and doubling, KangaRing) over the ranks of a mesh of Neuron cores.

The algorithms are those of the Neuron runtime (neuron-runtime/explore/intranode-collective-comm): N ranks, chunks of C bytes,
an all-gather of N C bytes in all; and a ring both ways round at once, as a program of permutes may make it. A step sends along
every edge of its pattern in all groups of the mesh at once; the wires in between are counted by `hardware/links.py`, and the
most loaded one says how long it takes. What steps cost is `hardware/collectives.py`'s.
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
"""Reads and writes of device memory for a chunk to pass two ranks, where a ring's are 4 and 6 (the page above)."""

MESH_BELOW = 1e6
RDH_BELOW = 56e6
"""Where the runtime goes over from mesh to recursive doubling, and from that to KangaRing: bytes, the page's `< 1MB`,
`1-56MB`."""


@dataclass(frozen=True)
class Mesh:
    """Ranks on the logical cores of an instance: the last axis over neighbouring cores, chips in the order of a ring.

    Attributes:
        axes: ranks along each axis, by name; their product is how many cores are used.
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
        """The chip of each rank."""
        every = [tuple(at) for at in grid(self.instance.sizes)]
        chips = ring_of(every)
        return tuple(chips[rank // self.instance.cores_per_chip] for rank in range(self.cores))

    def size(self, axis: str) -> int:
        """Raises ValueError for an axis that there is not."""
        found = dict(self.axes)
        if axis not in found:
            raise ValueError(f"expected an axis of {', '.join(found)}, found {axis!r}")
        return found[axis]

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Ranks that differ along this axis alone."""
        self.size(axis)
        names = [name for name, _ in self.axes]
        sizes = [size for _, size in self.axes]
        at = names.index(axis)
        stride = prod(sizes[at + 1 :])
        length = sizes[at]
        firsts = [rank for rank in range(self.cores) if rank // stride % length == 0]
        return [tuple(first + stride * n for n in range(length)) for first in firsts]

    def per_chip(self, axis: str) -> int:
        """Number of ranks of a group on one chip, the same for all chips; 1 where that differs."""
        counts = {count for group in self.groups(axis) for count in Counter(self.places[rank] for rank in group).values()}
        return counts.pop() if len(counts) == 1 else 1

    def link_rate(self, start: Place, end: Place) -> float:
        """Bytes a second of the link from one chip to its neighbour."""
        slow = any(start[axis] != end[axis] for axis in self.instance.slow_axes)
        return 1e9 * (self.instance.slow_link_gb_per_s if slow else self.instance.chip.link_gb_per_s)

    def pattern(self, edges: Sequence[tuple[int, int]]) -> tuple[int, tuple[float, ...]]:
        """Hops of the longest way of ranks that send to others at once, and seconds a byte on the busiest link, by channels."""
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
        # Over more channels half goes each way round, and over a torus that is filled as many rings as it has axes.
        both = max((ahead[link] + ahead[link[1], link[0]]) / 2 / self.link_rate(*link) for link in ahead)
        rings = self.rings(ahead)
        own = max(1 / self.link_rate(*link) for link in ahead)
        spread = [max(own / channels, both / rings) for channels in range(1, 2 * rings + 1)]
        return longest, tuple(min(one, each) for each in spread)

    def rings(self, links: Mapping[tuple[Place, Place], int]) -> int:
        """Rings without a link in common through the chips that take part: of a filled torus as many as it has axes."""
        chips = {place for link in links for place in link}
        full = len(chips) == self.instance.chips and len(self.instance.sizes) > 1 and not self.instance.slow_axes
        return len(self.instance.sizes) if full else 1


def grid(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every point of a grid."""
    points: list[tuple[int, ...]] = [()]
    for size in sizes:
        points = [(*point, at) for point in points for at in range(size)]
    return points


def chosen(mesh: Mesh, collective: Collective) -> str:
    """The algorithm of a collective: the one it names, else the one that the runtime's page has for its size.

    Rings of chips are not the 4 x 4 torus that page is about: there, and where an algorithm does not fit the group, it is a
        ring.
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
    """True if an algorithm can run over the groups of an axis.

    Mesh sends from every chip to every other one: on a ring of chips, whose runtime is built around neighbours, only where all
    of a group are neighbours.
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
    """The algorithms that fit the groups of an axis."""
    return tuple(name for name in ALGORITHMS if fits(mesh, axis, name))


def steps_of(mesh: Mesh, collective: Collective) -> list[CollectiveStep]:
    """The steps of a collective, one after another; of a permute the one step of a ring that it is.

    Raises:
        ValueError: an algorithm that there is not, or that does not fit the group.
    """
    axis = collective.axis
    ranks = mesh.size(axis)
    name = chosen(mesh, collective)
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
    """Each rank to the next one of its group's ring, and the last to the first; of `every` so many ranks one."""
    rings = [folded(mesh, group)[::every] for group in mesh.groups(axis)]
    return [(ring[n], ring[(n + 1) % len(ring)]) for ring in rings for n in range(len(ring))]


def folded(mesh: Mesh, group: Sequence[int]) -> list[int]:
    """Ranks so that the last is near the first: chips that do not close a ring go out by every second, and back."""
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
    """So many bytes from each rank to the next one of its ring, or in two directions half of them to each of its neighbours."""
    hops, links = mesh.pattern(ring_edges(mesh, axis))
    return CollectiveStep(sent, hops, links[:directions], touches_of(reduces), reduces)


def ring(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """N - 1 steps of a chunk each, to the next rank: over several channels a part of each chunk goes the other way round."""
    hops, links = mesh.pattern(ring_edges(mesh, axis))
    return [CollectiveStep(chunk, hops, links, touches_of(reduces), reduces)] * (mesh.size(axis) - 1)


def both_ways(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """A ring both ways round: half as many steps, a chunk to each neighbour in each."""
    return [ring_step(mesh, axis, count * chunk, 2, reduces) for count in ring_chunks(mesh.size(axis), 2)]


def kangaring(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """A ring of every second rank, which moves the chunks of its neighbour on the same chip too: N / 2 - 1 steps of two.

    Ranks take turns at being the second one in different cycles, so that each moves one chunk a step on average; a read feeds
    two writes, or three reads one.
    """
    hops, links = mesh.pattern(ring_edges(mesh, axis, 2))
    touches = KANGARING_TOUCHES["reduce-scatter" if reduces else "all-gather"]
    links = tuple(2 * each for each in links)  # two chunks pass where one of its ranks moves one on average
    steps = [CollectiveStep(chunk, hops, links, touches, reduces)] * (mesh.size(axis) // 2 - 1)
    # The first chunk of the pair: the neighbours exchange what they have.
    return [*steps, CollectiveStep(chunk, 1, (0.0,), touches, reduces)]


def all_to_all(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Mesh: every chip to every other one, each rank to its part of them; then the ranks of a chip among themselves."""
    local = mesh.per_chip(axis)
    chips = mesh.size(axis) // local
    touches = touches_of(reduces)
    steps = []
    if chips > 1:
        # A rank reads the chunks of its chip and writes them to the part of the other chips that is its own.
        edges = [(a, b) for group in mesh.groups(axis) for a in group for b in group[group.index(a) % local :: local]]
        edges = [(a, b) for a, b in edges if mesh.places[a] != mesh.places[b]]
        hops, links = mesh.pattern(edges)
        steps.append(CollectiveStep(chunk * (chips - 1), hops, (links[-1] / (chips - 1),), touches, reduces))
    if local > 1:
        steps.append(CollectiveStep(chunk * chips * (local - 1), 1, (0.0,), touches, reduces))
    return steps


def doubling(mesh: Mesh, axis: str, chunk: float, reduces: bool) -> list[CollectiveStep]:
    """Recursive doubling over chips, a distance along an axis at a time; then the ranks of a chip among themselves.

    On a filled torus the ranks of a chip are taken to begin with different axes, so that all wires have something to carry: the
    page says no more than "partial over-subscription".
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
    """Ranks in an order in which the bits of a chip's number, in Gray code, are steps along the axes of the grid."""
    sizes = [len({mesh.places[rank][axis] for rank in group}) for axis in range(len(mesh.instance.sizes))]
    if prod(sizes) != len({mesh.places[rank] for rank in group}):
        return list(group)
    return sorted(group, key=lambda rank: (gray_number(mesh.places[rank], sizes), rank))


def gray_number(place: Place, sizes: Sequence[int]) -> int:
    """The number whose Gray code has the Gray codes of the coordinates for its parts."""
    code = 0
    for at, size in zip(place, sizes, strict=True):
        code = code * size + (at ^ (at >> 1))
    return from_gray(code)


def gray_partner(number: int, bit: int) -> int:
    """The number whose Gray code differs in one bit: a neighbour on a ring of four."""
    return from_gray((number ^ (number >> 1)) ^ (1 << bit))


def from_gray(code: int) -> int:
    number = 0
    while code:
        number ^= code
        code >>= 1
    return number
