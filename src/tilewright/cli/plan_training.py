"""`tilewright plan training`: streams, packet sizes and shifts of a sharded training step, on a simulated Neuron instance."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console

from tilewright.cli.calibrate import NeuronModelOptions, print_notes, print_ranges
from tilewright.cli.common import mesh_axes
from tilewright.cli.options import Numbers, Words, flag, option_class
from tilewright.cli.outputs import PageFiles, progress
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.environment import as_record
from tilewright.perfmodel.plan_training import TrainingPlan, compare, setting_of, sweep
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.neuron import training_table, write_training_plan

SHOWN = 16
"""Settings in the table; `--json` and `--html` have all."""


@option_class
class TrainingOptions(NeuronModelOptions):
    """Options of what is compared. Those of several values take them with commas or blanks between them.

    Attributes:
        mesh: tp=N,fsdp=M: tensor-parallel ranks on neighbouring cores, and fully sharded ones.
        streams: of collectives, several.
        packet_size: default, recommended: several.
        prefetch_distance: by how many layers weights are gathered ahead, in steps of half a layer (attention or MLP), several.
        scatter_delay: by how many layers gradients are scattered behind, in the same steps, several.
        sequences, positions: of each fully sharded rank, and of each sequence.
        adaptive: search all shifts of up to 2 layers besides those that are named.
        draws: of the constants that have a range; the fastest settings are simulated at each.
    """

    model_config: str = "llama3-70b"
    instance: str = "trn2.48xlarge"
    mesh: str = "tp=4,fsdp=16"
    streams: Numbers = (1, 2)
    packet_size: Words = ("default", "recommended")
    prefetch_distance: Words = ("0", "0.5", "1")
    scatter_delay: Words = ("0", "0.5", "1", "1.5")
    sequences: int = 1
    positions: int = 4096
    adaptive: bool = False
    draws: int = EVENT_DRAWS

    def plan(self) -> TrainingPlan:
        """Raises ValueError where an option is none that there is, or does not fit the others."""
        axes = {"fsdp": 1, "tp": 1} | mesh_axes(self.mesh, ("tp", "fsdp"))
        names = ("prefetch_distance", "scatter_delay")
        distances, delays = (tuple(halves_of(name, text) for text in getattr(self, name)) for name in names)
        if self.adaptive:
            distances, delays = (tuple(sorted({*values, *range(5)})) for values in (distances, delays))
        place = (self.model_config, model_config(self.model_config), instance_of(self.instance), axes["fsdp"], axes["tp"])
        compared = (self.streams, self.packet_size, distances, delays, self.sequences, self.positions)
        return TrainingPlan(*place, *compared, calibration=self.calibration(self.draws))


def plan_training(*, options: TrainingOptions = TrainingOptions(), files: PageFiles = PageFiles()) -> None:
    """Ranks streams, packet sizes and shifts of a sharded training step, and prints the winner's environment.

    A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.
    """
    console = files.console()
    plan = options.plan()
    with progress(console, len(plan.settings) + options.draws) as step:
        records = compare(plan, step)
        drawn = sweep(plan, records, options.draws, partial(step, "ranges"))
    best = records[0]
    variables = setting_of(best).variables()
    limit = f"limited by {best['limit']}, busy for {best['limit_share']:.0%} of the step"
    text = f"{best['setting']}: {significant(best['step_ms'])} ms, {limit}"
    figures = {
        "model": plan.name,
        "instance": plan.instance.name,
        "mesh": [f"tp={plan.tp}", f"fsdp={plan.fsdp}"],
        "sequences": plan.sequences,
        "positions": plan.positions,
        "dtype": "bfloat16",
        "measured": False,
        "data": records,
        "winner": best,
        "winner_text": text,
        "winner_environment": as_record(variables),
        "ranges": {"step_ms": drawn.record()},
    }
    show(console, figures)
    for one in variables:
        console.print(f"export {one.name}={one.value}  # {one.does}", markup=False, soft_wrap=True)
    title = f"Training of {plan.name} on {plan.instance.name}"
    files.write(console, figures, lambda path: write_training_plan(path, title, figures))


def halves_of(name: str, text: str) -> int:
    """Halves of layers in a shift that is spelled in layers. Raises a `ValueError` for no multiple of half a layer from 0."""
    if re.fullmatch(r"\d+(\.[05])?", text) is None:
        raise ValueError(f"expected {flag(name)} in layers, in steps of half a layer, found {text!r}")
    return round(2 * float(text))


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """The ranking, the winner, and the ranges of the fastest."""
    records = figures["data"]
    title = f"{figures['model']} on {figures['instance']}, {','.join(figures['mesh'])}, {figures['positions']:,} positions"
    own = [one for one in records[SHOWN:] if not one["threaded"]]
    print_table(console, training_table(title, [*records[:SHOWN], *own]))
    if len(records) > SHOWN:
        console.print(f"{len(records)} settings, of which the first {SHOWN} and the compiler's own order")
    console.print(f"fastest: {figures['winner_text']}", markup=False, soft_wrap=True)
    title = "ranges of the fastest settings; all other figures are at the constants that are used"
    print_ranges(console, title, figures["ranges"].values())
    print_notes(console, records)
