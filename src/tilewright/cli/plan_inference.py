"""`tilewright plan inference`: schedules of a model by cores, batch and input, on a simulated Neuron instance."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console

from tilewright.cli.calibrate import NeuronModelOptions, print_notes, print_ranges
from tilewright.cli.options import Numbers, Words, option_class
from tilewright.cli.outputs import PageFiles, progress
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.plan_inference import InferencePlan, compare, sweeps, winner
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.neuron import inference_table, write_inference_plan


@option_class
class InferenceOptions(NeuronModelOptions):
    """Options of what is compared. Those of several values take them with commas or blanks between them.

    Attributes:
        cores: tensor-parallel widths, several.
        batch: rows, several.
        input: prompt tokens, several.
        output: tokens generated; time per token is that of a step in the middle of them.
        schedule: sync, sequence, domino, column, tiles+ring, ring: several.
        adaptive: search tile sizes, streams and prefetching for each shape, and take the best.
        draws: of the constants that have a range; all schedules are simulated at each.
    """

    cores: Numbers = (2, 4, 8, 16, 24)
    batch: Numbers = (4, 8)
    input: Numbers = (1024, 4096)
    output: int = 512
    schedule: Words = ("sync", "sequence", "domino", "ring")
    adaptive: bool = False
    draws: int = EVENT_DRAWS

    def plan(self) -> InferencePlan:
        """Raises ValueError where an option is none that there is, or does not fit the others."""
        place = (self.model_config, model_config(self.model_config), instance_of(self.instance))
        compared = (self.cores, self.batch, self.input, self.output, self.schedule, self.adaptive)
        return InferencePlan(*place, *compared, calibration=self.calibration(self.draws))


def plan_inference(*, options: InferenceOptions = InferenceOptions(), files: PageFiles = PageFiles()) -> None:
    """Compares schedules by cores, batch and input: throughput, time to the first token, time per token.

    A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.
    """
    console = files.console()
    plan = options.plan()
    with progress(console, len(plan.places) * len(plan.schedules) + 2 * options.draws) as step:
        records = compare(plan, step)
        best = winner(records)
        drawn = sweeps(plan, records, best, options.draws, partial(step, "ranges"))
    figures = {
        "model": plan.name,
        "instance": plan.instance.name,
        "dtype": "bfloat16",
        "adaptive": plan.adaptive,
        "measured": False,
        "output_tokens": plan.output,
        "data": records,
        "winner": best,
        "ranges": {name: one.record() for name, one in drawn.items()},
    }
    show(console, figures)
    title = f"Inference of {plan.name} on {plan.instance.name}"
    files.write(console, figures, lambda path: write_inference_plan(path, title, figures))


SHOWN = (
    "schedule cores batch_rows tokens_per_s tokens_per_s_gain tokens_per_s_gain_over_sequence ttft_ms ttft_gain "
    "ttft_gain_over_sequence memory_gib limit"
)
"""Columns in the terminal; a page has times per token too."""


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """A table for each input, the winner, and the ranges at its place."""
    records = figures["data"]
    for tokens, of in grouped(records, "input_tokens").items():
        title = f"{figures['model']} on {figures['instance']}, {tokens:,} tokens in, {figures['output_tokens']:,} out"
        print_table(console, inference_table(title, of, SHOWN))
    best = figures["winner"]
    said = f"most tokens a second: {best['schedule']} over {best['cores']} cores, batch {best['batch_rows']}"
    limit = f"{best['decode']['limit']}, busy for {best['decode']['limit_share']:.0%} of a decoding step"
    console.print(f"{said}: {significant(best['tokens_per_s'])} tokens/s; limited by {limit}")
    place = f"{best['cores']} cores, batch {best['batch_rows']}, {best['input_tokens']:,} tokens in"
    print_ranges(
        console, f"ranges at {place}; all other figures are at the constants that are used", figures["ranges"].values()
    )
    print_notes(console, records)
