"""More graph networks, of functions of edges: GATv2, graph transformers, GINE, PNA, and R-GCN and HGT for kinds of edges.

The families take neighbours with `propagate` (a `NeighborTable`, or a sample's layers), and features of edges. R-GCN and HGT
are layers over a `graph.relations.RelationTable`. Arrays are named as in PyTorch Geometric's modules.

Sources: GATv2, Brody et al. (arXiv 2105.14491) §3; graph transformer, Shi et al. (arXiv 2009.03509) §3.1; GINE, Hu et al.
(arXiv 1905.12265) §5; PNA, Corso et al. (arXiv 2004.05718) §2; R-GCN, Schlichtkrull et al. (arXiv 1703.06103) §2; HGT, Hu et
al. (arXiv 2003.01332) §3.

Legend: M source rows, N destination rows, E edges, S rows of edges with padding, F features, H heads, D features of a head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations
from tilewright.models import gnn
from tilewright.models.gnn import (
    AttentionConfig,
    Config,
    GINConfig,
    GINLayer,
    Linear,
    first_rows,
    glorot,
    leaky_relu,
    linear,
    product,
    zeros,
)
from tilewright.models.params import ArraySpec

Relation = tuple[str, str, str]
"""Kind of edges: kind of the sources, name, kind of the destinations."""


def check_edges(config: Any, edge_attr: Array | None) -> None:
    """Raises a `ValueError` for features of edges of another width than the configuration's; 0 is for none."""
    found = 0 if edge_attr is None else edge_attr.shape[1]
    if found != config.edge_features:
        raise ValueError(f"expected {config.edge_features} features of edges, found {found}")


