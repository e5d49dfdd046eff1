"""Transfers that share DMA engines, device memory and links, as flows with fair rates.

A DMA engine serves its rings round-robin and switches rings at the end of a packet. While several rings have packets waiting,
each ring gets a share of the engine in proportion to its packet size. `Flows` gives each transfer this share as a rate at every
moment (weighted max-min fairness over all resources of the transfer), so that a transfer of gigabytes is a few events.

`tests/perfmodel/packets.py` simulates the same engines packet by packet. A test holds the two to each other: transfers end
within a few packets' time.

With strict priorities, a class is served before all higher-numbered classes.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import simpy

from tilewright.perfmodel.machine import Limits, Resource

LEAST_BYTES = 1e-6
"""Remaining bytes below which a transfer has ended; rates are floats."""


@dataclass(eq=False)
class DmaTransfer:
    """Bytes that pass the DMA engines of a core, spread evenly over all of them.

    Attributes:
        bytes: total bytes.
        ring: ring of each engine that the transfer queues in.
        packet_bytes: bytes of a packet.
        priority: priority class, 0 first.
        dma_factor: time on the engines relative to plain copying; above 1 for small descriptors.
        uses: other resources of the transfer, each with the units that a transferred byte takes of the resource.
        remaining: bytes not yet transferred.
        rate: current bytes per second.
        done: event at the end of the transfer.
        demands: all resources of the transfer, with the units that a transferred byte takes.
        max_rate: bytes per second of the engines.
    """

    bytes: float
    ring: int
    packet_bytes: float
    priority: int = 0
    dma_factor: float = 1.0
    uses: tuple[tuple[Resource, float], ...] = ()
    remaining: float = 0.0
    rate: float = 0.0
    done: Any = None
    demands: tuple[tuple[Resource, float], ...] = ()
    max_rate: float = inf


class Flows:
    """Transfers as flows: rates are computed anew whenever a transfer begins or ends."""

    def __init__(self, env: simpy.Environment, limits: Limits):
        self.env = env
        self.limits = limits
        self.flows: dict[DmaTransfer, None] = {}
        self.updated_at = 0.0
        self.generation = 0
        self.stale = False

    def start(self, transfer: DmaTransfer) -> simpy.Event:
        """Begins a transfer and returns the event of its end."""
        transfer.done = self.env.event()
        transfer.max_rate = self.limits.engines * self.limits.dma_bytes_per_s / transfer.dma_factor
        transfer.remaining = transfer.bytes
        uses = ((name, factor) for name, factor in transfer.uses if factor > 0)
        transfer.demands = (("dma", transfer.dma_factor), *uses)
        if transfer.bytes <= 0:
            return transfer.done.succeed()
        self.advance()
        self.flows[transfer] = None
        self.schedule_update()
        return transfer.done

    def advance(self) -> None:
        """Advances all flows to the current time and ends those with no bytes left."""
        passed = self.env.now - self.updated_at
        self.updated_at = self.env.now
        ended = []
        for flow in self.flows:
            if flow.rate == inf:
                flow.remaining = 0.0
            elif passed > 0:
                flow.remaining -= flow.rate * passed
            if flow.remaining <= LEAST_BYTES:
                ended.append(flow)
        for flow in ended:
            del self.flows[flow]
            flow.done.succeed()

    def schedule_update(self) -> None:
        """Computes rates once, after all transfers that begin or end at this moment."""
        if not self.stale:
            self.stale = True
            self.env.timeout(0).callbacks.append(self.update)  # type: ignore[union-attr]

    def update(self, _: simpy.Event) -> None:
        """Computes all rates and schedules the next end of a flow."""
        self.stale = False
        self.generation += 1
        if not self.flows:
            return
        self.rates()
        soonest = min(flow.remaining / flow.rate if flow.rate else inf for flow in self.flows)
        if soonest < inf:
            generation = self.generation
            wake = self.env.timeout(max(soonest, 0.0))
            wake.callbacks.append(lambda _: self.wake(generation))  # type: ignore[union-attr]

    def wake(self, generation: int) -> None:
        """Ends the flow that was to end first, unless rates have changed since."""
        if generation != self.generation:
            return
        shortest = min(self.flows, key=lambda flow: flow.remaining / flow.rate if flow.rate else inf)
        self.advance()
        if shortest in self.flows:  # the rest is a rounding error
            del self.flows[shortest]
            shortest.done.succeed()
        self.schedule_update()

    def rates(self) -> None:
        """Sets rates by weighted max-min fairness.

        All rates grow in proportion to packet sizes until a resource is full; its flows then keep their rates.
        """
        free: dict[Resource, float] = {}
        for flow in self.flows:
            for name, _ in flow.demands:
                free[name] = self.capacity(name)
        classes = sorted({flow.priority for flow in self.flows}) if self.limits.strict_priority else [None]
        for number in classes:
            fill([flow for flow in self.flows if number is None or flow.priority == number], free)

    def capacity(self, name: Resource) -> float:
        """Units per second of a resource."""
        if name == "dma":
            return self.limits.engines * self.limits.dma_bytes_per_s
        return self.limits.others.get(name, inf)


def fill(growing: list[DmaTransfer], free: dict[Resource, float]) -> None:
    """Sets the rates of flows from the free capacity, and subtracts their use from it."""
    while growing:
        load: dict[Resource, float] = {}
        for flow in growing:
            for name, factor in flow.demands:
                load[name] = load.get(name, 0.0) + flow.packet_bytes * factor
        level = inf
        full = None
        for name, demand in load.items():
            if free[name] / demand < level:
                level = free[name] / demand
                full = name
        slowest = min(growing, key=lambda flow: flow.max_rate / flow.packet_bytes)
        if slowest.max_rate / slowest.packet_bytes <= level:
            fixed = [slowest]
            level = slowest.max_rate / slowest.packet_bytes
        else:
            fixed = [flow for flow in growing if any(name == full for name, _ in flow.demands)]
        for flow in fixed:
            flow.rate = level * flow.packet_bytes
            for name, factor in flow.demands:
                free[name] = max(0.0, free[name] - flow.rate * factor) if free[name] < inf else inf
        growing = [flow for flow in growing if flow not in fixed]
