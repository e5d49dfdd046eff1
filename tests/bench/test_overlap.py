"""How many layers are compiled before one of them stands for all."""

from itertools import product

import pytest

from tilewright.bench import overlap
from tilewright.bench.model_configs import model_config
from tilewright.bench.overlap import LAYERS, OverlapRun, OverlapSetup, Phase, runs_of, steady
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.parallel.auto import AUTO
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.schedule import Node, ScheduleGraph
from tilewright.perfmodel.timeline import simulate

PREFILL, DECODE = Phase("prefill", 1, 8), Phase("decode", 1, 8)
FABRIC = Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], (1, 1)), ((0, 0),))


def run_of(setup: OverlapSetup, phase: Phase, layers: int, cycles: dict[int, float]) -> OverlapRun:
    """Layers of 1,000 cycles, but for those named."""
    nodes = [Node(f"n{n}", "fusion", "", "run", cycles=cycles.get(n, 1000.0), layer=n) for n in range(layers)]
    return OverlapRun(setup, phase, "sync", layers, simulate(ScheduleGraph(tuple(nodes), ()), FABRIC), 0.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were compiled, one after another: the second of a program takes longer, and the last two less long."""
    found: list[int] = []

    def compiled(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> OverlapRun:
        found.append(layers)
        return run_of(setup, phase, layers, {1: 1100, layers - 2: 500, layers - 1: 500})

    monkeypatch.setattr(overlap, "compiled", compiled)
    return found


def setup_of(layers: int | None) -> OverlapSetup:
    return OverlapSetup("v5e:4x2", "llama3-8b", model_config("llama3-8b"), layers)


def test_layers_are_added_until_the_neighbours_agree(asked: list[int]):
    run = steady(setup_of(None), PREFILL, "sync")
    assert asked == [5, 7], "of five, the middle one has the second beside it"
    assert (run.layers, run.middle, run.steady, run.notes) == (7, 3, True, [])
    asked.clear()
    assert steady(setup_of(None), DECODE, "sync").layers == LAYERS["decode"][0]


def test_a_fixed_number_of_layers_is_kept(asked: list[int]):
    run = steady(setup_of(5), PREFILL, "sync")
    assert (asked, run.steady) == ([5], False)
    assert run.unsteady_share == pytest.approx(0.5)
    assert run.notes == ["prefill:1x8 sync: not steady, layer 2 of 5 and a neighbour of it differ by 50%"]


def test_what_is_never_steady_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "compiled", lambda setup, phase, _, n: run_of(setup, phase, n, {n // 2: 1060}))
    run = steady(setup_of(None), PREFILL, "sync")
    assert (run.layers, run.steady) == (LAYERS["prefill"][-1], False)
    assert run.unsteady_share == pytest.approx(1 - 1000 / 1060)


def test_what_auto_takes_is_compiled_once(asked: list[int]):
    setup = setup_of(9)
    vars(setup)["fabric"] = Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], (4, 2)), tuple(ring_of(product(range(4), range(2)))))
    vars(setup)["mesh"] = make_mesh({"tp": 8})
    runs = runs_of(setup, DECODE, ["sync", AUTO, "ring"])
    assert [run.schedule for run in runs] == ["sync", AUTO, "ring"]
    assert (len(asked), runs[0].timeline is runs[1].timeline) == (2, True)
    assert "auto: sync for 1 rows" in runs[1].notes[0]
