"""`tilewright neuron plan`: compares schedules of inference, or settings of sharded training, on simulated Neuron
instances."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console

from tilewright.cli.calibrate import NeuronOptions, half_layers, print_notes, print_ranges
from tilewright.cli.common import mesh_axes
from tilewright.cli.options import COMMON, Flag, Numbers, Words, changed_options, option_class
from tilewright.cli.outputs import PageFiles, progress
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel import plan_inference, plan_training
from tilewright.perfmodel.environment import as_record
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.neuron import inference_table, training_table, write_inference_plan, write_training_plan

INFERENCE = Group("Inference", sort_key=2)
TRAINING = Group("Training (with --training)", sort_key=3)

INFERENCE_COLUMNS = (
    "schedule cores batch_rows tokens_per_s tokens_per_s_gain tokens_per_s_gain_over_sequence ttft_ms ttft_gain "
    "ttft_gain_over_sequence memory_gib limit"
)
"""Columns in the terminal; the page also has the time per token."""
TRAINING_ROWS = 16
"""Settings in the table of the terminal; `--json` and `--html` have all."""


@option_class
class PlanOptions(NeuronOptions):
    """Options of the instance and of the comparison.

    Attributes:
        instance: inf2.48xlarge, trn1.32xlarge, trn2.48xlarge, trn2-ultraserver or trn3-16. By default inf2.48xlarge for
            inference and trn2.48xlarge for training.
        adaptive: for inference, search tile sizes, streams and prefetching of each shape; for training, all shifts of up to 2
            layers besides the given ones.
        draws: draws of the constants that have a range; the compared settings are simulated with each draw.
    """

    instance: Annotated[str | None, Parameter(group=COMMON)] = None
    adaptive: Annotated[Flag, Parameter(group=COMMON)] = False
    draws: int = EVENT_DRAWS


@option_class(group=INFERENCE)
class InferenceOptions:
    """Options of the inference schedules to compare.

    Attributes:
        cores: tensor-parallel widths, several.
        batch: batch sizes, several.
        input: prompt lengths in tokens, several.
        output: tokens to generate; the time per token is that of the middle decode step.
        schedule: sync, sequence, domino, column, tiles+ring, ring: several.
    """

    cores: Numbers = (2, 4, 8, 16, 24)
    batch: Numbers = (4, 8)
    input: Numbers = (1024, 4096)
    output: int = 512
    schedule: Words = ("sync", "sequence", "domino", "ring")


@option_class(group=TRAINING)
class TrainingOptions:
    """Options of the training settings to compare.

    Attributes:
        mesh: tp=N,fsdp=M: tensor-parallel ranks on neighbouring cores, and fully sharded ranks.
        streams: numbers of streams of collectives, several.
        packet_size: default, recommended: several.
        prefetch_distance: layers by which weights are gathered ahead, in steps of half a layer (attention or MLP), several.
        scatter_delay: layers by which the reduce-scatter of gradients is delayed, in the same steps, several.
        sequences: sequences of each fully sharded rank.
        positions: positions of each sequence.
    """

    mesh: str = "tp=4,fsdp=16"
    streams: Numbers = (1, 2)
    packet_size: Words = ("default", "recommended")
    prefetch_distance: Words = ("0", "0.5", "1")
    scatter_delay: Words = ("0", "0.5", "1", "1.5")
    sequences: int = 1
    positions: int = 4096


def plan(
    model: str | None = None,
    /,
    *,
    training: Annotated[Flag, Parameter(group=COMMON)] = False,
    options: PlanOptions = PlanOptions(),
    inference: InferenceOptions = InferenceOptions(),
    step: TrainingOptions = TrainingOptions(),
    files: PageFiles = PageFiles(),
) -> None:
    """Ranks schedules of inference, or settings of a sharded training step, on a simulated Neuron instance.

    Inference: throughput, time to the first token and time per token, by cores, batch size and input length. Training: streams,
    packet sizes and shifts, and the environment variables of the fastest setting. Predictions of a discrete-event model, not
    measurements: docs/neuron.md. docs/metrics.md defines the figures.

    Args:
        model: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json. By default
            llama3-8b for inference and llama3-70b for training.
        training: plan a training step instead of inference.
    """
    wrong = changed_options(inference) if training else changed_options(step)
    if wrong:
        raise ValueError(
            f"{wrong[0]} is for {'inference' if training else 'training'}: {'leave out' if training else 'add'} --training"
        )
    if training:
        plan_step(model, options, step, files)
    else:
        plan_generation(model, options, inference, files)


def plan_generation(model: str | None, options: PlanOptions, compared: InferenceOptions, files: PageFiles) -> None:
    """Compares inference schedules. Raises a `ValueError` for an option that is unknown or does not fit the others."""
    console = files.console()
    name = model or "llama3-8b"
    instance = instance_of(options.instance or "inf2.48xlarge")
    shapes = (compared.cores, compared.batch, compared.input, compared.output, compared.schedule, options.adaptive)
    calibration = options.calibration(instance.name, options.draws)
    planned = plan_inference.InferencePlan(name, model_config(name), instance, *shapes, calibration=calibration)
    with progress(console, len(planned.places) * len(planned.schedules) + 2 * options.draws) as step:
        records = plan_inference.compare(planned, step)
        best = plan_inference.winner(records)
        sweeps = plan_inference.sweeps(planned, records, best, options.draws, partial(step, "ranges"))
    figures = {
        "model": name,
        "instance": instance.name,
        "dtype": "bfloat16",
        "adaptive": planned.adaptive,
        "measured": False,
        "output_tokens": planned.output,
        "data": records,
        "winner": best,
        "ranges": {name: sweep.record() for name, sweep in sweeps.items()},
    }
    show_inference(console, figures)
    title = f"Inference of {name} on {instance.name}"
    files.write(console, figures, lambda path: write_inference_plan(path, title, figures))


def show_inference(console: Console, figures: Mapping[str, Any]) -> None:
    """Prints a table for each input length, the winner, and the ranges of its figures."""
    records = figures["data"]
    for tokens, rows in grouped(records, "input_tokens").items():
        title = f"{figures['model']} on {figures['instance']}, {tokens:,} tokens in, {figures['output_tokens']:,} out"
        print_table(console, inference_table(title, rows, INFERENCE_COLUMNS))
    best = figures["winner"]
    setting = f"{best['schedule']} over {best['cores']} cores, batch {best['batch_rows']}"
    limit = f"{best['decode']['limit']}, busy for {best['decode']['limit_share']:.0%} of a decode step"
    console.print(f"most tokens a second: {setting}: {significant(best['tokens_per_s'])} tokens/s; limited by {limit}")
    place = f"{best['cores']} cores, batch {best['batch_rows']}, {best['input_tokens']:,} tokens in"
    title = f"ranges at {place}; all other figures are at the constants in use"
    print_ranges(console, title, figures["ranges"].values())
    print_notes(console, records)


def plan_step(model: str | None, options: PlanOptions, compared: TrainingOptions, files: PageFiles) -> None:
    """Compares training settings. Raises a `ValueError` for an option that is unknown or does not fit the others."""
    console = files.console()
    name = model or "llama3-70b"
    instance = instance_of(options.instance or "trn2.48xlarge")
    axes = {"fsdp": 1, "tp": 1} | mesh_axes(compared.mesh, ("tp", "fsdp"))
    names = ("prefetch_distance", "scatter_delay")
    distances, delays = (tuple(half_layers(name, text) for text in getattr(compared, name)) for name in names)
    if options.adaptive:
        distances, delays = (tuple(sorted({*values, *range(5)})) for values in (distances, delays))
    place = (name, model_config(name), instance, axes["fsdp"], axes["tp"])
    settings = (compared.streams, compared.packet_size, distances, delays, compared.sequences, compared.positions)
    planned = plan_training.TrainingPlan(*place, *settings, calibration=options.calibration(instance.name, options.draws))
    with progress(console, len(planned.settings) + options.draws) as step:
        records = plan_training.compare(planned, step)
        sweep = plan_training.sweep(planned, records, options.draws, partial(step, "ranges"))
    best = records[0]
    variables = plan_training.setting_of(best).variables()
    limit = f"limited by {best['limit']}, busy for {best['limit_share']:.0%} of the step"
    figures = {
        "model": name,
        "instance": instance.name,
        "mesh": [f"tp={planned.tp}", f"fsdp={planned.fsdp}"],
        "sequences": planned.sequences,
        "positions": planned.positions,
        "dtype": "bfloat16",
        "measured": False,
        "data": records,
        "winner": best,
        "winner_text": f"{best['setting']}: {significant(best['step_ms'])} ms, {limit}",
        "winner_environment": as_record(variables),
        "ranges": {"step_ms": sweep.record()},
    }
    show_training(console, figures)
    for variable in variables:
        console.print(f"export {variable.name}={variable.value}  # {variable.does}", markup=False, soft_wrap=True)
    title = f"Training of {name} on {instance.name}"
    files.write(console, figures, lambda path: write_training_plan(path, title, figures))


def show_training(console: Console, figures: Mapping[str, Any]) -> None:
    """Prints the ranking, the fastest setting, and the ranges of the fastest settings."""
    records = figures["data"]
    title = f"{figures['model']} on {figures['instance']}, {','.join(figures['mesh'])}, {figures['positions']:,} positions"
    compilers = [record for record in records[TRAINING_ROWS:] if not record["threaded"]]
    print_table(console, training_table(title, [*records[:TRAINING_ROWS], *compilers]))
    if len(records) > TRAINING_ROWS:
        console.print(f"{len(records)} settings; the table has the first {TRAINING_ROWS} and the compiler's own order")
    console.print(f"fastest: {figures['winner_text']}", markup=False, soft_wrap=True)
    title = "ranges of the fastest settings; all other figures are at the constants in use"
    print_ranges(console, title, figures["ranges"].values())
    print_notes(console, records)
