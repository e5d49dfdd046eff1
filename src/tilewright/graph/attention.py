"""Attention over a graph's neighbours, in the caller's order of nodes and edges."""

import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.aggregate import check_numbers
from tilewright.graph.gradients import edge_softmax
from tilewright.graph.table import NeighborTable, check_scores


def attend(
    table: NeighborTable,
    x: Float[Array | np.ndarray, "M H D"],
    source_score: Float[Array | np.ndarray, "M H"],
    target_score: Float[Array | np.ndarray, "N H"],
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    key: Array | None = None,
) -> Float[Array, "N H D"]:
    """For each node and head the features of its neighbours, weighted by a softmax (Veličković et al. 2018, equations 3 to 6).

    Args:
        table: the graph. A node attends to itself only where it has an edge to itself (`self_loops=True` when it is built).
        x: float32 or bfloat16 features of the sources.
        source_score, target_score: the score of an edge j → i is `leaky_relu(target_score[i] + source_score[j])`, whose slope
            at 0 is the negative one, as in PyTorch.
        dropout: the probability with which an edge's weight is dropped after the softmax, for each head by itself; the others
            are scaled by `1 / (1 - dropout)`. Which these are depends on the key and on the caller's order of edges alone.
        key: for dropout; without one there is none.

    Returns:
        In the dtype of `x`; a node without neighbours gets zeros.

    Raises:
        ValueError: arrays that are another graph's, of another dtype, or hold a NaN; the first place is named.
    """
    features, source, target = (
        check_numbers(value, what)
        for value, what in ((x, "features"), (source_score, "source scores"), (target_score, "target scores"))
    )
    if target.ndim != 2 or target.shape[0] != table.num_nodes:
        raise ValueError(f"expected target scores [{table.num_nodes}, heads], found shape {list(target.shape)}")
    given = table.permute(features), table.permute(source), table.permute_nodes(target)
    return table.unpermute(table.attend(*given, negative_slope, dropout, key))


def segment_softmax(table: NeighborTable, edge_scores: Float[Array | np.ndarray, "E *H"]) -> Float[Array, "E *H"]:
    """The softmax of the edges' scores over the edges that end at the same node, in the caller's order of edges.

    Args:
        edge_scores: floating-point, `[E]`, or `[E, H]` for several heads.

    Raises:
        ValueError: scores that are another graph's, of another dtype, or hold a NaN.
    """
    scores = check_numbers(edge_scores, "edge scores")
    check_scores(scores)
    if scores.ndim not in (1, 2) or scores.shape[0] != table.num_edges:
        raise ValueError(f"expected scores of {table.num_edges} edges, found shape {list(scores.shape)}")
    of_heads = scores[:, None] if scores.ndim == 1 else scores
    return edge_softmax(table.forward, of_heads).reshape(scores.shape)
