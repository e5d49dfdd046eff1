"""Step of plain decoding, and round of speculative decoding with any drafter: propose, verify, accept, extend.

The output equals the target's own: in each slot the target draws its token from its full, warped distribution with the
randomness of that *position* (`sampling.sample`), and a draft is accepted only if it is that token. So every committed token is
the token that autoregressive decoding with the same seed would have drawn. Drafts determine only how many tokens a round
commits. For a drafter that proposes its argmax, the acceptance probability is that of the one-hot rejection rule, p(draft).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.runtime.automaton_table import AutomatonRows, AutomatonTable, advance_committed, follow, has_left, starting
from tilewright.runtime.constraints import Blocks
from tilewright.runtime.interfaces import OneKind, Proposal, Variant
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import (
    DecodeState,
    Models,
    Step,
    StepInfo,
    Target,
    commit,
    last_token,
    verify,
    verify_tree,
    with_path,
)
from tilewright.runtime.trees import accepted_nodes, along, path_of


def autoregressive_step(target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs the last committed token through the target, and commits the next one."""
    verified = verify(target, models.target, state, last_token(state), ())
    none = jnp.zeros_like(state.last_position)
    state, committed = commit(target, verified.state, verified.tokens, none)
    return state, StepInfo(verified.tokens, committed, none, none, verified.logprobs)


def speculative_round(drafter: Variant, target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs a round: commits the accepted drafts and one more token from the target."""
    if drafter.nodes:
        return tree_round(drafter, target, models, state)
    return run_block(drafter, target, models, state, drafter.propose(target, models, state))


def run_block(
    drafter: Variant, target: Target, models: Models, state: DecodeState, proposal: Proposal, masks: Array | None = None
) -> tuple[DecodeState, StepInfo]:
    """Runs a round with given drafts. If no row has a draft and the drafter may be idle, it is a plain step."""
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
) -> tuple[DecodeState, Any]:
    """Returns `run(state)` if `first` is true, else `otherwise(state)`.

    It is a branch; a drafter for a chip whose compiler takes no branches sets `may_be_idle` to False. On a CPU it is two loops
    of at most one iteration: XLA:CPU copies the inputs of a branch, caches included, and updates the carry of a loop in place.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.cond(first, run, otherwise, state)
    iterations = first.astype(jnp.int32)
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(run, state)[1])
    carry = jax.lax.fori_loop(0, iterations, lambda _, carry: run(carry[0]), (state, nothing))
    return jax.lax.fori_loop(0, 1 - iterations, lambda _, carry: otherwise(carry[0]), carry)


def verify_and_extend(
    drafter: Variant, target: Target, models: Models, state: DecodeState, proposal: Proposal, masks: Array | None = None
) -> tuple[DecodeState, StepInfo]:
    """Runs the block through the target, commits the accepted drafts, and extends the drafter's context by them."""
    block = proposal.block
    verified = verify(target, models.target, state, block, drafter.tap_layers, masks)
    is_draft = jnp.arange(block.shape[1] - 1)[None] < proposal.drafts[:, None]
    agrees = is_draft & (block[:, 1:] == verified.tokens[:, :-1])
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
    after, committed = commit(target, verified.state, verified.tokens, accepted)
    after = drafter.extend(target, models, after, verified.taps, state.last_position, after.last_position)
    drafted, accepted = (jnp.where(state.done, 0, count) for count in (proposal.drafts, accepted))
    return after, StepInfo(verified.tokens, committed, drafted, accepted, verified.logprobs, proposal.from_ngrams)


