"""Blocks and checks shared by drafters."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.draft_vocab import DraftVocab
from tilewright.runtime.state import DecodeState, Models, Target, last_token


def masked_block(state: DecodeState, size: int, filler: int) -> Int[Array, "B T"]:
    """Returns blocks of each row's last token followed by `filler` tokens."""
    last = last_token(state)
    return jnp.concatenate([last, jnp.full((last.shape[0], size - 1), filler, last.dtype)], axis=1)


def last_feature(
    features: Float[Array, "B T H"], start: Int[Array, " B"], stop: Int[Array, " B"], before: Float[Array, "B 1 H"]
) -> Float[Array, "B 1 H"]:
    """Returns the feature of position `stop - 1`.

    Args:
        features: features of the positions from `start` on.
        before: previous result, kept for rows without a new position.
    """
    index = jnp.clip(stop - 1 - start, 0, features.shape[1] - 1)[:, None, None]
    return jnp.where((stop > start)[:, None, None], jnp.take_along_axis(features, index, axis=1), before)


def most_likely(
    ops: Operations, target: Target, models: Models, vocab: DraftVocab | None, hidden: Float[Array, "B T H"]
) -> Int[Array, "B T"]:
    """Returns the most likely token of each slot, through the draft vocabulary or the target's output head.

    Args:
        ops: operations of the drafter.
        vocab: the draft vocabulary with its head; None for all tokens.
        hidden: the head's input, normalised.
    """
    if vocab is not None:
        return vocab.ids[ops.head_argmax(hidden, vocab.head)[0]]
    if models.draft_head is not None:
        return ops.head_argmax(hidden, models.draft_head)[0]
    return target.schedule.head_argmax(target.ops, hidden, decoder.output_head(models.target))


def best_tokens(
    ops: Operations, target: Target, models: Models, vocab: DraftVocab | None, hidden: Float[Array, "B T H"], k: int
) -> tuple[Int[Array, "B T {k}"], Int[Array, "B T {k}"], Float[Array, "B T {k}"]]:
    """Returns the `k` most likely tokens of each slot: ids of the draft vocabulary, ids of the target, logits.

    Args: as for `most_likely`.
    """
    if vocab is not None:
        drafted, logits = ops.head_top_k(hidden, vocab.head, k)
        return drafted, vocab.ids[drafted], logits
    if models.draft_head is not None:
        tokens, logits = ops.head_top_k(hidden, models.draft_head, k)
    else:
        tokens, logits = target.schedule.head_top_k(target.ops, hidden, decoder.output_head(models.target), k)
    return tokens, tokens, logits


def check_block_size(size: int, window: int | None = None, largest: int | None = None) -> None:
    """Raises a `ValueError` if a drafter cannot run with this block or window."""
    if size < 2 or (largest is not None and size > largest):
        limit = "of at least 2" if largest is None else f"from 2 to the drafter's {largest}"
        raise ValueError(f"expected a block size {limit}, found {size}")
    if window is not None and window < 1:
        raise ValueError(f"expected a draft window of at least 1, found {window}")


def check_nodes(nodes: int) -> None:
    """Raises a `ValueError` for a tree that holds no draft; 0 nodes are no tree."""
    if nodes < 0 or nodes == 1:
        raise ValueError(f"expected trees of at least 2 nodes, found {nodes}")
