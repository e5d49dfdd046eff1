"""Parts that specs of chips share: figures on which sources disagree, and names that a user misspelled."""

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn


class Disputed(float):
    """A figure that sources give differently: a float with the value that is used, and the other one beside it."""

    other: float

    def __new__(cls, value: float, other: float) -> "Disputed":
        made = super().__new__(cls, value)
        made.other = float(other)
        return made

    def __repr__(self) -> str:
        return f"{float(self):g} (or {self.other:g})"


def disputed(spec: Any) -> dict[str, Disputed]:
    """The disputed fields of a frozen spec, by name."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec)}
    return {name: value for name, value in found.items() if isinstance(value, Disputed)}


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
