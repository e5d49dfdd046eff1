"""`tilewright plan inference`: schedules of a model by cores, batch and input, on a simulated Neuron instance."""

from collections.abc import Mapping
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
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.metric import significant
from tilewright.perfmodel.calibration import Calibration, read_measurements
from tilewright.perfmodel.calibration_neuron import calibrate_neuron
from tilewright.perfmodel.plan_inference import InferencePlan, compare, sweeps, winner
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.neuron import write_inference_plan
from tilewright.report.terminal import print_table


@Parameter(name="*")
@dataclass(frozen=True)
class InferenceOptions:
    """Options of what is compared. Those of several values take them with commas or blanks between them.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        instance: inf2.48xlarge, trn1.32xlarge, trn2.48xlarge, trn2-ultraserver or trn3-16.
        cores: tensor-parallel widths, several.
        batch: rows, several.
        input: prompt tokens, several.
        output: tokens generated; time per token is that of a step in the middle of them.
        schedule: sync, sequence, domino, column, tiles+ring, ring: several.
        adaptive: search tile sizes, streams and prefetching for each shape, and take the best.
        calibrate: the output of nccom-test, to which latency and rate of collectives are fitted.
        draws: of the constants that have a range; all schedules are simulated at each.
    """

    model_config: str = "llama3-8b"
    instance: str = "inf2.48xlarge"
    cores: Annotated[tuple[int, ...], NUMBERS] = (2, 4, 8, 16, 24)
    batch: Annotated[tuple[int, ...], NUMBERS] = (4, 8)
    input: Annotated[tuple[int, ...], NUMBERS] = (1024, 4096)
    output: int = 512
    schedule: Annotated[tuple[str, ...], WORDS] = ("sync", "sequence", "domino", "ring")
    adaptive: bool = False
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def plan(self) -> InferencePlan:
        """Raises ValueError where an option is none that there is, or does not fit the others."""
        place = (self.model_config, model_config(self.model_config), instance_of(self.instance))
        compared = (self.cores, self.batch, self.input, self.output, self.schedule, self.adaptive)
        return InferencePlan(*place, *compared, calibration=fitted_constants(self.calibrate, self.instance, self.draws))


def fitted_constants(path: Path | None, instance: str, draws: int) -> Calibration | None:
    """Constants of an instance that are fitted to a file of nccom-test; None without one.

    Raises:
        ValueError: another file, or fewer than 2 draws.
    """
    if draws < 2:
        raise ValueError(f"expected --draws from 2, found {draws}")
    return None if path is None else calibrate_neuron(read_measurements(path), instance_of(instance))


def plan_inference(
    *, options: InferenceOptions = InferenceOptions(), json_file: JsonFile = None, html: Path | None = None
) -> None:
    """Compares schedules by cores, batch and input: throughput, time to the first token, time per token.

    A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    html
        Write a page with plots and tables to this file.
    """
    check_json_file(json_file)
    check_output_file("--html", None if html is None else str(html))
    plan, console = options.plan(), human_console(json_file)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=len(plan.places) * len(plan.schedules) + 2 * options.draws)
        records = compare(plan, lambda name: bar.update(row, advance=1, description=name))
        best = winner(records)
        drawn = sweeps(plan, records, best, options.draws, lambda: bar.update(row, advance=1, description="ranges"))
    figures = {
        "model": plan.name, "instance": plan.instance.name, "dtype": "bfloat16", "adaptive": plan.adaptive, "measured": False,
        "output_tokens": plan.output, "data": records, "winner": best,
        "ranges": {name: one.record() for name, one in drawn.items()},
    }  # fmt: skip
    show(console, figures)
    write_json(json_file, figures)
    if html is not None:
        with whole_file(html) as partial:
            write_inference_plan(partial, f"Inference of {plan.name} on {plan.instance.name}", figures)
        console.print(f"{html} written", markup=False)


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """A table for each input, the winner, and the ranges at its place."""
    records = figures["data"]
    for tokens in dict.fromkeys(one["input_tokens"] for one in records):
        title = f"{figures['model']} on {figures['instance']}, {tokens:,} tokens in, {figures['output_tokens']:,} out"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("schedule")
        heads = ("cores", "batch", "tokens/s", "gain", "over\nseq.", "TTFT\nms", "gain", "over\nseq.", "GiB")
        for head in heads:
            table.add_column(head, justify="right")
        table.add_column("decode\nlimit")
        for one in (each for each in records if each["input_tokens"] == tokens):
            table.add_row(*cells(one))
        print_table(console, table)
    best = figures["winner"]
    said = f"most tokens a second: {best['schedule']} over {best['cores']} cores, batch {best['batch_rows']}"
    limit = f"{best['decode']['limit']}, busy for {best['decode']['limit_share']:.0%} of a decoding step"
    console.print(f"{said}: {significant(best['tokens_per_s'])} tokens/s; limited by {limit}")
    place = f"{best['cores']} cores, batch {best['batch_rows']}, {best['input_tokens']:,} tokens in"
    print_ranges(
        console, f"ranges at {place}; all other figures are at the constants that are used", figures["ranges"].values()
    )
    for note in dict.fromkeys(note for one in records for note in one["notes"]):
        console.print(note, style="yellow", markup=False)


def cells(one: Mapping[str, Any]) -> list[str]:
    """The figures of a row."""
    found = [one["schedule"], str(one["cores"]), str(one["batch_rows"])]
    for name, gain in (("tokens_per_s", "tokens_per_s_gain"), ("ttft_ms", "ttft_gain")):
        gains = (one[gain], one[f"{gain}_over_sequence"])
        found += [significant(one[name]), *("" if each is None else f"{each:+.1%}" for each in gains)]
    memory = significant(one["memory_gib"]) + ("" if one["fits"] else " !")
    return [*found, memory, f"{one['decode']['limit']} {one['decode']['limit_share']:.0%}"]
