"""Drafters that take turns on one batch, and the rounds that each of them, or none, may draft.

Every drafter's context has to hold all positions before the known one, whoever drafted them. The one that drafts extends its
context in each round. For the others the rounds of a dispatch set the target's hidden states aside, and their contexts catch up
when it ends, many positions at a time: so a drafter that is off costs next to nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.decode.drafters import base
from tilewright.decode.drafters.base import Drafter, Proposal
from tilewright.decode.policy import PLAIN, Choice
from tilewright.decode.state import DecodeState, Models, Target
from tilewright.kernels import select
from tilewright.kernels.operations import Operations

CATCH_UP = 16
"""Positions that contexts take up at a time when they catch up."""


def rows_alike(ops: Operations, dtype: str) -> bool:
    """Whether the target gives a row the same tokens however many rows run with it: the CPU kernels do, and float32."""
    return ops.name.startswith("cpu ") or dtype == "float32"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SetAside:
    """The drafters' contexts in the middle of a dispatch.

    Attributes:
        contexts: of each drafter.
        taps: the target's hidden states at positions from `start` on, `[B, positions, H]` each.
        start: `[B]`; where the dispatch began.
    """

    contexts: tuple[Any, ...]
    taps: tuple[Any, ...]
    start: Any


@dataclass(frozen=True)
class Team:
    """What drafts where it is chosen round by round.

    Attributes:
        members: of different names, with as many tokens in a block as each may have.
        widths: those that blocks may have; a member's own block size counts as one where it is fixed by nobody else.
        masked: all rounds run the target over `block_size` rows, whatever their width. Where the target rounds differently with
            the number of rows, only this settles the same tokens whatever is chosen.
    """

    members: tuple[Drafter, ...]
    widths: tuple[int, ...]
    masked: bool = False

    name = "auto"

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected drafters of different kinds, found {', '.join(names) or 'none'}")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What rounds may do: plain decoding first."""
        drafted = (Choice(member.name, width) for member in self.members for width in self.widths_of(member))
        return PLAIN, *drafted

    def widths_of(self, member: Drafter) -> tuple[int, ...]:
        """The widths of a member's blocks: those of the table that it can draft, and its own, which is the widest."""
        return (*(width for width in self.widths if width < member.block_size), member.block_size)

    @property
    def block_size(self) -> int:
        return max(member.block_size for member in self.members)

    @property
    def dtype(self) -> str | None:
        return next((member.dtype for member in self.members if member.dtype is not None), None)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for member in self.members for layer in member.tap_layers}))

    def place(self, choice: Choice) -> int | None:
        """Which member drafts; None for plain decoding."""
        return next((place for place, member in enumerate(self.members) if member.name == choice.drafter), None)

    def turn(self, choice: Choice) -> "Turn":
        """The drafter of rounds that do this.

        Raises:
            ValueError: it is none of the choices.
        """
        if choice not in self.choices:
            raise ValueError(f"expected one of {'; '.join(map(str, self.choices))}, found {choice}")
        return Turn(self, choice)

    def allocate(self, batch: int, capacity: int) -> Any:
        return tuple(member.allocate(batch, capacity) for member in self.members)

    def extend(
        self, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:  # fmt: skip
        """Extends every member's context; see `base.Drafter`."""
        for place in range(len(self.members)):
            state = self.extend_one(place, target, models, state, taps, start, stop)
        return state

    def extend_one(
        self, place: int, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Array, stop: Array
    ) -> DecodeState:
        """The same for one member. Taps are those of all members."""
        member, contexts = self.members[place], state.draft_cache
        own = tuple(taps[self.tap_layers.index(layer)] for layer in member.tap_layers)
        after = member.extend(target, *self.seat(place, models, state), own, start, stop)
        return replace(state, draft_cache=(*contexts[:place], after.draft_cache, *contexts[place + 1 :]))

    def seat(self, place: int, models: Models, state: DecodeState) -> tuple[Models, DecodeState]:
        """Parameters and state as a member knows them."""
        return replace(models, drafter=models.drafter[place]), replace(state, draft_cache=state.draft_cache[place])


@dataclass(frozen=True)
class Turn:
    """A team in rounds of one kind: a drafter as any other, for the step of one round; `opened` for a dispatch of many."""

    team: Team
    choice: Choice

    reads_target_head = False
    declared = None
    dtype = None

    @property
    def name(self) -> str:
        return self.choice.drafter

    @property
    def block_size(self) -> int:
        return self.team.block_size if self.team.masked else self.choice.width

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.team.tap_layers

    @property
    def may_be_idle(self) -> bool:
        place = self.team.place(self.choice)
        return place is not None and self.team.members[place].may_be_idle and not self.team.masked

    @property
    def behind(self) -> tuple[int, ...]:
        """The members whose contexts this turn does not extend in each round."""
        active = self.team.place(self.choice)
        return tuple(n for n, member in enumerate(self.team.members) if n != active and member.tap_layers)

    def allocate(self, batch: int, capacity: int) -> Any:
        return self.team.allocate(batch, capacity)

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        place, width = self.team.place(self.choice), self.block_size
        if place is None:
            block = base.masked_block(state, width, 0)
            return Proposal(block, jnp.zeros(block.shape[:1], jnp.int32))
        member = replace(cast(Any, self.team.members[place]), block_size=self.choice.width)
        if isinstance(state.draft_cache, SetAside):
            state = replace(state, draft_cache=state.draft_cache.contexts)
        block, drafts = member.propose(target, *self.team.seat(place, models, state))
        return Proposal(jnp.pad(block, ((0, 0), (0, width - block.shape[1]))), drafts)

    def extend(
        self, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:  # fmt: skip
        """Extends all contexts; in an opened dispatch that of whoever drafts, and sets aside the taps for the others."""
        aside = state.draft_cache
        if not isinstance(aside, SetAside):
            return self.team.extend(target, models, state, taps, start, stop)
        begin, count = start - aside.start, stop - start
        kept = tuple(select.write(all_taps, new, begin, count) for all_taps, new in zip(aside.taps, taps, strict=True))
        state, place = replace(state, draft_cache=aside.contexts), self.team.place(self.choice)
        if place is not None:
            state = self.team.extend_one(place, target, models, state, taps, start, stop)
        return replace(state, draft_cache=SetAside(state.draft_cache, kept, aside.start))

    def opened(self, target: Target, state: DecodeState, rounds: int) -> DecodeState:
        """The state for a dispatch of so many rounds at most."""
        if not self.behind:
            return state
        shape = (state.known.shape[0], -(-rounds * self.block_size // CATCH_UP) * CATCH_UP, target.config.hidden_size)
        dtype = jax.tree.leaves(state.target_cache)[0].dtype
        return replace(
            state,
            draft_cache=SetAside(state.draft_cache, tuple(jnp.zeros(shape, dtype) for _ in self.tap_layers), state.known),
        )

    def closed(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        """The state after the dispatch, every context complete again."""
        aside = state.draft_cache
        if not isinstance(aside, SetAside):
            return state

        def going(carry: tuple[DecodeState, Array]) -> Array:
            return jnp.any(aside.start + carry[1] < carry[0].known)

        def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
            state, n = carry
            taps = tuple(jax.lax.dynamic_slice_in_dim(tap, n, CATCH_UP, axis=1) for tap in aside.taps)
            start = aside.start + n
            stop = jnp.clip(state.known, start, start + CATCH_UP)
            for place in self.behind:
                state = self.team.extend_one(place, target, models, state, taps, start, stop)
            return state, n + CATCH_UP

        return jax.lax.while_loop(going, body, (replace(state, draft_cache=aside.contexts), jnp.int32(0)))[0]
