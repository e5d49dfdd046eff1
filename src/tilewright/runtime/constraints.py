"""Constraints: rules for a row's tokens. The runtime knows them by these protocols only.

Masks (see `automata.py` for their form) are applied to the target's raw logits, so the drawn tokens equal those of plain
decoding under the same masks. The mask behind a draft depends on the draft. If every row's constraint has an automaton, and has
not left the automaton, the device makes the masks (`automaton_table.py`). Otherwise the host must know a block's drafts before
they are verified: a dispatch is then a single round, whose block the host provides, and which returns the drafts for the next
round. Both cases run the same program (`rounds.masked_round`).

A state takes in committed tokens only. It never contains drafts, so it needs no rollback, and a preempted row continues with
its state.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import UInt32

from tilewright.runtime.automata import ALL, AutomatonState, words

MaskSource = Literal["none", "host", "device"]
"""Source of the masks of a round: no masks, the host, or the device."""


class ConstraintError(Exception):
    """Failure of a constraint to determine the allowed tokens; its message may be shown to the client.

    Attributes:
        row: row of the batch whose constraint failed, if masks were made for a batch.
    """

    row: int = 0


@runtime_checkable
class ConstraintState(Protocol):
    """State of a row in its constraint."""

    @property
    def automaton(self) -> AutomatonState | None:
        """State of the constraint's automaton; None outside of the automaton, or for a constraint without one.

        A text that has left the automaton may return with later tokens: the device pauses the row until it gets the state.
        """
        ...

    def forced(self) -> list[int]:
        """Tokens of the forced text, often none. The model may write the text with other tokens."""
        ...

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        """Writes the masks of the next token and of the tokens behind allowed drafts. The state does not change.

        End-of-sequence tokens are allowed where the constraint is met.

        Args:
            drafts: at most T - 1.
            masks: the first is the mask of the next token.

        Returns:
            the number of allowed drafts, from the first on. The `masks` behind theirs are undefined.

        Raises:
            ConstraintError: the constraint cannot determine the allowed tokens.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that were committed under its masks. Raises a `ConstraintError` if it cannot."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """Rule that a row's text must follow. Its compilation may be slow; any number of rows can share it."""

    def begin(self) -> ConstraintState:
        """Returns the state before the first token."""
        ...


class Blocks(NamedTuple):
    """Drafts and masks from the host for rounds of rows of which some have a constraint.

    Attributes:
        drafts: int32 `[B, T - 1]`.
        counts: number of drafts of each row, int32 `[B]`; below 0 for drafts that the device has proposed itself.
        masks: uint32 `[B, T, ceil(V / 32)]`.
    """

    drafts: Any
    counts: Any
    masks: Any


class Drafted(NamedTuple):
    """Row of a block before its masks are made: the constraint's state, None without one, and its drafts."""

    state: ConstraintState | None
    drafts: Sequence[int]


def fill_blocks(batch: Sequence[Drafted], rows: int, width: int, vocab: int) -> Blocks:
    """Returns blocks with masks for all rows of a batch. Rows behind the batch allow all tokens.

    Drafts that violate a row's constraint are cut off. Forced text replaces a drafter's drafts.

    Raises:
        ConstraintError: the constraint of a row cannot determine the allowed tokens.
    """
    drafts = np.zeros((rows, width - 1), np.int32)
    counts = np.zeros(rows, np.int32)
    masks = np.full((rows, width, words(vocab)), ALL, np.uint32)
    for row, (state, proposed) in enumerate(batch):
        try:
            if state is not None:
                proposed = forced_first(state.forced(), proposed)
            proposed = proposed[: width - 1]
            counts[row] = len(proposed) if state is None else state.fill(proposed, masks[row])
        except ConstraintError as error:
            error.row = row
            raise
        drafts[row, : counts[row]] = proposed[: counts[row]]
    return Blocks(drafts, counts, masks)


def unconstrained_blocks(rows: int, width: int, vocab: int) -> Blocks:
    """Returns blocks of drafts that the device has proposed, which allow all tokens."""
    return fill_blocks((), rows, width, vocab)._replace(counts=np.full(rows, -1, np.int32))


def block_shapes(rows: int, width: int, vocab: int) -> Blocks:
    """Returns the abstract arrays of blocks."""
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), unconstrained_blocks(rows, width, vocab))


def forced_first(forced: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """Returns the drafts if they begin with the forced tokens, else the forced tokens."""
    return drafts if list(drafts[: len(forced)]) == list(forced) else forced
