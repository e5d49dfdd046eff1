"""Draft vocabulary: the tokens that a drafter can propose, if fewer than its target's vocabulary.

A drafter with the target's output head reads the whole head in each round; with a few thousand frequent tokens it reads a
fraction. Any other token is drafted wrong, and the target commits its own token, as after any wrong draft.

Sources: EAGLE-3 (arXiv 2503.01840), whose files hold the maps; FR-Spec (arXiv 2502.14856), for heads of any drafter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from tilewright.models.params import ArraySpec, matrix

MAPS = ("d2t", "t2d")
"""Tensors of a checkpoint: `d2t` is the target id minus the draft id of each draft token, `t2d` marks target ids with a draft
id."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftVocab:
    """Tokens that a drafter can propose through its target's output head.

    Attributes:
        ids: their target ids, int32 `[W]`.
        head: the part of the target's output head for them, `[hidden, W]`; None before a target is loaded.
    """

    ids: Any
    head: Any = None


def declare(size: int, hidden: int) -> DraftVocab:
    """Declares the arrays of a draft vocabulary with its head."""
    return DraftVocab(ArraySpec("d2t", (size,), ("vocab",)), matrix("d2t.head", hidden, size, ("hidden", "vocab"), kind="head"))


def draft_ids(ids: Int[Array, " W"], vocab_size: int) -> Int[Array, " V"]:
    """Returns the draft id of each target token; W for tokens that cannot be proposed."""
    return jnp.full(vocab_size, ids.shape[0], jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def target_ids_from_maps(count: int, vocab: int, maps: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Returns the target id of each of `count` draft ids, from the stored maps.

    Without maps, and with a target vocabulary of the same size, ids stay the same.

    Raises:
        ValueError: `d2t` is missing, has another length or dtype, maps outside of the vocabulary or twice to one id, or
            contradicts `t2d`.
    """
    shifts = maps.get("d2t", np.zeros(count, np.int64) if count == vocab else None)
    if shifts is None:
        raise ValueError(f"{where}: expected the tensor d2t, as draft_vocab_size {count} is not vocab_size {vocab}")
    if shifts.shape != (count,) or not np.issubdtype(shifts.dtype, np.integer):
        raise ValueError(f"{where}: expected d2t to hold {count} integers, found {shifts.dtype} {list(shifts.shape)}")
    ids = np.arange(count) + shifts
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < count:
        raise ValueError(f"{where}: expected d2t to map to {count} different ids below {vocab}, found others")
    inverse = maps.get("t2d")
    if inverse is not None and not np.array_equal(np.flatnonzero(inverse), np.sort(ids)):
        raise ValueError(
            f"{where}: expected t2d to be true for the {count} ids that d2t maps to, found {np.count_nonzero(inverse)}"
        )
    return ids.astype(np.int32)


def maps_from_target_ids(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns the stored maps: `d2t` int64 `[W]` and `t2d` bool `[vocab_size]`."""
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab_size), ids)}
