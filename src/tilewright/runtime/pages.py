"""Page pool with reference counts, shared prefixes and a cache of evictable pages.

Host code only. A full page with final keys and values may be published under a key of its contents: all tokens before it, its
own tokens, and the token behind it (which a drafter's context may have read, too). A row that finds the page takes a reference.
Published pages are never written to.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

FIRST = b""
"""Key before that of the first page."""


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the key of a full page from the key of the page before (or `FIRST`), its tokens and the token behind them."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class Pages:
    """Page pool.

    Attributes:
        count, page_size: number of pages, and positions of a page.
        ref_counts: number of rows that hold each page.
        empty: pages without contents.
        published, keys: published pages by key, and their keys by page.
        evictable: published pages that no row holds, the least recently released first.
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
        """Number of pages that rows hold."""
        return self.count - self.free

    @property
    def free(self) -> int:
        """Number of pages that can be allocated, evictable ones included."""
        return len(self.empty) + len(self.evictable)

    @property
    def cached(self) -> int:
        """Number of published pages that no row holds."""
        return len(self.evictable)

    def take(self, count: int) -> list[int] | None:
        """Allocates pages for one row, empty ones first, then the least recently released; None if there are too few."""
        if count > self.free:
            return None
        pages = [self.empty.popleft() if self.empty else self.evict() for _ in range(count)]
        for page in pages:
            self.ref_counts[page] = 1
        return pages

    def evict(self) -> int:
        page, _ = self.evictable.popitem(last=False)
        del self.published[self.keys.pop(page)]
        return page

    def acquire_prefix(self, keys: Iterator[bytes]) -> list[int]:
        """Takes references to the pages published under these keys, up to the first missing one. Returns the pages."""
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
        """Publishes a page under a key. A page that is published under the key already stays there."""
        assert self.ref_counts[page] > 0, f"page {page} is published without a reference"
        if key not in self.published and page not in self.keys:
            self.published[key] = page
            self.keys[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Drops a row's references, the last page's first, so that the beginning of a text is evicted last."""
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} has no reference to release"
            self.ref_counts[page] -= 1
            if self.ref_counts[page]:
                continue
            if page in self.keys:
                self.evictable[page] = None
            else:
                self.empty.append(page)

    def forget(self) -> None:
        """Drops all unreferenced pages and unpublishes the rest, so that later requests share none of them."""
        self.empty.extend(self.evictable)
        self.evictable.clear()
        self.published.clear()
        self.keys.clear()
