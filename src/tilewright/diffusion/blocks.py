"""Denoising of blocks over a KV cache: options, state of the rows, and the pass that a program repeats.

The tokens of a block see each other and all blocks before. Finished blocks have exact keys and values in the cache. A pass runs
the current block of every row, writes its keys and values, and commits tokens in place of some masks. A pass that begins
without a mask leaves the block's final keys and values, and the row goes on to its next block. So rows in all phases share a
pass. `models.config.MaskedBlocks` says how the blocks of a model differ: where they begin, what their final keys and values
see, and whether the pass that stores a block also chooses the next block's first token.

With edits, tokens of the current block may be replaced by others until a pass changes none, or as many passes as allowed ran
without masks. A block whose last pass changed nothing has its final keys and values.

Sources: SDAR (arXiv 2510.06303) and its published `generate.py`; Nemotron-Labs-Diffusion (arXiv 2607.05722) and `generate` in
its published `modeling_nemotron_labs_diffusion.py`; Fast-dLLM v2 (arXiv 2509.26328) and `generate` in its published
`modeling.py`; for edits LLaDA2.1 (arXiv 2602.08676) and `generate` in its published `modeling_llada2_moe.py`.

Legend: B rows of a batch, T positions of a block, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, UInt32

from tilewright.diffusion.commit import Choices, choose
from tilewright.diffusion.options import REMASKING
from tilewright.kernels import select
from tilewright.models import decoder
from tilewright.models.config import MaskedBlocks
from tilewright.runtime.logprobs import MOST_ALTERNATIVES, Logprobs, logprobs_of
from tilewright.runtime.per_row import penalises
from tilewright.runtime.prefill import tokens_at
from tilewright.runtime.rounds import one_of
from tilewright.runtime.sampling import penalise
from tilewright.runtime.state import (
    NOT_FINITE,
    DecodeState,
    Models,
    Reports,
    Span,
    Target,
    block_positions,
    commit,
    run_target,
)

Strategy = Literal["low_confidence_dynamic", "low_confidence_static", "sequential", "joint_threshold"]
"""Rule that selects the masks which a pass replaces, as in the code of SDAR and LLaDA2.

"low_confidence_dynamic": all tokens above the threshold, or the pass's quota of the most probable ones if these are more.
"low_confidence_static": the quota of the most probable tokens. "sequential": the quota of the first masks.
"joint_threshold": as "low_confidence_dynamic", with edits.
"""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DEFAULT_STRATEGY: Strategy = "low_confidence_dynamic"
READ_BY: dict[str, tuple[Strategy, ...]] = {
    "threshold": ("low_confidence_dynamic", "joint_threshold"),
    "edit_threshold": ("joint_threshold",),
    "max_post_steps": ("joint_threshold",),
}
"""Strategies that read an option; all strategies read the others."""
FREE_TOKENS = 256
"""Tokens of a pass up to which more tokens cost little on TPUs and GPUs, since reading the weights takes longer.

