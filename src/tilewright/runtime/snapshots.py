"""Snapshots of the states that layers keep of a row in no page, such as those of linear attention.

A state holds all that came before it and cannot be taken back, so that a prefix's pages are not enough to go on behind it: it
takes the state at their end, too. Some prefills therefore stop at the end of a page and copy the row's states to a place of
their own, and a later request that begins alike starts from the copy. Plain host code: which snapshot is whose.
"""

from collections import OrderedDict
from collections.abc import Sequence

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.pages import Pages

OVERHEAD = 64
"""What a prefill takes besides its positions, in positions: weights are read, and a dispatch is sent."""


class Snapshots:
    """The accounts of a fixed number of snapshots.

    Attributes:
        count: how many there may be.
        pages: of the group of layers that see every position, beside which snapshots are found.
        least: positions that a snapshot saves over the one before it, at the least: as many as it costs to stop for it.
        published: the snapshot at the end of each prefix, by the key of its last page; the one that was used the longest ago
            first.
        held: how many sequences are still to begin with each.
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
        """Which of these positions, in order, a prefill from `start` on stops at for the sake of a snapshot."""
        found = [start]
        for end in ends:
            if end - found[-1] > self.least:
                found.append(end)
        return tuple(found[1:])

    def acquire(self, key: bytes) -> int:
        """The snapshot of a key, for a sequence that is to begin with it; it holds it until it has."""
        found = self.published[key]
        self.published.move_to_end(key)
        self.held[found] += 1
        return found

    def release(self, snapshot: int) -> None:
        """Gives up a sequence's hold."""
        assert self.held[snapshot] > 0, f"snapshot {snapshot} is held by nobody"
        self.held[snapshot] -= 1

    def take(self) -> int:
        """A place for a new snapshot; `UNMAPPED` if sequences hold all that there are.

        Those go first whose page is given away, for nobody finds them; then the one that was used the longest ago.
        """
        if self.empty:
            return self.empty.pop()
        idle = [key for key, snapshot in self.published.items() if not self.held[snapshot]]
        if not idle:
            return UNMAPPED
        return self.published.pop(next((key for key in idle if key not in self.pages.published), idle[0]))

    def publish(self, snapshot: int, key: bytes) -> None:
        """Lets others find a snapshot that was taken; the first one under a key stays."""
        if key in self.published:
            self.empty.append(snapshot)
        else:
            self.published[key] = snapshot

    def forget(self) -> None:
        """Keeps none any more, and none is held: what the device held is lost."""
        self.empty = list(range(self.count))
        self.held = [0] * self.count
        self.published.clear()
