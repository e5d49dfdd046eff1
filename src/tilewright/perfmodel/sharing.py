"""Transfers that share DMA engines, memory and links: exactly, packet by packet, or as flows with rates in proportion.

A DMA engine serves its rings in turns and goes from one to the next at the end of a packet. While several rings have packets
waiting, each gets a share of the engine in proportion to the size of its packets; `Flows` takes this for the rate of each
transfer at every moment (weighted max-min fairness over all that it passes), so that a transfer of gigabytes is a few events.
`Packets` is what it stands for, an event or two for each packet on each engine. A test holds one against the other: a transfer
ends within a few packets' time of where it ends exactly.

With strict priorities a class is served before all higher-numbered ones; `Packets` changes over at the end of a packet, too.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import simpy

from tilewright.perfmodel.machine import Limits, Resource

LEAST_BYTES = 1e-6
"""Rest of a transfer that counts as nothing: rates are floats."""


@dataclass(eq=False)
class DmaTransfer:
    """Bytes that pass a core's DMA engines.

    Attributes:
        bytes: in all.
        core: whose DMA engines.
        engines: over how many of these it is spread.
        ring: that it is in, on each of them.
        packet_bytes: of its packets.
        priority: its class, 0 first.
        dma_factor: time on the engines over that of plain copying: of small descriptors more than 1.
        uses: what else it passes, and how many bytes of that each of its own takes.
    """

    bytes: float
    core: int
    ring: int
    packet_bytes: float
    engines: int = 16
    priority: int = 0
    dma_factor: float = 1.0
    uses: tuple[tuple[Resource, float], ...] = ()
    left: float = 0.0
    rate: float = 0.0
    done: Any = None
    demands: tuple[tuple[Resource, float], ...] = ()
    most: float = inf


class Flows:
    """Transfers as flows: what runs when one begins or ends is a new division of the rates."""

    def __init__(self, env: simpy.Environment, limits: Limits):
        self.env = env
        self.limits = limits
        self.flows: dict[DmaTransfer, None] = {}
        self.since = 0.0
        self.turn = 0
        self.stale = False

    def start(self, transfer: DmaTransfer) -> simpy.Event:
        """Begins a transfer; the event comes when it is done."""
        transfer.done = self.env.event()
        share = transfer.engines / self.limits.engines
        transfer.most = transfer.engines * self.limits.dma_bytes_per_s / transfer.dma_factor
        transfer.left = transfer.bytes
        dma = (("dma", transfer.core), transfer.dma_factor)
        # Transfers over a part of the engines are taken to be over the same ones.
        part = ((("part", transfer.core, transfer.engines), transfer.dma_factor),) if share < 1 else ()
        transfer.demands = (dma, *part, *((name, factor) for name, factor in transfer.uses if factor > 0))
        if transfer.bytes <= 0 or share <= 0:
            return transfer.done.succeed()
        self.advance()
        self.flows[transfer] = None
        self.renew()
        return transfer.done

    def advance(self) -> None:
        """Moves every flow on to now, and ends those that have nothing left."""
        passed = self.env.now - self.since
        self.since = self.env.now
        ended = []
        for flow in self.flows:
            if flow.rate == inf:
                flow.left = 0.0
            elif passed > 0:
                flow.left -= flow.rate * passed
            if flow.left <= LEAST_BYTES:
                ended.append(flow)
        for flow in ended:
            del self.flows[flow]
            flow.done.succeed()

    def renew(self) -> None:
        """Divides anew once all that begins and ends at this moment has."""
        if not self.stale:
            self.stale = True
            self.env.timeout(0).callbacks.append(self.divide)  # type: ignore[union-attr]

    def divide(self, _: simpy.Event) -> None:
        self.stale = False
        self.turn += 1
        if not self.flows:
            return
        self.rates()
        soonest = min(flow.left / flow.rate if flow.rate else inf for flow in self.flows)
        if soonest < inf:
            turn = self.turn
            wake = self.env.timeout(max(soonest, 0.0))
            wake.callbacks.append(lambda _: self.wake(turn))  # type: ignore[union-attr]

    def wake(self, turn: int) -> None:
        """The end of the flow that was to end first, unless rates have changed since."""
        if turn != self.turn:
            return
        shortest = min(self.flows, key=lambda flow: flow.left / flow.rate if flow.rate else inf)
        self.advance()
        if shortest in self.flows:  # what is left is an error of rounding
            del self.flows[shortest]
            shortest.done.succeed()
        self.renew()

    def rates(self) -> None:
        """Weighted max-min fairness: all rates grow in proportion to packets until something that a flow passes is full."""
        free: dict[Resource, float] = {}
        for flow in self.flows:
            for name, _ in flow.demands:
                free[name] = self.capacity(name)
        classes = sorted({flow.priority for flow in self.flows}) if self.limits.strict_priority else [None]
        for number in classes:
            growing = [flow for flow in self.flows if number is None or flow.priority == number]
            fill(growing, free)

    def capacity(self, name: Resource) -> float:
        if isinstance(name, tuple) and name[0] in ("dma", "part"):
            engines = self.limits.engines if name[0] == "dma" else name[2]
            return engines * self.limits.dma_bytes_per_s
        return self.limits.others.get(name, inf)


def fill(growing: list[DmaTransfer], free: dict[Resource, float]) -> None:
    """Gives flows their rates out of what is free, and takes it from there."""
    while growing:
        load: dict[Resource, float] = {}
        for flow in growing:
            for name, factor in flow.demands:
                load[name] = load.get(name, 0.0) + flow.packet_bytes * factor
        level = inf
        full = None
        for name, taken in load.items():
            if free[name] / taken < level:
                level = free[name] / taken
                full = name
        limited = min(growing, key=lambda flow: flow.most / flow.packet_bytes)
        if limited.most / limited.packet_bytes <= level:
            settled = [limited]
            level = limited.most / limited.packet_bytes
        else:
            settled = [flow for flow in growing if any(name == full for name, _ in flow.demands)]
        for flow in settled:
            flow.rate = level * flow.packet_bytes
            for name, factor in flow.demands:
                free[name] = max(0.0, free[name] - flow.rate * factor) if free[name] < inf else inf
        growing = [flow for flow in growing if flow not in settled]


@dataclass
class DmaRing:
    """A queue of one engine: transfers with what this engine has left of each."""

    number: int
    queue: deque[list[Any]] = field(default_factory=deque)
    eligible_at: float = 0.0


class Packets:
    """Transfers packet by packet: one process for each DMA engine of each core.

    What a packet passes besides the engine takes packets in the order in which they come; its ring goes on when it has.
    """

    def __init__(self, env: simpy.Environment, limits: Limits):
        self.env = env
        self.limits = limits
        self.engines: dict[tuple[int, int], list[DmaRing]] = {}
        self.arrivals: dict[tuple[int, int], simpy.Event] = {}
        self.free_at: dict[Resource, float] = {}

    def start(self, transfer: DmaTransfer) -> simpy.Event:
        """Begins a transfer; the event comes when the last engine is done with it."""
        transfer.done = self.env.event()
        if transfer.bytes <= 0:
            return transfer.done.succeed()
        transfer.left = transfer.engines  # engines that are not done
        for engine in range(transfer.engines):
            place = (transfer.core, engine)
            if place not in self.engines:
                self.engines[place] = []
                self.arrivals[place] = self.env.event()
                self.env.process(self.serve(place))
            rings = self.engines[place]
            ring = next((each for each in rings if each.number == transfer.ring), None)
            if ring is None:
                ring = DmaRing(transfer.ring)
                rings.append(ring)
                rings.sort(key=lambda each: each.number)
            ring.queue.append([transfer, transfer.bytes / transfer.engines])
            if not self.arrivals[place].triggered:
                self.arrivals[place].succeed()
        return transfer.done

    def serve(self, place: tuple[int, int]) -> Generator[simpy.Event, Any, None]:
        """One engine: a packet of one ring, then one of the next that has any."""
        rings = self.engines[place]
        last = -1
        while True:
            waiting = [ring for ring in rings if ring.queue]
            now = self.env.now
            ready = [ring for ring in waiting if ring.eligible_at <= now + 1e-15]
            if not ready:
                self.arrivals[place] = self.env.event()
                soonest = min((ring.eligible_at for ring in waiting), default=inf)
                later = [self.env.timeout(soonest - now)] if soonest < inf else []
                yield self.env.any_of([self.arrivals[place], *later])
                continue
            if self.limits.strict_priority:
                first = min(ring.queue[0][0].priority for ring in ready)
                ready = [ring for ring in ready if ring.queue[0][0].priority == first]
            ring = next((each for each in ready if each.number > last), ready[0])
            last = ring.number
            transfer, left = ring.queue[0]
            size = min(left, transfer.packet_bytes)
            passed = self.pass_on(transfer, size)
            yield self.env.timeout(size * transfer.dma_factor / self.limits.dma_bytes_per_s)
            ring.eligible_at = passed
            ring.queue[0][1] = left - size
            if ring.queue[0][1] <= LEAST_BYTES:
                ring.queue.popleft()
                self.env.process(self.finish(transfer, passed))

    def pass_on(self, transfer: DmaTransfer, size: float) -> float:
        """Time when a packet has passed all else that it takes; each of that is busy with it for as long as its bytes need."""
        end = self.env.now
        for name, factor in transfer.uses:
            rate = self.limits.others.get(name, inf)
            begin = max(self.env.now, self.free_at.get(name, 0.0))
            self.free_at[name] = begin + size * factor / rate
            end = max(end, self.free_at[name])
        return end

    def finish(self, transfer: DmaTransfer, at: float) -> Generator[simpy.Event, Any, None]:
        """The end of one engine's part."""
        if at > self.env.now:
            yield self.env.timeout(at - self.env.now)
        transfer.left -= 1
        if transfer.left == 0:
            transfer.done.succeed()
