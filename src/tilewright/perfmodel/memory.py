"""A memory of a core: who asks for room gets it in the order of asking."""

from collections import deque

import simpy


class OnChipMemory:
    """Room for results, in bytes."""

    def __init__(self, env: simpy.Environment, size: float):
        self.env = env
        self.size = size
        self.held = self.peak = 0.0
        self.waiting: deque[tuple[float, simpy.Event]] = deque()

    def request(self, wanted: float) -> simpy.Event | None:
        """Takes room: at once (None), or when the event comes.

        Raises:
            ValueError: more than there is in all.
        """
        if wanted > self.size:
            raise ValueError(f"expected at most {self.size:,.0f} bytes of on-chip memory for a tile, found {wanted:,.0f}")
        if not self.waiting and self.held + wanted <= self.size:
            self.take(wanted)
            return None
        event = self.env.event()
        self.waiting.append((wanted, event))
        return event

    def take(self, wanted: float) -> None:
        self.held += wanted
        self.peak = max(self.peak, self.held)

    def release(self, given: float) -> None:
        """Gives room back, and passes it on."""
        self.held -= given
        while self.waiting and self.held + self.waiting[0][0] <= self.size:
            wanted, event = self.waiting.popleft()
            self.take(wanted)
            event.succeed()
