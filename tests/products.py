"""Cases of tests that hold for a product of values, of which slow runs keep as few as make every two values meet."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import combinations, product
from typing import Any

import pytest


def cases(quick: Collection[tuple[Any, ...]], *values: Iterable[Any], fits: Callable[..., bool] | None = None) -> Iterator[Any]:
    """A product's cases: those of `quick` for every run, a few for slow ones, the others for `--products`.

    Every two values of different parts meet in a case of the first two kinds, if there is any for them: each of the second kind
    brings together as many as it can that did not meet before.

    Args:
        fits: says of a case's values whether there is such a case; all of them without it.
    """
    every = [each for each in product(*values) if fits is None or fits(*each)]
    missing = set[Any]().union(*map(pairs, every)).difference(*map(pairs, quick))
    kept = set(quick)
    while missing:
        best = max(every, key=lambda each: len(missing & pairs(each)))
        missing -= pairs(best)
        kept.add(best)
    meetings = Counter[Any](pair for each in kept for pair in pairs(each))
    for each in [each for each in every if each in kept and each not in quick]:
        if all(meetings[pair] > 1 for pair in pairs(each)):  # of an early one others may have brought together all
            meetings.subtract(pairs(each))
            kept.remove(each)
    for each in every:
        marks = [] if each in quick else [pytest.mark.slow] if each in kept else [pytest.mark.slow, pytest.mark.product]
        yield pytest.param(*each, marks=marks)


def pairs(each: tuple[Any, ...]) -> set[Any]:
    """Every two values of a case, with the places of their parts."""
    return set(combinations(enumerate(each), 2))
