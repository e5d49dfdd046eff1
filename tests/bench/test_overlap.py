"""How many layers are compiled before one of them stands for all."""

from dataclasses import replace
from itertools import product

import pytest

from tilewright.bench import overlap
from tilewright.bench.overlap import LAYERS, OverlapRun, OverlapSetup, Phase, make_runs, steady
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.ranged import Ranged
from tilewright.hardware.tpu import CHIPS
from tilewright.models.published_configs import model_config
from tilewright.parallel.auto import AUTO
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.calibration import Calibration, Measurement, calibrated
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.timeline import simulate
from tilewright.perfmodel.uncertainty import MODEL_ERROR

PREFILL = Phase("prefill", 1, 8)
DECODE = Phase("decode", 1, 8)
PLACES = tuple(ring_of(product(range(4), range(2))))
FABRIC = Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], (1, 1)), ((0, 0),))


def run_of(setup: OverlapSetup, phase: Phase, layers: int, cycles: dict[int, float]) -> OverlapRun:
    """Layers of 1,000 cycles, but for those named."""
    nodes = [Node(f"n{n}", "fusion", "", "run", cycles=cycles.get(n, 1000.0), layer=n) for n in range(layers)]
    return OverlapRun(setup, phase, "sync", layers, simulate(ScheduleGraph(tuple(nodes), ()), FABRIC), 0.0)


@pytest.fixture
def layer_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were compiled, one after another: the second of a program takes longer, and the last two less long."""
    found: list[int] = []

    def compiled(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> OverlapRun:
        found.append(layers)
        return run_of(setup, phase, layers, {1: 1100, layers - 2: 500, layers - 1: 500})

    monkeypatch.setattr(overlap, "compiled", compiled)
    return found


def setup_of(layers: int | None) -> OverlapSetup:
    return OverlapSetup("v5e:4x2", "llama3-8b", model_config("llama3-8b"), layers)


def test_layers_are_added_until_the_neighbours_agree(layer_counts: list[int]):
    run = steady(setup_of(None), PREFILL, "sync")
    assert layer_counts == [5, 7], "of five, the middle one has the second beside it"
    assert (run.layers, run.middle, run.steady, run.notes) == (7, 3, True, [])
    layer_counts.clear()
    assert steady(setup_of(None), DECODE, "sync").layers == LAYERS["decode"][0]


def test_a_fixed_number_of_layers_is_kept(layer_counts: list[int]):
    run = steady(setup_of(5), PREFILL, "sync")
    assert (layer_counts, run.steady) == ([5], False)
    assert run.unsteady_share == pytest.approx(0.5)
    assert run.notes == ["prefill:1x8 sync: not steady, layer 2 of 5 and a neighbour of it differ by 50%"]


def test_what_is_never_steady_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "compiled", lambda setup, phase, _, n: run_of(setup, phase, n, {n // 2: 1060}))
    run = steady(setup_of(None), PREFILL, "sync")
    assert (run.layers, run.steady) == (LAYERS["prefill"][-1], False)
    assert run.unsteady_share == pytest.approx(1 - 1000 / 1060)


def test_what_auto_takes_is_compiled_once(layer_counts: list[int]):
    setup = setup_of(9)
    vars(setup)["fabric"] = Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], (4, 2)), tuple(ring_of(product(range(4), range(2)))))
    vars(setup)["mesh"] = make_mesh({"tp": 8})
    runs = make_runs(setup, DECODE, ["sync", AUTO, "ring"])
    assert [run.schedule for run in runs] == ["sync", AUTO, "ring"]
    assert (len(layer_counts), runs[0].timeline is runs[1].timeline) == (2, True)
    assert "auto: sync for 1 rows" in runs[1].notes[0]


def test_fitted_constants_move_predictions_and_are_drawn():
    """A link of half the rate doubles what a layer waits for; the sweep draws the fitted ranges and the fit's own error."""
    point = Measurement("all-reduce", 8, 1e6, 100.0)
    constants = {"ici_gb_per_s": Ranged(25.0, 20.0, 30.0), "hop_us": Ranged(2.0, 1.0, 3.0)}
    fit = Calibration("a file", constants, (), ((point, 100.0),), ((point, 110.0),))
    totals = {}
    for name, calibration in (("published", None), ("fitted", fit)):
        setup = replace(setup_of(5), calibration=calibration)
        fabric = calibrated(Fabric(setup.spec, torus_of(setup.spec, (4, 2)), PLACES, setup.hop_us), calibration)
        vars(setup)["fabric"] = fabric
        sums = [
            Node(f"n{n}", "all-reduce", "", "sync", transfer=ScheduledTransfer("all-reduce", 10**7), layer=n) for n in range(5)
        ]
        sums.append(Node("n", "fusion", "", "run", cycles=1.0, layer=2))  # of whose time a share can be told
        run = OverlapRun(setup, PREFILL, "sync", 5, simulate(ScheduleGraph(tuple(sums), ()), fabric), 0.0)
        (found,) = overlap.sweeps([run], draws=8).values()
        totals[name] = found.predicted["sync"]
        assert found.best == "sync"
    assert setup.spec.ici_gb_per_s == 25
    assert totals["fitted"] == pytest.approx(2 * totals["published"], rel=0.1)
    assert {"ici_gb_per_s", "hop_us", MODEL_ERROR} <= set(found.constants)
    assert found.basis.calibrated_against == "a file"
    assert found.basis.residual == pytest.approx(0.1)