A chip computes about so many products per weight in the time of reading it (v5e: 240, H100: 295, in bfloat16).
"""
JOINT_THRESHOLD = 0.5
"""Default threshold of "joint_threshold": that of the speed mode of LLaDA2.1's model card, and of SGLang's `JointThreshold`."""
MOST_POST_STEPS = 1000
"""Maximum of `max_post_steps`."""
BY_PROBABILITY = REMASKING.index("maskgit_plus")
"""Rule of `commit.choose` whose probabilities are those after temperature and filters, if a row draws."""
BY_PLAIN_PROBABILITY = REMASKING.index("low_confidence")
"""Rule of `commit.choose` whose probabilities are those before temperature and filters."""


@dataclass(frozen=True)
class BlockDenoising:
    """Options of a request to a model whose blocks are denoised.

    Attributes:
        strategy: rule that selects the masks which a pass replaces.
        threshold: probability above which "low_confidence_dynamic" and "joint_threshold" commit a token; None for the model's
            published default, or 0.5 for "joint_threshold".
        steps: the most passes of a block, whose quotas are as even as possible; None for as many as a block has tokens to
            denoise.
        small_block_size: tokens of the parts of a block that are denoised one after the other, a divisor of the block's length;
            None for the model's published default. `steps` are shared by the parts, and have to be a multiple of their number.
        left_to_right: each pass commits the first mask alone, whatever the strategy, and the token is delivered at once. Rows
            with a constraint are denoised so, since only the text before a token tells which tokens it may be. There are no
            edits.
        edit_threshold: probability above which "joint_threshold" replaces a token of the block by another.
        max_post_steps: the most passes of "joint_threshold" over a block without masks.
    """

    strategy: Strategy = DEFAULT_STRATEGY
    threshold: float | None = None
    steps: int | None = None
    small_block_size: int | None = None
    left_to_right: bool = False
    edit_threshold: float = 0.0
    max_post_steps: int = 16

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"expected strategy to be one of {', '.join(STRATEGIES)}, found {self.strategy!r}")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"expected a threshold above 0, up to 1, found {self.threshold}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected at least 1 step, found {self.steps}")
        if self.small_block_size is not None and self.small_block_size < 1:
            raise ValueError(f"expected a small_block_size of at least 1, found {self.small_block_size}")
        if not 0 <= self.edit_threshold <= 1:
            raise ValueError(f"expected an edit_threshold from 0 to 1, found {self.edit_threshold}")
        if not 0 <= self.max_post_steps <= MOST_POST_STEPS:
            raise ValueError(f"expected max_post_steps from 0 to {MOST_POST_STEPS}, found {self.max_post_steps}")

    @property
    def edits(self) -> bool:
        """True if tokens of the current block may be replaced by others."""
        return self.strategy == "joint_threshold" and not self.left_to_right

    def threshold_for(self, blocks: MaskedBlocks) -> float:
        """Returns the threshold that applies to a model with these blocks."""
        if self.threshold is not None:
            return self.threshold
        return JOINT_THRESHOLD if self.strategy == "joint_threshold" else blocks.threshold

    def small_length(self, blocks: MaskedBlocks) -> int:
        """Returns the number of tokens of the parts of a block that are denoised one after the other."""
        return self.small_block_size or gcd(blocks.length, blocks.small_length or blocks.length)

    def check(self, blocks: MaskedBlocks) -> None:
        """Raises a `ValueError` for options that do not fit these blocks.

        Small blocks divide a block and share its steps. Edits need blocks all of whose tokens are denoised.
        """
        if self.strategy == "joint_threshold" and (blocks.causal or blocks.first_token is not None):
            raise ValueError(
                "expected a strategy other than joint_threshold, since this model decodes the first token of a block"
            )
        small = self.small_length(blocks)
        if blocks.length % small:
            raise ValueError(f"expected a small_block_size that divides the block length {blocks.length}, found {small}")
        parts = blocks.length // small
        if self.steps is not None and self.steps % parts:
            raise ValueError(f"expected steps that are a multiple of the {parts} small blocks of a block, found {self.steps}")
        if self.steps is not None and self.steps > blocks.denoised:
            raise ValueError(f"expected at most {blocks.denoised} steps, one for each token of a block, found {self.steps}")

    def quotas(self, blocks: MaskedBlocks) -> np.ndarray:
        """Returns the number of tokens that each pass of a block commits, int32 `[T]`; the remainder goes to the first."""
        small = self.small_length(blocks)
        if small < blocks.length:
            passes = small if self.steps is None else self.steps * small // blocks.length
            return np.full(blocks.length, -(-small // passes), np.int32)
        steps = self.steps or max(1, blocks.denoised)
        base, remainder = divmod(blocks.denoised, steps)
        return np.asarray([base + (n < remainder) if n < steps else 1 for n in range(blocks.length)], np.int32)


def check_read(strategy: Strategy, named: Collection[str], where: str = "") -> None:
    """Raises a `ValueError` for named options that a strategy does not read.

    Args:
        where: beginning of the message.
    """
    for name in named:
        if strategy not in (read := READ_BY.get(name, STRATEGIES)):
            raise ValueError(f"{where}expected strategy={' or '.join(read)} with {name}, found strategy={strategy}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockRows:
    """State of rows whose blocks are denoised.

    Attributes:
        strategy: `[B]`, index in `STRATEGIES`.
        threshold: `[B]`.
        left_to_right: bool `[B]`, see `BlockDenoising`.
        quotas: `[B, T]`, see `BlockDenoising.quotas`.
        small: `[B]`, see `BlockDenoising.small_length`.
        edit_threshold: `[B]`; infinity for rows without edits.
        max_post_steps: `[B]`; 0 for rows without edits.
        start: `[B]`, first position of the current block.
        count: `[B]`, its number of positions.
        passes: `[B]`, number of passes over the current block so far.
        post_steps: `[B]`, number of those that began without a mask and could edit.
        logprobs: log-probabilities of the block's committed tokens, `[B, T]`; None if no row can want them.
    """

    strategy: Any
    threshold: Any
    left_to_right: Any
    quotas: Any
    small: Any
    edit_threshold: Any
    max_post_steps: Any
    start: Any
    count: Any
    passes: Any
    post_steps: Any
    logprobs: Logprobs | None


@lru_cache(maxsize=256)
def options_row(options: BlockDenoising, blocks: MaskedBlocks) -> tuple[Any, ...]:
    """Returns the options of a request as arrays of one row, in the order of `BlockRows`. Do not write to them."""
    strategy = np.asarray([STRATEGIES.index(options.strategy)], np.int32)
    threshold = np.asarray([options.threshold_for(blocks)], np.float32)
    if blocks.plain_confidence:  # a probability of this value exceeds the number below it
        threshold = np.nextafter(threshold, np.float32(0))
    small = np.asarray([options.small_length(blocks)], np.int32)
    edit_threshold = np.asarray([options.edit_threshold if options.edits else np.inf], np.float32)
    post_steps = np.asarray([options.max_post_steps if options.edits else 0], np.int32)
    left_to_right = np.asarray([options.left_to_right])
    return strategy, threshold, left_to_right, options.quotas(blocks)[None], small, edit_threshold, post_steps


def block_rows(options: list[BlockDenoising], lengths: list[int], blocks: MaskedBlocks, vocab: int | None) -> BlockRows:
    """Returns the state of rows at the beginning of a block, on the host.

    Args:
        lengths: number of each row's tokens.
        vocab: size of the vocabulary, if rows may want log-probabilities.
    """
    options_of_rows = map(np.concatenate, zip(*(options_row(one, blocks) for one in options), strict=True))
    start, count = np.asarray([blocks.first_block(length) for length in lengths], np.int32).T
    logprobs = None
    if vocab is not None:
        zeros = np.zeros((len(lengths), blocks.length), np.float32)
        k = min(MOST_ALTERNATIVES, vocab)
        logprobs = Logprobs(zeros, np.zeros((*zeros.shape, k), np.int32), np.zeros((*zeros.shape, k), np.float32))
    zero = np.zeros_like(start)
    return BlockRows(*options_of_rows, start=start, count=count, passes=zero, post_steps=zero, logprobs=logprobs)


class PassInfo(NamedTuple):
    """Report of a pass: all results that the host reads; int32 except for log-probabilities.

    Attributes:
        tokens: `[B, T]`; a row's first `committed` entries are its new tokens, others are undefined.
        committed: `[B]`; number of tokens that the pass finished for the user: those of a finished block, the one token of a
            row from left to right, or 0.
        unmasked: `[B]`; number of masks that the pass replaced.
        ran: `[B]`; 1 for a row that ran the pass, 2 if it stored a block and denoised the next one.
        logprobs: log-probabilities of the new tokens of rows that want them.
    """

    tokens: Any
    committed: Any
    unmasked: Any
    ran: Any
    logprobs: Logprobs | None = None

    def packed(self) -> Int[Array, "B _"]:
        """Packs everything but the log-probabilities into one array, for one transfer to the host."""
        counts = jnp.stack([self.committed, self.unmasked, self.ran], axis=1)
        return jnp.concatenate([counts, self.tokens], axis=1).astype(jnp.int32)

    @staticmethod
    def unpacked(reports: Reports, wanted: bool = False) -> "PassInfo":
        """Unpacks the passes of a dispatch that ran.

        Args:
            wanted: whether a row wants log-probabilities; otherwise these stay on the device.
        """
        packed = np.asarray(reports.packed)
        count = np.count_nonzero(np.any(packed[..., 2] > 0, axis=1))
        logprobs = jax.tree.map(lambda each: np.asarray(each)[:count], reports.logprobs) if wanted else None
        committed, unmasked, ran = np.moveaxis(packed[:count, :, :3], -1, 0)
        return PassInfo(packed[:count, :, 3:], committed, unmasked, ran, logprobs)


def replaced(found: Choices, masked: Bool[Array, "B T"], rows: BlockRows) -> Bool[Array, "B T"]:
    """Returns the masks that a pass replaces by each row's strategy; of equal probabilities the first position wins."""
    slot = jnp.arange(masked.shape[1])
    score = jnp.where(masked, found.probability, -jnp.inf)
    ahead = (score[:, None, :] > score[:, :, None]) | ((score[:, None, :] == score[:, :, None]) & (slot < slot[:, None]))
    rank = jnp.sum(ahead & masked[:, None, :], axis=-1)
    at = jnp.minimum(rows.passes, masked.shape[1] - 1)[:, None]
    quota = jnp.take_along_axis(jnp.asarray(rows.quotas), at, axis=1)
    above = masked & (found.probability > jnp.asarray(rows.threshold)[:, None])
    enough = jnp.sum(above, axis=1, keepdims=True) >= quota
    best = rank < quota
    first = jnp.cumsum(masked, axis=1) <= quota
    dynamic = jnp.where(enough, above, best)
    rules = jnp.stack([dynamic, best, first, dynamic])
    chosen = jnp.take_along_axis(rules, jnp.asarray(rows.strategy)[None, :, None], axis=0)[0]
    return masked & jnp.where(jnp.asarray(rows.left_to_right)[:, None], jnp.cumsum(masked, axis=1) == 1, chosen)


