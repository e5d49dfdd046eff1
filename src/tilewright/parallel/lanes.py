"""Hops of several collectives on the two directions of a ring, tied to the compute between them. Within `jax.shard_map`.

Each direction of the ring is a lane. Collectives queue for lanes; a lane with room sends the hop of the collective with the
earliest deadline. Both directions of every link are therefore busy while any collective waits for one of them. A single
collective leaves one direction idle at its last hop, and both between two collectives. A lane has room for two hops, of two
collectives: one passes the link, and the other follows at once, even where the core is inside a long operation and could not
send at that moment.

All scheduling happens while a program is traced. A hop is a permute between neighbours, which every TPU compiler can run beside
matmuls. `jax.lax.optimization_barrier` ties the hop to as much compute as the hop takes; without this tie the compiler places
all tiles of a matmul beside one hop and none beside the others. Results computed while nothing arrived are tied to the next
arrival; without this tie the compiler postpones them to their first use. Hops of the gradient are tied to its tiles alike.
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
"""Hops of a collective on one lane: yields the array that the device sends, and receives the array that arrives."""

Rows = dict[int, Array]
"""Rows of each device, by the number of places that the device is ahead on the ring."""

HOPS_IN_FLIGHT = 2
"""Maximum number of hops in flight on a lane."""


@dataclass
class PendingCollective:
    """A collective with `legs` legs that have not ended."""

    legs: int
    on_complete: Callable[[], None]

    def leg_ended(self) -> None:
        self.legs -= 1
        if not self.legs:
            self.on_complete()


@dataclass(eq=False)
class QueuedHop:
    """The next hop of a leg, which sends `sent`; see `Lanes.begin`."""

    deadline: int
    number: int
    sent: Array
    leg: Leg
    collective: PendingCollective


@dataclass(eq=False)
class Hop:
    """A hop in flight.

    Attributes:
        arriving: array that arrives.
        queued: hop as it was queued.
        until: value of the clock at which the hop has passed the link.
    """

    arriving: Array
    queued: QueuedHop
    until: float


@dataclass
class Lane:
    """A direction of the ring.

    Attributes:
        step: places by which a hop moves; see `rings.shift`.
        queue: hops that wait.
        hops: number of hops queued or in flight, later hops of the same legs included.
        in_flight: hops in flight, in order of departure.
        until: value of the clock at which the last hop in flight has passed the link.
    """

    step: int
    queue: list[QueuedHop] = field(default_factory=list)
    hops: int = 0
    in_flight: list[Hop] = field(default_factory=list)
    until: float = 0.0


class Lanes:
    """The directions of a ring, with the hops queued and in flight on each.

    Attributes:
        size: devices on the ring.
        lanes: lanes by their step.
        clock: operations of the core so far; the clock of the program while it is traced.
        intensity: operations of the core per byte on a link: the compute that a hop is tied to. By default a hop is tied to
            the next operation.
        loading: extra rows that each matmul counts for, the time to load its weights.
        moving: operations of the core per byte of device memory traffic.
        untied: results computed since the last arrival, each as the dict that holds it and its key.
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
        self.clock = 0.0
        self.untied: list[tuple[dict[int, Any], int]] = []

    def hop_counts(self) -> dict[int, int]:
        """Returns the number of hops of the next collective on each lane; the emptier lane gets the longer leg."""
        first, *rest = sorted(self.lanes.values(), key=lambda lane: lane.hops)
        back = (self.size - 1) // 2 if rest else 0
        counts = {first.step: self.size - 1 - back, **{lane.step: back for lane in rest}}
        return {step: hops for step, hops in counts.items() if hops}

    def begin(self, legs: dict[int, Leg], hop_counts: dict[int, int], deadline: int, on_complete: Callable[[], None]) -> None:
        """Queues a collective.

        Args:
            legs: leg on each lane.
            hop_counts: number of hops of each leg.
            deadline: when the result is needed, in any unit. The queued hop with the least deadline departs first.
            on_complete: called when the last hop has arrived.
        """
        self.begun += 1
        collective = PendingCollective(len(legs), on_complete)
        for step, leg in legs.items():
            lane = self.lanes[step]
            lane.hops += hop_counts[step]
            lane.queue.append(QueuedHop(deadline, self.begun, next(leg), leg, collective))
            self.depart(lane)
        if not legs:
            on_complete()

    def depart(self, lane: Lane) -> None:
        """Sends queued hops, earliest deadline first, while the lane has room."""
        while lane.queue and len(lane.in_flight) < HOPS_IN_FLIGHT:
            queued = min(lane.queue, key=lambda each: (each.deadline, each.number))
            lane.queue.remove(queued)
            lane.until = max(lane.until, self.clock) + self.intensity * queued.sent.nbytes
            lane.in_flight.append(Hop(rings.shift(queued.sent, self.axis, lane.step), queued, lane.until))

    def count_compute(self, operations: float) -> None:
        """Advances the clock by operations of the core."""
        self.clock += operations

    def count_traffic(self, arrays: Any, times: int) -> None:
        """Advances the clock by `times` passes of arrays through device memory."""
        self.count_compute(self.moving * times * sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))

    def matmul_operations(self, w: Any, rows: float) -> float:
        """Operations of matmuls of `rows` rows with the matrices of `w`, the loading of weights included."""
        matrices = [leaf for leaf in jax.tree.leaves(w) if leaf.ndim > 1]
        return sum(2.0 * (rows + self.loading) * matrix.size for matrix in matrices)

    def overlap(self, results: Tree, following: float = 0.0) -> Tree:
        """Ties hops that have passed the link by now to computed results; at most those in flight at the call.

        Args:
            results: results, and values that may be read only after the arrivals.
            following: operations of the compute that could still run before the tie. A first hop is also tied where the
                clock will reach it within half of them.

        Returns:
            the results, tied to the arrivals.
        """
        departed = {step: len(lane.in_flight) for step, lane in self.lanes.items()}
        for n in range(HOPS_IN_FLIGHT):
            now = self.clock + (0 if n else following / 2)
            ready = [lane for step, lane in self.lanes.items() if departed[step] > n and lane.in_flight[0].until <= now]
            results = self.arrive(ready, results)
        return results

    def arrive(self, lanes: list[Lane], results: Tree) -> Tree:
        """Lets the first hop of each lane arrive after `results` and all untied values; then queued hops depart."""
        if not lanes:
            return results
        untied = self.untied
        self.untied = []
        arrivals, results, values = tied(
            ([lane.in_flight[0].arriving for lane in lanes], results, [holder[key] for holder, key in untied])
        )
        for (holder, key), value in zip(untied, values, strict=True):
            holder[key] = value
        ended = []
        landed = []
        for lane in lanes:
            landed.append(lane.in_flight.pop(0).queued)
            lane.hops -= 1
        for lane, arrived, hop in zip(lanes, arrivals, landed, strict=True):
            try:
                hop.sent = hop.leg.send(arrived)
                lane.queue.append(hop)
            except StopIteration:
                ended.append(hop.collective)
            self.depart(lane)
        for collective in ended:
            collective.leg_ended()
        return results

    def wait(self, is_enough: Callable[[], bool]) -> None:
        """Lets hops arrive, without further compute beside them, until `is_enough()` is true."""
        while not is_enough():
            busy = [lane for lane in self.lanes.values() if lane.in_flight]
            assert busy, "no hop is in flight that could end the wait"
            self.clock = max(self.clock, min(lane.in_flight[0].until for lane in busy))
            self.arrive([lane for lane in busy if lane.in_flight[0].until <= self.clock], ())


