"""Constraints of few states, as automata over tokens: what may come in each of them is known beforehand.

A mask has a bit for each token of the vocabulary: token v is bit `v % 32` of word `v // 32`, 1 where it may come.

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
"""A word of a mask that allows all of its tokens."""

BEYOND = -2
"""The state behind what leaves an automaton: the constraint goes on there, and the automaton does not."""

MOST_STATES = 4096
MOST_MASKS = 256
"""Different ones of one automaton: most states of a long text have the same."""
MOST_ENTRIES = 2**18
"""States times classes of tokens, of one automaton."""


def words(vocab: int) -> int:
    """Words in a mask."""
    return -(-vocab // WORD)


@dataclass(frozen=True, eq=False)
class Automaton:
    """A constraint of few states over tokens; it begins in state 0.

    Attributes:
        masks: the different masks.
        mask_of: which of them each state has.
        classes: of tokens. Those of one class lead to the same state, wherever they may come.
        after: the state behind a token of each class; -1 where it may not come, and behind a token that ends the text;
            `BEYOND` where it may come, and what follows is not described here.
        forced: the token that a state's forced text begins with; -1 where there is none.
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
        """The state behind tokens; None once they leave it. Raises a `ValueError` for one that may not come."""
        for token in tokens:
            following = int(self.after[state, self.classes[token]])
            if following == BEYOND:
                return None
            if following < 0:
                raise ValueError(f"expected a token that may come in state {state}, found {token}")
            state = following
        return state


class AutomatonState(NamedTuple):
    """Where a row stands in its automaton."""

    automaton: Automaton
    state: int

    def advance(self, tokens: Sequence[int]) -> "AutomatonState | None":
        """Where it stands behind tokens; None once they leave it. Raises a `ValueError` for one that may not come."""
        state = self.automaton.advance(self.state, tokens)
        return None if state is None else self._replace(state=state)
