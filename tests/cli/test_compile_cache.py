"""Which commands keep their compiled programs on disk for the next process, and whether they say where a program came from."""

from pathlib import Path

import jax
import pytest

from cli.conftest import Run
from tilewright.compiled import compare

GNN = ["train", "gnn", "--epochs", 3]
GRAPH = ["bench", "graph", "--data", "uniform:30:4", "--features", 8, "--repetitions", 1, "--experiment", "gcn"]
COMPILING = [
    "generate x",
    "doctor",
    "bench graph",
    "bench speculative",
    "train lm text --out out",
    "train drafter text --target demo --out out",
    "train gnn",
]


def test_training_loads_what_an_earlier_run_compiled_and_ends_the_same(run: Run, kept: Path):
    first, second = [run(*GNN, "--json", "-").json for _ in range(2) if not jax.clear_caches()]
    assert first["compilations"] == second["compilations"] >= 3, "start, step and evaluation"
    assert [each["programs_loaded"] for each in (first, second)] == [0, first["compilations"]]
    assert first["loss_nats"] == second["loss_nats"]
    assert list((kept / "xla").glob("*/*"))


def test_a_comparison_says_what_was_loaded(run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch):
    """Its account of a program does not depend on where that came from."""
    monkeypatch.setattr(compare, "COPY_BYTES", 2**16)
    monkeypatch.setattr(compare, "RUN_S", 0.001)
    ran = [run(*GRAPH, "--json", "-") for _ in range(2) if not jax.clear_caches()]
    first, second = (each.json["data"] for each in ran)
    assert [[one["loaded"] for one in each] for each in (first, second)] == [[False] * 3, [True] * 3]
    for name in ("read_bytes", "written_bytes", "round_trips", "peak_bytes"):
        assert [one[name] for one in first] == [one[name] for one in second]


class Reached(Exception):
    """Programs were to be kept."""


@pytest.mark.parametrize("command", COMPILING)
def test_every_command_that_compiles_keeps_programs(run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    def enable(*_: object) -> None:
        raise Reached

    monkeypatch.setattr("tilewright.cli.common.compile_cache.enable", enable)
    with pytest.raises(Reached):
        run(*command.split())


def test_nothing_is_stored_if_the_variable_says_so(run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    ran = run(*GNN)
    assert (ran.status, list(kept.iterdir())) == (0, [])
