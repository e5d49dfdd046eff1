"""`tilewright bench round`: where a round's time goes, measured here or estimated for TPUs that are not there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from tilewright.bench.round import RoundSetup, load, measure, runs
from tilewright.bench.round_compiled import compiled_rounds, round_sweep
from tilewright.cli.calibrate import print_ranges
from tilewright.cli.common import DEMO, keep_programs
from tilewright.cli.options import CompileCache, KernelChoice, Numbers, Several, check_least, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import chip_of
from tilewright.kernels.select import operations
from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.round import PARTS, ROUND
from tilewright.metrics.tables import FigureTable, grouped, print_table
from tilewright.models import checkpoint, decoder, dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig
from tilewright.models.hub import PACKAGED
from tilewright.models.params import Dtype
from tilewright.models.published_configs import DFLASH_B16, MODELS

DEMO_DRAFTER = "demo-drafter"
BUILT_IN = "qwen3-4b, dflash-b16"

FOOTNOTE = (
    "Compiler estimates, in thousands of cycles. cycles: the sum over all operations, and for Pallas kernels, which carry no "
    "estimate, the roofline of the bytes and flops that they declare. HBM: the least cycles for all bytes to and from memory; "
    "what is copied beside the compute is only there, so that the larger of both is the least; × is its ratio to block {base}. "
    "GB: the most memory at once."
)


@option_class
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
    """

    model_config: str | None = None
    draft_config: str | None = None
    block_size: Numbers = (16, 32, 64, 128)
    context: Numbers = (256, 1024)
    chip: Several[str] = ()
    dtype: Dtype = "bfloat16"
    repetitions: int = 5
    kernels: KernelChoice = "auto"
    compile_cache: CompileCache = True

    def pair(self) -> tuple[DecoderConfig, DFlashConfig]:
        """The shapes of both models.

        Raises:
            ValueError: only one is named, a file cannot be read, or the drafter does not fit.
        """
        if (self.model_config is None) != (self.draft_config is None):
            raise ValueError("expected --model-config and --draft-config together, or neither; found one of them")
        if self.model_config is None or self.draft_config is None:
            return MODELS["qwen3-4b"], DFLASH_B16
        target = decoder.config_from_hf(read_config(self.model_config, DEMO), self.model_config)
        drafter = dflash.config_from_hf(read_config(self.draft_config, DEMO_DRAFTER), self.draft_config, target)
        dflash.check_fits(drafter, target)
        if drafter.variations:
            raise ValueError(f"{self.draft_config}: expected a plain drafter, found one with {', '.join(drafter.variations)}")
        return target, drafter

    def setups(self) -> list[list[RoundSetup]]:
        """For each context a setup for every block size. Raises a `ValueError` where an option is out of its range."""
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
    return checkpoint.read_json(path)


def bench_round(*, options: RoundOptions = RoundOptions(), json_file: JsonFile = None) -> None:
    """Times drafting, verifying, both heads and the extension of the context apart, with random weights."""
    console = human_console(json_file)
    setups = options.setups()
    keep_programs(options.compile_cache)
    named = options.model_config is not None
    model = {"model": f"{options.model_config}, {options.draft_config}" if named else BUILT_IN, "dtype": options.dtype}
    about = {**model, "jax_version": jax.__version__}
    if options.chip:
        data = []
        ranges = {}
        for topology in dict.fromkeys(options.chip):
            with progress(console, sum(len(group) + 1 for group in setups), topology) as step:
                rounds = [one for group in setups for one in compiled_rounds(topology, group, step)]
            show_estimated(console, topology, rounds)
            found = [{"chip": topology, **one} for one in rounds]
            ranges[topology] = round_sweep(topology, found).record()
            print_ranges(console, topology, [ranges[topology]])
            data += found
        write_json(json_file, {**about, "measured": False, "data": data, "ranges": ranges})
        return
    models = load(setups[0][0])
    kernels = setups[0][0].ops.name
    data = []
    with progress(console, sum(runs(len(group), options.repetitions) for group in setups)) as step:
        for group in setups:
            step(f"context {group[0].context}", 0)
            data += measure(models, group, options.repetitions, step)
    about |= {"chip": chip_name(), "kernels": kernels, "repetitions": options.repetitions}
    write_json(json_file, {**about, "measured": True, "data": data})
    show_measured(console, kernels, data)


def show_measured(console: Console, kernels: str, data: Sequence[Mapping[str, Any]]) -> None:
    """A line for each context and block size."""
    title = f"a round on {chip_name()}, {kernels}: ms (× of block {data[0]['base_block_size']})"
    rows = [
        {**one, **{part: f"{significant(one[f'{part}_ms'])} ({one[f'{part}_ms_ratio']:.2f})" for part in MEASURED}}
        for one in data
    ]
    parts = [Metric(part, head=name) for part, name in MEASURED.items()]
    metrics = (*chosen(ROUND, "context block_size"), *parts, *chosen(ROUND, "step_ms"))
    print_table(console, FigureTable(title, "", {"": rows}, metrics))
    firsts = [of[0] for of in grouped(data, "context").values()]
    share = ", ".join(f"{one['step_share_of_bandwidth']:.0%} at context {one['context']}" for one in firsts)
    console.print(
        f"a plain step reads its weights at this share of the memory's {data[0]['bandwidth_gb_per_s']:.0f} GB/s: {share}"
    )


MEASURED = {
    "draft": "draft",
    "draft_head": "its head",
    "draft_top_k": "top 16",
    "verify": "verify",
    "verify_head": "its head",
    "extend": "extend",
    "round": "round",
}
"""Parts of a round and their names in the table."""


def show_estimated(console: Console, topology: str, data: Sequence[Mapping[str, Any]]) -> None:
    """A table for each context, with lines for the parts of each block size."""
    layers = " and ".join(map(str, data[0]["layers_compiled"]))
    how = f"layers beyond those of models of {layers} extrapolated" if data[0]["extrapolated"] else "all layers compiled"
    metrics = (*chosen(ROUND, "block_size"), Metric("part", head="part", words=True), *ESTIMATES)
    for context, of in grouped(data, "context").items():
        rows = [{"at": 0, "block_size": "", "part": "plain step", **estimates(of[0], "step")}]
        for one in of:
            size = one["block_size"]
            for line, part in enumerate(part for part in ESTIMATED if f"{part}_cycles" in one):
                head = {"at": size, "block_size": "" if line else str(size), "part": ESTIMATED[part]}
                rows.append(head | estimates(one, part))
        title = f"a round on {topology} at context {context}, {how}"
        print_table(console, FigureTable(title, "", {"": rows}, metrics, apart="at", unknown=""))
    console.print(FOOTNOTE.format(base=data[0]["base_block_size"]))


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


ESTIMATES = [metric for metric in PARTS if metric.head]


def estimates(one: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The figures of a part in a record; only those of the largest programs have a ratio."""
    return {metric.name: one.get(f"{part}_{metric.name}") for metric in ESTIMATES}
