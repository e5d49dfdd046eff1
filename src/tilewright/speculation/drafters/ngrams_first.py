"""Drafting with n-grams where the text repeats itself, and with a model elsewhere, row by row within one round.

SuffixDecoding (arXiv 2411.04975) is paired with a model in the same way, by a score of its suffixes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from tilewright.kernels.operations import Operations
from tilewright.runtime import trees
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.ngram import NGram


@dataclass(frozen=True)
class NGramsFirst(OneKind):
    """Drafter that proposes n-gram matches, and another drafter's block in rows without a match.

    A round in which every row has a match skips the other drafter's pass. Every round extends the other drafter's context.

    Attributes:
        other: drafter with weights.
        block_size: tokens in a block, the last token included; at most the other drafter's block size.
        ngram: n-gram drafter. Its block size is ignored.
        nodes: nodes of its trees; 0 for chains. A match is a chain in a tree, too.
    """

    other: Any
    block_size: int
    ngram: NGram
    nodes: int = 0

    may_be_idle = False

    @property
    def branches(self) -> bool:
        return self.other.branches

    @property
    def name(self) -> str:
        return f"{self.ngram.name}+{self.other.name}"

    @property
    def dtype(self) -> str | None:
        return self.other.dtype

    @property
    def declared(self) -> Any:
        return self.other.declared

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.other.tap_layers

    @property
    def reads_target_head(self) -> bool:
        return self.other.reads_target_head

    @property
    def beyond_windows(self) -> int:
        return self.other.beyond_windows

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        return self.other.expected_acceptance

    @property
    def ops(self) -> Operations:
        return self.other.ops

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return self.other.allocate(layout, target, dtype)

    def on_prefill(self, context: Any, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Any:
        return self.other.on_prefill(context, start, admitted)

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        matches = replace(self.ngram, block_size=self.block_size).propose(target, models, state)
        other = replace(self.other, block_size=self.block_size)
        unmatched = (matches.drafts == 0) & ~state.done
        matches = matches._replace(from_ngrams=~unmatched)

        def drafted() -> Proposal:
            learnt = other.propose(target, models, state)
            block = jnp.where(unmatched[:, None], learnt.block, matches.block)
            return Proposal(block, jnp.where(unmatched, learnt.drafts, matches.drafts), ~unmatched)

        if not target.loops:
            return drafted()
        # The branch changes none of its inputs, so XLA:CPU copies no cache for it. A loop of at most one iteration would not
        # do: XLA hoists loop-invariant work out of a loop, which here is the whole pass.
        return jax.lax.cond(jnp.any(unmatched), drafted, lambda: matches)

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> trees.Proposal:
        matches = replace(self.ngram, block_size=self.block_size).propose(target, models, state)
        other = replace(self.other, block_size=self.block_size, nodes=self.nodes)
        unmatched = (matches.drafts == 0) & ~state.done
        chains = trees.chains(matches.block, matches.drafts, self.nodes)

        def drafted() -> trees.DraftTree:
            learnt = other.propose_tree(target, models, state).tree
            return jax.tree.map(lambda x, y: jnp.where(unmatched.reshape(-1, *[1] * (x.ndim - 1)), x, y), learnt, chains)

        # A branch, as in `propose`.
        tree = jax.lax.cond(jnp.any(unmatched), drafted, lambda: chains) if target.loops else drafted()
        return trees.Proposal(tree, ~unmatched)

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        return self.other.extend(target, models, state, taps, start, stop)


def ngrams_first(drafters: Iterable[Any]) -> tuple[Any, ...]:
    """Puts n-grams before every drafter with weights, if n-grams are among the drafters.

    Raises:
        ValueError: there are two drafters without a model, which are "ngram" and "suffix".
    """
    drafters = tuple(drafters)
    found = [drafter for drafter in drafters if isinstance(drafter, NGram)]
    if not found:
        return drafters
    if len(found) > 1:
        raise ValueError(f"expected ngram or suffix, which also matches n-grams, found {found[0].name} and {found[1].name}")
    ngram = found[0]
    return tuple(drafter if drafter is ngram else NGramsFirst(drafter, drafter.block_size, ngram) for drafter in drafters)
