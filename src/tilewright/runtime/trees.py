"""Trees of drafts: their form, and the path through a tree that the target's own tokens take.

A tree is verified in one pass: each node attends to the context, its ancestors and itself. The target draws the token behind
every node by seed and position, as in plain decoding. If a child of the node has this token, the path goes on at that child. So
the committed tokens are those of plain decoding, at any temperature, and the tree determines only how many a round commits.

Legend: B rows, N nodes, D drafts on the longest path.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, UInt32

from tilewright.kernels.masks import packed


class DraftTree(NamedTuple):
    """Trees of drafts, one for each row. Ancestors precede their descendants, and siblings have different tokens.

    Attributes:
        tokens: int32 `[B, N]`; node 0 is the root, the last committed token.
        parents: int32 `[B, N]`: the number of each node's parent; -1 for the root and for nodes that hold no draft.
        depths: int32 `[B, N]`: number of nodes above each node; 0 for the root and for nodes that hold no draft.
        ancestors: bool `[B, N, N]`: the nodes above each node, and the node itself.
    """

    tokens: Any
    parents: Any
    depths: Any
    ancestors: Any

    @property
    def bits(self) -> UInt32[Array, "B N W"]:
        """Visible nodes of each node, as `AttentionMask.block` has them."""
        return packed(self.ancestors)

    @property
    def drafts(self) -> Int[Array, " B"]:
        """Number of drafts of each row."""
        return jnp.sum(self.parents >= 0, axis=1)


class Proposal(NamedTuple):
    """Trees of drafts for every row.

    Attributes:
        from_ngrams: true for a row whose drafts n-grams made in place of a model, bool `[B]`; None if n-grams make none.
    """

    tree: DraftTree
    from_ngrams: Any = None


def chains(block: Int[Array, "B T"], drafts: Int[Array, " B"], nodes: int) -> DraftTree:
    """Returns trees that are chains: the last committed token, then each row's `drafts` of a block."""
    width = block.shape[1]
    node = jnp.arange(nodes)[None]
    holds_draft = (node > 0) & (node <= jnp.minimum(drafts, width - 1)[:, None])
    tokens = jnp.pad(block, ((0, 0), (0, max(0, nodes - width))))[:, :nodes]
    itself = jnp.eye(nodes, dtype=bool)
    above = jnp.where(holds_draft[:, :, None], jnp.tril(jnp.ones((nodes, nodes), bool)), itself)
    depths = jnp.where(holds_draft, node, 0)
    return DraftTree(tokens.astype(jnp.int32), jnp.where(holds_draft, node - 1, -1), depths, above)


def matched(tree: DraftTree, drawn: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Returns the nodes whose token the target drew behind their parent; true for the root."""
    behind = jnp.take_along_axis(drawn, jnp.maximum(tree.parents, 0), axis=1)
    return ((tree.parents >= 0) & (tree.tokens == behind)).at[:, 0].set(True)


def accepted_nodes(tree: DraftTree, drawn: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Returns the nodes that the target's tokens lead to: the root, and nodes that match and whose ancestors all match.

    Args:
        drawn: the target's token behind each node. Tokens behind other than these nodes may be undefined.
    """
    return ~jnp.any(tree.ancestors & ~matched(tree, drawn)[:, None], axis=2)


def path_of(tree: DraftTree, accepted: Bool[Array, "B N"], size: int) -> Int[Array, "B {size}"]:
    """Returns the accepted nodes by depth; entries beyond the deepest one are 0.

    Args:
        size: D + 1.
    """
    at_depth = accepted[:, None] & (tree.depths[:, None] == jnp.arange(size)[None, :, None])
    return jnp.argmax(at_depth, axis=2).astype(jnp.int32)


def along(path: Int[Array, "B S"], x: Array, axis: int = 1) -> Array:
    """Selects the entries of a path's nodes from an array with a dim of nodes."""
    index = path.reshape(path.shape[0], *[1] * (axis - 1), path.shape[1], *[1] * (x.ndim - axis - 1))
    return jnp.take_along_axis(x, index, axis=axis)
