"""Cases of tests that hold for a product of values, of which slow runs keep those in which every two values meet."""

from collections.abc import Collection, Iterable, Iterator
from itertools import product
from typing import Any

import pytest


def cases(quick: Collection[tuple[Any, ...]], share: int, *values: Iterable[Any]) -> Iterator[Any]:
    """A product's cases: those of `quick` for every run, one in `share` for slow ones, the others for `--products`.

    Every two values of different parts meet in one of the second kind where the other parts' places leave every remainder.
    """
    for places in product(*(list(enumerate(part)) for part in values)):
        each = tuple(value for _, value in places)
        kept = sum(place for place, _ in places) % share == 0
        marks = [] if each in quick else [pytest.mark.slow] if kept else [pytest.mark.slow, pytest.mark.product]
        yield pytest.param(*each, marks=marks)
