"""Graph neural networks: GraphSAGE, GCN, GIN and GAT, for nodes and for whole graphs.

A family of models is a subclass of `Config`, which declares the arrays of a layer and computes it; `gnn_families` has more. A
model does not depend on a table: it takes any object with the methods of `Neighbours`, one for all layers or one for each.
All rows are in the order of that object. Padding rows never affect other rows, not even through batch norm.

Sources: GraphSAGE, Hamilton et al. (arXiv 1706.02216) §3; GCN, Kipf & Welling (arXiv 1609.02907) §2; GIN, Xu et al. (arXiv
1810.00826) §4; GAT, Veličković et al. (arXiv 1710.10903) §2.1. Arrays are named as in PyTorch Geometric's modules.

Legend: M source rows, N destination rows (the first N sources are the destinations themselves), F features, C classes, H heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from tilewright.kernels import select
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Reduce
from tilewright.models.params import DTYPES, ArraySpec, Dtype, initialise, matrix, norm_weight

BATCH_NORM_MOMENTUM = 0.1
BATCH_NORM_EPS = 1e-5


@runtime_checkable
class Neighbours(Protocol):
    """Neighbours of each row, and reductions over them.

    Attributes:
        num_nodes: number of output rows, N.
        num_sources: number of input rows, M; the first N are the destinations themselves.
    """

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_sources(self) -> int: ...

    def aggregate(self, x: Array, *, reduce: Reduce = "sum", normalisation: Literal["symmetric"] | None = None) -> Array:
        """Reduces `x[M, F]` over the neighbours of each row to `[N, F]`; rows without neighbours get zeros.

        `normalisation="symmetric"` is GCN's: self-loops are added, and an edge counts 1 / sqrt(degree i · degree j).
        """
        ...

    def attend(
        self,
        x: Array,
        source_score: Array,
        target_score: Array,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Array:
        """Attends over the neighbours: `x[M, H, D]` and scores `[M, H]`, `[N, H]` to `[N, H, D]`.

        The weights are the softmax of `leaky_relu(source_score[j] + target_score[i])` over the neighbours j of i. With a key,
        each is then dropped with probability `dropout`, and the others are scaled.
        """
        ...


@runtime_checkable
class SparseInput(Protocol):
    """Sparse features `[M, F]`, with the operations that a first layer needs."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __matmul__(self, weight: Array) -> Array: ...

    def dropped(self, rate: float, key: Array) -> "SparseInput":
        """Returns the features after dropout."""
        ...


Input = Array | SparseInput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Linear:
    """Matrix `[in, out]` and bias."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SAGELayer:
    """GraphSAGE layer: `neighbour` for the mean of the neighbours, `root` (a matrix) for the node itself."""

    neighbour: Any
    root: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GATLayer:
    """GAT layer: one matrix for all heads `[in, H * D]`, the attention vectors `[1, H, D]`, and a bias."""

    weight: Any
    source: Any
    target: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchNorm:
    """Scale and shift of a batch norm."""

    scale: Any
    shift: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningStatistics:
    """Statistics that a batch norm gathers in training and uses afterwards; they have no gradient."""

    mean: Any
    variance: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GINLayer:
    """GIN layer: MLP `second(relu(inner(first(x))))` and the norm after it; `epsilon` is None in GIN-0."""

    epsilon: Any
    first: Any
    inner: Any
    second: Any
    outer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GNNParams:
    """All arrays of a model. `scores` is GIN's: one linear layer for each representation, including the input."""

    layers: tuple[Any, ...]
    scores: tuple[Any, ...] = ()


State = tuple[tuple[Any, ...], ...]
"""Running statistics of GIN, two for each layer; an empty tuple for the other models."""


def leaky_relu(x: Array, negative_slope: float) -> Array:
    """Computes the leaky ReLU with PyTorch's slope at 0, the negative one (in JAX it is 1)."""
    return jnp.where(x > 0, x, negative_slope * x)