def tree_round(drafter: Variant, target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs a round with trees: the target's own tokens choose a path, whose keys and values alone enter the caches."""
    tree, from_ngrams = drafter.propose_tree(target, models, state)
    verified = verify_tree(target, models.target, state, tree, drafter.tap_layers)
    on_path = accepted_nodes(tree, verified.tokens)
    path = path_of(tree, on_path, drafter.block_size)
    accepted = jnp.sum(on_path, axis=1) - 1
    tokens = along(path, verified.tokens)
    after, committed = commit(target, state, tokens, accepted)
    after = replace(after, target_cache=with_path(target, verified.entries, path, state.last_position, committed))
    taps = tuple(along(path, tap) for tap in verified.taps)
    after = drafter.extend(target, models, after, taps, state.last_position, after.last_position)
    drafted, accepted = (jnp.where(state.done, 0, count) for count in (tree.drafts, accepted))
    logprobs = jax.tree.map(partial(along, path), verified.logprobs)
    return after, StepInfo(tokens, committed, drafted, accepted, logprobs, from_ngrams)


@dataclass(frozen=True)
class HostDrafts(OneKind):
    """Drafter without a model, for rounds under masks: only forced text is drafted.

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
        rest = jnp.zeros((state.last_position.shape[0], self.block_size - 1), jnp.int32)
        return Proposal(jnp.concatenate([last_token(state), rest], axis=1), jnp.zeros_like(state.last_position))

    def extend(
        self, target: Target, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Array, stop: Array
    ) -> DecodeState:
        return state


class RowMasks(NamedTuple):
    """Masks of a program's rows, made by the host, by automata on the device, or both.

    A token must be allowed by both sources. For each row at most one source restricts tokens: the host's blocks allow all
    tokens, or the row's place in the table is that of rows without a constraint.

    Attributes:
        blocks: the host's masks for a single round; for any number of rounds where they allow all tokens.
        automata: automata of the rows, and the state of each row; None if the device makes no masks.
    """

    blocks: Blocks
    automata: tuple[AutomatonTable, AutomatonRows] | None = None


def begin_masked(masks: RowMasks, state: DecodeState) -> DecodeState:
    """Sets the rows' automaton states. Rows that have left their automaton count as done until the host continues them."""
    if masks.automata is None:
        return state
    states = starting(masks.automata[1], state.automaton)
    return replace(state, automaton=states, done=state.done | has_left(states))


def masked_round(
    drafter: Variant, masks: RowMasks, target: Target, models: Models, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """Runs a round with drafts from the round before, and drafts for the next one, which it leaves in the state.

    So the host can make masks for drafts before they are run; see `constraints.py`. A row that leaves its automaton counts as
    done until the dispatch ends.
    """
    blocks = masks.blocks
    allowed = jnp.asarray(masks.blocks.masks)
    counts = jnp.where(blocks.counts < 0, state.proposed[:, 0], blocks.counts)
    drafts = jnp.where(blocks.counts[:, None] < 0, state.proposed[:, 1:], blocks.drafts)
    states = jnp.zeros_like(state.proposed)
    if masks.automata is not None:
        table, rows = masks.automata
        drafts, counts, states = follow(table, rows.place, state.automaton, drafts, counts)
        allowed = allowed & table.masks_at(rows.place, states)
    proposal = Proposal(jnp.concatenate([last_token(state), drafts], axis=1), counts)
    after, info = run_block(drafter, target, models, state, proposal, allowed)
    if masks.automata is not None:
        table, rows = masks.automata
        reached = advance_committed(table, rows.place, states, info.tokens, info.committed)
        after = replace(after, automaton=reached, done=after.done | has_left(reached))
    proposal = drafter.propose(target, models, after)
    return replace(after, proposed=jnp.concatenate([proposal.drafts[:, None], proposal.block[:, 1:]], axis=1)), info


def end_masked(masks: RowMasks, state: DecodeState) -> DecodeState:
    """Restores `done` of rows that have left their automata: they are done only at their end."""
    if masks.automata is None:
        return state
    return replace(state, done=jnp.where(has_left(state.automaton), state.last_position >= state.end - 1, state.done))


def step_of(drafter: Variant | None, target: Target, masks: RowMasks | None = None) -> Step:
    """Returns the step of a decode loop: a round with the drafter, masked if there are masks, or a plain step without one."""
    if drafter is None:
        return partial(autoregressive_step, target)
    return partial(speculative_round, drafter, target) if masks is None else partial(masked_round, drafter, masks, target)