def gather(lanes: Lanes, received: Rows, deadline: int) -> None:
    """Begins a ring all-gather into `received`, which holds this device's rows; others are added as they arrive."""

    def leg(step: int, hops: int) -> Leg:
        rows = received[0]
        for hop in range(1, hops + 1):
            rows = yield rows
            received[step * hop % lanes.size] = rows

    counts = lanes.hop_counts()
    lanes.begin({step: leg(step, hops) for step, hops in counts.items()}, counts, deadline, lambda: None)


def scatter(
    lanes: Lanes,
    hop_counts: dict[int, int],
    part: Callable[..., Array],
    deadline: int,
    on_complete: Callable[[Float[Array, "M H"]], None],
) -> None:
    """Begins a ring reduce-scatter; on each lane, the partial sum for the farthest device leaves first.

    Args:
        hop_counts: number of hops on each lane; see `Lanes.hop_counts`.
        part: `(at, *received) -> total`: adds this device's partial sum for the device `at` places ahead to the received sums.
            It is called after they arrive, so that a matmul can fuse the addition.
        on_complete: called with the sum of this device's own rows.
    """
    sums: list[Array] = []

    def leg(step: int, hops: int) -> Leg:
        total = part(-step * hops % lanes.size)
        for hop in range(hops - 1, 0, -1):
            received = yield total
            total = part(-step * hop % lanes.size, received)
        sums.append((yield total))

    legs = {step: leg(step, hops) for step, hops in hop_counts.items()}
    lanes.begin(legs, hop_counts, deadline, lambda: on_complete(part(0, *sums)))


def farthest_first(hop_counts: dict[int, int], size: int) -> list[int]:
    """Devices in the order in which `scatter` calls `part` for them; this device is last."""
    rounds = range(max(hop_counts.values(), default=0))
    return [*(-step * (hops - n) % size for n in rounds for step, hops in hop_counts.items() if n < hops), 0]
