"""DMA engines packet by packet: the reference that flows are tested against.

Each packet on each engine is one or two events, so that large transfers take long to simulate. Plans therefore use
`tilewright.perfmodel.sharing.Flows`.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import simpy

from tilewright.perfmodel.machine import Limits, Resource
from tilewright.perfmodel.sharing import LEAST_BYTES, DmaTransfer


@dataclass
class DmaRing:
    """A queue of one engine: transfers with the bytes that this engine has left of each."""

    number: int
    queue: deque[list[Any]] = field(default_factory=deque)
    eligible_at: float = 0.0


class Packets:
    """Transfers packet by packet, with one process for each DMA engine; the interface is that of `Flows`.

    Other resources serve packets in order of arrival. A ring sends its next packet when the last one has passed all resources.
    """

    def __init__(self, env: simpy.Environment, limits: Limits):
        self.env = env
        self.limits = limits
        self.engines: dict[int, list[DmaRing]] = {}
        self.arrivals: dict[int, simpy.Event] = {}
        self.free_at: dict[Resource, float] = {}

    def start(self, transfer: DmaTransfer) -> simpy.Event:
        """Begins a transfer and returns the event of its end on the last engine."""
        transfer.done = self.env.event()
        if transfer.bytes <= 0:
            return transfer.done.succeed()
        transfer.remaining = self.limits.engines  # engines that have not finished
        for engine in range(self.limits.engines):
            if engine not in self.engines:
                self.engines[engine] = []
                self.arrivals[engine] = self.env.event()
                self.env.process(self.serve(engine))
            rings = self.engines[engine]
            ring = next((each for each in rings if each.number == transfer.ring), None)
            if ring is None:
                ring = DmaRing(transfer.ring)
                rings.append(ring)
                rings.sort(key=lambda each: each.number)
            ring.queue.append([transfer, transfer.bytes / self.limits.engines])
            if not self.arrivals[engine].triggered:
                self.arrivals[engine].succeed()
        return transfer.done

    def serve(self, engine: int) -> Generator[simpy.Event, Any, None]:
        """Serves the rings of one engine round-robin, a packet at a time."""
        rings = self.engines[engine]
        last = -1
        while True:
            waiting = [ring for ring in rings if ring.queue]
            now = self.env.now
            ready = [ring for ring in waiting if ring.eligible_at <= now + 1e-15]
            if not ready:
                self.arrivals[engine] = self.env.event()
                soonest = min((ring.eligible_at for ring in waiting), default=inf)
                later = [self.env.timeout(soonest - now)] if soonest < inf else []
                yield self.env.any_of([self.arrivals[engine], *later])
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
        """Occupies the other resources with a packet; returns the time at which the packet has passed all of them."""
        end = self.env.now
        for name, factor in transfer.uses:
            rate = self.limits.others.get(name, inf)
            begin = max(self.env.now, self.free_at.get(name, 0.0))
            self.free_at[name] = begin + size * factor / rate
            end = max(end, self.free_at[name])
        return end

    def finish(self, transfer: DmaTransfer, at: float) -> Generator[simpy.Event, Any, None]:
        """Ends one engine's part of a transfer."""
        if at > self.env.now:
            yield self.env.timeout(at - self.env.now)
        transfer.remaining -= 1
        if transfer.remaining == 0:
            transfer.done.succeed()
