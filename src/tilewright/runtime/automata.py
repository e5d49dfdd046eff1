"""Constraints with few states, as automata over tokens whose masks are computed beforehand.

A mask has a bit for each token of the vocabulary: token v is bit `v % 32` of word `v // 32`, 1 if it is allowed.

Legend: S states, M masks, W words of a mask, V tokens, C classes of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt32

WORD = 32
"""Bits in a word of a mask."""
ALL = np.uint32(0xFFFFFFFF)
"""Mask word that allows all of its tokens."""

BEYOND = -2
"""State behind an allowed token that the automaton does not cover: only the host can follow the constraint from there."""

MOST_STATES = 4096
MOST_MASKS = 256
"""The most different masks of one automaton. Most states of a long text share a mask."""
MOST_ENTRIES = 2**18
"""The most entries of an automaton's transition table: states times classes of tokens."""


def words(vocab: int) -> int:
    """Number of words in a mask."""
    return -(-vocab // WORD)


@dataclass(frozen=True, eq=False)
class Automaton:
    """Constraint with few states over tokens; it begins in state 0.

    Attributes:
        masks: the different masks.
        mask_of: index of each state's mask.
        classes: class of each token. Tokens of one class lead to the same state wherever they are allowed.
        after: the state behind a token of each class; -1 if the token is not allowed, and behind a token that ends the text;
            `BEYOND` if the token is allowed and leaves the automaton.
        forced: first token of the forced text of each state; -1 if no text is forced.
    """

    masks: UInt32[np.ndarray, "M W"]
    mask_of: Int32[np.ndarray, " S"]
    classes: Int32[np.ndarray, " V"]
    after: Int32[np.ndarray, "S C"]
    forced: Int32[np.ndarray, " S"]

    def __post_init__(self) -> None:
        states, classes = self.after.shape
        if states > MOST_STATES or len(self.masks) > MOST_MASKS or states * classes > MOST_ENTRIES:
            raise ValueError(
                f"expected an automaton of at most {MOST_STATES} states, {MOST_MASKS} masks and {MOST_ENTRIES} entries, found "
                f"{states}, {len(self.masks)} and {states * classes}"
            )

    def advance(self, state: int, tokens: Sequence[int]) -> int | None:
        """Returns the state behind tokens; None once they leave the automaton. Raises a `ValueError` for a forbidden token."""
        for token in tokens:
            following = int(self.after[state, self.classes[token]])
            if following == BEYOND:
                return None
            if following < 0:
                raise ValueError(f"expected a token that is allowed in state {state}, found {token}")
            state = following
        return state


class AutomatonState(NamedTuple):
    """State of a row in its automaton."""

    automaton: Automaton
    state: int

    def advance(self, tokens: Sequence[int]) -> "AutomatonState | None":
        """Returns the state behind tokens; None once they leave the automaton. Raises a `ValueError` for a forbidden token."""
        state = self.automaton.advance(self.state, tokens)
        return None if state is None else self._replace(state=state)
