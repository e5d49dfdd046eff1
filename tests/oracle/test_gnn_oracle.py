"""The four graph networks against PyTorch Geometric: the same weights, the same scores and gradients, live.

Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.graph.aggregate import aggregate
from tilewright.graph.attention import segment_softmax
from tilewright.graph.edges import from_edge_index, repeated_loops, with_self_loops
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv  # noqa: E402
from torch_geometric.utils import scatter, softmax  # noqa: E402

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
NODES = 60
EDGES = 400
FEATURES = 12
CLASSES = 5
TOLERANCE = 2e-5
LAYOUTS = ("padded", "bucketed", "csr")


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"ORACLE_SEED={SEED}")
    return np.random.default_rng(SEED)


def random_graph(rng: np.random.Generator) -> np.ndarray:
    """Edges with a hub, isolated nodes and duplicates; some nodes have several self-loops, others none."""
    edges = rng.integers(0, NODES - 3, (2, EDGES))
    edges[1, : EDGES // 3] = 7
    edges[0, ::20] = edges[1, ::20]
    return edges


def to_torch(x: Any) -> Any:
    return torch.from_numpy(np.array(x, np.float32)).requires_grad_()


class Torch(torch.nn.Module):
    """One of our models as modules of PyG, with our weights."""

    def __init__(self, config: gnn.Config, params: gnn.GNNParams, state: gnn.State):
        super().__init__()
        self.config = config
        widths = [config.features, *[config.hidden] * (config.layers - 1), config.classes]
        self.convs = torch.nn.ModuleList()
        self.norms = torch.nn.ModuleList()
        for n, layer in enumerate(params.layers):
            d_in = widths[n]
            d_out = widths[n + 1]
            last = n == config.layers - 1
            match config:
                case gnn.GCNConfig():
                    conv = GCNConv(d_in, d_out)
                    values = {"lin.weight": layer.weight.T, "bias": layer.bias}
                case gnn.GraphSAGEConfig():
                    conv = SAGEConv(d_in, d_out)
                    near = layer.neighbour
                    values = {"lin_l.weight": near.weight.T, "lin_l.bias": near.bias, "lin_r.weight": layer.root.T}
                case gnn.GATConfig():
                    heads = config.output_heads if last else config.heads
                    conv = GATConv(d_in * (config.heads if n else 1), d_out, heads, not last, config.negative_slope)
                    values = {
                        "lin.weight": layer.weight.T,
                        "att_src": layer.source,
                        "att_dst": layer.target,
                        "bias": layer.bias,
                    }
                case gnn.GINConfig():
                    hidden = config.hidden
                    mlp = torch.nn.Sequential(
                        torch.nn.Linear(d_in, hidden),
                        torch.nn.BatchNorm1d(hidden),
                        torch.nn.ReLU(),
                        torch.nn.Linear(hidden, hidden),
                    )
                    conv = GINConv(mlp)
                    values = {
                        "nn.0.weight": layer.first.weight.T,
                        "nn.0.bias": layer.first.bias,
                        "nn.1.weight": layer.inner.scale,
                        "nn.1.bias": layer.inner.shift,
                        "nn.3.weight": layer.second.weight.T,
                        "nn.3.bias": layer.second.bias,
                    }
                    norm = torch.nn.BatchNorm1d(hidden)
                    self.norms.append(set_values(norm, {"weight": layer.outer.scale, "bias": layer.outer.shift}))
            self.convs.append(set_values(conv, values))
        heads = (torch.nn.Linear(h.weight.shape[0], config.classes) for h in params.scores)
        self.scores = torch.nn.ModuleList(
            set_values(head, {"weight": one.weight.T, "bias": one.bias}) for head, one in zip(heads, params.scores, strict=True)
        )

    def forward(self, x: Any, edge_index: Any) -> Any:
        if isinstance(self.config, gnn.GINConfig):
            hidden = [x]
            for conv, norm in zip(self.convs, self.norms, strict=True):
                hidden.append(norm(conv(hidden[-1], edge_index)).relu())
            return sum(head(h) for head, h in zip(self.scores, hidden, strict=True))
        activation = torch.nn.functional.elu if isinstance(self.config, gnn.GATConfig) else torch.relu
        for conv in self.convs[:-1]:
            x = activation(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


def set_values(module: Any, values: dict[str, Any]) -> Any:
    named = dict(module.named_parameters())
    assert {name for name, p in named.items() if p.numel()} >= values.keys()
    with torch.no_grad():
        for name, value in values.items():
            named[name].copy_(torch.from_numpy(np.array(value)))
    return module


CONFIGS = {
    "gcn": gnn.GCNConfig(FEATURES, CLASSES, hidden=8, layers=3),
    "sage": gnn.GraphSAGEConfig(FEATURES, CLASSES, hidden=8, layers=2),
    "gat": gnn.GATConfig(FEATURES, CLASSES, hidden=4, heads=3, output_heads=2),
    "gin": gnn.GINConfig(FEATURES, CLASSES, hidden=8, layers=2),
}


def perturbed(tree: Any, rng: np.random.Generator) -> Any:
    """Biases and norms that are not what they begin as."""
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), tree)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_scores_and_gradients_are_those_of_pyg(family: str, layout: str, rng: np.random.Generator):
    config = CONFIGS[family]
    params, state = gnn.init(config, jax.random.key(int(rng.integers(2**31))))
    params = perturbed(params, rng)
    edges = random_graph(rng)
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    pull = rng.standard_normal((NODES, CLASSES)).astype(np.float32)
    # PyG's attention adds the self-loops that ours is given.
    ours = with_self_loops(from_edge_index(edges, NODES)).edge_index if family == "gat" else edges
    table = NeighborTable.from_edges(ours, NODES, layout=layout)

    def loss(params: Any, x: Any) -> Any:
        scores, _ = gnn.apply(config, params, table, table.permute(x), state, train=family == "gin")
        scores = table.unpermute(scores)
        return (scores * pull).sum(), scores

    (_, scores), (by_params, by_x) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, jnp.asarray(x))
    module = Torch(config, params, state).train(family == "gin")
    given = to_torch(x)
    expected = module(given, torch.from_numpy(edges))
    (expected * torch.from_numpy(pull)).sum().backward()
    np.testing.assert_allclose(scores, expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(by_x, given.grad, atol=10 * TOLERANCE, rtol=10 * TOLERANCE)
    gradients = sorted(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)
    norms = sorted(float(jnp.linalg.norm(leaf.ravel())) for leaf in jax.tree.leaves(by_params))
    np.testing.assert_allclose(norms, gradients, atol=20 * TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_reductions_are_those_of_pyg(reduce: str, layout: str, rng: np.random.Generator):
    edges = random_graph(rng)
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    pull = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    table = NeighborTable.build(Data(edge_index=torch.from_numpy(edges), num_nodes=NODES), layout=layout)
    given = to_torch(x)
    expected = scatter(given[edges[0]], torch.from_numpy(edges[1]), 0, NODES, reduce)
    (expected * torch.from_numpy(pull)).sum().backward()
    np.testing.assert_allclose(aggregate(table, x, reduce), expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    gradient = jax.grad(lambda x: (aggregate(table, x, reduce) * pull).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient, given.grad, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weighted_gcn_is_that_of_pyg(layout: str, rng: np.random.Generator):
    """The last weight of several self-loops counts. PyG gives the others its gradient, too, though they change nothing."""
    edges = random_graph(rng)
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    weights = rng.uniform(0, 2, EDGES).astype(np.float32)
    pull = rng.standard_normal(x.shape).astype(np.float32)
    table = NeighborTable.from_edges(edges, NODES, layout=layout)
    conv = GCNConv(FEATURES, FEATURES, bias=False)
    given = to_torch(weights)
    set_values(conv, {"lin.weight": np.eye(FEATURES, dtype=np.float32)})
    expected = conv(torch.from_numpy(x), torch.from_numpy(edges), given)
    (expected * torch.from_numpy(pull)).sum().backward()

    def weighed(weights: Any) -> Any:
        out = aggregate(table, x, weights=weights, normalisation="symmetric")
        return (out * pull).sum(), out

    gradient, found = jax.jit(jax.grad(weighed, has_aux=True))(jnp.asarray(weights))
    np.testing.assert_allclose(found, expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    wanted = np.where(repeated_loops(from_edge_index(edges, NODES)), 0, given.grad)
    np.testing.assert_allclose(gradient, wanted, atol=10 * TOLERANCE, rtol=10 * TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_slope_at_zero_is_that_of_torch(layout: str):
    """Attention whose raw scores are all exactly 0."""
    edges = np.array([[0, 1, 2], [0, 0, 0]])
    x = np.array([[1], [3], [8]], np.float32)
    table = NeighborTable.from_edges(edges, 3, layout=layout)
    score = torch.zeros(3, requires_grad=True)
    raw = torch.nn.functional.leaky_relu(score, 0.2)
    (softmax(raw, torch.from_numpy(edges[1])) * torch.from_numpy(x[:, 0])).sum().backward()
    zeros = jnp.zeros((3, 1))
    found = jax.grad(lambda source: table.attend(table.permute(x[:, None]), table.permute(source), zeros).sum())(zeros)
    np.testing.assert_allclose(found[:, 0], score.grad, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_segment_softmax_is_that_of_pyg(layout: str, rng: np.random.Generator):
    edges = random_graph(rng)
    scores = 3 * rng.standard_normal((edges.shape[1], 2)).astype(np.float32)
    table = NeighborTable.from_edges(edges, NODES, layout=layout)
    expected = softmax(torch.from_numpy(scores), torch.from_numpy(edges[1]), num_nodes=NODES)
    np.testing.assert_allclose(segment_softmax(table, scores), expected, atol=1e-6, rtol=1e-5)
