"""`tilewright inspect training`: what a train step over a mesh leaves exposed of its communication, on absent TPUs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.model_configs import model_config
from tilewright.bench.training import (
    ANNOTATED,
    LEAST_LAYERS,
    PASSES,
    PLAIN_STEP,
    UNTHREADED,
    TrainingCase,
    TrainingProgram,
    compiled_programs,
    lanes,
    programs_of,
    records,
    sweeps,
)
from tilewright.cli.calibrate import calibrated_for, print_ranges
from tilewright.cli.common import (
    WORDS,
    JsonFile,
    check_json_file,
    check_output_file,
    human_console,
    whole_file,
    write_json,
    write_text,
)
from tilewright.cli.inspect_overlap import end_if_exposed
from tilewright.cli.train import mesh_axes
from tilewright.hardware.links import HOP_US
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.parallel.exchanges import FullyShardedPlan, Halves
from tilewright.perfmodel.timeline import trace
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.overlap import CAVEATS, OverlapReport, layer_estimates
from tilewright.report.terminal import percent, print_table
from tilewright.report.training import place, write_training

TRAVELLERS = ("weights", "gradients", "activations")

FOOTNOTE = (
    "Compiler estimates and a model of links and memory. Of the middle layer, in both passes: compute, and what the core waits "
    "for collectives (exposed); hidden: under way beside compute. peak: device memory of the compiled step, and, reckoned from "
    "it, with all layers. all layers: the whole step, where the update of layers that were not compiled is not in it. "
    f"{CAVEATS}"
)


@Parameter(name="*")
@dataclass(frozen=True)
class TrainingInspection:
    """Options of what is compiled. Those of several values take them with commas or blanks between them.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        chip: topologies of TPUs, several: v5e:4x4, v5p:2x2x4, v6e:4x4. The mesh takes all devices of each.
        mesh: devices along "fsdp" and "tp": fsdp=8,tp=2.
        prefetch_distance: by how many layers weights are gathered ahead, several.
        scatter_delay: by how many layers gradients are scattered behind, several. Each is compiled with every distance.
        rings: what goes hop by hop: weights, gradients, activations, several, or all.
        reduce_dtype: in which gradients are summed between devices; auto-sharded they are bfloat16.
        batch_size: sequences of a step, over all devices.
        length: positions of each.
        layers: how many are compiled; by default two more than twice the largest shift. A middle one is reported.
        peers: whether the step without tokens and the auto-sharded one are compiled too.
        hop_us: latency of a hop between neighbours, in microseconds: a working figure, which no specification gives.
        calibrate: JSON of "bench overlap --micro" on several devices, to which constants of links, products and memory are
            fitted.
        draws: of the constants that have a range.
    """

    model_config: str = "llama3-8b"
    chip: Annotated[tuple[str, ...], WORDS] = ("v5e:4x4",)
    mesh: str = "fsdp=8,tp=2"
    prefetch_distance: Annotated[tuple[str, ...], WORDS] = ("1",)
    scatter_delay: Annotated[tuple[str, ...], WORDS] = ("1",)
    rings: Annotated[tuple[str, ...], WORDS] = ()
    reduce_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batch_size: int = 16
    length: int = 2048
    layers: int | None = None
    peers: bool = True
    hop_us: float = HOP_US
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def plans(self) -> dict[str, FullyShardedPlan]:
        """By their names in tables.

        Raises:
            ValueError: a shift that is no number, or rings of something else.
        """
        for name in ("chip", "prefetch_distance", "scatter_delay"):
            if not getattr(self, name):
                raise ValueError(f"expected at least one --{name.replace('_', '-')}, found none")
        for name, given in (("prefetch_distance", self.prefetch_distance), ("scatter_delay", self.scatter_delay)):
            for text in given:
                if not text.isdecimal():
                    raise ValueError(f"expected --{name.replace('_', '-')} as numbers of layers, found {text!r}")
        unknown = sorted(set(self.rings) - {*TRAVELLERS, "all"})
        if unknown:
            raise ValueError(f"expected --rings of {', '.join(TRAVELLERS)} or all, found {', '.join(unknown)}")
        rings = set(TRAVELLERS) if "all" in self.rings else set(self.rings)
        forms: Any = {name: "ring" if name in rings else "whole" for name in TRAVELLERS}
        found = {}
        for distance, delay in product(map(int, self.prefetch_distance), map(int, self.scatter_delay)):
            shifts = Halves(distance, distance), Halves(delay, delay)
            found[f"prefetch {distance}, delay {delay}"] = FullyShardedPlan(
                *shifts, dtype="bfloat16", reduce_dtype=self.reduce_dtype, **forms
            )  # fmt: skip
        return found

    def cases(self) -> list[TrainingCase]:
        """One for each chip.

        Raises:
            ValueError: an option that does not fit the others.
        """
        for chip in self.chip:
            chip_of(chip)
        config, axes = model_config(self.model_config), mesh_axes(self.mesh)
        shift = max(map(int, (*self.prefetch_distance, *self.scatter_delay)))
        layers = max(LEAST_LAYERS, 2 * shift + 2) if self.layers is None else self.layers
        fitted = calibrated_for(self.calibrate, map(chip_of, self.chip))
        shape = (self.model_config, config, axes, layers, self.batch_size, self.length, self.hop_us)
        cases = [TrainingCase(chip, *shape, fitted.get(chip_of(chip).name)) for chip in self.chip]
        for case in cases:
            for plan in self.plans().values():
                case.setup(plan)
        return cases


def inspect_training(
    *,
    options: TrainingInspection = TrainingInspection(),
    transfers: bool = False,
    json_file: JsonFile = None,
    html: Path | None = None,
    trace_file: Annotated[Path | None, Parameter(name="--trace")] = None,
    fail_above: float | None = None,
) -> None:
    """Compiles a train step over a mesh for TPUs and shows how much of its communication each shift hides, and at what memory.

    Beside it the same step without tokens, and the auto-sharded one (GSPMD) with the flags that MaxText sets. Compiler
    estimates and a model of links and memory, no measurements; every figure is defined in docs/metrics.md.

    Parameters
    ----------
    transfers
        Print each transfer of the reported layer: when it begins and ends, what the core waits for it, what runs meanwhile.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    html
        Write a page with tables and timelines to this file.
    trace_file
        Write what runs when as a Chrome trace, which Perfetto opens, to this file.
    fail_above
        Exit with status 1 if a plan leaves more than this share of its communication exposed, from 0 to 1; the programs beside
        them don't count.
    """
    check_json_file(json_file)
    for option, path in (("--html", html), ("--trace", trace_file)):
        check_output_file(option, None if path is None else str(path))
    if fail_above is not None and not 0 <= fail_above <= 1:
        raise ValueError(f"expected --fail-above from 0 to 1, found {fail_above:g}")
    plans, console = options.plans(), human_console(json_file)
    cases, plans = options.cases(), programs_of(plans, options.peers)
    programs: list[TrainingProgram] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(cases) * len(plans))
        for case in cases:
            programs += compiled_programs(case, plans, lambda name: bar.update(task, advance=1, description=name))
    figures, about = records(programs), environment(options)
    ranges = {name: one.record() for name, one in sweeps(programs, options.draws).items()}
    show(console, figures, transfers)
    for name, one in ranges.items():
        print_ranges(console, name, [one])
    write_json(json_file, {**about, "measured": False, "data": figures, "ranges": ranges})
    write_files(console, programs, figures, about, html, trace_file, ranges)
    if fail_above is not None:
        check_exposed(console, figures, fail_above)


def environment(options: TrainingInspection) -> dict[str, Any]:
    """Settings that the figures depend on."""
    about = {"model": options.model_config, "dtype": "bfloat16", "mesh": options.mesh, "hop_us": options.hop_us}
    return {**about, "jax_version": jax.__version__, "libtpu_version": version("libtpu")}


def write_files(
    console: Console, programs: Sequence[TrainingProgram], figures: Sequence[Mapping[str, Any]], about: Mapping[str, Any],
    html: Path | None, trace_file: Path | None, ranges: Mapping[str, Any],
) -> None:  # fmt: skip
    """The page and the trace, as far as they are asked for."""
    if html is not None:
        shown = {place(one): [] for one in figures}
        for one, program in zip(figures, programs, strict=True):
            shown[place(one)].append(lanes(program))
        report = OverlapReport(f"Communication of training {about['model']}", figures, shown, about, ranges)
        with whole_file(html) as partial:
            write_training(partial, report)
    if trace_file is not None:
        named = ((f"{program.case.chip} {program.name}", program.timeline) for program in programs)
        write_text(trace_file, json.dumps(trace(named)))
    for path in (html, trace_file):
        if path is not None:
            console.print(f"{path} written", markup=False)


def show(console: Console, figures: Sequence[Mapping[str, Any]], transfers: bool) -> None:
    """A table for each chip, and one of transfers for each program if they are asked for."""
    for name in dict.fromkeys(map(place, figures)):
        of = [one for one in figures if place(one) == name]
        first = of[0]
        layers = f"layer {first['reported_layer']} of {first['layers_compiled']} compiled, {first['model_layers']} in all"
        table = Table(title=f"{name}: {layers}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("program")
        heads = [f"{part}\n{what}" for part in PASSES for what in ("compute ms", "exposed ms")]
        for column in (
            *heads,
            "hidden\nms",
            "exposed",
            "of\nplain's",
            "total\nms",
            "compute\nshare",
            "peak\nGiB",
            "all layers\nGiB",
        ):
            table.add_column(column, justify="right")
        table.add_column("all layers\nms", justify="right")
        for one in of:
            table.add_row(one["program"], *cells(one))
        print_table(console, table)
        console.print(layer_estimates(of, "program"), markup=False)
        for note in dict.fromkeys(note for one in of for note in one["notes"]):
            console.print(note, style="yellow", markup=False)
        for one in of if transfers else ():
            print_table(console, transfers_table(one))
    console.print(FOOTNOTE)


def cells(one: Mapping[str, Any]) -> list[str]:
    """The figures of a row of the table."""
    return [
        *(significant(one[part][f"{what}_ms"]) for part in PASSES for what in ("compute", "exposed")),
        significant(one["hidden_ms"]),
        percent(one["exposed_share"]),
        percent(one["exposed_share_of_plain"]),
        significant(one["total_ms"]),
        percent(one["compute_share"]),
        f"{one['peak_bytes'] / 2**30:.2f}",
        f"{one['model_peak_bytes'] / 2**30:.2f}",
        significant(one["model_total_ms"]),
    ]


def transfers_table(one: Mapping[str, Any]) -> Table:
    """The transfers of the reported layer of one program."""
    table = Table(title=f"{one['program']}: transfers of layer {one['reported_layer']}", box=box.SIMPLE_HEAD)
    table.add_column("pass")
    table.add_column("for")
    table.add_column("kind")
    for column in ("begin ms", "end ms", "alone ms", "exposed ms"):
        table.add_column(column, justify="right")
    table.add_column("compute meanwhile, ms")
    for each in one["transfers_of_layer"]:
        beside = ", ".join(f"{name} {significant(taken)}" for name, taken in each["beside_ms"].items())
        times = (significant(each[f"{what}_ms"]) for what in ("begin", "end", "alone", "exposed"))
        kind = f"{each['transfers']} {each['kind']}, {each['asynchronous']} asynchronous"
        table.add_row(each["pass"], each["name"], kind, *times, beside)
    return table


def check_exposed(console: Console, figures: Sequence[Mapping[str, Any]], most: float) -> None:
    """Ends with status 1 if more than this share of a plan's communication is exposed."""
    ours = [one for one in figures if one["program"] not in (PLAIN_STEP, UNTHREADED, ANNOTATED)]
    above = [one for one in ours if (one["exposed_share"] or 0) > most]
    end_if_exposed(console, {f"{place(one)} {one['program']}": one["exposed_share"] for one in above}, most)
