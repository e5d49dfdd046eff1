"""Hops of several collectives on the ways round a ring, tied to what is computed meanwhile. Within `jax.shard_map`.

Each way round is a lane. Collectives queue: whenever there is room on a lane, that one goes on which is needed first. So both
directions of every link are busy as long as anything waits for one of them, whichever collectives it belongs to, where a
collective by itself leaves one direction idle at its last hop, and both between two of them. Two hops may be on a lane, of two
collectives: one passes the link, the other follows as soon as it has, also where the core is in the middle of one long
operation and could not send it then.

All this happens while a program is traced. A hop is a permute between neighbours, which every TPU's compiler lets run beside
products; it is tied to as much compute as it takes by `jax.lax.optimization_barrier`, for otherwise the compiler puts all tiles
of a product beside one hop and nothing beside the others. What was computed while nothing arrived is kept before the next
arrival, for otherwise it is put off to where it is needed. The gradient's hops are tied to its tiles in the same way.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax import Array
from jaxtyping import Float

from tilewright.parallel import rings
from tilewright.parallel.ordering import tied

Tree = TypeVar("Tree")

Leg = Generator[Array, Array, None]
"""A collective's hops on one lane: it yields what a device sends and takes what arrives."""

Rows = dict[int, Array]
"""Of each device, by how many places it is ahead."""

AT_ONCE = 2
"""Hops on a lane."""


@dataclass
class Travel:
    """A collective with so many legs that have not arrived."""

    legs: int
    then: Callable[[], None]

    def arrived(self) -> None:
        self.legs -= 1
        if not self.legs:
            self.then()


@dataclass(eq=False)
class Waiting:
    """A leg whose next hop sends `sent`; see `Lanes.begin`."""

    due: int
    number: int
    sent: Array
    leg: Leg
    travel: Travel


@dataclass(eq=False)
class Hop:
    """One under way: what arrives, whose it is, and the work of the core by when it has."""

    arriving: Array
    waiting: Waiting
    until: float


@dataclass
class Lane:
    """One way round.

    Attributes:
        step: of its hops; see `rings.shift`.
        hops: queued or under way.
        under: what is under way, in the order in which it departed.
        until: the work of the core by when the last of them has arrived; see `Lanes.work`.
    """

    step: int
    queue: list[Waiting] = field(default_factory=list)
    hops: int = 0
    under: list[Hop] = field(default_factory=list)
    until: float = 0.0


