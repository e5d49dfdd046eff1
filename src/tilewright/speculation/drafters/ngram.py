"""Drafting without a model: what followed the last few tokens where they came before (prompt lookup).

The matching itself is `longest_suffix_match`; no weights, no context, no host.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Int32

from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, known_token
from tilewright.speculation.drafters import base


@dataclass(frozen=True)
class NGram(OneKind):
    """Proposes what followed the longest n-gram that the text now ends with, at its earliest place; nothing if it is new.

    Attributes:
        block_size: tokens in a block, the known one included.
        min_n, max_n: the lengths of n-gram that are tried.
        may_be_idle: a round in which no row has a proposal is a plain step of one row. False runs the whole block then too:
            where a block and a single row round differently, only that commits the tokens of a block-wide program.
    """

    block_size: int = 16
    min_n: int = 2
    max_n: int = 4
    may_be_idle: bool = True

    name = "ngram"
    reads_target_head = False
    dtype = None
    declared = None
    tap_layers = ()

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size)
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(
                f"expected n-gram lengths with 1 <= min_n <= max_n, found min_n {self.min_n} and max_n {self.max_n}"
            )

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return ()

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        drafts, count = longest_suffix_match(state.tokens, state.known, self.min_n, self.max_n, self.block_size - 1)
        return Proposal(jnp.concatenate([known_token(state), drafts], axis=1), count)

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        return state


def longest_suffix_match(
    tokens: Int[Array, "B L"], known: Int[Array, " B"], min_n: int, max_n: int, k: int
) -> tuple[Int32[Array, "B {k}"], Int32[Array, " B"]]:
    """Finds where the end of each row came before, and returns what followed it there.

    The end is the longest n-gram with n from `min_n` to `max_n` that `tokens[: known + 1]` ends with and that also stands
    earlier in it (the two may overlap); of several places the earliest is taken, as vLLM's n-gram proposer does. Comparing the
    buffer with itself shifted costs `max_n` passes over it, whatever the tokens are.

    Args:
        tokens: entries beyond `known` are not read.
        known: position of each row's last token.
        k: the most tokens to return.

    Returns:
        the tokens that followed, up to the one at `known`, with zeros behind them, and how many they are: 0 where nothing
        matched, else from 1 to k.

    Raises:
        ValueError: not 1 <= min_n <= max_n, or k below 1.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"expected n-gram lengths with 1 <= min_n <= max_n, found min_n {min_n} and max_n {max_n}")
    if k < 1:
        raise ValueError(f"expected at least 1 token to propose, found {k}")
    size = tokens.shape[1]
    place = jnp.arange(size)[None]
    last = known[:, None]
    # length[b, i]: how many tokens that end at i are those that end at the row's last one, counted up to max_n.
    length = jnp.zeros(tokens.shape, jnp.int32)
    same = place < last
    for back in range(min(max_n, size)):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :size]
        same = same & (place >= back) & (shifted == wanted)
        length = length + same.astype(jnp.int32)
    longest = jnp.max(length, axis=1, keepdims=True)
    at = jnp.min(jnp.where(length == longest, place, size), axis=1, keepdims=True)
    count = jnp.where(longest >= min_n, jnp.minimum(last - at, k), 0)
    slot = jnp.arange(k)[None]
    followed = jnp.take_along_axis(tokens, jnp.minimum(at + 1 + slot, size - 1), axis=1)
    return jnp.where(slot < count, followed, 0).astype(jnp.int32), count[:, 0].astype(jnp.int32)