def by_head(values: Array, heads: int) -> Float[Array, "_ H D"]:
    return values.reshape(values.shape[0], heads, values.shape[1] // heads)


def sum_by_head(values: Float[Array, "S H D"]) -> Float[Array, "S H"]:
    """Sums the features of each head, by a matrix product, since XLA reduces few numbers slowly on CPUs."""
    slots, heads, size = values.shape
    if heads == 1 and size == 1:
        return values[:, :, 0]
    ones = jnp.repeat(jnp.eye(heads, dtype=values.dtype), size, axis=0)
    flat = values.reshape(slots, heads * size)
    wide = jnp.dot(flat, ones, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return wide.astype(values.dtype)


def glorot_linear(name: str, d_in: int, d_out: int) -> Linear:
    return Linear(glorot(f"{name}.weight", d_in, d_out), zeros(f"{name}.bias", d_out))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GATv2Layer:
    """GATv2 layer: linear layers of sources and destinations, an edge's matrix or None, the attention vector, and a bias."""

    source: Any
    target: Any
    edge: Any
    attention: Any
    bias: Any


@dataclass(frozen=True)
class GATv2Config(AttentionConfig):
    """Graph attention whose score has a layer inside the leaky ReLU. The neighbours must include self-loops.

    Attributes:
        negative_slope: of the leaky ReLU.
        edge_features: width of the edges' features, which take part in the scores; 0 for none.
    """

    negative_slope: float = 0.2
    edge_features: int = 0

    self_loops = "table"
    takes_edges = True

    def declare_layer(self, n: int) -> GATv2Layer:
        d_in, d_out = self.widths(n)
        wide = self.layer_heads(n) * d_out
        name = f"convs.{n}"
        return GATv2Layer(
            glorot_linear(f"{name}.lin_l", d_in, wide),
            glorot_linear(f"{name}.lin_r", d_in, wide),
            glorot(f"{name}.lin_edge.weight", self.edge_features, wide) if self.edge_features else None,
            self.attention_vector(n, "att"),
            zeros(f"{name}.bias", d_out if n == self.layers - 1 else wide),
        )

    def layer(
        self, ops: Operations, layer: GATv2Layer, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        check_edges(self, edge_attr)
        heads = layer.attention.shape[1]
        source = by_head(linear(ops, x, layer.source), heads)
        target = by_head(first_rows(ops, x, graph.num_nodes, layer.target.weight) + layer.target.bias, heads)

        def weight(x_j: Array, target_i: Array, edge: Array | None, index: Any) -> Float[Array, "S H"]:
            inner = x_j + target_i
            if edge is not None:  # its layer is here, so that no array has its results for all edges
                inner = inner + by_head(product(ops, edge, layer.edge), heads)
            scores = sum_by_head(leaky_relu(inner, self.negative_slope) * layer.attention)
            return index.dropout(index.softmax(scores), self.dropout, key)

        out = graph.propagate(source, weight=weight, target=(None, target), edge=edge_attr)
        return (out.mean(1) if last else out.reshape(out.shape[0], -1)) + layer.bias


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransformerLayer:
    """Layer of a graph transformer: linear layers for keys, queries, values and the node itself; an edge's matrix or None."""

    key: Any
    query: Any
    value: Any
    edge: Any
    skip: Any


@dataclass(frozen=True)
class GraphTransformerConfig(AttentionConfig):
    """Graph transformer: scaled dot-product attention over the neighbours, plus a linear layer of the node itself.

    Attributes:
        edge_features: width of the edges' features, which are added to keys and values; 0 for none.
    """

    edge_features: int = 0

    takes_edges = True

    def declare_layer(self, n: int) -> TransformerLayer:
        d_in, d_out = self.widths(n)
        wide = self.layer_heads(n) * d_out
        name = f"convs.{n}"
        key, query, value = (glorot_linear(f"{name}.lin_{each}", d_in, wide) for each in ("key", "query", "value"))
        edge = glorot(f"{name}.lin_edge.weight", self.edge_features, wide) if self.edge_features else None
        return TransformerLayer(
            key, query, value, edge, glorot_linear(f"{name}.lin_skip", d_in, d_out if n == self.layers - 1 else wide)
        )

    def layer(
        self, ops: Operations, layer: Any, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        check_edges(self, edge_attr)
        heads = self.output_heads if last else self.heads
        keys, values = (by_head(linear(ops, x, each), heads) for each in (layer.key, layer.value))
        query = by_head(first_rows(ops, x, graph.num_nodes, layer.query.weight) + layer.query.bias, heads)

        def weight(k_j: Array, q_i: Array, index: Any) -> Float[Array, "S H"]:
            scores = sum_by_head(q_i * k_j) / math.sqrt(k_j.shape[-1])
            return index.dropout(index.softmax(scores), self.dropout, key)

        def message(x_j: Array, k_j: Array, q_i: Array, edge: Array, index: Any) -> Float[Array, "S H D"]:
            wide = by_head(product(ops, edge, layer.edge), heads)  # here, so that no array has it for all edges
            return (x_j + wide) * weight(k_j + wide, q_i, index)[:, :, None]

        nodes = {"k": keys, "q": (None, query)}
        if edge_attr is None:
            out = graph.propagate(values, weight=weight, **nodes)
        else:
            out = graph.propagate(values, message, **nodes, edge=edge_attr)
        root = first_rows(ops, x, graph.num_nodes, layer.skip.weight) + layer.skip.bias
        return (out.mean(1) if last else out.reshape(out.shape[0], -1)) + root


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GINELayer(GINLayer):
    """GIN layer with a linear layer of the edges' features."""

    edge: Any


@dataclass(frozen=True)
class GINEConfig(GINConfig):
    """GIN whose messages are `relu(x_j + linear(edge_attr))`.

    Attributes:
        edge_features: width of the edges' features.
    """

    edge_features: int = 1

    takes_edges = True
    ABOVE_ZERO = (*GINConfig.ABOVE_ZERO, "edge_features")

    def declare_layer(self, n: int) -> GINELayer:
        edge = glorot_linear(f"convs.{n}.lin", self.edge_features, self.widths(n)[0])
        return GINELayer(**vars(super().declare_layer(n)), edge=edge)

    def layer(
        self, ops: Operations, layer: Any, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        check_edges(self, edge_attr)
        assert edge_attr is not None
        if not isinstance(x, Array):
            raise ValueError("expected dense features of nodes, which GINE's messages add to those of edges, found sparse ones")
        near = graph.propagate(x, lambda x_j, edge: jax.nn.relu(x_j + linear(ops, edge, layer.edge)), edge=edge_attr)
        itself = x[: graph.num_nodes]
        return linear(ops, near + (itself if layer.epsilon is None else itself * (1 + layer.epsilon)), layer.first)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PNALayer:
    """PNA layer: parts of the message's matrix for destination, source and edge (None without), its bias, the edges' linear
    layer (None without), and the linear layers after the reduction, the first with a matrix for the node itself."""

    target: Any
    source: Any
    edge: Any
    bias: Any
    encoder: Any
    itself: Any
    post: Any
    out: Any


@dataclass(frozen=True)
class PNAConfig(Config):
    """Principal neighbourhood aggregation: mean, minimum, maximum and standard deviation, with three scalings by degree.

    Attributes:
        edge_features: width of the edges' features; 0 for none.
        mean_log_degree: mean of `log(degree + 1)` over the nodes of the training data.
    """

    edge_features: int = 0
    mean_log_degree: float = 1.0

    takes_edges = True

    def declare_layer(self, n: int) -> PNALayer:
        d_in, d_out = self.widths(n)
        name = f"convs.{n}"
        ends = [glorot(f"{name}.pre_nns.0.0.weight_{end}", d_in, d_in) for end in ("target", "source", "edge")]
        return PNALayer(
            ends[0],
            ends[1],
            ends[2] if self.edge_features else None,
            zeros(f"{name}.pre_nns.0.0.bias", d_in),
            glorot_linear(f"{name}.edge_encoder", self.edge_features, d_in) if self.edge_features else None,
            glorot(f"{name}.post_nns.0.0.weight_itself", d_in, d_out),
            glorot_linear(f"{name}.post_nns.0.0", 12 * d_in, d_out),
            glorot_linear(f"{name}.lin", d_out, d_out),
        )

    def layer(
        self, ops: Operations, layer: PNALayer, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        check_edges(self, edge_attr)
        edge = None if edge_attr is None else product(ops, linear(ops, edge_attr, layer.encoder), layer.edge)
        target = first_rows(ops, x, graph.num_nodes, layer.target)

        def message(x_j: Array, target_i: Array, edge: Array) -> Float[Array, "S F"]:
            return x_j + target_i + edge

        source = product(ops, x, layer.source) + layer.bias
        degrees = graph.aggregate(jnp.ones((graph.num_sources, 1), jnp.float32), reduce="sum")
        names = "mean", "min", "max", "std"
        if edge is None:  # the destination's part shifts all messages alike, so that none is stored
            shift = jnp.where(degrees > 0, target, 0)
            near = graph.propagate(source, None, names) + jnp.concatenate([shift, shift, shift, jnp.zeros_like(shift)], -1)
        else:
            near = graph.propagate(source, message, names, target=(None, target), edge=edge)
        up = (jnp.log(degrees + 1) / self.mean_log_degree).astype(near.dtype)
        down = (self.mean_log_degree / jnp.log(jnp.maximum(degrees, 1) + 1)).astype(near.dtype)
        itself = first_rows(ops, x, graph.num_nodes, layer.itself)
        wide = jnp.concatenate([near, near * up, near * down], axis=-1)
        return linear(ops, itself + linear(ops, wide, layer.post), layer.out)


FAMILIES: dict[str, type[Config]] = {
    **gnn.FAMILIES,
    "gatv2": GATv2Config,
    "transformer": GraphTransformerConfig,
    "gine": GINEConfig,
    "pna": PNAConfig,
}
"""All families by their names in checkpoints."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RGCNLayer:
    """R-GCN layer: a matrix for each relation `[R, in, out]`, one for the node itself, and a bias."""

    weight: Any
    root: Any
    bias: Any

    @classmethod
    def declare(cls, name: str, d_in: int, d_out: int, relations: int) -> "RGCNLayer":
        """Declares the arrays."""
        spread = (2 / (d_in + d_out)) ** 0.5
        weight = ArraySpec(f"{name}.weight", (relations, d_in, d_out), ("relations", "features", "hidden"), scale=spread)
        return cls(weight, glorot(f"{name}.root", d_in, d_out), zeros(f"{name}.bias", d_out))

    def __call__(self, x: Float[Array, "N F"], relations: Any) -> Float[Array, "N O"]:
        """Sums the means over each relation's neighbours after its matrix; `relations` has one kind of nodes."""
        sources = jnp.einsum("nf,rfo->rno", x, self.weight).reshape(-1, self.weight.shape[2])
        return relations.mean_by_relation(sources) + x @ self.root + self.bias


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HGTLayer:
    """HGT layer for kinds of nodes and relations.

    Attributes:
        inputs: by kind of nodes, the linear layer `[in, 3 * H * D]` to keys, queries and values.
        outputs: by kind of nodes, the linear layer `[H * D, H * D]` after attention.
        skips: by kind of nodes, the logit `[1]` of the output's share against the input.
        keys: by relation, the matrices of keys `[H, D, D]`.
        values: by relation, the matrices of values `[H, D, D]`.
        priors: by relation, the factors of the scores `[H]`.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    skips: Mapping[str, Any]
    keys: Mapping[Relation, Any]
    values: Mapping[Relation, Any]
    priors: Mapping[Relation, Any]

    @classmethod
    def declare(
        cls, name: str, widths: Mapping[str, int], hidden: int, heads: int, relations: Sequence[Relation]
    ) -> "HGTLayer":
        """Declares the arrays.

        Args:
            name: prefix of the arrays' names.
            widths: width of the input by kind of nodes.
            hidden: width of the output, H * D.
            heads: number of heads H.
            relations: the relations.

        Raises:
            ValueError: the heads do not divide the width.
        """
        size, rest = divmod(hidden, heads)
        if rest:
            raise ValueError(f"expected a width that {heads} heads divide, found {hidden}")

        def by_relation(part: str) -> dict[Relation, ArraySpec]:
            axes = "heads", "features", "hidden"
            return {
                r: ArraySpec(f"{name}.{part}.{'__'.join(r)}", (heads, size, size), axes, scale=size**-0.5) for r in relations
            }

        return cls(
            inputs={kind: glorot_linear(f"{name}.kqv_lin.{kind}", width, 3 * hidden) for kind, width in widths.items()},
            outputs={kind: glorot_linear(f"{name}.out_lin.{kind}", hidden, hidden) for kind in widths},
            skips={kind: ArraySpec(f"{name}.skip.{kind}", (1,), ("one",), init="ones") for kind in widths},
            keys=by_relation("k_rel"),
            values=by_relation("v_rel"),
            priors={r: ArraySpec(f"{name}.p_rel.{'__'.join(r)}", (heads,), ("heads",), init="ones") for r in relations},
        )

    def __call__(self, x: Mapping[str, Float[Array | np.ndarray, "_ _"]], relations: Any) -> dict[str, Float[Array, "_ _"]]:
        """Attends over the neighbours of all relations together. Returns the kinds of nodes that relations end at."""
        heads, size, _ = next(iter(self.keys.values())).shape
        parts = {
            kind: [by_head(part, heads) for part in jnp.split(x[kind] @ each.weight + each.bias, 3, axis=1)]
            for kind, each in self.inputs.items()
        }

        def transformed(part: int, matrices: Mapping[Relation, Array]) -> Float[Array, "M H D"]:
            each = [jnp.einsum("nhd,hde->nhe", parts[r[0]][part], matrices[r]) for r in relations.relations]
            return jnp.concatenate(each)

        scaled = {r: self.keys[r] * (self.priors[r] / math.sqrt(size))[:, None, None] for r in relations.relations}
        query = jnp.concatenate([parts[kind][1] for kind in relations.kinds])

        def weight(k_j: Array, q_i: Array, index: Any) -> Float[Array, "S H"]:
            return index.softmax((q_i * k_j).sum(-1))

        out = relations.propagate(transformed(2, self.values), weight=weight, k=transformed(0, scaled), q=(None, query))
        near = relations.split(out.reshape(out.shape[0], -1))
        result = {}
        for kind in {r[2]: None for r in relations.relations}:
            y = jax.nn.gelu(near[kind], approximate=False) @ self.outputs[kind].weight + self.outputs[kind].bias
            share = jax.nn.sigmoid(self.skips[kind])
            result[kind] = share * y + (1 - share) * x[kind] if y.shape[1] == x[kind].shape[1] else y
        return result
