"""Constraints: which tokens may come next in a row, as a source of masks says that the runtime knows by these protocols alone.

Masks (`automata.py` has their form) are applied to the target's logits before anything else is, so that what is drawn is what
plain decoding under the same masks draws. The mask behind a draft depends on the draft. Where every row's constraint has an
automaton, and has not left it, the device makes masks by itself (`automaton_table.py`). Else the host must know a block's
drafts before it is verified: a dispatch is one round then, in which the block comes from the host and the drafts behind what
it commits go back. It is the same program (`rounds.masked_round`).

A state takes in what was committed, and nothing else: what was drafted is never part of it, so that nothing is rolled back, and
a row that gives its pages up goes on from the state that it has.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import UInt32

from tilewright.runtime.automata import ALL, AutomatonState, words

MaskSource = Literal["none", "host", "device"]
"""Where the masks of a round come from: there are none, the host makes them, or the device does."""


class ConstraintError(Exception):
    """A constraint cannot say what may come next; its message may be shown to whoever asked.

    Attributes:
        row: of the batch whose constraint it is, where masks are made for one.
    """

    row: int = 0


@runtime_checkable
class ConstraintState(Protocol):
    """State of a row in its constraint."""

    @property
    def automaton(self) -> AutomatonState | None:
        """Where it stands in the constraint's automaton; None for a constraint that has none, and outside of it.

        What leaves it comes back, if at all, with tokens that were drawn later: the device rests until it is told the state.
        """
        ...

    def forced(self) -> list[int]:
        """Tokens of the text that has to come next, whatever the model says; it may have them in other tokens. Often none."""
        ...

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        """Writes the mask of the next token and of those behind the drafts that the constraint allows; the state stays.

        An end-of-sequence token may come where the constraint is met.

        Args:
            drafts: at most T - 1.
            masks: the first is that of the next token.

        Returns:
            how many of the drafts it allows, from the first. What stands in `masks` behind theirs means nothing.

        Raises:
            ConstraintError: it cannot say.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that were committed, drawn under its masks. Raises a `ConstraintError` where it cannot."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """Rule that a row's text must follow: made once, whatever it takes, and of any number of rows."""

    def begin(self) -> ConstraintState:
        """The state before the first token."""
        ...


class Blocks(NamedTuple):
    """Drafts and masks that the host gives to rounds of rows of which some have a constraint.

    Attributes:
        drafts: int32 `[B, T - 1]`.
        counts: how many of them each row has, int32 `[B]`; below 0 for those that the device has proposed for itself.
        masks: uint32 `[B, T, ceil(V / 32)]`.
    """

    drafts: Any
    counts: Any
    masks: Any


class Drafted(NamedTuple):
    """A row of a block before its masks are made: its state, None without a constraint, and its drafts."""

    state: ConstraintState | None
    drafts: Sequence[int]


def fill_blocks(batch: Sequence[Drafted], rows: int, width: int, vocab: int) -> Blocks:
    """Blocks with masks for all slots of a batch. Other rows allow all tokens.

    Drafts that break a row's constraint are cut off. A text that has to come is drafted before what a drafter would have.

    Raises:
        ConstraintError: a row's constraint cannot say what may come.
    """
    drafts = np.zeros((rows, width - 1), np.int32)
    counts = np.zeros(rows, np.int32)
    masks = np.full((rows, width, words(vocab)), ALL, np.uint32)
    for row, (state, own) in enumerate(batch):
        try:
            if state is not None:
                own = forced_first(state.forced(), own)
            own = own[: width - 1]
            counts[row] = len(own) if state is None else state.fill(own, masks[row])
        except ConstraintError as error:
            error.row = row
            raise
        drafts[row, : counts[row]] = own[: counts[row]]
    return Blocks(drafts, counts, masks)


def open_blocks(rows: int, width: int, vocab: int) -> Blocks:
    """Blocks of drafts that the device has proposed, in which any token may come."""
    return fill_blocks((), rows, width, vocab)._replace(counts=np.full(rows, -1, np.int32))


def block_shapes(rows: int, width: int, vocab: int) -> Blocks:
    """The arrays of blocks, abstract."""
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), open_blocks(rows, width, vocab))


def forced_first(forced: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """The drafts where they begin with what is forced, and else what is forced."""
    return drafts if list(drafts[: len(forced)]) == list(forced) else forced
