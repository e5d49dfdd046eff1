"""`tilewright plan training`: streams, packet sizes and shifts of a sharded training step, on a simulated Neuron instance."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.model_configs import model_config
from tilewright.cli.calibrate import print_ranges
from tilewright.cli.common import (
    NUMBERS,
    WORDS,
    JsonFile,
    check_json_file,
    check_output_file,
    human_console,
    whole_file,
    write_json,
)
from tilewright.cli.plan_inference import fitted_constants
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.metric import significant
from tilewright.perfmodel.environment import as_record
from tilewright.perfmodel.plan_training import TrainingPlan, compare, setting_of, sweep
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.neuron import write_training_plan
from tilewright.report.terminal import print_table

SHOWN = 16
"""Settings in the table; `--json` and `--html` have all."""


@Parameter(name="*")
@dataclass(frozen=True)
class TrainingOptions:
    """Options of what is compared. Those of several values take them with commas or blanks between them.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        instance: inf2.48xlarge, trn1.32xlarge, trn2.48xlarge, trn2-ultraserver or trn3-16.
        mesh: tp=N,fsdp=M: tensor-parallel ranks on neighbouring cores, and fully sharded ones.
        streams: of collectives, several.
        packet_size: default, recommended: several.
        prefetch_distance: by how many layers weights are gathered ahead, in steps of half a layer (attention or MLP), several.
        scatter_delay: by how many layers gradients are scattered behind, in the same steps, several.
        sequences, positions: of each fully sharded rank, and of each sequence.
        adaptive: search all shifts of up to 2 layers besides those that are named.
        calibrate: the output of nccom-test, to which latency and rate of collectives are fitted.
        draws: of the constants that have a range; the fastest settings are simulated at each.
    """

    model_config: str = "llama3-70b"
    instance: str = "trn2.48xlarge"
    mesh: Annotated[tuple[str, ...], WORDS] = ("tp=4", "fsdp=16")
    streams: Annotated[tuple[int, ...], NUMBERS] = (1, 2)
    packet_size: Annotated[tuple[str, ...], WORDS] = ("default", "recommended")
    prefetch_distance: Annotated[tuple[str, ...], WORDS] = ("0", "0.5", "1")
    scatter_delay: Annotated[tuple[str, ...], WORDS] = ("0", "0.5", "1", "1.5")
    sequences: int = 1
    positions: int = 4096
    adaptive: bool = False
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def plan(self) -> TrainingPlan:
        """Raises ValueError where an option is none that there is, or does not fit the others."""
        axes = read_mesh(self.mesh)
        names = ("prefetch_distance", "scatter_delay")
        distances, delays = (tuple(halves_of(name, text) for text in getattr(self, name)) for name in names)
        if self.adaptive:
            distances, delays = (tuple(sorted({*values, *range(5)})) for values in (distances, delays))
        place = (self.model_config, model_config(self.model_config), instance_of(self.instance), axes["fsdp"], axes["tp"])
        compared = (self.streams, self.packet_size, distances, delays, self.sequences, self.positions)
        return TrainingPlan(*place, *compared, calibration=fitted_constants(self.calibrate, self.instance, self.draws))


def plan_training(
    *, options: TrainingOptions = TrainingOptions(), json_file: JsonFile = None, html: Path | None = None
) -> None:  # fmt: skip
    """Ranks streams, packet sizes and shifts of a sharded training step, and prints the winner's environment.

    A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    html
        Write a page with the ranking and plots to this file.
    """
    check_json_file(json_file)
    check_output_file("--html", None if html is None else str(html))
    plan, console = options.plan(), human_console(json_file)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=len(plan.settings) + options.draws)
        records = compare(plan, lambda name: bar.update(row, advance=1, description=name))
        drawn = sweep(plan, records, options.draws, lambda: bar.update(row, advance=1, description="ranges"))
    best = records[0]
    variables = setting_of(best).variables()
    text = f"{best['setting']}: {significant(best['step_ms'])} ms, limited by {limit_of(best)}"
    figures = {
        "model": plan.name, "instance": plan.instance.name, "mesh": [f"tp={plan.tp}", f"fsdp={plan.fsdp}"],
        "sequences": plan.sequences, "positions": plan.positions, "dtype": "bfloat16", "measured": False,
        "data": records, "winner": best, "winner_text": text, "winner_environment": as_record(variables),
        "ranges": {"step_ms": drawn.record()},
    }  # fmt: skip
    show(console, figures)
    for one in variables:
        console.print(f"export {one.name}={one.value}  # {one.does}", markup=False, soft_wrap=True)
    write_json(json_file, figures)
    if html is not None:
        with whole_file(html) as partial:
            write_training_plan(partial, f"Training of {plan.name} on {plan.instance.name}", figures)
        console.print(f"{html} written", markup=False)


def halves_of(name: str, text: str) -> int:
    """Halves of layers in a shift that is spelled in layers.

    Raises:
        ValueError: no multiple of half a layer from 0.
    """
    if re.fullmatch(r"\d+(\.[05])?", text) is None:
        raise ValueError(f"expected --{name.replace('_', '-')} in layers, in steps of half a layer, found {text!r}")
    return round(2 * float(text))


def read_mesh(words: Sequence[str]) -> dict[str, int]:
    """The sizes of both axes.

    Raises:
        ValueError: other names, or no whole numbers.
    """
    axes = {"fsdp": 1, "tp": 1}
    for word in words:
        name, _, size = word.partition("=")
        if name not in axes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"expected --mesh tp=N,fsdp=M with whole numbers from 1, found {word!r}")
        axes[name] = int(size)
    return axes


def limit_of(one: Mapping[str, Any]) -> str:
    return f"{one['limit']}, busy for {one['limit_share']:.0%} of the step"


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """The ranking, the winner, and the ranges of the fastest."""
    records = figures["data"]
    title = f"{figures['model']} on {figures['instance']}, {','.join(figures['mesh'])}, {figures['positions']:,} positions"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("packets")
    shifts = ("prefetch\nlayers", "delay\nlayers")
    for head in ("streams", *shifts, "step\nms", "gain", "tokens/s", "exposed\nms", "TP delay\nms", "GiB"):
        table.add_column(head, justify="right")
    table.add_column("limit")
    own = [one for one in records[SHOWN:] if not one["threaded"]]
    for one in (*records[:SHOWN], *own):
        times = [significant(one["step_ms"]), f"{one['gain']:+.1%}", f"{one['tokens_per_s']:,.0f}"]
        waits = [significant(one["exposed_ms"]), significant(one["tp_delay_ms"])]
        memory = significant(one["memory_gib"]) + ("" if one["fits"] else " !")
        shifts = (f"{one['early_layers']:g}", f"{one['late_layers']:g}") if one["threaded"] else ("compiler's", "order")
        limit = f"{one['limit']} {one['limit_share']:.0%}"
        table.add_row(one["packets"], str(one["streams"]), *shifts, *times, *waits, memory, limit)
    print_table(console, table)
    if len(records) > SHOWN:
        console.print(f"{len(records)} settings, of which the first {SHOWN} and the compiler's own order")
    console.print(f"fastest: {figures['winner_text']}", markup=False, soft_wrap=True)
    title = "ranges of the fastest settings; all other figures are at the constants that are used"
    print_ranges(console, title, figures["ranges"].values())
    for note in dict.fromkeys(note for one in records for note in one["notes"]):
        console.print(note, style="yellow", markup=False)
