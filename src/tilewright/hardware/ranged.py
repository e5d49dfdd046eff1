"""Helpers for chip specifications: constants with a range, and errors for unknown names."""

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from typing import Any, NoReturn


class Ranged(float):
    """A float constant with the lowest and highest value that sources or fits give."""

    low: float
    high: float

    def __new__(cls, value: float, *alternatives: float) -> "Ranged":
        """Makes a constant from the value in use and all other published values.

        Raises:
            ValueError: a value that is not above 0 or not finite.
        """
        made = super().__new__(cls, value)
        made.low = float(min((value, *alternatives)))
        made.high = float(max((value, *alternatives)))
        if not (made.low > 0 and made.high < inf):
            raise ValueError(
                f"expected a constant and its range above 0 and finite, found {value:g}, {made.low:g} to {made.high:g}"
            )
        return made

    def __repr__(self) -> str:
        return f"{float(self):g} ({self.low:g} to {self.high:g})"


def ranged(spec: Any) -> dict[str, Ranged]:
    """Returns the fields of a frozen dataclass that are `Ranged`, by name."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec)}
    return {name: value for name, value in found.items() if isinstance(value, Ranged)}


def refuse_name(kind: str, name: str, known: Iterable[str]) -> NoReturn:
    """Raises an error for an unknown name.

    Raises:
        ValueError: always; the message lists the known names and suggests the nearest.
    """
    names = list(known)
    near = get_close_matches(name.lower(), [each.lower() for each in names], n=3, cutoff=0.5)
    ordered = [each for word in near for each in names if each.lower() == word]
    meant = f" (did you mean {' or '.join(ordered)}?)" if ordered else ""
    raise ValueError(f"expected {kind} of {', '.join(names)}; found {name!r}{meant}")