def edited(found: Choices, block: Int[Array, "B T"], editable: Bool[Array, "B T"], rows: BlockRows) -> Bool[Array, "B T"]:
    """Returns the editable tokens of a block that a pass replaces by others."""
    sure = found.probability > jnp.asarray(rows.edit_threshold)[:, None]
    return editable & (found.token != block) & sure


def count_of(rows: Bool[Array, " B"]) -> Array:
    return jnp.sum(rows, dtype=jnp.float32)


def least_share(target: Target, blocks: MaskedBlocks, rows: int) -> float | None:
    """Returns the share of running rows that have a block to store, from which a pass runs two blocks of each row.

    Such a pass stores a block and denoises the next one, which saves a pass of these rows. It computes twice as many tokens for
    all rows. With `r` as the ratio of its time to that of a pass over one block, it pays above a share of `r - 1`: `n` rows of
    which `s` store a block get the results of `n + s` passes in the time of `r`. On a CPU it pays for a row that is alone
    (`benchmarks/stored_blocks.py`). Tokens are the same where a row's results do not depend on the width
    (`operations.is_batch_invariant`).

    Returns:
        the share; None for passes that always run one block: it does not pay, or logits of the stored block choose the next
        one's first token, or the chip's compiler takes no branches.
    """
    if blocks.causal or blocks.shifted or blocks.first_token is not None or not target.loops:
        return None
    if jax.default_backend() == "cpu":
        return 0.0 if rows == 1 else None
    tokens = rows * blocks.length
    share = max(FREE_TOKENS, 2 * tokens) / max(FREE_TOKENS, tokens) - 1
    return share if share < 1 else None


