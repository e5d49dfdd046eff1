"""Layers of functions of edges against PyTorch Geometric's, live: weights copied, outputs and gradients compared.

Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.graph.edges import from_edge_index, with_self_loops
from tilewright.graph.relations import RelationTable
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn
from tilewright.models.gnn_families import (
    GATv2Config,
    GINEConfig,
    GraphTransformerConfig,
    HGTLayer,
    PNAConfig,
    RGCNLayer,
)
from tilewright.models.params import initialise

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from torch_geometric.nn import (  # noqa: E402
    GATv2Conv,
    GINEConv,
    HGTConv,
    PNAConv,
    RGCNConv,
    TransformerConv,
)

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
NODES = 30
EDGES = 160
FEATURES = 6
EDGE_FEATURES = 3
OUT = 4
HEADS = 2
TOLERANCE = 3e-5


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"ORACLE_SEED={SEED}")
    return np.random.default_rng(SEED)


def random_graph(rng: np.random.Generator, edges: int = EDGES) -> np.ndarray:
    """Edges with a hub, isolated nodes, duplicates and self-loops."""
    ids = rng.integers(0, NODES - 3, (2, edges))
    ids[1, : edges // 3] = 7
    ids[0, ::20] = ids[1, ::20]
    return ids


def to_torch(x: Any) -> Any:
    return torch.from_numpy(np.array(x))


def set_values(module: Any, values: dict[str, Any]) -> Any:
    """Copies all parameters; a parameter that is not named is an error."""
    named = {name for name, parameter in module.named_parameters() if parameter.numel()}
    assert named == values.keys()
    module.load_state_dict({name: to_torch(value) for name, value in values.items()}, strict=False)
    return module


def lines(**layers: gnn.Linear) -> dict[str, Any]:
    pairs = [(name.replace("__", "."), each) for name, each in layers.items()]
    return {f"{name}.{kind}": value for name, each in pairs for kind, value in (("weight", each.weight.T), ("bias", each.bias))}


def gatv2(config: Any, layer: Any, last: bool, d_in: int, d_out: int) -> Any:
    heads = layer.attention.shape[1]
    conv = GATv2Conv(d_in, d_out, heads, not last, config.negative_slope, edge_dim=config.edge_features or None)
    values = {**lines(lin_l=layer.source, lin_r=layer.target), "att": layer.attention, "bias": layer.bias}
    return set_values(conv, values | ({} if layer.edge is None else {"lin_edge.weight": layer.edge.T}))


def transformer(config: Any, layer: Any, last: bool, d_in: int, d_out: int) -> Any:
    heads = config.output_heads if last else config.heads
    conv = TransformerConv(d_in, d_out, heads, not last, edge_dim=config.edge_features or None)
    values = lines(lin_key=layer.key, lin_query=layer.query, lin_value=layer.value, lin_skip=layer.skip)
    return set_values(conv, values | ({} if layer.edge is None else {"lin_edge.weight": layer.edge.T}))


def pna(config: Any, layer: Any, last: bool, d_in: int, d_out: int) -> Any:
    degrees = torch.tensor([3, 4, 5, 6])
    names = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    conv = PNAConv(d_in, d_out, *names, degrees, edge_dim=config.edge_features or None)
    parts = [layer.target, layer.source, *([] if layer.edge is None else [layer.edge])]
    values = {"pre_nns.0.0.weight": np.concatenate(parts).T, "pre_nns.0.0.bias": layer.bias}
    values |= lines(post_nns__0__0=layer.post, lin=layer.out)
    values["post_nns.0.0.weight"] = np.concatenate([layer.itself, layer.post.weight]).T
    return set_values(conv, values | ({} if layer.encoder is None else lines(edge_encoder=layer.encoder)))


PNA_LOG = float((np.log(np.arange(4) + 1) * [3, 4, 5, 6]).sum() / 18)
"""PyG's mean of log(degree + 1) for the histogram in `pna`."""
SIZES: dict[str, Any] = {"hidden": 4, "layers": 2, "dropout": 0.0}
CONVS = {
    "gatv2": (GATv2Config(FEATURES, OUT, **SIZES, heads=HEADS, output_heads=3), gatv2),
    "gatv2 with edges": (GATv2Config(FEATURES, OUT, **SIZES, heads=HEADS, edge_features=EDGE_FEATURES), gatv2),
    "transformer": (GraphTransformerConfig(FEATURES, OUT, **SIZES, heads=HEADS), transformer),
    "transformer with edges": (
        GraphTransformerConfig(FEATURES, OUT, **SIZES, heads=HEADS, output_heads=3, edge_features=EDGE_FEATURES),
        transformer,
    ),
    "pna": (PNAConfig(FEATURES, OUT, **SIZES, mean_log_degree=PNA_LOG), pna),
    "pna with edges": (PNAConfig(FEATURES, OUT, **SIZES, mean_log_degree=PNA_LOG, edge_features=EDGE_FEATURES), pna),
}