def dropout(x: Any, rate: float, key: Array | None) -> Any:
    """Drops entries with probability `rate` and scales the others; without a key, nothing is dropped."""
    if key is None or rate == 0:
        return x
    if not isinstance(x, Array):
        return x.dropped(rate, key)
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)


def batch_norm(
    x: Float[Array, "N F"], norm: BatchNorm, running: RunningStatistics, rows: Bool[Array, " N"] | None, train: bool
) -> tuple[Float[Array, "N F"], RunningStatistics]:
    """Applies batch norm (Ioffe & Szegedy 2015) over the valid rows, in float32.

    The running variance is the unbiased one.
    """
    wide = x.astype(jnp.float32)
    mean = running.mean
    variance = running.variance
    if train:
        present = jnp.ones(x.shape[0], bool) if rows is None else rows
        count = jnp.maximum(present.sum().astype(jnp.float32), 1.0)
        mean = jnp.where(present[:, None], wide, 0).sum(0) / count
        variance = (jnp.where(present[:, None], wide - mean, 0) ** 2).sum(0) / count
        batch = (mean, variance * count / jnp.maximum(count - 1, 1.0))
        old = (running.mean, running.variance)
        moved = [o + BATCH_NORM_MOMENTUM * (jax.lax.stop_gradient(s) - o) for o, s in zip(old, batch, strict=True)]
        running = RunningStatistics(*moved)
    scale = norm.scale.astype(jnp.float32) * jax.lax.rsqrt(variance + BATCH_NORM_EPS)
    return ((wide - mean) * scale + norm.shift.astype(jnp.float32)).astype(x.dtype), running


def product(ops: Operations, x: Input, weight: Any) -> Float[Array, "N O"]:
    """Computes `x @ weight`. Sparse features need matrices that are not prepared."""
    if isinstance(x, Array):
        return ops.linear(x, weight)
    if ops.prepares:
        raise ValueError("expected unprepared matrices for sparse features, found prepared ones")
    return x @ weight


def linear(ops: Operations, x: Input, layer: Linear) -> Float[Array, "N O"]:
    return product(ops, x, layer.weight) + layer.bias


def first_rows(ops: Operations, x: Input, rows: int, weight: Any) -> Float[Array, "N O"]:
    """Computes `x[:rows] @ weight`."""
    return product(ops, x[:rows], weight) if isinstance(x, Array) else product(ops, x, weight)[:rows]


def aggregated_linear(ops: Operations, graph: Neighbours, x: Input, layer: Linear, **options: Any) -> Float[Array, "N O"]:
    """Computes `linear(aggregate(x))`, in the cheaper of the two orders (both steps are linear)."""
    narrows = layer.bias.shape[0] <= x.shape[1] and graph.num_sources < 2 * graph.num_nodes
    if isinstance(x, Array) and not narrows:
        return linear(ops, graph.aggregate(x, **options), layer)
    return graph.aggregate(product(ops, x, layer.weight), **options) + layer.bias


def glorot(name: str, d_in: int, d_out: int) -> ArraySpec:
    return matrix(name, d_in, d_out, ("features", "hidden"), scale=(2 / (d_in + d_out)) ** 0.5)


def zeros(name: str, *shape: int) -> ArraySpec:
    return ArraySpec(name, shape, ("hidden",) * len(shape), scale=0.0)


def declare_linear(name: str, d_in: int, d_out: int) -> Linear:
    """Declares a linear layer of GIN, with PyTorch's initial spread, which the authors used."""
    return Linear(
        matrix(f"{name}.weight", d_in, d_out, ("features", "hidden"), (3 * d_in) ** -0.5), zeros(f"{name}.bias", d_out)
    )


def declare_norm(name: str, size: int) -> BatchNorm:
    return BatchNorm(norm_weight(f"{name}.weight", size), zeros(f"{name}.bias", size))


