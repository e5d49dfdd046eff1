"""`tilewright bench round`: where a round's time goes, measured here or estimated for TPUs that are not there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.model_configs import json_fields
from tilewright.bench.round import DFLASH_B16, QWEN3_4B, RoundSetup, load, measure, runs
from tilewright.bench.round_compiled import compiled_rounds, round_sweep
from tilewright.cli.calibrate import print_ranges
from tilewright.cli.common import (
    DEMO,
    NUMBERS,
    SEVERAL,
    CompileCache,
    JsonFile,
    check_json_file,
    human_console,
    keep_programs,
    write_json,
)
from tilewright.cli.outputs import check_least
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import chip_of
from tilewright.kernels.select import operations
from tilewright.metrics.metric import significant
from tilewright.models import checkpoint, decoder, dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig
from tilewright.models.hub import PACKAGED
from tilewright.models.params import Dtype
from tilewright.report.terminal import print_table

DEMO_DRAFTER = "demo-drafter"
BUILT_IN = "qwen3-4b, dflash-b16"

FOOTNOTE = (
    "Compiler estimates, in thousands of cycles. cycles: the sum over all operations, and for Pallas kernels, which carry no "
    "estimate, the roofline of the bytes and flops that they declare. HBM: the least cycles for all bytes to and from memory; "
    "what is copied beside the compute is only there, so that the larger of both is the least; × is its ratio to block {base}. "
    "GB: the most memory at once."
)


@Parameter(name="*")
@dataclass(frozen=True)
class RoundOptions:
    """Options of what is measured.

    Attributes:
        model_config: the target's config.json, or "demo"; by default Qwen3-4B's shapes.
        draft_config: the drafter's config.json, or "demo-drafter"; by default the shapes of Qwen3-4B's DFlash drafter.
        block_size: tokens drafted at once, the known one included: several, with commas or blanks between them.
        context: positions before the block, several likewise.
        chip: TPUs to compile for instead of measuring, such as v5e:2x2, v5p:2x2x1, v6e:2x2.
        dtype: of weights, activations and caches.
        repetitions: how often each part is timed.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.
    """

    model_config: str | None = None
    draft_config: str | None = None
    block_size: Annotated[tuple[int, ...], NUMBERS] = (16, 32, 64, 128)
    context: Annotated[tuple[int, ...], NUMBERS] = (256, 1024)
    chip: Annotated[tuple[str, ...], SEVERAL] = ()
    dtype: Dtype = "bfloat16"
    repetitions: int = 5
    kernels: Literal["auto", "xla"] = "auto"
    compile_cache: CompileCache = True

    def pair(self) -> tuple[DecoderConfig, DFlashConfig]:
        """The shapes of both models.

        Raises:
            ValueError: only one is named, a file cannot be read, or the drafter does not fit.
        """
        if (self.model_config is None) != (self.draft_config is None):
            raise ValueError("expected --model-config and --draft-config together, or neither; found one of them")
        if self.model_config is None or self.draft_config is None:
            return QWEN3_4B, DFLASH_B16
        target = decoder.config_from_hf(read_config(self.model_config, DEMO), self.model_config)
        drafter = dflash.config_from_hf(read_config(self.draft_config, DEMO_DRAFTER), self.draft_config, target)
        dflash.check_fits(drafter, target)
        if drafter.variations:
            raise ValueError(f"{self.draft_config}: expected a plain drafter, found one with {', '.join(drafter.variations)}")
        return target, drafter

    def setups(self) -> list[list[RoundSetup]]:
        """For each context a setup for every block size.

        Raises:
            ValueError: an option is out of its range.
        """
        target, drafter = self.pair()
        check_least(self, block_size=2, context=1, repetitions=1)
        sizes, contexts = (sorted(given) for given in (self.block_size, self.context))
        most = sizes[-1] + contexts[-1]
        if most > target.max_position_embeddings:
            raise ValueError(
                f"expected context and block within the model's {target.max_position_embeddings} positions, found {most}"
            )
        for topology in self.chip:
            chip_of(topology)
        ops = operations("tpu" if self.chip else None, kernels=self.kernels)
        return [[RoundSetup(target, drafter, size, context, self.dtype, ops) for size in sizes] for context in contexts]


def read_config(file: str, packaged: str) -> dict[str, Any]:
    """The fields of a config.json, by its path or by the name of a packaged model.

    Raises:
        ValueError: there is no such file, or it holds no JSON object.
    """
    if file == packaged:
        return checkpoint.read_config(PACKAGED[packaged])
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"expected a config.json or {packaged!r}, found {file!r}, which is no file")
    return json_fields(path)


def bench_round(*, options: RoundOptions = RoundOptions(), json_file: JsonFile = None) -> None:
    """Times drafting, verifying, both heads and the extension of the context apart, with random weights.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    setups = options.setups()
    keep_programs(options.compile_cache)
    console = human_console(json_file)
    named = options.model_config is not None
    model = {"model": f"{options.model_config}, {options.draft_config}" if named else BUILT_IN, "dtype": options.dtype}
    about = {**model, "jax_version": jax.__version__}
    if options.chip:
        data, ranges = [], {}
        for topology in dict.fromkeys(options.chip):
            found = estimated(console, topology, setups)
            ranges[topology] = round_sweep(topology, found).record()
            print_ranges(console, topology, [ranges[topology]])
            data += found
        write_json(json_file, {**about, "measured": False, "data": data, "ranges": ranges})
        return
    kernels, data = measured(console, setups, options)
    about |= {"chip": chip_name(), "kernels": kernels, "repetitions": options.repetitions}
    write_json(json_file, {**about, "measured": True, "data": data})


