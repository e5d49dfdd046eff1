"""Groups of layers, each with pages and a table of its own: those that see every position, and those that see a window.

A group with a window keeps the pages that a query may still see, and gives up those that lie wholly before. A rejected draft
takes a row back to its last committed position and no further, so that no query stands before that again. Page numbers of one
group mean nothing to another; all have the same page size, so that a column of every table stands for the same positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.pages import Pages


def first_column(window: int | None, position: int, page_size: int) -> int:
    """The first column that queries see from the beginning of a position's page on.

    From the page's beginning, so that a row that ends in it leaves what a later one needs that goes on behind the page before.
    """
    if window is None:
        return 0
    return max(0, position // page_size * page_size - window + 1) // page_size


@dataclass(eq=False)
class RowPages:
    """The pages of a row in one group.

    Attributes:
        columns: of its table, from position 0 on; `UNMAPPED` before the `first`.
        first: columns before it were given up.
        published: columns before it were offered to others.
    """

    columns: list[int] = field(default_factory=list)
    first: int = 0
    published: int = 0

    @property
    def held(self) -> list[int]:
        return self.columns[self.first :]


@dataclass(frozen=True, eq=False)
class PageGroup:
    """The accounts of one group.

    Attributes:
        window: of its layers; None where a query sees every position.
    """

    pages: Pages
    window: int | None = None

    def first(self, position: int) -> int:
        """The first column that queries at a position, or behind it, may see."""
        return first_column(self.window, position, self.pages.page_size)

    def shared(self, keys: Sequence[bytes]) -> RowPages:
        """The pages kept under these keys, of which a row that goes on behind them needs some; it holds them."""
        first = min(len(keys), self.first(len(keys) * self.pages.page_size))
        found = self.pages.acquire_prefix(iter(keys[first:]))
        assert len(found) == len(keys) - first, "what is shared was found before"
        return RowPages([UNMAPPED] * first + found, first, len(keys))

    def lacking(self, row: RowPages, columns: int) -> int:
        """Number of pages that a row lacks up to a column."""
        return max(0, columns - len(row.columns))

    def grow(self, row: RowPages, columns: int) -> None:
        """Takes the pages that a row lacks, of which there are enough."""
        taken = self.pages.take(self.lacking(row, columns))
        assert taken is not None, "there are enough pages"
        row.columns += taken

    def slide(self, row: RowPages, position: int) -> None:
        """Gives up what no query at a position, or behind it, sees."""
        first = min(self.first(position), len(row.columns))
        if first > row.first:
            self.pages.release(row.columns[row.first : first])
            row.columns[row.first : first] = [UNMAPPED] * (first - row.first)
            row.first = first

    def publish(self, row: RowPages, columns: int, key: Callable[[int], bytes]) -> None:
        """Lets others find the pages of a row before a column, those that it still has."""
        for column in range(max(row.published, row.first), columns):
            self.pages.publish(row.columns[column], key(column))
        row.published = max(row.published, columns)

    def release(self, row: RowPages) -> None:
        """Gives up all of a row's pages."""
        self.pages.release(row.held)
        row.columns = []
        row.first = 0


def usable_prefix(
    groups: Sequence[PageGroup], keys: Callable[[int], bytes], most: int, ends: Callable[[bytes], bool] = lambda key: True
) -> list[bytes]:
    """The keys of the longest prefix, of at most so many pages, of which every group has all that a row behind it needs.

    Args:
        keys: of each page of a text.
        ends: whether a prefix may end with the page of a key.
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
