"""On-chip memory of a core, allocated in order of request."""

from collections import deque

import simpy


class OnChipMemory:
    """A memory with a capacity in bytes."""

    def __init__(self, env: simpy.Environment, size: float):
        self.env = env
        self.size = size
        self.held = self.peak = 0.0
        self.waiting: deque[tuple[float, simpy.Event]] = deque()

    def request(self, wanted: float) -> simpy.Event | None:
        """Allocates bytes: at once (returns None), or when the returned event is triggered.

        Raises:
            ValueError: the request exceeds the capacity.
        """
        if wanted > self.size:
            raise ValueError(f"expected at most {self.size:,.0f} bytes of on-chip memory for a tile, found {wanted:,.0f}")
        if not self.waiting and self.held + wanted <= self.size:
            self.allocate(wanted)
            return None
        event = self.env.event()
        self.waiting.append((wanted, event))
        return event

    def allocate(self, wanted: float) -> None:
        self.held += wanted
        self.peak = max(self.peak, self.held)

    def release(self, released: float) -> None:
        """Releases bytes and grants waiting requests."""
        self.held -= released
        while self.waiting and self.held + self.waiting[0][0] <= self.size:
            wanted, event = self.waiting.popleft()
            self.allocate(wanted)
            event.succeed()