def denoise_pass(
    target: Target,
    blocks: MaskedBlocks,
    allowed: UInt32[Array, "B _"] | None,
    models: Models,
    state: DecodeState,
) -> tuple[DecodeState, PassInfo]:
    """Runs the current block of every row, and replaces some of its masks, and some of its tokens in rows with edits.

    A pass over a block without a mask stores the block's keys and values, and chooses the next block's first token if the
    model's blocks begin so. Where it pays, such a pass also denoises the next block (`least_share`). With edits, a pass over a
    block without a mask may still replace tokens; if it replaces none, it stores the block.

    A block is finished, and its tokens are given to the user, once it has no mask, or an end-of-sequence token without a mask
    before it, which ends the row. With edits it is finished when no pass may change it any more. Rows from left to right give
    each token to the user.

    Args:
        allowed: bits of the tokens that may replace a block's first mask; None if all may.
    """
    rows: BlockRows = state.denoising
    length = blocks.length
    slot = jnp.arange(length)[None]
    left_to_right = jnp.asarray(rows.left_to_right)
    positions = block_positions(rows.start, length)
    block = tokens_at(state, positions)
    running = ~state.done
    masked = (block == blocks.mask_token_id) & (slot < rows.count[:, None]) & running[:, None]
    without_masks = running & ~jnp.any(masked, axis=1)
    post = without_masks & (rows.post_steps < jnp.asarray(rows.max_post_steps))
    stores = without_masks & ~post

    def next_block(goes_on: Array, start: Array, count: Array) -> tuple[Array, Array]:
        """Returns first position and number of positions of the blocks behind these, for rows that go on, or of the same."""
        start = jnp.where(goes_on, start + count, start)
        # A causal row from left to right decodes token by token. A slot may have no room for a whole block behind the prompt.
        room = jnp.clip(state.tokens.shape[1] - start, 0, jnp.where(left_to_right & blocks.causal, 1, length))
        return start, jnp.where(goes_on, room, count)

    start, count = next_block(stores, jnp.asarray(rows.start), jnp.asarray(rows.count))

    def run_block(state: DecodeState) -> tuple[DecodeState, Array]:
        ends = jnp.broadcast_to((rows.start + rows.count)[:, None], block.shape)
        if blocks.causal:
            ends = jnp.where(stores[:, None], positions + 1, ends)
        span = Span(rows.start, jnp.where(running, rows.count, 0))
        ran = run_target(target, models.target, state, block, span, (), ends)
        return replace(state, target_cache=ran.caches), ran.hidden

    def run_two(state: DecodeState) -> tuple[DecodeState, Array]:
        both = block_positions(rows.start, 2 * length)
        span = Span(rows.start, jnp.where(running, rows.count + jnp.where(stores, count, 0), 0))
        ran = run_target(target, models.target, state, tokens_at(state, both), span, ())
        chosen = jnp.where(stores, length, 0)[:, None] + slot
        return replace(state, target_cache=ran.caches), jnp.take_along_axis(ran.hidden, chosen[..., None], axis=1)

    runs_two = jnp.zeros((), bool)
    if (share := least_share(target, blocks, len(rows.start))) is None:
        after, hidden = run_block(state)
    else:
        runs_two = jnp.any(stores) & (count_of(stores) >= np.float32(share) * count_of(running))
        after, hidden = one_of(runs_two, run_two, run_block, state)

    # From here on, `block` is the one whose tokens the pass chooses.
    positions = block_positions(start, length)
    block = jnp.where(stores[:, None], blocks.mask_token_id, block)
    masked = jnp.where(stores[:, None], runs_two & (slot < count[:, None]), masked)
    if blocks.first_token is not None:
        masked = jnp.where(stores[:, None], slot == 0, masked)
    rows = replace(rows, passes=jnp.where(stores, 0, rows.passes))
    part = slot // jnp.asarray(rows.small)[:, None]
    masked = masked & (part == jnp.min(jnp.where(masked, part, length), axis=1, keepdims=True))
    if blocks.first_token is not None or blocks.shifted:
        predicting = jnp.maximum(slot - 1, 0) if blocks.shifted else slot
        predicting = jnp.where(stores[:, None], rows.count[:, None] - 1, predicting)
        hidden = jnp.take_along_axis(hidden, predicting[..., None], axis=1)

    logits = decoder.logits(target.config, target.ops, models.target, hidden, target.schedule)
    logits = penalised(state, block, positions, blocks.mask_token_id, logits)
    if allowed is not None:
        bits = jnp.broadcast_to(allowed[:, None], (*logits.shape[:2], allowed.shape[-1]))
        logits = jnp.where(left_to_right[:, None, None], select.allowed(logits, bits), logits)
    # A row from left to right may be computed again from within a block, and draws each position once.
    draws = jnp.where(left_to_right | stores, 0, rows.passes)
    rule = jnp.full_like(rows.start, BY_PLAIN_PROBABILITY if blocks.plain_confidence else BY_PROBABILITY)
    sampling = state.sampling
    temperature = jnp.asarray(sampling.temperature)
    if blocks.first_token == "likely":
        temperature = jnp.where(stores, 0.0, temperature)
    hot = temperature > 0
    # Filters keep the most likely token, but would change its probability.
    top_p = jnp.where(hot, jnp.asarray(sampling.top_p), 1.0)
    top_k = jnp.where(hot, jnp.asarray(sampling.top_k), 0)
    min_p = jnp.where(hot, jnp.asarray(sampling.min_p), 0.0)
    sampling = replace(sampling, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    found = choose(logits, rule, sampling, positions, draws, blocks.mask_token_id)
    new = positions > state.last_position[:, None]
    edits = running & (jnp.asarray(rows.edit_threshold) < jnp.inf)
    editable = new & (block != blocks.mask_token_id) & (slot < count[:, None]) & edits[:, None]
    failed = jnp.any((masked | editable) & ~jnp.isfinite(found.probability), axis=1)
    changed = (replaced(found, masked, rows) | edited(found, block, editable, rows)) & ~failed[:, None]
    block = jnp.where(changed, found.token, block)
    rows = replace(rows, logprobs=committed_logprobs(target, blocks, state, logits, found, changed))

    is_eos = jnp.zeros(block.shape, bool)
    for eos in target.config.eos_token_ids:
        is_eos = is_eos | (block == eos)
    is_eos = is_eos & new & ~state.ignore_eos[:, None]
    left = jnp.cumsum((block == blocks.mask_token_id) & (slot < count[:, None]), axis=1)
    ended = jnp.any(is_eos & (left == 0), axis=1)
    had_masks = jnp.any(masked, axis=1)
    unchanged = ~jnp.any(changed, axis=1)
    post_steps = rows.post_steps + post.astype(jnp.int32)
    final = post & (unchanged | (post_steps == jnp.asarray(rows.max_post_steps)))
    whole = had_masks & (left[:, -1] == 0) & (jnp.asarray(rows.max_post_steps) == 0)
    finished = final | whole | (had_masks & ended & ~edits)

    first = state.last_position + 1 - start
    shift = jnp.clip(first[:, None] + slot, 0, length - 1)
    tokens = jnp.where(failed[:, None], NOT_FINITE, jnp.take_along_axis(block, shift, axis=1))
    accepted = jnp.where(finished, count - 1 - first, -1)
    accepted = jnp.where(failed | (left_to_right & had_masks), 0, accepted)
    written = select.write_buffer(state.tokens, block, start, jnp.where(running, count, 0))
    after, committed = commit(target, replace(after, tokens=written), tokens, accepted)
    # A block that a pass without masks left as it was has its final keys and values.
    stored = stores | (post & unchanged)
    start, count = next_block(stored & post, start, count)
    passes = jnp.where(stored & ~(stores & runs_two), 0, rows.passes + running.astype(jnp.int32))
    rows = replace(rows, start=start, count=count, passes=passes, post_steps=jnp.where(stored, 0, post_steps))
    logprobs = None
    if rows.logprobs is not None and target.reports_logprobs:
        logprobs = jax.tree.map(
            lambda each: jnp.take_along_axis(each, shift.reshape(*shift.shape, *[1] * (each.ndim - 2)), axis=1), rows.logprobs
        )
    unmasked = jnp.sum(changed & masked, axis=1, dtype=jnp.int32)
    ran = running.astype(jnp.int32) + (stores & runs_two).astype(jnp.int32)
    info = PassInfo(tokens, committed, unmasked, ran, logprobs)
    return replace(after, denoising=rows), info


def penalised(
    state: DecodeState, block: Int[Array, "B T"], positions: Int[Array, "B T"], mask_token_id: int, logits: Array
) -> Array:
    """Applies biases and penalties to logits of a block, for rows that have any.

    The history of a position is the text before the block, and the block's committed tokens before the position.
    """

    def apply() -> Array:
        # `penalise` counts a block's tokens as generated. It counts the prompt's by itself, so that masks replace these here.
        generated = positions >= jnp.asarray(state.sampling.prompt_length)[:, None]
        tokens = jnp.where(generated, block, mask_token_id)
        before = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)  # it does not read the first entry
        return penalise(logits, state.sampling, state.tokens, positions[:, 0] - 1, before)

    return jax.lax.cond(jnp.any(penalises(state.sampling) & ~state.done), apply, lambda: logits)


def committed_logprobs(
    target: Target, blocks: MaskedBlocks, state: DecodeState, logits: Array, found: Choices, changed: Bool[Array, "B T"]
) -> Logprobs | None:
    """Returns the log-probabilities of each block, with those of the tokens that a pass has committed.

    A log-probability is that of the pass that commits the token: the model sees masks and tokens on both sides. The mask token
    has none.
    """
    old = state.denoising.logprobs
    if old is None or not target.reports_logprobs:
        return old
    is_mask = jnp.arange(logits.shape[-1]) == blocks.mask_token_id
    asking = changed & jnp.asarray(state.sampling.wants_logprobs)[:, None]
    new = logprobs_of(jnp.where(is_mask, -jnp.inf, logits), found.token, asking)
    return jax.tree.map(lambda x, y: jnp.where(changed.reshape(*changed.shape, *[1] * (x.ndim - 2)), y, x), old, new)
