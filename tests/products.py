"""Selects few cases of a product of values such that every pair of values occurs in a case."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import combinations, product
from typing import Any

import pytest


def cases(quick: Collection[tuple[Any, ...]], *values: Iterable[Any], fits: Callable[..., bool] | None = None) -> Iterator[Any]:
    """Yields the cases of a product: `quick` cases for every run, a few for slow runs, the others for `--products`.

    The first two kinds cover every pair of values that a case can have. Slow cases are selected greedily by the number of new
    pairs.

    Args:
        quick: cases for every run.
        values: values of each part.
        fits: returns False for values that are not a case; by default all values are.
    """
    every = [each for each in product(*values) if fits is None or fits(*each)]
    missing = set[Any]().union(*map(pairs, every)).difference(*map(pairs, quick))
    selected = set(quick)
    while missing:
        best = max(every, key=lambda each: len(missing & pairs(each)))
        missing -= pairs(best)
        selected.add(best)
    pair_counts = Counter[Any](pair for each in selected for pair in pairs(each))
    for each in [each for each in every if each in selected and each not in quick]:
        if all(pair_counts[pair] > 1 for pair in pairs(each)):  # later cases may cover all pairs of an early one
            pair_counts.subtract(pairs(each))
            selected.remove(each)
    for each in every:
        marks = [] if each in quick else [pytest.mark.slow] if each in selected else [pytest.mark.slow, pytest.mark.product]
        yield pytest.param(*each, marks=marks)


def pairs(each: tuple[Any, ...]) -> set[Any]:
    """Returns the pairs of values of a case, with their positions."""
    return set(combinations(enumerate(each), 2))
