"""Which pages of the pool are whose: handed out, shared by rows that begin alike, kept for later ones, given away again.

Plain host code. A page that is full, and whose keys and values are final, may be kept under a key that says what it holds:
all tokens before it, its own, and the one behind it (a drafter's context may have read that one, too). Whoever finds it
holds it with the others; nobody writes to it any more.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

FIRST = b""
"""Stands for what comes before the first page."""


def page_key(before: bytes, held: Sequence[int]) -> bytes:
    """The key of a full page, given that of the one before it (`FIRST` for the first), its tokens and the one behind them."""
    return hashlib.blake2b(before + np.asarray(held, np.int32).tobytes(), digest_size=16).digest()


class Pages:
    """The accounts of a pool.

    Attributes:
        count, page_size: of the pool.
        ref_counts: how many rows hold each page.
        evictable: published pages that no row holds, the one that was held the longest ago first.
    """

    def __init__(self, count: int, page_size: int):
        self.count = count
        self.page_size = page_size
        self.ref_counts = [0] * count
        self.empty = deque(range(count))
        self.published: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Pages that rows hold."""
        return self.count - self.free

    @property
    def free(self) -> int:
        """Pages that can be taken: those that nobody holds, kept ones included."""
        return len(self.empty) + len(self.evictable)

    @property
    def cached(self) -> int:
        """Pages that are kept though no row holds them."""
        return len(self.evictable)

    def take(self, count: int) -> list[int] | None:
        """Pages for one row, which now holds them; None if there are not so many. What was kept the longest ago goes first."""
        if count > self.free:
            return None
        taken = [self.empty.popleft() if self.empty else self.forget_oldest() for _ in range(count)]
        for page in taken:
            self.ref_counts[page] = 1
        return taken

    def forget_oldest(self) -> int:
        page, _ = self.evictable.popitem(last=False)
        del self.published[self.keys.pop(page)]
        return page

    def acquire_prefix(self, keys: Iterator[bytes]) -> list[int]:
        """The pages kept under these keys, as far as they go without a gap; the row that asks holds them."""
        found = []
        for key in keys:
            page = self.published.get(key)
            if page is None:
                break
            self.ref_counts[page] += 1
            self.evictable.pop(page, None)
            found.append(page)
        return found

    def publish(self, page: int, key: bytes) -> None:
        """Lets others find a page that is held; the first one under a key stays."""
        assert self.ref_counts[page] > 0, "only a page that is held is known to hold what its key says"
        if key not in self.published and page not in self.keys:
            self.published[key] = page
            self.keys[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Gives up a row's hold, the last page first: of a text kept in part, its beginning is what others can use."""
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} is held by nobody"
            self.ref_counts[page] -= 1
            if self.ref_counts[page]:
                continue
            if page in self.keys:
                self.evictable[page] = None
            else:
                self.empty.append(page)

    def forget(self) -> None:
        """Keeps nothing any more that nobody holds, and lets nobody find what somebody does."""
        self.empty.extend(self.evictable)
        self.evictable.clear()
        self.published.clear()
        self.keys.clear()
