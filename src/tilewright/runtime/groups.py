"""Groups of layers, each with its own page pool and block table: layers without a window, and layers with one.

A group with a window keeps the pages that later queries may attend to, and releases the pages wholly before them. A rejected
draft returns a row to its last committed position and no further, so no later query is before that position. Each group numbers
its own pages. All groups have the same page size, so a column of every table covers the same positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.pages import Pages


def first_column(window: int | None, position: int, page_size: int) -> int:
    """Returns the first column that queries from the beginning of a position's page on attend to.

    It counts from the beginning of the page: a row that ends within a page leaves all pages that a row behind the page before
    needs.
    """
    if window is None:
        return 0
    return max(0, position // page_size * page_size - window + 1) // page_size


@dataclass(eq=False)
class RowPages:
    """Pages of a row in one group.

    Attributes:
        columns: its row of the block table, from position 0 on; `UNMAPPED` before `first`.
        first: first column that was not released.
        published: number of columns that were published.
    """

    columns: list[int] = field(default_factory=list)
    first: int = 0
    published: int = 0

    @property
    def held(self) -> list[int]:
        return self.columns[self.first :]


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Page pool of one group of layers.

    Attributes:
        window: positions that its layers' queries, and a drafter, may read, their own included; None if they read every one.
    """

    pages: Pages
    window: int | None = None

    def first(self, position: int) -> int:
        """Returns the first column that queries from a position on attend to."""
        return first_column(self.window, position, self.pages.page_size)

    def shared(self, keys: Sequence[bytes]) -> RowPages:
        """Takes references to the cached pages that a row behind a prefix needs. `keys` are those of the prefix's pages."""
        first = min(len(keys), self.first(len(keys) * self.pages.page_size))
        found = self.pages.acquire_prefix(iter(keys[first:]))
        assert len(found) == len(keys) - first, "a usable prefix has all pages"
        return RowPages([UNMAPPED] * first + found, first, len(keys))

    def lacking(self, row: RowPages, columns: int) -> int:
        """Returns the number of pages that a row lacks up to a column."""
        return max(0, columns - len(row.columns))

    def grow(self, row: RowPages, columns: int) -> None:
        """Allocates the pages that a row lacks up to a column. The caller has checked that there are enough."""
        pages = self.pages.take(self.lacking(row, columns))
        assert pages is not None, "there are enough free pages"
        row.columns += pages

    def slide(self, row: RowPages, position: int) -> None:
        """Releases the pages that no query from a position on attends to."""
        first = min(self.first(position), len(row.columns))
        if first > row.first:
            self.pages.release(row.columns[row.first : first])
            row.columns[row.first : first] = [UNMAPPED] * (first - row.first)
            row.first = first

    def publish(self, row: RowPages, columns: int, key: Callable[[int], bytes]) -> None:
        """Publishes a row's pages before a column, as far as it still holds them."""
        for column in range(max(row.published, row.first), columns):
            self.pages.publish(row.columns[column], key(column))
        row.published = max(row.published, columns)

    def release(self, row: RowPages) -> None:
        """Releases all pages of a row."""
        self.pages.release(row.held)
        row.columns = []
        row.first = 0


def usable_prefix(
    groups: Sequence[PageGroup], keys: Callable[[int], bytes], most: int, ends: Callable[[bytes], bool] = lambda key: True
) -> list[bytes]:
    """Returns the keys of the longest usable prefix of at most `most` pages.

    A prefix is usable if every group has all pages that a row behind the prefix needs.

    Args:
        keys: the key of each page of a text.
        ends: whether a prefix may end with a page, given the page's key.
    """
    found: list[bytes] = []
    usable = 0
    runs = [0] * len(groups)
    for column in range(most):
        found.append(keys(column))
        runs = [run + 1 if found[-1] in group.pages.published else 0 for run, group in zip(runs, groups, strict=True)]
        if any(not run and group.window is None for run, group in zip(runs, groups, strict=True)):
            break
        end = column + 1
        first = [group.first(end * group.pages.page_size) for group in groups]
        if ends(found[-1]) and all(run >= end - begin for run, begin in zip(runs, first, strict=True)):
            usable = end
    return found[:usable]
