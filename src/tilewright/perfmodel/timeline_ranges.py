"""Ranges of timeline predictions of TPU programs, over drawn constants of links and memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tilewright.hardware.links import Fabric
from tilewright.hardware.ranged import Ranged, ranged
from tilewright.perfmodel.calibration import Calibration, constants_to_sweep, prediction_basis, with_constants
from tilewright.perfmodel.schedule import ScheduleGraph
from tilewright.perfmodel.timeline import Timeline, simulate
from tilewright.perfmodel.uncertainty import Sweep, sweep_constants

ROOFLINE_TIME = Ranged(1.0, 2.0)
"""Factor on the roofline time of operations without a compiler estimate: an assumed range, because kernels seldom reach the
roofline."""


def fabric_constants(fabric: Fabric) -> dict[str, Ranged]:
    """Returns the ranged constants of a slice, by name."""
    return ranged(fabric.chip) | ranged(fabric)


def with_roofline_time(graph: ScheduleGraph, factor: float) -> ScheduleGraph:
    """Returns the graph with operations without an estimate scaled to `factor` times their roofline."""
    if factor == 1:
        return graph
    nodes = (node if node.estimated else replace(node, cycles=factor * node.cycles) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def sweep_timelines(
    timelines: Mapping[str, Timeline],
    fabric: Fabric,
    milliseconds: Callable[[str, Timeline], float],
    calibration: Calibration | None,
    roofline_share: float,
    draws: int,
    unit: str,
) -> Sweep:
    """Sweeps the constants of a slice for several programs that are compared.

    Args:
        timelines: timeline of each program at the default constants, by name.
        milliseconds: prediction from a program's name and timeline.
        calibration: source of fitted constants of the slice.
        roofline_share: the largest share of the programs; see `Basis`.
        draws: number of draws.
        unit: unit of the predictions, for the text.
    """
    constants = constants_to_sweep(calibration, {**fabric_constants(fabric), "roofline_time": ROOFLINE_TIME})

    def predict(changes: Mapping[str, float]) -> dict[str, float]:
        links = {name: value for name, value in changes.items() if name != "roofline_time"}
        changed = with_constants(fabric, links)
        factor = changes.get("roofline_time", 1.0)
        return {
            name: milliseconds(name, simulate(with_roofline_time(timeline.graph, factor), changed))
            for name, timeline in timelines.items()
        }

    return sweep_constants(predict, constants, draws, unit=unit, basis=prediction_basis(calibration, roofline_share))
