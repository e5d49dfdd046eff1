"""A constraint for tests of the runtime, with an automaton or without."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

from tilewright.runtime.automata import BEYOND, Automaton, AutomatonState, words
from tilewright.runtime.constraints import ConstraintError

VOCAB = 40
EOS = (39,)


class Dance:
    """A row of tokens: each lies at most `reach` beyond the one before, in a circle; every fifth is forced.

    Attributes:
        least: tokens after which it may end.
        breaks: after how many tokens it cannot go on; None for never.
        known: its automaton, if it has one, and has not left it.
    """

    def __init__(
        self,
        reach: int = 12,
        least: int = 6,
        breaks: int | None = None,
        seen: tuple[int, ...] = (),
        known: Automaton | None = None,
    ):
        self.reach = reach
        self.least = least
        self.breaks = breaks
        self.seen = seen
        self.known = known

    def begin(self) -> "Dance":
        return Dance(self.reach, self.least, self.breaks, known=self.known)

    @property
    def key(self) -> int:
        """The number of its state: the last token, and how many there were, in circles of five once it may end."""
        count = len(self.seen)
        rounds = count if count < self.least else self.least + (count - self.least) % 5
        return rounds * VOCAB + (self.seen[-1] if self.seen else 0)

    @property
    def automaton(self) -> AutomatonState | None:
        return None if self.known is None else AutomatonState(self.known, self.key)

    def next(self) -> list[int]:
        last = self.seen[-1] if self.seen else 0
        if len(self.seen) % 5 == 4:
            return [(last + 3) % VOCAB]
        ends = EOS if len(self.seen) >= self.least else ()
        return sorted({*((last + step) % VOCAB for step in range(1, self.reach)), *ends} - ({*EOS} - {*ends}))

    def forced(self) -> list[int]:
        return self.next() if len(self.seen) % 5 == 4 else []

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        if self.breaks is not None and len(self.seen) >= self.breaks:
            raise ConstraintError("it knows no further")
        state = self
        for slot in range(len(drafts) + 1):
            bits = np.zeros(32 * masks.shape[1], np.uint8)
            bits[state.next()] = 1
            masks[slot] = np.packbits(bits, bitorder="little").view(np.uint32)
            if slot == len(drafts) or drafts[slot] not in state.next() or drafts[slot] in EOS:
                return slot
            state = Dance(self.reach, self.least, None, (*state.seen, drafts[slot]))
        raise AssertionError

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.next()
            if self.known is not None and self.known.after[self.key, token] == BEYOND:
                self.known = None
            self.seen = (*self.seen, token)


def with_automaton(least: int, leaving: Sequence[int] = ()) -> Dance:
    """A dance with its automaton, of which every state is filled in, reached or not.

    Args:
        leaving: tokens that leave the automaton.
    """
    assert least % 5 == 0, "what is forced is so by the count in circles of five"
    seen = [(0,) * (count - 1) + (last,) * (count > 0) for count in range(least + 5) for last in range(VOCAB)]
    states = [Dance(least=least, seen=each) for each in seen]
    after = np.full((len(states), VOCAB), -1, np.int32)
    bits = np.zeros((len(states), 32 * words(VOCAB)), bool)
    forced = np.full(len(states), -1, np.int32)
    for n, state in enumerate(states):
        may = state.next()
        bits[n, may] = True
        forced[n] = state.forced()[0] if state.forced() else -1
        for token in set(may) - {*EOS}:
            after[n, token] = BEYOND if token in leaving else Dance(least=least, seen=(*state.seen, token)).key
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    kinds, mask_of = np.unique(masks, axis=0, return_inverse=True)
    classes = np.arange(VOCAB, dtype=np.int32)
    return Dance(least=least, known=Automaton(kinds, mask_of.reshape(-1).astype(np.int32), classes, after, forced))
