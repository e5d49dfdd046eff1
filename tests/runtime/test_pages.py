"""Every page is somebody's, kept, or empty; what is found under a key holds what the key says."""

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.pages import FIRST, Pages, page_key

SIZE = 4


def page_keys(text: Sequence[int], size: int) -> Iterator[bytes]:
    """The keys of a text's full pages, from the first on: of those that have a token behind them."""
    key = FIRST
    for stop in range(size, len(text), size):
        key = page_key(key, text[stop - size : stop + 1])
        yield key


def test_keys_tell_pages_by_all_that_came_before_and_the_token_behind():
    text = list(range(13))
    keys = list(page_keys(text, SIZE))
    assert len(keys) == 3
    assert list(page_keys(text[:12], SIZE)) == keys[:2], "the last page has no token behind it"
    for place, first in ((0, 0), (3, 0), (4, 0), (5, 1), (8, 1), (12, 2)):
        other = [*text]
        other[place] = 99
        same = [a == b for a, b in zip(keys, page_keys(other, SIZE), strict=True)]
        assert same == [n < first for n in range(3)], place


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_the_accounts_hold_whatever_happens(steps: list[tuple[int, int]]):
    """Rows take, find, keep and release; a kept page is found until it is given away, and never while somebody writes it."""
    pages = Pages(8, SIZE)
    rows = []
    content = {}
    texts = [[n // 2, *range(10 * n, 10 * n + 23)] for n in range(6)]
    for what, n in steps:
        keys = list(page_keys(texts[n], SIZE))
        if what == 0:
            found = pages.acquire_prefix(iter(keys))
            assert [content[page] for page in found] == keys[: len(found)]
            free = pages.free
            new = pages.take(len(keys) - len(found))
            assert (new is None) == (len(keys) - len(found) > free)
            if new is None:
                pages.release(found)
            else:
                content.update(dict.fromkeys(new))
                rows.append((n, [*found, *new]))
        elif rows and what == 1:
            pages.release(rows.pop(n % len(rows))[1])
        elif rows and what == 2:
            text, held = rows[n % len(rows)]
            for page, key in zip(held, page_keys(texts[text], SIZE), strict=True):
                pages.publish(page, key)
                content[page] = key
        held = [page for _, each in rows for page in each]
        assert pages.ref_counts == [held.count(page) for page in range(8)]
        assert pages.used == len(set(held))
        assert sorted([*pages.empty, *pages.evictable, *set(held)]) == list(range(8))
        assert set(pages.published.values()) == set(pages.keys)
    for _, held in rows:
        pages.release(held)
    assert pages.free == 8
    pages.forget()
    assert (pages.cached, len(pages.empty), pages.published, pages.keys) == (0, 8, {}, {})


def test_what_was_kept_the_longest_ago_goes_first():
    pages = Pages(3, SIZE)
    a = pages.take(1)
    b = pages.take(1)
    assert a is not None
    assert b is not None
    pages.publish(a[0], b"a")
    pages.publish(b[0], b"b")
    pages.release(b)
    pages.release(a)
    assert pages.take(2) == [2, b[0]]
    assert pages.acquire_prefix(iter([b"b"])) == []
    assert pages.acquire_prefix(iter([b"a"])) == a
