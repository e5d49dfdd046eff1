"""Neighbours as a dense matrix, the plainest thing that offers `gnn.Neighbours`, and the models in NumPy float64."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tilewright.models import gnn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseNeighbours:
    """`matrix[i, j]` is the number of edges from source j to destination i."""

    matrix: Any
    kind: str = field(default="dense", metadata={"static": True})

    @classmethod
    def from_edges(cls, edge_index: np.ndarray, num_nodes: int, num_sources: int | None = None) -> "DenseNeighbours":
        matrix = np.zeros((num_nodes, num_sources or num_nodes), np.float32)
        np.add.at(matrix, (edge_index[1], edge_index[0]), 1)
        return cls(jnp.asarray(matrix))

    @property
    def num_nodes(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_sources(self) -> int:
        return self.matrix.shape[1]

    def aggregate(self, x: Array, *, reduce: str = "sum", normalisation: str | None = None) -> Array:
        m = self.matrix
        if normalisation == "symmetric":
            m = m + jnp.eye(*m.shape)
            scale = jax.lax.rsqrt(m.sum(1))
            return (m * scale[:, None] * scale) @ x
        if reduce in ("max", "min"):
            sign = 1 if reduce == "max" else -1
            best = jnp.where(m[:, :, None] > 0, sign * x[None], -jnp.inf).max(1)
            return sign * jnp.where(m.sum(1)[:, None] > 0, best, 0)
        total = m @ x
        return total if reduce == "sum" else total / jnp.maximum(m.sum(1), 1)[:, None]

    def attend(
        self,
        x: Array,
        source_score: Array,
        target_score: Array,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Array:
        scores = jax.nn.leaky_relu(target_score[:, None] + source_score[None], negative_slope)
        powers = self.matrix[:, :, None] * jnp.exp(scores)
        weights = gnn.dropout(powers / powers.sum(1, keepdims=True), dropout, key)
        return jnp.einsum("ijh,jhd->ihd", weights, x)


def numpy_scores(family: str, params: Any, matrix: np.ndarray, x: np.ndarray, statistics: Any = (), pool: Any = None) -> Any:
    """The scores of a model that does not train, from the papers' equations, in float64."""
    params, statistics = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, statistics))
    h = np.asarray(x, np.float64)
    last = len(params.layers) - 1
    if family == "gin":
        return gin_scores(params, matrix, h, statistics, pool)
    for n, layer in enumerate(params.layers):
        if family == "gcn":
            tilde = matrix + np.eye(len(matrix))
            root = np.diag(tilde.sum(1) ** -0.5)
            h = root @ tilde @ root @ h @ layer.weight + layer.bias
        elif family == "sage":
            mean = matrix @ h / np.maximum(matrix.sum(1, keepdims=True), 1)
            h = mean @ layer.neighbour.weight + layer.neighbour.bias + h @ layer.root
        else:
            h = gat_layer(layer, matrix, h, n == last)
        if n < last:
            h = np.where(h > 0, h, np.expm1(np.minimum(h, 0))) if family == "gat" else np.maximum(h, 0)
    return h if pool is None else pool @ h / np.maximum(pool.sum(1, keepdims=True), 1)


def gat_layer(layer: Any, matrix: np.ndarray, h: np.ndarray, last: bool) -> np.ndarray:
    _, heads, width = layer.source.shape
    out = []
    for k in range(heads):
        z = h @ layer.weight[:, k * width : (k + 1) * width]
        e = (z @ layer.target[0, k])[:, None] + (z @ layer.source[0, k])[None]
        powers = matrix * np.exp(np.where(e > 0, e, 0.2 * e))
        out.append(powers / powers.sum(1, keepdims=True) @ z)
    return (np.mean(out, 0) if last else np.concatenate(out, 1)) + layer.bias


def gin_scores(params: Any, matrix: np.ndarray, h: np.ndarray, statistics: Any, pool: np.ndarray | None) -> np.ndarray:
    def norm(x: np.ndarray, layer: Any, running: Any) -> np.ndarray:
        return (x - running.mean) / np.sqrt(running.variance + 1e-5) * layer.scale + layer.shift

    pool = np.eye(len(matrix)) if pool is None else pool
    total = pool @ h @ params.scores[0].weight + params.scores[0].bias
    for layer, running, score in zip(params.layers, statistics, params.scores[1:], strict=True):
        self_weight = 1 + (0 if layer.epsilon is None else layer.epsilon)
        z = (matrix @ h + self_weight * h) @ layer.first.weight + layer.first.bias
        z = np.maximum(norm(z, layer.inner, running[0]), 0) @ layer.second.weight + layer.second.bias
        h = np.maximum(norm(z, layer.outer, running[1]), 0)
        total = total + pool @ h @ score.weight + score.bias
    return total
