"""Drafting without a model: the tokens that followed an earlier occurrence of the last tokens (prompt lookup).

`longest_suffix_match` runs on the device. The drafters have no weights and no context. `Suffix` also searches other texts.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, last_token
from tilewright.speculation import suffix_index
from tilewright.speculation.drafters import base
from tilewright.speculation.suffix_index import Found


@dataclass(frozen=True)
class NGram(OneKind):
    """Proposes the continuation of the longest n-gram that ends the text and occurred before; nothing if there is none.

    Attributes:
        block_size: tokens in a block, the last token included.
        min_n, max_n: shortest and longest n-gram that are matched.
        may_be_idle: True runs a decode step of one token in rounds without a proposal. False runs the whole block: where a
            block and a single token round differently, only this commits the tokens of a block-wide program.
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
        found = self.found(models, state)
        return Proposal(jnp.concatenate([last_token(state), found.drafts], axis=1), found.number)

    def found(self, models: Models, state: DecodeState) -> Found:
        """Returns each row's drafts."""
        return longest_suffix_match(state.tokens, state.last_position, self.min_n, self.max_n, self.block_size - 1)

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


@dataclass(frozen=True)
class Suffix(NGram):
    """Proposes the continuation of the longest suffix that occurred before, in the row's text or in those of a corpus.

    The longer of the two matches counts; of equal ones the row's own. Without a corpus it matches longer suffixes than `NGram`
    does. The index of the corpus is `Models.corpus`.

    Attributes:
        min_score: least number of drafts that a match in the corpus has to promise; see `suffix_index.find`.
    """

    max_n: int = suffix_index.DEPTH
    min_score: float = 2.0

    name = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_n < suffix_index.SHORTEST or self.max_n > suffix_index.DEPTH:
            limits = f"from {suffix_index.SHORTEST} to {suffix_index.DEPTH}"
            raise ValueError(f"expected suffix lengths {limits}, found min_n {self.min_n} and max_n {self.max_n}")

    def found(self, models: Models, state: DecodeState) -> Found:
        row = super().found(models, state)
        if models.corpus is None:
            return row
        lengths = (self.min_n, self.max_n)
        other = suffix_index.find(
            models.corpus, state.tokens, state.last_position, *lengths, self.min_score, self.block_size - 1
        )
        longer = other.length > row.length
        drafts = jnp.where(longer[:, None], other.drafts, row.drafts)
        return Found(drafts, *(jnp.where(longer, a, b) for a, b in zip(other[1:], row[1:], strict=True)))


def longest_suffix_match(tokens: Int[Array, "B L"], last_position: Int[Array, " B"], min_n: int, max_n: int, k: int) -> Found:
    """Finds an earlier occurrence of each row's last n-gram and returns the tokens that followed.

    The n-gram is the longest suffix of `tokens[: last_position + 1]` with `min_n` to `max_n` tokens that also occurs earlier
    in the row (the two may overlap). Of several occurrences the earliest counts, as in vLLM's n-gram proposer. The cost is
    `max_n` passes over the buffer, independent of the tokens.

    Args:
        tokens: entries beyond `last_position` are ignored.
        last_position: position of each row's last token.
        k: maximum number of tokens to return.

    Returns:
        The tokens that followed, up to `last_position`. Each match has at least one.

    Raises:
        ValueError: min_n < 1, max_n < min_n, or k < 1.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"expected n-gram lengths with 1 <= min_n <= max_n, found min_n {min_n} and max_n {max_n}")
    if k < 1:
        raise ValueError(f"expected at least 1 token to propose, found {k}")
    size = tokens.shape[1]
    place = jnp.arange(size)[None]
    last = last_position[:, None]
    # length[b, i]: length of the common suffix of tokens[: i + 1] and the row, up to max_n.
    length = jnp.zeros(tokens.shape, jnp.int32)
    same = place < last
    for back in range(min(max_n, size)):
        suffix_token = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :size]
        same = same & (place >= back) & (shifted == suffix_token)
        length = length + same.astype(jnp.int32)
    longest = jnp.max(length, axis=1, keepdims=True)
    match_end = jnp.min(jnp.where(length == longest, place, size), axis=1, keepdims=True)
    count = jnp.where(longest >= min_n, jnp.minimum(last - match_end, k), 0)
    slot = jnp.arange(k)[None]
    followed = jnp.take_along_axis(tokens, jnp.minimum(match_end + 1 + slot, size - 1), axis=1)
    drafts, count, longest = (each.astype(jnp.int32) for each in (jnp.where(slot < count, followed, 0), count, longest))
    return Found(drafts, count[:, 0], jnp.where(count > 0, longest, 0)[:, 0])