@dataclass(frozen=True)
class Config(ABC):
    """Sizes of a model, and the base of the families, which declare and compute a layer.

    Attributes:
        features: width of the input.
        classes: width of the output.
        hidden: width of a hidden layer (of one head, with attention).
        layers: rounds of message passing.
        dropout: probability with which an input of a layer is dropped in training (GIN: a layer's score; attention: also its
            weights).
        readout: reduction from the nodes of a graph to the graph's scores.
        self_loops: "given" takes self-loops like any other edge, "table" expects one per node in the neighbours, "layer" adds
            one per node in the layer.
        takes_weights: True if a layer takes edge weights.
        takes_edges: True if a layer takes features of edges.
        decays_first: True if only the first layer's matrices have an L2 penalty in training.
    """

    features: int
    classes: int
    hidden: int = 16
    layers: int = 2
    dropout: float = 0.5
    readout: Reduce = "mean"

    self_loops: ClassVar[Literal["given", "table", "layer"]] = "given"
    takes_weights: ClassVar[bool] = False
    takes_edges: ClassVar[bool] = False
    decays_first: ClassVar[bool] = False
    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("features", "classes", "hidden", "layers")

    def __post_init__(self) -> None:
        for name in self.ABOVE_ZERO:
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, found {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected a dropout from 0 to below 1, found {self.dropout}")
        if self.readout not in get_args(Reduce):
            raise ValueError(f"expected the readout {', '.join(get_args(Reduce))}, found {self.readout!r}")

    def widths(self, n: int) -> tuple[int, int]:
        """Returns the widths of the input and of the output (of a head) of layer n."""
        return self.hidden if n else self.features, self.classes if n == self.layers - 1 else self.hidden

    @abstractmethod
    def declare_layer(self, n: int) -> Any:
        """Declares the arrays of layer n."""

    @abstractmethod
    def layer(
        self, ops: Operations, layer: Any, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        """Computes a layer, before its activation.

        Args:
            ops: computes the dense matmuls.
            layer: arrays of the layer.
            graph: neighbours, see `Neighbours`.
            x: features of the sources, after dropout; dense, or a `SparseInput`.
            edge_attr: features of the edges; None for none.
            last: True for the last layer.
            key: random key, for dropped attention weights; None for no dropout.
        """

    def activation(self, x: Array) -> Array:
        """Activation between two layers."""
        return jax.nn.relu(x)

    def declare(self) -> GNNParams:
        """Declares the arrays of the model."""
        return GNNParams(tuple(self.declare_layer(n) for n in range(self.layers)))

    def declare_state(self) -> State:
        """Declares the running statistics; none by default."""
        return ()

    def run(self, ops: Operations, params: GNNParams, given: "Given", x: Any, state: State) -> tuple[Array, State]:
        """Runs all layers on the nodes, and the readout; see `apply`."""
        h = x
        for n, (layer, graph, edge_attr, key) in enumerate(zip(params.layers, *given.by_layer, strict=True)):
            last = n == self.layers - 1
            h = self.layer(ops, layer, graph, dropout(h, self.dropout, key), edge_attr, last, key)
            h = h if last else self.activation(h)
        return (h if given.pool is None else given.pool.aggregate(h, reduce=self.readout)).astype(jnp.float32), state


@dataclass(frozen=True)
class Given:
    """Inputs of a model besides the features, see `apply`.

    Attributes:
        graphs: neighbours of each layer.
        edges: features of the edges of each layer; None for none.
        keys: random key of each layer, and one more; None for no dropout.
        train: see `apply`.
        rows: see `apply`.
        pool: see `apply`.
    """

    graphs: Sequence[Neighbours]
    edges: Sequence[Array | None]
    keys: Sequence[Array | None]
    train: bool
    rows: Array | None
    pool: Neighbours | None

    @property
    def by_layer(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Neighbours, edge features and key of each layer."""
        return self.graphs, self.edges, self.keys[: len(self.graphs)]


@dataclass(frozen=True)
class GCNConfig(Config):
    """Kipf & Welling's graph convolution. Neighbours exclude self-loops, which the normalisation adds."""

    self_loops = "layer"
    takes_weights = True
    decays_first = True

    def declare_layer(self, n: int) -> Linear:
        d_in, d_out = self.widths(n)
        return Linear(glorot(f"convs.{n}.lin.weight", d_in, d_out), zeros(f"convs.{n}.bias", d_out))

    def layer(
        self, ops: Operations, layer: Linear, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        return aggregated_linear(ops, graph, x, layer, normalisation="symmetric")


@dataclass(frozen=True)
class GraphSAGEConfig(Config):
    """GraphSAGE with the mean of the neighbours."""

    def declare_layer(self, n: int) -> SAGELayer:
        d_in, d_out = self.widths(n)
        name = f"convs.{n}"
        neighbour = Linear(glorot(f"{name}.lin_l.weight", d_in, d_out), zeros(f"{name}.lin_l.bias", d_out))
        return SAGELayer(neighbour, glorot(f"{name}.lin_r.weight", d_in, d_out))

    def layer(
        self, ops: Operations, layer: SAGELayer, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        near = aggregated_linear(ops, graph, x, layer.neighbour, reduce="mean")
        return near + first_rows(ops, x, graph.num_nodes, layer.root)


@dataclass(frozen=True)
class AttentionConfig(Config):
    """Base of families with attention over heads.

    Attributes:
        heads: heads of a hidden layer, whose outputs are concatenated.
        output_heads: heads of the last layer, whose outputs are averaged.
    """

    hidden: int = 8
    dropout: float = 0.6
    heads: int = 8
    output_heads: int = 1

    ABOVE_ZERO = (*Config.ABOVE_ZERO, "heads", "output_heads")

    def widths(self, n: int) -> tuple[int, int]:
        d_in, d_out = super().widths(n)
        return d_in * self.heads if n else d_in, d_out

    def layer_heads(self, n: int) -> int:
        """Returns the number of heads of layer n."""
        return self.output_heads if n == self.layers - 1 else self.heads

    def activation(self, x: Array) -> Array:
        return jax.nn.elu(x)

    def attention_vector(self, n: int, name: str) -> ArraySpec:
        """Declares an attention vector `[1, H, D]` of layer n."""
        heads = self.layer_heads(n)
        d_out = self.widths(n)[1]
        return ArraySpec(f"convs.{n}.{name}", (1, heads, d_out), ("one", "heads", "hidden"), scale=(2 / (heads + d_out)) ** 0.5)


@dataclass(frozen=True)
class GATConfig(AttentionConfig):
    """Graph attention. A node also attends to itself, so the neighbours must include self-loops.

    Attributes:
        negative_slope: of the leaky ReLU on the scores.
    """

    negative_slope: float = 0.2

    self_loops = "table"

    def declare_layer(self, n: int) -> GATLayer:
        d_in, d_out = self.widths(n)
        heads = self.layer_heads(n)
        weight = glorot(f"convs.{n}.lin.weight", d_in, heads * d_out)
        bias = zeros(f"convs.{n}.bias", d_out if n == self.layers - 1 else heads * d_out)
        return GATLayer(weight, self.attention_vector(n, "att_src"), self.attention_vector(n, "att_dst"), bias)

    def layer(
        self, ops: Operations, layer: GATLayer, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        heads = product(ops, x, layer.weight).reshape(x.shape[0], *layer.source.shape[1:])
        source = (heads * layer.source).sum(-1)
        target = (heads[: graph.num_nodes] * layer.target).sum(-1)
        attention_key = None if key is None else jax.random.fold_in(key, 1)
        out = graph.attend(heads, source, target, self.negative_slope, self.dropout, attention_key)
        return (out.mean(1) if last else out.reshape(out.shape[0], -1)) + layer.bias


@dataclass(frozen=True)
class GINConfig(Config):
    """Graph isomorphism network: sums, a two-layer MLP with batch norm, and scores from every layer's representation.

    The paper counts the input as a layer: its five layers are four here.

    Attributes:
        learn_epsilon: learn a node's own weight 1 + ε (GIN-ε); otherwise it is 1 (GIN-0).
    """

    hidden: int = 64
    layers: int = 4
    readout: Reduce = "sum"
    learn_epsilon: bool = False

    def widths(self, n: int) -> tuple[int, int]:
        return self.hidden if n else self.features, self.hidden

    def declare_layer(self, n: int) -> GINLayer:
        d_in, hidden = self.widths(n)
        mlp = f"convs.{n}.nn"
        return GINLayer(
            zeros(f"convs.{n}.eps", 1) if self.learn_epsilon else None,
            declare_linear(f"{mlp}.lins.0", d_in, hidden),
            declare_norm(f"{mlp}.norms.0", hidden),
            declare_linear(f"{mlp}.lins.1", hidden, hidden),
            declare_norm(f"norms.{n}", hidden),
        )

    def declare(self) -> GNNParams:
        widths = [self.features] + [self.hidden] * self.layers
        scores = (declare_linear(f"scores.{n}", width, self.classes) for n, width in enumerate(widths))
        return GNNParams(super().declare().layers, tuple(scores))

    def declare_state(self) -> State:
        def statistics(name: str) -> RunningStatistics:
            ones = ArraySpec(f"{name}.running_var", (self.hidden,), ("hidden",), init="ones")
            return RunningStatistics(zeros(f"{name}.running_mean", self.hidden), ones)

        return tuple((statistics(f"convs.{n}.nn.norms.0"), statistics(f"norms.{n}")) for n in range(self.layers))

    def layer(
        self, ops: Operations, layer: GINLayer, graph: Any, x: Any, edge_attr: Array | None, last: bool, key: Array | None
    ) -> Float[Array, "N O"]:
        """Computes the first linear layer of the MLP on the sum of a node and its neighbours."""
        root = first_rows(ops, x, graph.num_nodes, layer.first.weight)
        root = root if layer.epsilon is None else root * (1 + layer.epsilon)
        return aggregated_linear(ops, graph, x, layer.first, reduce="sum") + root

    def run(self, ops: Operations, params: GNNParams, given: Given, x: Any, state: State) -> tuple[Array, State]:
        """Runs GIN: the score is the sum of linear layers on the readouts of all representations (the paper's §4.2)."""
        if len(state) != self.layers:
            raise ValueError(f"expected the statistics of {self.layers} layers as the state, found {len(state)}")
        final = given.graphs[-1].num_nodes
        after = []
        hidden = [x]
        for n, (layer, graph, edge_attr, _) in enumerate(zip(params.layers, *given.by_layer, strict=True)):
            rows = None if given.rows is None else given.rows[: graph.num_nodes]
            h = self.layer(ops, layer, graph, hidden[-1], edge_attr, n == self.layers - 1, None)
            h, inner = batch_norm(h, layer.inner, state[n][0], rows, given.train)
            h, outer = batch_norm(linear(ops, jax.nn.relu(h), layer.second), layer.outer, state[n][1], rows, given.train)
            hidden.append(jax.nn.relu(h))
            after.append((inner, outer))
        scores = jnp.zeros((), jnp.float32)
        for h, head, key in zip(hidden, params.scores, given.keys, strict=True):
            if given.pool is None:
                score = first_rows(ops, h, final, head.weight) + head.bias
            else:
                score = linear(ops, given.pool.aggregate(h[:final], reduce=self.readout), head)
            scores = scores + dropout(score, self.dropout, key).astype(jnp.float32)
        return scores, tuple(after)


FAMILIES: dict[str, type[Config]] = {"gcn": GCNConfig, "sage": GraphSAGEConfig, "gat": GATConfig, "gin": GINConfig}
"""Families by their names on the command line and in checkpoints; `gnn_families.FAMILIES` has all."""


def declare(config: Config) -> GNNParams:
    """Declares the model's arrays (see `params.ArraySpec`)."""
    return config.declare()


def declare_state(config: Config) -> State:
    """Declares the running statistics."""
    return config.declare_state()


def init(config: Config, key: Array, dtype: Dtype = "float32") -> tuple[GNNParams, State]:
    """Draws random parameters, and returns them with the initial state (always float32)."""
    return initialise(declare(config), key, DTYPES[dtype]), initialise(declare_state(config), key)


def layer_graphs(config: Config, graphs: Neighbours | Sequence[Neighbours], x: Input) -> Sequence[Neighbours]:
    """Returns a `Neighbours` for each layer, with the number of sources checked against the rows of the layer before."""
    each = list(graphs) if isinstance(graphs, Sequence) else [graphs] * config.layers
    if len(each) != config.layers:
        raise ValueError(f"expected neighbours for {config.layers} layers, found {len(each)}")
    rows = x.shape[0]
    for n, graph in enumerate(each):
        if config.takes_edges and not hasattr(graph, "propagate"):
            name = type(config).__name__
            raise ValueError(f"layer {n}: expected neighbours with propagate for {name}, found a {type(graph).__name__}")
        if graph.num_sources != rows:
            raise ValueError(f"layer {n}: the neighbours are those of {graph.num_sources} rows, found {rows} rows of features")
        rows = graph.num_nodes
    return each


def layer_edges(config: Config, edge_attr: Any) -> Sequence[Array | None]:
    """Returns the features of the edges of each layer.

    Raises:
        ValueError: there are features for another number of layers, or the family takes none.
    """
    each = list(edge_attr) if isinstance(edge_attr, Sequence) else [edge_attr] * config.layers
    if len(each) != config.layers:
        raise ValueError(f"expected features of edges for {config.layers} layers, found {len(each)}")
    if edge_attr is not None and not config.takes_edges:
        raise ValueError(f"expected no features of edges for {type(config).__name__}, found some")
    return each


def apply(
    config: Config,
    params: GNNParams,
    graphs: Neighbours | Sequence[Neighbours],
    x: Float[Array, "M F"] | SparseInput,
    state: State = (),
    *,
    edge_attr: Float[Array, "E D"] | Sequence[Float[Array, "_ D"]] | None = None,
    train: bool = False,
    key: Array | None = None,
    rows: Bool[Array, " M"] | None = None,
    pool: Neighbours | None = None,
    ops: Operations = select.PLAIN,
) -> tuple[Float[Array, "_ C"], State]:
    """Runs a model.

    Args:
        graphs: the neighbours, of all layers or of each (a sampled mini-batch has one for each, the input's first).
        x: features of the first layer's sources, in the order of `graphs`; dense, or a `SparseInput`.
        state: the running statistics (GIN).
        edge_attr: features of the edges in the caller's order, of all layers or of each; None for none.
        train: apply dropout, and let batch norm use and gather the statistics of these rows.
        key: for dropout; without a key there is none.
        rows: marks rows that are nodes, not padding; by default all.
        pool: `Neighbours` from nodes to graphs; the scores are then those of graphs.
        ops: computes the dense matmuls, for which `params` were prepared (`ops.prepare(declare(config), params)`).

    Returns:
        Float32 scores (logits) of each node, or of each graph, and the state afterwards.

    Raises:
        ValueError: neighbours, features and configuration do not match.
    """
    if x.shape[1] != config.features:
        raise ValueError(f"expected {config.features} features, found {x.shape[1]}")
    if pool is not None and not isinstance(x, Array):
        raise ValueError("expected dense features where the scores are those of graphs, found sparse ones")
    each = layer_graphs(config, graphs, x)
    keys = [None] * (config.layers + 1) if key is None or not train else list(jax.random.split(key, config.layers + 1))
    given = Given(each, layer_edges(config, edge_attr), keys, train, rows, pool)
    return config.run(ops, params, given, x, state)
