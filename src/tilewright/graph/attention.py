"""Attention over neighbours, in the caller's order of nodes and edges."""

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
    """Sums the features of each node's neighbours with softmax weights per head (Veličković et al. 2018, equations 3 to 6).

    Args:
        table: the graph. A node attends to itself only with a self-loop (`self_loops=True` when the table is built).
        x: float32 or bfloat16 features of the sources.
        source_score: score of each source; the score of an edge j → i is `leaky_relu(target_score[i] + source_score[j])`.
        target_score: score of each node.
        negative_slope: slope of the leaky ReLU for negative values and, as in PyTorch, at 0.
        dropout: probability of dropping an edge's weight after the softmax, per head; the other weights are scaled by
            `1 / (1 - dropout)`. The dropped edges depend only on the key and the caller's order of edges.
        key: random key of the dropout; None for no dropout.

    Returns:
        features in the dtype of `x`; zeros for a node without neighbours.

    Raises:
        ValueError: arrays do not fit the graph, have another dtype, or have a NaN (the message names the first place).
    """
    features, source, target = (
        check_numbers(value, noun)
        for value, noun in ((x, "features"), (source_score, "source scores"), (target_score, "target scores"))
    )
    if target.ndim != 2 or target.shape[0] != table.num_nodes:
        raise ValueError(f"expected target scores [{table.num_nodes}, heads], found shape {list(target.shape)}")
    operands = table.permute(features), table.permute(source), table.permute_nodes(target)
    return table.unpermute(table.attend(*operands, negative_slope, dropout, key))


def segment_softmax(table: NeighborTable, edge_scores: Float[Array | np.ndarray, "E *H"]) -> Float[Array, "E *H"]:
    """Computes the softmax of edge scores over the incoming edges of each node, in the caller's order of edges.

    Args:
        table: the graph.
        edge_scores: floating-point scores, `[E]`, or `[E, H]` for several heads.

    Raises:
        ValueError: scores do not fit the graph, have another dtype, or have a NaN.
    """
    scores = check_numbers(edge_scores, "edge scores")
    check_scores(scores)
    if scores.ndim not in (1, 2) or scores.shape[0] != table.num_edges:
        raise ValueError(f"expected scores of {table.num_edges} edges, found shape {list(scores.shape)}")
    per_head = scores[:, None] if scores.ndim == 1 else scores
    return edge_softmax(table.forward, per_head).reshape(scores.shape)
