"""Message passing compared: graphs, that all programs of an experiment compute the same, bytes, counts. No times."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.bench import graph as bench
from tilewright.bench.graph import EXPERIMENTS, BenchGraph, Segments, measure, prepare, read_graph, rmat, uniform
from tilewright.compiled import compare
from tilewright.compiled.compare import compare_all

SMALL = BenchGraph("small", uniform(40, 3), 40)
FEATURES = 16


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "COPY_BYTES", 2**16)
    monkeypatch.setattr(compare, "RUN_S", 0.001)


def test_uniform_degrees_and_a_random_graph_with_hubs():
    degrees = np.bincount(uniform(500, 7)[1], minlength=500)
    assert (degrees.min(), degrees.max()) == (1, 7)
    edges = rmat(1000, 20_000)
    assert edges.shape == (2, 20_000)
    assert (edges.min(), edges.max()) >= (0, 900)
    assert edges.max() < 1000
    assert np.bincount(edges[1]).max() > 10 * 20
    assert np.array_equal(edges, rmat(1000, 20_000))


def test_graphs_by_name():
    assert read_graph("seed").record() == {"graph": "seed", "nodes": 2048, "edges": 68078, "max_degree": 64}
    assert read_graph("karate").record() == {"graph": "karate", "nodes": 34, "edges": 156, "max_degree": 17}
    assert read_graph("rmat:50:300").record()["edges"] == 300


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("uniform:10", "expected uniform:NODES:MAXDEGREE with numbers of at least 1, found 'uniform:10'"),
        ("uniform:0:4", "expected uniform:NODES"),
        ("rmat:10:x", "expected rmat:NODES:EDGES"),
        ("rmat:10:-4", "expected rmat:NODES:EDGES"),
        ("nowhere.npz", "expected 'karate', an .npz file"),
    ],
)
def test_an_unknown_graph_is_refused(data: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_graph(data)


def test_a_folder_of_graphs_is_refused(tmp_path: Path):
    (tmp_path / "two.txt").write_text("2\n2 0\n0 1 1\n0 1 0\n2 1\n0 1 1\n0 1 0\n")
    with pytest.raises(ValueError, match="expected one graph, found a folder of 2"):
        read_graph(str(tmp_path))


def test_a_graph_without_edges_is_refused(tmp_path: Path):
    edge_index = np.zeros((2, 0), np.int32)
    x = np.ones((3, 2), np.float32)
    y = np.zeros(3, np.int32)
    np.savez(tmp_path / "x.npz", edge_index=edge_index, x=x, y=y)
    with pytest.raises(ValueError, match="expected a graph with edges, found none"):
        read_graph(str(tmp_path / "x.npz"))


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_programs_of_an_experiment_compute_the_same(name: str):
    (experiment,) = prepare(SMALL, [name], ["padded", "bucketed", "csr"], FEATURES, "float32")
    compared, records = measure(experiment, repetitions=1)
    wanted = ["baseline", "fused"] if name == "scatter-add" else ["baseline", "segment_sum", "padded", "bucketed", "csr"]
    assert [record["name"] for record in records] == wanted
    assert compared.agrees, compared
    assert {(record["experiment"], record["compared_with"]) for record in records} == {(name, "baseline")}


def test_the_sums_are_the_graphs():
    (experiment,) = prepare(SMALL, ["gather-scatter"], ["auto"], FEATURES, "float32")
    adjacency = np.zeros((40, 40))
    np.add.at(adjacency, (SMALL.edge_index[1], SMALL.edge_index[0]), 1)
    x = np.asarray(experiment.inputs["x"], np.float64)
    for name, function in experiment.functions.items():
        np.testing.assert_allclose(function(experiment.inputs), adjacency @ x, atol=1e-5, err_msg=name)


def test_graph_convolution_has_the_factors_of_its_equation():
    edges = np.array([[1, 2, 0, 2], [0, 0, 1, 2]])  # node 2 is its own neighbour
    segments = bench.peers(BenchGraph("three", edges, 3), gathered=True)
    looped = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 1]], np.float64)
    root = np.diag(looped.sum(1) ** -0.5)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for name, peer in segments.items():
        found = peer.aggregate(jnp.asarray(x), normalisation="symmetric")
        np.testing.assert_allclose(found, root @ looped @ root @ x, atol=1e-6, err_msg=name)


def test_bytes_and_round_trips_of_gathering():
    graph = read_graph("uniform:300:20")  # of smaller messages, XLA makes one loop
    (experiment,) = prepare(graph, ["gather-scatter"], ["padded"], 64, "float32")
    _, (baseline, segment_sum, padded) = measure(experiment, repetitions=1)
    out = 300 * 64 * 4
    assert baseline["round_trip_bytes"] >= 20 * out
    assert baseline["written_bytes"] >= 21 * out
    assert segment_sum["written_bytes"] >= graph.edge_index.shape[1] * 64 * 4
    assert padded["written_bytes"] == out
    assert padded["round_trips"] == 0


def test_dmas_are_those_of_the_kernels_times_the_layers():
    single, model = prepare(SMALL, ["gather-scatter", "graphsage"], ["padded", "csr"], 128, "float32")
    edges = SMALL.edge_index.shape[1]
    most = int(SMALL.degrees.max())
    assert single.counts["padded"]["tpu_gathered_bytes"] == edges * 512
    assert single.counts["padded"]["nki_dma_descriptors"] == 40 * (most + 2)
    assert single.counts["padded"]["nki_written_bytes"] == 40 * 512
    assert model.counts["padded"]["tpu_gathered_bytes"] == 2 * edges * 512
    assert model.counts["padded"]["nki_dma_descriptors"] == 2 * 40 * (most + 3)  # and a scale for each row
    assert single.counts["csr"] == {}


def test_split_rows_gather_their_parts_too():
    hub = np.stack([np.arange(1, 131), np.zeros(130, np.int64)])
    (experiment,) = prepare(BenchGraph("hub", hub, 131), ["gather-scatter"], ["bucketed"], 128, "float32")
    assert experiment.counts["bucketed"]["tpu_gathered_bytes"] == (130 + 3) * 512


def test_without_room_for_the_messages_segment_sum_is_the_baseline(monkeypatch: pytest.MonkeyPatch):
    most = int(SMALL.degrees.max())
    monkeypatch.setattr(bench, "LARGEST_MESSAGES", 40 * most * FEATURES * 4 - 1)
    left_out, gathering = prepare(SMALL, ["scatter-add", "gather-scatter"], ["padded", "bucketed"], FEATURES, "float32")
    assert not left_out.functions
    assert left_out.notes == (f"scatter-add left out: messages [40, {most}, 16] would take 0.0 GB",)
    assert list(gathering.functions) == ["segment_sum", "bucketed"]
    assert gathering.notes[0].startswith("gather-scatter without baseline and padded layout, so against segment_sum")
    _, records = measure(gathering, repetitions=1)
    assert {record["compared_with"] for record in records} == {"segment_sum"}


def test_bfloat16():
    (experiment,) = prepare(SMALL, ["gather-scatter"], ["bucketed"], FEATURES, "bfloat16")
    assert isinstance(experiment.inputs["segments"], Segments)
    compared, _ = measure(experiment, repetitions=1)
    assert compared.agrees, compared


@pytest.mark.tpu
def test_estimates_for_a_tpu_take_buckets_and_run_nothing():
    (experiment,) = prepare(SMALL, ["gather-scatter"], ["auto"], FEATURES, "float32", ["v5e:1x1"])
    assert list(experiment.functions) == ["baseline", "segment_sum", "bucketed"]
    _, records = measure(experiment, repetitions=1, chips=["v5e:1x1"])
    assert [(one["place"], one["measured"]) for one in records] == [("v5e:1x1", False)] * 3


@pytest.mark.tpu
def test_the_published_baseline_writes_67_times_its_result_where_vmem_is_too_small():
    (experiment,) = prepare(read_graph("seed"), ["gather-scatter"], ["padded"], 128, "float32", ["v5p:1x1x1"])
    functions = {"baseline": experiment.functions["baseline"]}
    (baseline,) = compare_all(functions, (experiment.inputs,), chips=["v5p:1x1x1"], run=False).programs
    assert baseline.written_bytes / (2048 * 512) == pytest.approx(67, abs=1)
    assert baseline.round_trip_bytes > 2048 * 64 * 512
