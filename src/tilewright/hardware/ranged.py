"""Parts that specs of chips share: constants with a range, and names that a user misspelled."""

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from typing import Any, NoReturn


class Ranged(float):
    """A constant with a range: a float with the value that is used, and the ends between which sources or fits put it."""

    low: float
    high: float

    def __new__(cls, value: float, *others: float) -> "Ranged":
        """Takes the value that is used, and all other ones that are given for it.

        Raises:
            ValueError: one of them is not above 0, or not finite.
        """
        made = super().__new__(cls, value)
        made.low = float(min((value, *others)))
        made.high = float(max((value, *others)))
        if not (made.low > 0 and made.high < inf):
            raise ValueError(
                f"expected a constant and its range above 0 and finite, found {value:g}, {made.low:g} to {made.high:g}"
            )
        return made

    def __repr__(self) -> str:
        return f"{float(self):g} ({self.low:g} to {self.high:g})"


def ranged(spec: Any) -> dict[str, Ranged]:
    """The fields of a frozen spec that have a range, by name."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec)}
    return {name: value for name, value in found.items() if isinstance(value, Ranged)}


def refuse_name(what: str, name: str, known: Iterable[str]) -> NoReturn:
    """Refuses a name that nothing has.

    Raises:
        ValueError: always; it says what there is, the nearest names first.
    """
    names = list(known)
    near = get_close_matches(name.lower(), [each.lower() for each in names], n=3, cutoff=0.5)
    ordered = [each for word in near for each in names if each.lower() == word]
    meant = f" (did you mean {' or '.join(ordered)}?)" if ordered else ""
    raise ValueError(f"expected {what} of {', '.join(names)}; found {name!r}{meant}")
