"""Ranges of what the timeline of a scheduled TPU program gives: the same schedule over links and memory of drawn constants."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tilewright.hardware.links import Fabric
from tilewright.hardware.ranged import Ranged, ranged
from tilewright.perfmodel.calibration import Calibration, basis_of, swept_with, with_constants
from tilewright.perfmodel.schedule import ScheduleGraph
from tilewright.perfmodel.timeline import Timeline, simulate
from tilewright.perfmodel.uncertainty import Sweep, swept

ROOFLINE_TIME = Ranged(1.0, 2.0)
"""Time of operations without an estimate over their roofline, which they are counted at: a working range, for kernels seldom
reach all of it."""


def fabric_constants(fabric: Fabric) -> dict[str, Ranged]:
    """Constants of a slice that have a range, by name."""
    return ranged(fabric.chip) | ranged(fabric)


def with_roofline_time(graph: ScheduleGraph, factor: float) -> ScheduleGraph:
    """The graph whose operations without an estimate take so many times their roofline."""
    if factor == 1:
        return graph
    nodes = (node if node.estimated else replace(node, cycles=factor * node.cycles) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def swept_timelines(
    timelines: Mapping[str, Timeline],
    fabric: Fabric,
    milliseconds: Callable[[str, Timeline], float],
    calibration: Calibration | None,
    roofline_share: float,
    draws: int,
    unit: str,
) -> Sweep:
    """Sweep over programs that are set against each other on one slice.

    Args:
        timelines: each program at the constants that are used, by name.
        milliseconds: the prediction from a timeline of the program of this name.
        calibration: that the slice's constants are of.
        roofline_share: the largest of the programs; see `Basis`.
    """
    constants = swept_with(calibration, {**fabric_constants(fabric), "roofline_time": ROOFLINE_TIME})

    def predict(changes: Mapping[str, float]) -> dict[str, float]:
        links = {name: value for name, value in changes.items() if name != "roofline_time"}
        changed = with_constants(fabric, links)
        factor = changes.get("roofline_time", 1.0)
        return {
            name: milliseconds(name, simulate(with_roofline_time(timeline.graph, factor), changed))
            for name, timeline in timelines.items()
        }

    return swept(predict, constants, draws, unit=unit, basis=basis_of(calibration, roofline_share))