def perturbed(tree: Any, rng: np.random.Generator) -> Any:
    """Adds noise, so that biases are not zero."""
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), tree)


def close(found: Any, wanted: Any) -> None:
    wanted = wanted.detach().numpy()
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * max(1, np.abs(wanted).max()), rtol=TOLERANCE)


CASES = [
    *((name, "csr", EDGES) for name in CONVS),
    ("gatv2 with edges", "bucketed", EDGES),
    ("pna with edges", "bucketed", EDGES),
    ("transformer with edges", "padded", 0),
    ("pna", "csr", 0),
]


@pytest.mark.parametrize(("name", "layout", "edges"), CASES)
def test_families(name: str, layout: str, edges: int, rng: np.random.Generator):
    config, make = CONVS[name]
    params, state = gnn.init(config, jax.random.key(int(rng.integers(2**31))))
    params = perturbed(params, rng)
    ids = random_graph(rng, edges)
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    edge_attr = rng.standard_normal((edges, EDGE_FEATURES)).astype(np.float32) if config.edge_features else None
    pull = rng.standard_normal((NODES, OUT)).astype(np.float32)

    given = from_edge_index(ids, NODES, features=edge_attr)
    given = with_self_loops(given) if config.self_loops == "table" else given
    table = NeighborTable.from_edges(given.edge_index, NODES, layout=layout, limit=8)

    def loss(x: Any, params: Any) -> Any:
        out = table.unpermute(
            gnn.apply(
                config,
                params,
                table,
                table.permute(x),
                state,
                edge_attr=None if given.features is None else jnp.asarray(given.features),
            )[0]
        )
        return (out * pull).sum(), out

    (_, out), (x_grad, _) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, params)

    convs = []
    for n, layer in enumerate(params.layers):
        d_in, d_out = config.widths(n)
        convs.append(make(config, layer, n == 1, d_in, d_out))
    activation = torch.relu if name.startswith("pna") else torch.nn.functional.elu
    moved = to_torch(x).requires_grad_()
    edge_index = torch.from_numpy(ids)
    features = None if edge_attr is None else to_torch(edge_attr)
    wanted = convs[1](activation(convs[0](moved, edge_index, edge_attr=features)), edge_index, edge_attr=features)
    (wanted * to_torch(pull)).sum().backward()
    close(out, wanted)
    close(x_grad, moved.grad)


@pytest.mark.parametrize("layout", ["csr", "bucketed"])
def test_gine(layout: str, rng: np.random.Generator):
    """The message and the first layer of the MLP; the rest is GIN's."""
    config = GINEConfig(FEATURES, OUT, hidden=5, layers=1, learn_epsilon=True, edge_features=EDGE_FEATURES)
    (layer,) = perturbed(gnn.init(config, jax.random.key(0))[0], rng).layers
    ids = random_graph(rng)
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    edge_attr = rng.standard_normal((EDGES, EDGE_FEATURES)).astype(np.float32)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=8)

    @jax.jit
    def run(x: Any, edge_attr: Any) -> Any:
        return table.unpermute(config.layer(gnn.select.PLAIN, layer, table, table.permute(x), edge_attr, True, None))

    conv = GINEConv(torch.nn.Linear(FEATURES, 5), train_eps=True, edge_dim=EDGE_FEATURES)
    set_values(conv, {"eps": layer.epsilon, **lines(nn=layer.first, lin=layer.edge)})
    moved = to_torch(edge_attr).requires_grad_()
    wanted = conv(to_torch(x), torch.from_numpy(ids), moved)
    close(run(x, edge_attr), wanted)
    wanted.pow(2).sum().backward()
    close(jax.jit(jax.grad(lambda e: (run(x, e) ** 2).sum()))(edge_attr), moved.grad)


