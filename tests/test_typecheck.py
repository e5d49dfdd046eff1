"""Annotations are checked where they name shapes and where they name none."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jaxtyping
import numpy as np
import pytest
from beartype.roar import BeartypeException
from jaxtyping import Float

from typecheck import check, checked, names_shapes


@checked(typechecker=check)
def plain(n: int, names: Sequence[str] = ()) -> int | None:
    return n if n else None


@checked(typechecker=check)
def shaped(x: Float[np.ndarray, "A B"], y: Float[np.ndarray, "B C"] | None = None) -> Float[np.ndarray, "A C"]:
    return x if y is None else x[:, :1] + y[:1]


@checked(typechecker=check)
@dataclass
class Plain:
    n: int

    @checked(typechecker=check)
    @property
    def half(self) -> int:
        return self.n // 2 if self.n % 2 == 0 else self.n / 2  # type: ignore[return-value]

    @checked(typechecker=check)
    @staticmethod
    def parse(text: str) -> "Plain":
        return Plain(int(text))


@checked(typechecker=check)
@dataclass
class Shaped:
    x: Float[np.ndarray, "A A"]


def test_annotations_with_shapes_and_without_are_checked():
    wide = np.zeros((2, 3))
    square = np.zeros((2, 2))
    assert plain(1, ["a"]) == 1
    assert shaped(square).shape == (2, 2)
    assert shaped(wide, np.zeros((3, 5))).shape == (2, 5)
    assert (Plain.parse("4").half, Shaped(square).x.shape) == (2, (2, 2))
    for wrong in (
        lambda: plain("1"),
        lambda: plain(1, [2]),
        lambda: shaped(wide, wide),
        lambda: shaped(np.zeros(2)),
        lambda: shaped(wide.astype(int)),
        lambda: Plain("1"),
        lambda: Plain(3).half,
        lambda: Plain.parse(4),
        lambda: Shaped(wide),
    ):
        with pytest.raises((jaxtyping.TypeCheckError, BeartypeException)):
            wrong()


def test_checks_leave_the_shared_generator_alone():
    before = random.getstate()
    assert plain(1, ["a"] * 100) == 1
    assert random.getstate() == before


def test_only_what_names_shapes_goes_the_long_way():
    vector = cast(Any, Float[np.ndarray, "A"])
    nested = Callable[[Sequence[vector], int], None]
    naming = [vector, vector | None, dict[str, tuple[vector, ...]], nested, "Plain"]
    assert all(names_shapes([int, each]) for each in naming)
    assert not names_shapes([int, str | None, np.ndarray, Callable[[list[int]], Any], None, Any, type[int], dict[str, Plain]])
