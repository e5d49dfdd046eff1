"""Collectives beside products: what is said of them, and what runs on CPU devices."""

import jax
import pytest

from tilewright.bench.overlap_micro import AXIS, COLLECTIVES, MicroCase, cases, measured, verdict
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph


def graph(*found: tuple[str, str]) -> ScheduleGraph:
    """Collectives, each by its kind and role."""
    return ScheduleGraph(tuple(Node("n", kind, "", role, transfer=ScheduledTransfer(kind, 8)) for kind, role in found), ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program, found, words",
    [
        ("beside", [("all-reduce", "sync")], "synchronous"),
        ("beside", [("all-reduce", "start")], "asynchronous"),
        ("two", [("all-reduce", "sync")], "synchronous, merged"),
        ("two", [("all-reduce", "start"), ("all-reduce", "sync")], "partly asynchronous"),
        ("before", [("collective-permute", "start")] * 3, "asynchronous, in parts, as collective-permute"),
        ("beside", [], "left out"),
    ],
)
def test_what_became_of_the_collectives(program: str, found: list[tuple[str, str]], words: str):
    assert verdict(graph(*found), MicroCase("all-reduce", program, 65536))["made_of_it"] == words


def test_cases_are_all_programs_at_all_sizes():
    found = cases(["all-reduce", "all-gather"], [64, 128], 8)
    assert len(found) == len(set(found)) == 2 * 2 * 4
    assert {case.rows for case in found} == {8, 16}
    with pytest.raises(ValueError, match=r"expected a collective of all-reduce, .* found 'gather'"):
        cases(["gather"], [64], 8)
    with pytest.raises(ValueError, match="expected multiples of 64 KiB, a row for each of 8 devices, found 100"):
        cases(["all-reduce"], [100], 8)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_program_runs_on_devices_that_are_here(collective: str):
    mesh = make_mesh({AXIS: 4}, jax.devices()[:4])
    for case in cases([collective], [1], 4, hidden=128, product_rows=8):
        times = measured(case, mesh, 1)
        assert min(times[f"{name}_us"] for name in ("both", "product", "collective", "memory")) > 0
        hidden = times["product_us"] + times["collective_us"] - times["both_us"]
        assert times["hidden_share"] == pytest.approx(hidden / times["collective_us"])