def measured(
    console: Console, setups: Sequence[Sequence[RoundSetup]], options: RoundOptions
) -> tuple[str, list[dict[str, Any]]]:
    """Measures on this machine and prints the table."""
    models, kernels = load(setups[0][0]), setups[0][0].ops.name
    data = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(runs(len(group), options.repetitions) for group in setups))
        for group in setups:
            bar.update(task, description=f"context {group[0].context}")
            data += measure(models, group, options.repetitions, lambda: bar.advance(task))
    table = Table(
        title=f"a round on {chip_name()}, {kernels}: ms (× of block {data[0]['base_block_size']})", box=box.SIMPLE_HEAD
    )
    for column in ("context", "block", "draft", "its head", "top 16", "verify", "its head", "extend", "round", "step"):
        table.add_column(column, justify="right")
    for one in data:
        parts = [f"{significant(one[f'{part}_ms'])} ({one[f'{part}_ms_ratio']:.2f})" for part in MEASURED]
        table.add_row(str(one["context"]), str(one["block_size"]), *parts, significant(one["step_ms"]))
    print_table(console, table)
    share = ", ".join(f"{group['step_share_of_bandwidth']:.0%} at context {group['context']}" for group in by_context(data))
    console.print(
        f"a plain step reads its weights at this share of the memory's {data[0]['bandwidth_gb_per_s']:.0f} GB/s: {share}"
    )
    return kernels, data


MEASURED = ("draft", "draft_head", "draft_top_k", "verify", "verify_head", "extend", "round")


def by_context(data: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first record of each context."""
    return list({one["context"]: one for one in reversed(data)}.values())[::-1]


def estimated(console: Console, topology: str, setups: Sequence[Sequence[RoundSetup]]) -> list[dict[str, Any]]:
    """Compiles for a TPU and prints the tables."""
    data: list[dict[str, Any]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(topology, total=sum(len(group) + 1 for group in setups))
        for group in setups:
            data += compiled_rounds(topology, group, lambda: bar.advance(task))
    layers = " and ".join(map(str, data[0]["layers_compiled"]))
    how = f"layers beyond those of models of {layers} extrapolated" if data[0]["extrapolated"] else "all layers compiled"
    for first in by_context(data):
        table = Table(title=f"a round on {topology} at context {first['context']}, {how}", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("block", "part", "cycles", "HBM", "larger", "×", "MB read", "written", "GB"):
            table.add_column(column, justify="left" if column == "part" else "right")
        table.add_row("", "plain step", *estimate_cells(first, "step"), end_section=True)
        for one in (one for one in data if one["context"] == first["context"]):
            for line, (part, name) in enumerate((part, name) for part, name in ESTIMATED.items() if f"{part}_cycles" in one):
                block = "" if line else str(one["block_size"])
                table.add_row(block, name, *estimate_cells(one, part), end_section=part == "extend")
        print_table(console, table)
    console.print(FOOTNOTE.format(base=data[0]["base_block_size"]))
    return [{"chip": topology, **one} for one in data]


ESTIMATED = {
    "draft": "draft",
    "draft_head": "  its head",
    "draft_head_xla": "  … by XLA",
    "draft_top_k": "  its top 16",
    "draft_top_k_xla": "  … by XLA",
    "verify": "verify",
    "verify_head": "  its head",
    "verify_head_xla": "  … by XLA",
    "extend": "extend",
}
"""Parts of a round and their names in the table; the heads by XLA are what the blockwise head is set against.
A DFlash 2 drafter asks for each slot's best tokens where a DFlash one asks for the best."""


def estimate_cells(one: Mapping[str, Any], part: str) -> list[str]:
    """The figures of a row of the table."""
    ratio = one.get(f"{part}_bound_cycles_ratio")
    return [
        f"{one[f'{part}_cycles'] / 1e3:,.0f}",
        f"{one[f'{part}_memory_cycles'] / 1e3:,.0f}",
        f"{one[f'{part}_bound_cycles'] / 1e3:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{one[f'{part}_read_bytes'] / 1e6:,.0f}",
        f"{one[f'{part}_written_bytes'] / 1e6:,.1f}",
        f"{one[f'{part}_peak_bytes'] / 1e9:.1f}",
    ]
