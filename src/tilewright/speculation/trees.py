"""Trees of drafts from scores of pairs of neighbouring tokens, grown best first.

A drafter with candidates for each slot and scores of pairs defines a probability of every path through the candidates. The tree
of N nodes that is expected to hold the longest accepted path has the N most probable paths from the root: a node's probability
is that of its whole path being accepted, and the expected number of accepted drafts is the sum over all nodes (DDTree, arXiv
2604.12989). A smaller tree is the beginning of a larger one.

Where the target draws with noise that the drafter knows (`runtime/noise.py`), a node's probability is that of the *target's*
draw given the noise: the candidates' scores and their noise are added, as in the drafter's own walk, and the rest of the
uncertainty is the difference between the drafter's scores and the target's logits.

Legend: B rows, L slots, K candidates, N nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int

from tilewright.runtime.trees import DraftTree


def log_probs(
    scores: Float32[Array, "B L P K"],
    temperature: Float32[Array, " B"] | None = None,
    gumbel: Float32[Array, "B L K"] | None = None,
) -> Float32[Array, "B L P K"]:
    """Returns each candidate's log-probability of being the target's token behind each candidate of the slot before.

    With a temperature, rows above 0 are ranked by the scores plus the noise of the target's draw, as the walk of
    `dflash2.walk` is, in units of the scores.
    """
    if temperature is not None and gumbel is not None:
        warm = temperature[:, None, None, None]
        scores = jnp.where(warm > 0, (scores / jnp.where(warm > 0, warm, 1.0) + gumbel[:, :, None]) * warm, scores)
    return jax.nn.log_softmax(scores, axis=-1)


def best_first(
    last: Int[Array, " B"], tokens: Int[Array, "B L K"], log_probs: Float32[Array, "B L P K"], nodes: int
) -> DraftTree:
    """Grows a tree: N - 1 times the most probable path that is not in the tree yet, the first among equals.

    Nodes that no path is left for hold no draft.

    Args:
        last: the root's token.
        tokens: candidates of each slot, all different.
        log_probs: log-probability of each slot's candidate behind each candidate of the slot before; the first slot's
            candidates follow the root, the first of its P entries.
    """
    batch, slots, k = tokens.shape
    row = jnp.arange(batch)
    root = jnp.zeros((batch, nodes), jnp.int32)
    # Log-probabilities of the paths to each node's children that are not in the tree.
    open_paths = jnp.full((batch, nodes, k), -jnp.inf).at[:, 0].set(log_probs[:, 0, 0])
    tree = DraftTree(
        root.at[:, 0].set(last), root - 1, root, jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))
    )

    def add(n: Array, carry: tuple[DraftTree, Array]) -> tuple[DraftTree, Array]:
        tree, open_paths = carry
        best = jnp.argmax(open_paths.reshape(batch, -1), axis=1)
        parent, candidate = best // k, best % k
        path = open_paths[row, parent, candidate]
        found = path > -jnp.inf
        above = tree.depths[row, parent]  # the child is in this slot
        depth = above + 1
        children = path[:, None] + log_probs[row, jnp.minimum(depth, slots - 1), candidate]
        open_paths = open_paths.at[row, parent, candidate].set(-jnp.inf)
        open_paths = open_paths.at[:, n].set(jnp.where((found & (depth < slots))[:, None], children, -jnp.inf))
        up = jnp.where(found[:, None], tree.ancestors[row, parent], False).at[:, n].set(True)
        return DraftTree(
            tree.tokens.at[:, n].set(jnp.where(found, tokens[row, above, candidate], 0)),
            tree.parents.at[:, n].set(jnp.where(found, parent, -1)),
            tree.depths.at[:, n].set(jnp.where(found, depth, 0)),
            tree.ancestors.at[:, n].set(up),
        ), open_paths

    return jax.lax.fori_loop(1, nodes, add, (tree, open_paths))[0]


class Candidates(NamedTuple):
    """Candidates of one depth, with a path each.

    Attributes:
        tokens: int32 `[B, C]`; those behind one parent are all different.
        parents: int32 `[B, C]`: place of each one's parent among the candidates of all depths, in order; -1 for the root.
        paths: log-probability of the path to each one, float32 `[B, C]`; at most that of its parent's path.
    """

    tokens: Array
    parents: Array
    paths: Array


def most_probable(last: Int[Array, " B"], depths: Sequence[Candidates], nodes: int) -> DraftTree:
    """Returns the tree of the N - 1 most probable paths, the first among equals, so that every path's beginning is in it.

    Args:
        last: the root's token.
        depths: candidates of each depth.
    """
    tokens, parents, paths = (jnp.concatenate(parts, axis=1) for parts in zip(*depths, strict=True))
    depth = jnp.concatenate([jnp.full(each.tokens.shape[1], 1 + n, jnp.int32) for n, each in enumerate(depths)])
    count = min(nodes - 1, tokens.shape[1])
    chosen = jnp.sort(jax.lax.top_k(paths, count)[1], axis=1)
    above = jnp.take_along_axis(parents, chosen, axis=1)
    # A parent's number is that of the root, 0, or else one more than the number of chosen candidates before it.
    parent = jnp.where(above < 0, 0, 1 + jnp.sum(chosen[:, None] < above[:, :, None], axis=2))

    def with_root(root: Array, drafts: Array, filler: int) -> Array:
        return jnp.pad(jnp.concatenate([root, drafts], axis=1), ((0, 0), (0, nodes - 1 - count)), constant_values=filler)

    first = jnp.zeros((last.shape[0], 1), jnp.int32)
    parent = with_root(first - 1, parent.astype(jnp.int32), -1)
    itself = jnp.eye(nodes, dtype=bool)
    ancestors = jnp.broadcast_to(itself, (last.shape[0], nodes, nodes))
    for _ in depths:
        higher = jnp.take_along_axis(ancestors, jnp.maximum(parent, 0)[:, :, None], axis=1)
        ancestors = itself | (higher & (parent >= 0)[:, :, None])
    drafts = jnp.take_along_axis(tokens, chosen, axis=1).astype(jnp.int32)
    return DraftTree(
        with_root(last[:, None].astype(jnp.int32), drafts, 0), parent, with_root(first, depth[chosen], 0), ancestors
    )