class Lanes:
    """The ways round a ring, and what is queued on them.

    Attributes:
        size: devices on the ring.
        lanes: by the step of their hops.
        work: operations of the core so far, by which the program keeps time while it is traced.
        intensity: operations that the core does while a link passes a byte: how much compute a hop is tied to. By default
            whatever is computed next.
        loading: rows that a product counts for besides its own: loading weights takes as long.
        moving: operations that the core does while a byte passes to or from device memory.
        loose: what was computed since the last arrival, by the dicts that hold it and its keys there.
    """

    def __init__(
        self, axis: rings.Axis, bidirectional: bool, intensity: float = 0.0, loading: int = 0, moving: float = 0.0
    ) -> None:
        self.axis = axis
        self.size = jax.lax.axis_size(axis)
        self.intensity = intensity
        self.loading = loading
        self.moving = moving
        steps = (1, -1) if bidirectional and self.size > 2 else (1,)
        self.lanes = {step: Lane(step) for step in steps}
        self.begun = 0
        self.work = 0.0
        self.loose: list[tuple[dict[int, Any], int]] = []

    def ways(self) -> dict[int, int]:
        """Number of hops of the next collective on each lane; the longer way is that on which less is queued."""
        first, *others = sorted(self.lanes.values(), key=lambda lane: lane.hops)
        back = (self.size - 1) // 2 if others else 0
        lengths = {first.step: self.size - 1 - back, **{lane.step: back for lane in others}}
        return {step: hops for step, hops in lengths.items() if hops}

    def begin(self, legs: dict[int, Leg], lengths: dict[int, int], due: int, then: Callable[[], None]) -> None:
        """Queues a collective.

        Args:
            legs, lengths: on each lane, with the hops of each.
            due: when its result is needed, in any unit: of those that could go on, the one with the least goes.
            then: is called when the last of its hops has arrived.
        """
        self.begun += 1
        travel = Travel(len(legs), then)
        for step, leg in legs.items():
            lane = self.lanes[step]
            lane.hops += lengths[step]
            lane.queue.append(Waiting(due, self.begun, next(leg), leg, travel))
            self.depart(lane)
        if not legs:
            then()

    def depart(self, lane: Lane) -> None:
        """Sends what is needed first, as far as the lane has room."""
        while lane.queue and len(lane.under) < AT_ONCE:
            going = min(lane.queue, key=lambda each: (each.due, each.number))
            lane.queue.remove(going)
            lane.until = max(lane.until, self.work) + self.intensity * going.sent.nbytes
            lane.under.append(Hop(rings.shift(going.sent, self.axis, lane.step), going, lane.until))

    def worked(self, operations: float) -> None:
        """Counts operations as beside what is under way."""
        self.work += operations

    def moved(self, arrays: Any, times: int) -> None:
        """Counts as many passes of arrays through device memory."""
        self.worked(self.moving * times * sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))

    def of_products(self, w: Any, rows: float) -> float:
        """Weight of products of so many rows with matrices, in operations."""
        matrices = [leaf for leaf in jax.tree.leaves(w) if leaf.ndim > 1]
        return sum(2.0 * (rows + self.loading) * matrix.size for matrix in matrices)

    def beside(self, made: Tree, following: float = 0.0) -> Tree:
        """Ties those hops to what was computed that have passed the link meanwhile (see `worked`), at most those on the lane.

        Args:
            made: what was computed, and whatever is to be read only when they have arrived.
            following: operations of what could be computed before they are tied.
        """
        departed = {step: len(lane.under) for step, lane in self.lanes.items()}
        for turn in range(AT_ONCE):
            by = self.work + (0 if turn else following / 2)
            ready = [lane for step, lane in self.lanes.items() if departed[step] > turn and lane.under[0].until <= by]
            made = self.arrive(ready, made)
        return made

    def arrive(self, lanes: list[Lane], made: Tree) -> Tree:
        """The first hop under way on each of these lanes arrives, after `made` and what is loose; what is queued departs."""
        if not lanes:
            return made
        held = self.loose
        self.loose = []
        came, made, kept = tied(([lane.under[0].arriving for lane in lanes], made, [of[key] for of, key in held]))
        for (of, key), value in zip(held, kept, strict=True):
            of[key] = value
        ended = []
        going = []
        for lane in lanes:
            going.append(lane.under.pop(0).waiting)
            lane.hops -= 1
        for lane, own, waiting in zip(lanes, came, going, strict=True):
            try:
                waiting.sent = waiting.leg.send(own)
                lane.queue.append(waiting)
            except StopIteration:
                ended.append(waiting.travel)
            self.depart(lane)
        for travel in ended:
            travel.arrived()
        return made

    def wait(self, enough: Callable[[], bool]) -> None:
        """Lets hops arrive, with nothing more beside them, until it is enough."""
        while not enough():
            under = [lane for lane in self.lanes.values() if lane.under]
            assert under, "nothing is under way that could bring it"
            self.work = max(self.work, min(lane.under[0].until for lane in under))
            self.arrive([lane for lane in under if lane.under[0].until <= self.work], ())


def gather(lanes: Lanes, came: Rows, due: int) -> None:
    """Begins to bring the rows of all devices into `came`, in the order in which they come; this device's are there."""

    def leg(step: int, hops: int) -> Leg:
        rows = came[0]
        for hop in range(1, hops + 1):
            rows = yield rows
            came[step * hop % lanes.size] = rows

    lengths = lanes.ways()
    lanes.begin({step: leg(step, hops) for step, hops in lengths.items()}, lengths, due, lambda: None)


def scatter(
    lanes: Lanes, lengths: dict[int, int], part: Callable[..., Array], due: int, then: Callable[[Float[Array, "M H"]], None]
) -> None:
    """Begins the sum of the devices' parts of each other's rows, that of the farthest device first on each lane.

    Args:
        lengths: hops on each lane; see `Lanes.ways`.
        part: `(at, *came) -> total`: what came and on top of it this device's part of the sum of the rows of the device so many
            places ahead. It is asked for when that has come, so that a product takes the addition in.
        then: is called with the sum of this device's own rows.
    """
    sums: list[Array] = []

    def leg(step: int, hops: int) -> Leg:
        total = part(-step * hops % lanes.size)
        for hop in range(hops - 1, 0, -1):
            came = yield total
            total = part(-step * hop % lanes.size, came)
        sums.append((yield total))

    legs = {step: leg(step, hops) for step, hops in lengths.items()}
    lanes.begin(legs, lengths, due, lambda: then(part(0, *sums)))


def farthest_first(lengths: dict[int, int], size: int) -> list[int]:
    """The devices in the order in which `scatter` asks for their parts; this one is the last."""
    turns = range(max(lengths.values(), default=0))
    return [*(-step * (hops - turn) % size for turn in turns for step, hops in lengths.items() if turn < hops), 0]
