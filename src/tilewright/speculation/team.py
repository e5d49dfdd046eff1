"""Teams: several drafters of one batch, one of which drafts in each round, or none.

A drafter's context must hold all positions before the last token. The drafter of a round extends its own context. For the
others, the target's auxiliary hidden states go into a buffer, and a context catches up many positions at a time when its
drafter runs again. A drafter that is off therefore costs next to nothing.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from tilewright.runtime import trees
from tilewright.runtime.interfaces import PLAIN, Choice, Proposal, Variant
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters import base
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.drafters.ngrams_first import NGramsFirst

CATCH_UP = 16
"""Positions per step of a catch-up."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contexts:
    """Contexts of a team.

    Attributes:
        by_member: context of each drafter.
        lengths: number of positions, from the first, that each context holds, `[B]`.
        taps: auxiliary hidden states of the target at the positions that contexts lack, the tapped layers concatenated,
            `[..., taps * H]`; None without tapped layers.
    """

    by_member: tuple[Any, ...]
    lengths: tuple[Any, ...]
    taps: Any


@dataclass(frozen=True)
class Team:
    """Team of drafters, one of which drafts in each round.

    Attributes:
        members: drafters of different names, each with its widest block.
        widths: block widths of the shape table; each member's own block size is added.
        masked: True runs the target over `block_size` tokens in every round. Where the target rounds differently with the
            number of tokens, only this commits the same tokens whatever the policy chooses.
        trees: numbers of nodes of the trees of members that draft trees. A tree may be as deep as the member's widest block.
    """

    members: tuple[Variant, ...]
    widths: tuple[int, ...]
    masked: bool = False
    trees: tuple[int, ...] = ()

    name = "auto"
    reads_target_head = False
    declared = None

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected drafters of different kinds, found {', '.join(names) or 'none'}")
        if self.trees and self.masked:
            raise ValueError("expected no trees, since all rounds have the width of the widest block, found some")

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices of a round, plain decoding first."""
        return self._choices

    @cached_property
    def _choices(self) -> tuple[Choice, ...]:
        drafted = (Choice(member.name, width) for member in self.members for width in self.widths_of(member))
        branching = [member for member in self.members if member.branches]
        grown = (Choice(each.name, min(each.block_size, nodes), nodes) for each in branching for nodes in self.trees)
        return PLAIN, *drafted, *grown

    @property
    def nodes(self) -> int:
        return max((choice.nodes for choice in self.choices), default=0)

    def widths_of(self, member: Variant) -> tuple[int, ...]:
        """Returns the block widths of a member: narrower widths of the table, then its own block size."""
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

    @property
    def beyond_windows(self) -> int:
        return max(member.beyond_windows for member in self.members)

    def place(self, choice: Choice) -> int | None:
        """Returns the index of the choice's drafter; None for plain decoding."""
        return next((place for place, member in enumerate(self.members) if member.name == choice.drafter), None)

    def variant(self, choice: Choice | None) -> "TeamVariant":
        """Returns the drafter of rounds with this choice.

        Raises:
            ValueError: the team does not have this choice.
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
        by_member = tuple(member.allocate(layout, target, dtype) for member in self.members)
        lengths = tuple(jnp.zeros(layout.batch, jnp.int32) for _ in self.members)
        size = len(self.tap_layers) * target.config.hidden_size
        return Contexts(by_member, lengths, layout.auxiliary(size, dtype) if size else None)

    def on_prefill(self, context: Contexts, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Contexts:
        return replace(context, lengths=tuple(jnp.where(admitted, start, lengths) for lengths in context.lengths))

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        """Extends every member's context; see `runtime.interfaces.Drafter`."""
        for place in range(len(self.members)):
            state = self.extend_one(place, target, models, state, taps, start, stop)
        return state

    def extend_one(
        self, place: int, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Array, stop: Array
    ) -> DecodeState:
        """Extends the context of one member, given the taps of all members."""
        member = self.members[place]
        contexts = state.draft_cache
        tapped = tuple(taps[self.tap_layers.index(layer)] for layer in member.tap_layers)
        after = member.extend(target, *self.member_state(place, models, state), tapped, start, stop)
        by_member = list(contexts.by_member)
        lengths = list(contexts.lengths)
        by_member[place] = after.draft_cache
        lengths[place] = jnp.where(stop > start, stop, lengths[place])
        return replace(state, draft_cache=replace(contexts, by_member=tuple(by_member), lengths=tuple(lengths)))

    def member_state(self, place: int, models: Models, state: DecodeState) -> tuple[Models, DecodeState]:
        """Returns the parameters and the state from one member's point of view."""
        return replace(models, drafter=models.drafter[place]), replace(state, draft_cache=state.draft_cache.by_member[place])


