"""Snapshots of layer states outside of pages, such as those of linear attention.

A state summarises all earlier positions and cannot be rolled back. To continue a cached prefix, a row needs the state at the
prefix's end besides its pages. Therefore some prefills stop at the end of a page and copy the row's states to a snapshot, from
which a later request with the same prefix starts. Host code only: it tracks the contents of each snapshot.
"""

from collections import OrderedDict
from collections.abc import Sequence

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.pages import Pages

OVERHEAD = 64
"""Cost of a prefill besides its positions, in positions: reading the weights, and a dispatch."""


class Snapshots:
    """Fixed number of snapshots.

    Attributes:
        count: number of snapshots.
        pages: pages of the group of layers without a window.
        least: least number of positions that a snapshot must save over the one before it: the cost of the stop.
        published: snapshot at the end of each prefix, by the key of its last page, the least recently used first.
        held: number of sequences that will start from each snapshot.
        empty: unused snapshots.
    """

    def __init__(self, count: int, pages: Pages, least: int = OVERHEAD):
        self.count = count
        self.pages = pages
        self.least = least
        self.published: OrderedDict[bytes, int] = OrderedDict()
        self.forget()

    def has(self, key: bytes) -> bool:
        """True if there is a snapshot at the end of the page with this key."""
        return key in self.published

    def stops(self, start: int, ends: Sequence[int]) -> tuple[int, ...]:
        """Returns the positions among `ends`, in order, at which a prefill from `start` on stops for a snapshot."""
        found = [start]
        for end in ends:
            if end - found[-1] > self.least:
                found.append(end)
        return tuple(found[1:])

    def acquire(self, key: bytes) -> int:
        """Takes a reference to the snapshot of a key, until the sequence has started from it."""
        found = self.published[key]
        self.published.move_to_end(key)
        self.held[found] += 1
        return found

    def release(self, snapshot: int) -> None:
        """Drops a reference."""
        assert self.held[snapshot] > 0, f"snapshot {snapshot} has no reference to release"
        self.held[snapshot] -= 1

    def take(self) -> int:
        """Allocates a snapshot; `UNMAPPED` if all have references.

        It evicts snapshots whose page was evicted first, since no request finds them, then the least recently used one.
        """
        if self.empty:
            return self.empty.pop()
        unused = [key for key, snapshot in self.published.items() if not self.held[snapshot]]
        if not unused:
            return UNMAPPED
        return self.published.pop(next((key for key in unused if key not in self.pages.published), unused[0]))

    def publish(self, snapshot: int, key: bytes) -> None:
        """Publishes a snapshot under a key. A snapshot that is published under the key already stays there."""
        if key in self.published:
            self.empty.append(snapshot)
        else:
            self.published[key] = snapshot

    def forget(self) -> None:
        """Drops all snapshots and references, because the device's state is lost."""
        self.empty = list(range(self.count))
        self.held = [0] * self.count
        self.published.clear()
