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