@pytest.mark.parametrize("layout", ["csr", "bucketed"])
def test_rgcn(layout: str, rng: np.random.Generator):
    relations = 3
    layer = perturbed(initialise(RGCNLayer.declare("conv", FEATURES, OUT, relations), jax.random.key(0)), rng)
    ids = random_graph(rng)
    kinds = rng.integers(0, relations - 1, EDGES)  # the last relation has no edges
    x = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    tables = {("node", str(r), "node"): ids[:, kinds == r] for r in range(relations)}
    table = RelationTable.build(tables, {"node": NODES}, layout=layout, limit=8)
    conv = set_values(RGCNConv(FEATURES, OUT, relations), {"weight": layer.weight, "root": layer.root, "bias": layer.bias})
    moved = to_torch(x).requires_grad_()
    wanted = conv(moved, torch.from_numpy(ids), torch.from_numpy(kinds))
    run = jax.jit(lambda x: layer(x, table))
    close(run(x), wanted)
    wanted.pow(2).sum().backward()
    close(jax.jit(jax.grad(lambda x: (run(x) ** 2).sum()))(x), moved.grad)


@pytest.mark.parametrize("layout", ["csr", "bucketed"])
def test_hgt(layout: str, rng: np.random.Generator):
    """Three kinds of nodes, one of them only a source; an isolated destination; widths that keep the input and that do not."""
    size = 3
    wide = HEADS * size
    counts = {"paper": 12, "author": 9, "venue": 4}
    widths = {"paper": wide, "author": 5, "venue": 7}
    relations = [
        ("author", "writes", "paper"),
        ("venue", "prints", "paper"),
        ("paper", "by", "author"),
        ("paper", "cites", "paper"),
    ]
    edges = {r: np.stack([rng.integers(0, counts[r[0]], 25), rng.integers(0, counts[r[2]] - 1, 25)]) for r in relations}
    conv = HGTConv(widths, wide, (list(counts), relations), heads=HEADS)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape).astype(np.float32) * 0.3))

    def lin(dictionary: Any, kind: str) -> gnn.Linear:
        return gnn.Linear(
            *(jnp.asarray(v.detach().numpy()) for v in (dictionary.lins[kind].weight.T, dictionary.lins[kind].bias))
        )

    def by_relation(module: Any) -> dict[Any, Any]:
        matrices = module.weight.detach().numpy().reshape(HEADS, len(relations), size, size)
        return {r: jnp.asarray(matrices[:, n]) for n, r in enumerate(relations)}

    layer = HGTLayer(
        inputs={kind: lin(conv.kqv_lin, kind) for kind in counts},
        outputs={kind: lin(conv.out_lin, kind) for kind in counts},
        skips={kind: jnp.asarray(value.detach().numpy()) for kind, value in conv.skip.items()},
        keys=by_relation(conv.k_rel),
        values=by_relation(conv.v_rel),
        priors={r: jnp.asarray(conv.p_rel["__".join(r)].detach().numpy()[0]) for r in relations},
    )
    x = {kind: rng.standard_normal((counts[kind], widths[kind])).astype(np.float32) for kind in counts}
    moved = {kind: to_torch(value).requires_grad_() for kind, value in x.items()}
    wanted = conv(moved, {r: torch.from_numpy(ids) for r, ids in edges.items()})
    table = RelationTable.build(edges, counts, layout=layout, limit=8)
    run = jax.jit(lambda x: layer(x, table))
    found = run(x)
    assert found.keys() == {"paper", "author"}
    for kind, value in found.items():
        close(value, wanted[kind])
    sum(value.pow(2).sum() for value in wanted.values() if value is not None).backward()
    gradient = jax.jit(jax.grad(lambda x: sum((value**2).sum() for value in run(x).values())))(x)
    for kind, value in gradient.items():
        close(value, moved[kind].grad)
