"""Drafters that take turns on one batch, and the rounds that each of them, or none, may draft.

A drafter's context has to hold all positions before the known one, whoever drafted them. The one that drafts extends its own
in each round. For the others the target's hidden states go into an auxiliary buffer, and a context catches up when its
drafter's turn comes, many positions at a time: so a drafter that is off costs next to nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from tilewright.runtime.interfaces import PLAIN, Choice, Proposal, Variant
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters import base

CATCH_UP = 16
"""Positions that contexts take up at a time when they catch up."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contexts:
    """Contexts that a team keeps of its rows.

    Attributes:
        of_members: the context of each drafter.
        held: how many positions, from the first, each of them holds, `[B]`.
        taps: the target's hidden states at all positions that a context lacks, those of the tapped layers side by side,
            `taps * H` of them; None where nothing is tapped.
    """

    of_members: tuple[Any, ...]
    held: tuple[Any, ...]
    taps: Any


@dataclass(frozen=True)
class Team:
    """Team of drafters, one of which is chosen round by round.

    Attributes:
        members: of different names, with as many tokens in a block as each may have.
        widths: those that blocks may have; a member's own block size counts as one where it is fixed by nobody else.
        masked: all rounds run the target over `block_size` rows, whatever their width. Where the target rounds differently with
            the number of rows, only this commits the same tokens whatever is chosen.
    """

    members: tuple[Variant, ...]
    widths: tuple[int, ...]
    masked: bool = False

    name = "auto"
    reads_target_head = False
    declared = None

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected drafters of different kinds, found {', '.join(names) or 'none'}")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Choices that a round has: plain decoding first."""
        drafted = (Choice(member.name, width) for member in self.members for width in self.widths_of(member))
        return PLAIN, *drafted

    def widths_of(self, member: Variant) -> tuple[int, ...]:
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
        """Index of the member that drafts; None for plain decoding."""
        return next((place for place, member in enumerate(self.members) if member.name == choice.drafter), None)

    def turn(self, choice: Choice | None) -> "TeamVariant":
        """The drafter of rounds that do this.

        Raises:
            ValueError: it is none of the choices.
        """
        if choice is None or choice not in self.choices:
            raise ValueError(f"expected one of {'; '.join(map(str, self.choices))}, found {choice}")
        return TeamVariant(self, choice)

    @property
    def contexts(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members if member.tap_layers)

    def params_for(self, models: Models) -> Models:
        return models

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        of_members = tuple(member.allocate(layout, target, dtype) for member in self.members)
        held = tuple(jnp.zeros(layout.batch, jnp.int32) for _ in self.members)
        size = len(self.tap_layers) * target.config.hidden_size
        return Contexts(of_members, held, layout.auxiliary(size, dtype) if size else None)

    def on_prefill(self, context: Contexts, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Contexts:
        return replace(context, held=tuple(jnp.where(admitted, start, held) for held in context.held))

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        """Extends every member's context; see `base.Drafter`."""
        for place in range(len(self.members)):
            state = self.extend_one(place, target, models, state, taps, start, stop)
        return state

    def extend_one(
        self, place: int, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Array, stop: Array
    ) -> DecodeState:
        """Extends the context of one member. Taps are those of all members."""
        member = self.members[place]
        contexts = state.draft_cache
        own = tuple(taps[self.tap_layers.index(layer)] for layer in member.tap_layers)
        after = member.extend(target, *self.seat(place, models, state), own, start, stop)
        of_members = list(contexts.of_members)
        held = list(contexts.held)
        of_members[place] = after.draft_cache
        held[place] = jnp.where(stop > start, stop, held[place])
        return replace(state, draft_cache=replace(contexts, of_members=tuple(of_members), held=tuple(held)))

    def seat(self, place: int, models: Models, state: DecodeState) -> tuple[Models, DecodeState]:
        """Parameters and state as a member knows them."""
        return replace(models, drafter=models.drafter[place]), replace(state, draft_cache=state.draft_cache.of_members[place])


@dataclass(frozen=True)
class TeamVariant:
    """A team in rounds of one kind: a drafter as any other, once its state is `open`."""

    team: Team
    choice: Choice

    reads_target_head = False
    declared = None
    dtype = None
    expected_acceptance = ()

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

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        return (self.choice,)

    @property
    def contexts(self) -> tuple[str, ...]:
        return self.team.contexts

    def turn(self, choice: Choice | None) -> "TeamVariant":
        return self.team.turn(choice)

    def params_for(self, models: Models) -> Models:
        place = self.team.place(self.choice)
        return replace(models, drafter=tuple(own if at == place else None for at, own in enumerate(models.drafter)))

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return self.team.allocate(layout, target, dtype)

    def on_prefill(self, context: Contexts, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Contexts:
        return self.team.on_prefill(context, start, admitted)

    def open(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        """The state with the context of whoever drafts complete."""
        team = self.team
        contexts = state.draft_cache
        # A row may hold another request than it did, and stand before what its contexts held.
        held = tuple(jnp.minimum(each, state.known) for each in contexts.held)
        state = replace(state, draft_cache=replace(contexts, held=held))
        place = team.place(self.choice)
        if place is None or not team.members[place].tap_layers:
            return state

        # Rows that are done draft no more, and may have no memory.
        goal = jnp.where(state.done, held[place], state.known)

        def behind(state: DecodeState) -> Array:
            return jnp.any(state.draft_cache.held[place] < goal)

        def caught_up(state: DecodeState) -> DecodeState:
            contexts = state.draft_cache
            start = state.draft_cache.held[place]
            kept = contexts.taps.at(target.ops, start[:, None] + jnp.arange(CATCH_UP))
            taps = tuple(jnp.split(kept, len(team.tap_layers), axis=-1))
            return team.extend_one(place, target, models, state, taps, start, jnp.minimum(start + CATCH_UP, goal))

        return jax.lax.while_loop(behind, caught_up, state)

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        place = self.team.place(self.choice)
        width = self.block_size
        if place is None:
            block = base.masked_block(state, width, 0)
            return Proposal(block, jnp.zeros(block.shape[:1], jnp.int32))
        member = replace(cast(Any, self.team.members[place]), block_size=self.choice.width)
        proposal = member.propose(target, *self.team.seat(place, models, state))
        return proposal._replace(block=jnp.pad(proposal.block, ((0, 0), (0, width - proposal.block.shape[1]))))

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        """Extends the context of whoever drafts, and keeps the auxiliary hidden states for the others."""
        if self.behind:
            contexts = state.draft_cache
            added = jnp.concatenate(taps, axis=-1)
            kept = contexts.taps.append(target.ops, added, start, stop - start)
            state = replace(state, draft_cache=replace(contexts, taps=kept))
        place = self.team.place(self.choice)
        return state if place is None else self.team.extend_one(place, target, models, state, taps, start, stop)
