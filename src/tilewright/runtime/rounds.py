"""A step of plain decoding, and a round of speculative decoding, whatever the drafter: propose, verify, accept, extend.

Why the output is the target's own: in each slot the target draws its token from its full, warped distribution with the
randomness of that *position* (`sampling.sample`), and a draft is accepted only if it is that very token. So every token that
is committed is the one that autoregressive decoding with the same seed would have drawn; the draft decides only how many of
them a round may commit. For a drafter that proposes its argmax this has the acceptance probability of the one-hot rejection
rule, p(draft).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.runtime.automaton_table import AutomatonRows, AutomatonTable, advance_committed, follow, has_left
from tilewright.runtime.constraints import Blocks
from tilewright.runtime.interfaces import OneKind, Proposal, Variant
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Step, StepInfo, Target, commit, known_token, verify


def autoregressive_step(target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs the known token through the target and commits the one that follows it."""
    verified = verify(target, models.target, state, known_token(state), ())
    none = jnp.zeros_like(state.known)
    state, committed = commit(target, verified.state, verified.tokens, none)
    return state, StepInfo(verified.tokens, committed, none, none, verified.logprobs)


def speculative_round(drafter: Variant, target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """One round: commits the accepted drafts and one more token from the target."""
    return run_block(drafter, target, models, state, drafter.propose(target, models, state))


def run_block(
    drafter: Variant, target: Target, models: Models, state: DecodeState, proposal: Proposal, masks: Array | None = None
) -> tuple[DecodeState, StepInfo]:
    """A round with the drafts of a proposal; without any, a plain step where the drafter may be idle."""
    if not drafter.may_be_idle:
        return verify_and_extend(drafter, target, models, state, proposal, masks)

    def idle(state: DecodeState) -> tuple[DecodeState, StepInfo]:
        nothing = Proposal(proposal.block[:, :1], jnp.zeros_like(proposal.drafts))
        after, info = verify_and_extend(drafter, target, models, state, nothing, None if masks is None else masks[:, :1])
        return after, info.widened(proposal.block.shape[1])

    def drafted(state: DecodeState) -> tuple[DecodeState, StepInfo]:
        return verify_and_extend(drafter, target, models, state, proposal, masks)

    return one_of(jnp.any((proposal.drafts > 0) & ~state.done), drafted, idle, state)


def one_of(
    first: Array, run: Callable[[DecodeState], Any], otherwise: Callable[[DecodeState], Any], state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """`run(state)` where `first` is true, else `otherwise(state)`.

    A branch, which a chip whose compiler takes none avoids by `may_be_idle`; on a CPU two loops of one turn or none, for XLA
    copies there what it gives to a branch, caches and all, and updates in place what a loop carries.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.cond(first, run, otherwise, state)
    turns = first.astype(jnp.int32)
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(run, state)[1])
    carry = jax.lax.fori_loop(0, turns, lambda _, carry: run(carry[0]), (state, nothing))
    return jax.lax.fori_loop(0, 1 - turns, lambda _, carry: otherwise(carry[0]), carry)


def verify_and_extend(
    drafter: Variant, target: Target, models: Models, state: DecodeState, proposal: Proposal, masks: Array | None = None
) -> tuple[DecodeState, StepInfo]:
    """Runs the block through the target, commits what it agrees with, and extends the drafter's context by that."""
    block = proposal.block
    verified = verify(target, models.target, state, block, drafter.tap_layers, masks)
    is_draft = jnp.arange(block.shape[1] - 1)[None] < proposal.drafts[:, None]
    agrees = is_draft & (block[:, 1:] == verified.tokens[:, :-1])
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
    after, committed = commit(target, verified.state, verified.tokens, accepted)
    after = drafter.extend(target, models, after, verified.taps, state.known, after.known)
    drafted, accepted = (jnp.where(state.done, 0, count) for count in (proposal.drafts, accepted))
    return after, StepInfo(verified.tokens, committed, drafted, accepted, verified.logprobs)


@dataclass(frozen=True)
class HostDrafts(OneKind):
    """Stands in for a drafter where there is none, in rounds under masks: all that is drafted is text that has to come.

    Attributes:
        may_be_idle: False for a compiler that takes no branches.
    """

    block_size: int
    may_be_idle: bool

    name = "none"
    reads_target_head = False
    dtype = None
    declared = None
    tap_layers = ()

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return ()

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        rest = jnp.zeros((state.known.shape[0], self.block_size - 1), jnp.int32)
        return Proposal(jnp.concatenate([known_token(state), rest], axis=1), jnp.zeros_like(state.known))

    def extend(
        self, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Array, stop: Array
    ) -> DecodeState:
        return state


def constrained_round(
    drafter: Variant, target: Target, models: Models, state: DecodeState, given: Blocks
) -> tuple[DecodeState, StepInfo, Array]:
    """One round of the host's drafts under its masks, and the drafts for the next one, as `Reports.proposed` has them.

    So the host knows drafts before they are run, and makes their masks; see `constraints.py`.
    """
    proposal = Proposal(jnp.concatenate([known_token(state), given.drafts], axis=1), jnp.asarray(given.counts))
    state, info = run_block(drafter, target, models, state, proposal, jnp.asarray(given.masks))
    block, drafts = drafter.propose(target, models, state)
    return state, info, jnp.concatenate([drafts[:, None], block[:, 1:]], axis=1)


def automaton_round(
    drafter: Variant, table: AutomatonTable, rows: AutomatonRows, target: Target, models: Models, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """One round under the masks of the rows' automata, which go on with what it commits.

    A row that leaves its automaton counts as done until the dispatch ends.
    """
    drafted = drafter.propose(target, models, state)
    followed = follow(table, rows.place, state.automaton, drafted.block[:, 1:], drafted.drafts)
    proposal = Proposal(jnp.concatenate([drafted.block[:, :1], followed.drafts], axis=1), followed.counts)
    masks = table.of(rows.place, followed.states)
    after, info = run_block(drafter, target, models, state, proposal, masks)
    states = advance_committed(table, rows.place, followed.states, info.tokens, info.committed)
    return replace(after, automaton=states, done=after.done | has_left(states)), info


def step_of(drafter: Variant | None, target: Target) -> Step:
    """The step that a decode loop runs: a round with the drafter, or an autoregressive step without one."""

    def step(models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        if drafter is None:
            return autoregressive_step(target, models, state)
        return speculative_round(drafter, target, models, state)

    return step