@dataclass(frozen=True)
class TeamVariant:
    """A team in rounds of one choice. It is a drafter like any other once `complete_context` prepared the state."""

    team: Team
    choice: Choice

    branches = False
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
    def nodes(self) -> int:
        return self.choice.nodes

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.team.tap_layers

    @property
    def beyond_windows(self) -> int:
        return self.team.beyond_windows

    @property
    def may_be_idle(self) -> bool:
        place = self.team.place(self.choice)
        return place is not None and self.team.members[place].may_be_idle and not self.team.masked

    @property
    def stale_members(self) -> tuple[int, ...]:
        """Indices of the members whose contexts these rounds do not extend."""
        active = self.team.place(self.choice)
        return tuple(n for n, member in enumerate(self.team.members) if n != active and member.tap_layers)

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        return (self.choice,)

    @property
    def contexts(self) -> tuple[str, ...]:
        return self.team.contexts

    def variant(self, choice: Choice | None) -> "TeamVariant":
        return self.team.variant(choice)

    def params_for(self, models: Models) -> Models:
        place = self.team.place(self.choice)
        searches = place is not None and isinstance(self.team.members[place], NGram | NGramsFirst)
        drafter = tuple(params if at == place else None for at, params in enumerate(models.drafter))
        return replace(models, drafter=drafter, corpus=models.corpus if searches else None)

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return self.team.allocate(layout, target, dtype)

    def on_prefill(self, context: Contexts, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Contexts:
        return self.team.on_prefill(context, start, admitted)

    def complete_context(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        """Brings the context of the choice's drafter up to date."""
        team = self.team
        contexts = state.draft_cache
        # A slot may hold a new request, which is shorter than the context of the one before.
        lengths = tuple(jnp.minimum(length, state.last_position) for length in contexts.lengths)
        state = replace(state, draft_cache=replace(contexts, lengths=lengths))
        place = team.place(self.choice)
        if place is None or not team.members[place].tap_layers:
            return state

        # Finished rows draft no more and may have no pages.
        goal = jnp.where(state.done, lengths[place], state.last_position)

        def is_behind(state: DecodeState) -> Array:
            return jnp.any(state.draft_cache.lengths[place] < goal)

        def catch_up(state: DecodeState) -> DecodeState:
            contexts = state.draft_cache
            start = state.draft_cache.lengths[place]
            buffered = contexts.taps.at(target.ops, start[:, None] + jnp.arange(CATCH_UP))
            taps = tuple(jnp.split(buffered, len(team.tap_layers), axis=-1))
            return team.extend_one(place, target, models, state, taps, start, jnp.minimum(start + CATCH_UP, goal))

        return jax.lax.while_loop(is_behind, catch_up, state)

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        place = self.team.place(self.choice)
        width = self.block_size
        if place is None:
            block = base.masked_block(state, width, 0)
            return Proposal(block, jnp.zeros(block.shape[:1], jnp.int32))
        member = replace(cast(Any, self.team.members[place]), block_size=self.choice.width)
        proposal = member.propose(target, *self.team.member_state(place, models, state))
        return proposal._replace(block=jnp.pad(proposal.block, ((0, 0), (0, width - proposal.block.shape[1]))))

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> trees.Proposal:
        place = self.team.place(self.choice)
        assert place is not None, "plain decoding drafts no trees"
        member = replace(cast(Any, self.team.members[place]), block_size=self.choice.width, nodes=self.choice.nodes)
        return member.propose_tree(target, *self.team.member_state(place, models, state))

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        """Extends the context of the choice's drafter and buffers the auxiliary hidden states for the others."""
        if self.stale_members:
            contexts = state.draft_cache
            added = jnp.concatenate(taps, axis=-1)
            buffer = contexts.taps.append(target.ops, added, start, stop - start)
            state = replace(state, draft_cache=replace(contexts, taps=buffer))
        place = self.team.place(self.choice)
        return state if place is None else self.team.extend_one(place, target, models, state, taps, start, stop)
