"""What every drafter offers: proposals for a block, and a context that it extends by what was accepted."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.decode.layout import Layout
from tilewright.decode.state import DecodeState, Models, Target, known_token


class Proposal(NamedTuple):
    """Drafts for every row.

    Attributes:
        block: the known token, then the drafts, `[B, T]`; what lies behind the last draft is run and never accepted.
        drafts: how many drafts each row has, from 0 to T - 1, `[B]`.
    """

    block: Array
    drafts: Array


@runtime_checkable
class Drafter(Protocol):
    """A frozen, hashable description of how to draft; its arrays are in `Models.drafter` and in `DecodeState.draft_cache`.

    One with arrays has a field `ops` besides: the operations that they were prepared for.
    """

    @property
    def block_size(self) -> int:
        """Tokens in a block, the known one included."""
        ...

    @property
    def name(self) -> str:
        """The drafter's kind."""
        ...

    @property
    def dtype(self) -> str | None:
        """Of its weights and activations; None if it has none."""
        ...

    @property
    def declared(self) -> Any:
        """Its arrays as they are declared (`models.params.ArraySpec`); None if it has none."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers, from 0, whose outputs `extend` reads."""
        ...

    @property
    def reads_target_head(self) -> bool:
        """Whether it drafts through the target's output head."""
        ...

    @property
    def may_be_idle(self) -> bool:
        """Whether a round without any proposal is run as a plain step of one row."""
        ...

    def allocate(self, layout: Layout) -> Any:
        """An empty context for the rows of a layout."""
        ...

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts what follows the known token."""
        ...

    def extend(
        self, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:  # fmt: skip
        """Adds positions `start` to `stop - 1` to the context, from the target's hidden states at `start` onwards.

        Tokens up to `stop` are settled in `state.tokens`. A row whose `stop` is its `start` keeps its context as it is.
        """
        ...


def masked_block(state: DecodeState, size: int, filler: int) -> Int[Array, "B T"]:
    """The known token, and `filler` in every later slot."""
    known = known_token(state)
    return jnp.concatenate([known, jnp.full((known.shape[0], size - 1), filler, known.dtype)], axis=1)


def check_block_size(size: int, window: int | None = None, most: int | None = None) -> None:
    """Raises a `ValueError` if a drafter cannot run with this block or window."""
    if size < 2 or (most is not None and size > most):
        limit = "of at least 2" if most is None else f"from 2 to the drafter's {most}"
        raise ValueError(f"expected a block size {limit}, found {size}")
    if window is not None and window < 1:
        raise ValueError(f"expected a draft window of at least 1, found {window}")
