"""`tilewright bench speculative`: compares drafters with plain decoding and with each other."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.compare import environment
from tilewright.bench.datasets import Example, read_examples
from tilewright.bench.speculative import DatasetPrompts, build_prompts, measure
from tilewright.bench.speculative_figures import BASELINE, DecodingRun, average_rows, benchmark_csv, benchmark_rows
from tilewright.cli import common
from tilewright.cli.common import DraftingSettings
from tilewright.cli.options import COMMON, SAMPLING, SPECULATION, Several, check_least, check_some, option_class, settings
from tilewright.cli.outputs import TableFiles, circumstances, progress, progress_console, write_replay_page, write_text
from tilewright.compiled.timing import REPETITIONS
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.tables import print_table
from tilewright.models.chat import ChatTemplate
from tilewright.report.page import Report
from tilewright.report.speculative import benchmark_tables, write_benchmark
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, SUFFIX, WITHOUT_FILES, DrafterOptions

TRAINED = "trained"
"""Value of --block-size for each drafter's trained block size."""
REPLAYED = 3
"""Number of prompts of each dataset on the page of `--replay`."""


@option_class(group=SPECULATION)
class DrafterArguments:
    """Options of the compared drafters.

    Attributes:
        drafter: folders, Hugging Face ids, "ngram", "suffix", "mtp" (the head for multi-token prediction in the folder of a
            target such as Qwen3.5), "self" (a target that was trained to denoise blocks, such as Nemotron-Labs-Diffusion); for
            the demo also "dflash", "dflash2" and "eagle3", for smollm2-135m "dflash2". "auto" chooses for each round among
            n-grams, the packaged drafters and the head in a target's local folder. By default "dflash" for the demo, "auto" for
            smollm2-135m, else "ngram". Plain decoding always runs too; "none" with a block size adds plain decoding in blocks
            of that size.
        block_size: tokens in a block, including the last committed token. "auto" chooses for each round, as `generate` does;
            "auto-inexact" runs only the chosen rows, even if the target then rounds differently; "trained" is the size of each
            drafter's training.
        refine: number of further passes of a DFlash drafter over each block.
        walk: choice among a slot's candidates (DFlash 2, DSpark, LiLiCorr): "greedy" or "sampled" (the default, with the
            request's temperature and the target's noise). The output does not depend on it.
    """

    drafter: Annotated[Several[str] | None, Parameter(alias="-d", group=COMMON)] = None
    block_size: int | Literal["auto", "auto-inexact", "trained"] = common.AUTO
    drafting: Annotated[DraftingSettings, settings(DraftingSettings, "further settings of the drafters")] = DraftingSettings()
    refine: int = 0
    walk: str | None = None

    @property
    def options(self) -> DrafterOptions:
        size = None if self.block_size == TRAINED else self.block_size
        drafting = self.drafting
        corpus = drafting.suffix_corpus
        return DrafterOptions(size, drafting.window, drafting.dtype, self.refine, self.walk, suffix_corpus=corpus)

    def names(self, model: str) -> tuple[str, ...]:
        """Returns the names of the drafters. Raises a `ValueError` for drafters that cannot be measured."""
        names = self.drafter
        if names is None:
            names = ("dflash",) if model == common.DEMO else (common.AUTO,) if common.PACKAGED_DRAFTERS.get(model) else (NGRAM,)
        common.check_drafters(names, model)
        if not isinstance(self.block_size, int) and set(names) <= {BASELINE}:
            raise ValueError("expected a drafter, or a block size for plain decoding in blocks; found neither")
        if set(names) <= {BASELINE, *WITHOUT_FILES}:
            options = replace(self.options, suffix_corpus=None)
            options.check(next((name for name in names if name != BASELINE), NGRAM))  # refuses options of weights
        if self.drafting.suffix_corpus is not None and {SUFFIX, common.AUTO}.isdisjoint(names):
            raise ValueError(f"a corpus needs the drafter {SUFFIX} or {common.AUTO}, found {', '.join(names)}")
        return names

    def variants(self, names: Sequence[str], target: common.TargetOptions, console: Console) -> dict[str, LanguageModel]:
        """Loads the baseline and every drafter, by their displayed names. All share the target."""
        base = target.load_with(None, console)
        variants = {BASELINE: base}
        for name, shown in common.short_names(names).items():
            if name != BASELINE:
                variants[shown] = base.with_drafter(*self.load(name, target, base, console))
            elif isinstance(self.block_size, int):
                variants[f"none, block {self.block_size}"] = base.with_drafter(*self.load(None, target, base, console))
        return variants

    def load(self, name: str | None, target: common.TargetOptions, base: LanguageModel, console: Console) -> tuple[Any, Any]:
        options = self.options if name == common.AUTO else self.options.fitting(name)
        if name == common.AUTO and options.block_size is None:
            options = replace(options, block_size=common.AUTO)
        return base.load_drafter(target.drafter_source(name, self.drafting.suffix_corpus), options, progress_console(console))


@option_class
class SpeculativeFiles(TableFiles):
    """Options of output besides the terminal.

    Attributes:
        replay: write an HTML page that replays the first prompts token by token, with the first drafter and without.
        price_per_hour: price of the machine per hour; adds the cost of a million tokens.
    """

    replay: Path | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ValueError(f"expected a price per hour above 0, found {self.price_per_hour}")


@option_class(group=COMMON)
class Measuring:
    """Options of the prompts, of sampling and of the measurement.

    Attributes:
        data: JSONL files (GSM8K, MATH-500, HumanEval, MBPP, MT-Bench, SWE-bench, or records with a prompt or messages). By
            default the demo model's held-out code.
        samples: number of records of each file, from the first on.
        max_new_tokens: maximum number of tokens of each text.
        temperature: sampling temperature; 0 takes the most likely token.
        top_p: sample from the smallest set of most likely tokens with this total probability.
        top_k: sample from this number of most likely tokens; 0 for all.
        seed: seed of the random numbers.
        batch_size: rows decoded together; several sizes are measured in sequence.
        repetitions: number of timed runs.
    """

    data: Several[Path] = ()
    samples: int = 20
    max_new_tokens: Annotated[int, Parameter(alias="-n")] = 128
    temperature: float = 0.0
    top_p: Annotated[float, Parameter(group=SAMPLING)] = 1.0
    top_k: Annotated[int, Parameter(group=SAMPLING)] = 0
    seed: Annotated[int, Parameter(alias="-s", group=SAMPLING)] = 0
    batch_size: Several[int] = (1,)
    repetitions: int = REPETITIONS

    def __post_init__(self) -> None:
        check_least(self, samples=1, repetitions=1, batch_size=1)
        check_some(self, "batch_size")

    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)


def speculative(
    *,
    measuring: Measuring = Measuring(),
    target: common.TargetOptions = common.TargetOptions(),
    drafted: DrafterArguments = DrafterArguments(),
    outputs: SpeculativeFiles = SpeculativeFiles(),
) -> None:
    """Compares drafters with plain decoding on the same prompts: speedup, τ, acceptance and round times.

    docs/metrics.md defines every figure.
    """
    console = outputs.console()
    sampling = measuring.sampling()
    names = drafted.names(target.model)
    sets = read_sets(measuring.data, measuring.samples)
    template = target.chat_template(console)
    variants = drafted.variants(names, target, console)
    datasets, runs = run_all(variants, sets, template, measuring, console)
    rows = benchmark_rows(runs, outputs.price_per_hour)
    averages = average_rows(rows)
    settings = {name: value for name, value in vars(measuring).items() if name != "data"}
    facts = {
        "date": datetime.date.today().isoformat(),
        **environment(variants[BASELINE]),
        "model": target.model,
        **settings,
        "draft_window": drafted.drafting.window,
        "drafter_dtype": drafted.drafting.dtype or target.dtype,
        "suffix_corpus": None if drafted.drafting.suffix_corpus is None else str(drafted.drafting.suffix_corpus),
        "refine": drafted.refine,
        "walk": drafted.walk,
        "chat_template": template is not None,
    }
    title = "temperature {temperature:g}, top-p {top_p:g}, {max_new_tokens} new tokens, batch ".format(**settings)
    title += " and ".join(map(str, measuring.batch_size))
    notes = left_out(datasets)
    lead = f"Model {target.model}, {title}."
    report = Report("Speculative decoding", lead, rows, circumstances(facts), [f"{note}." for note in notes])
    figures = {**facts, "price_per_hour": outputs.price_per_hour, "data": rows, "averages": averages}
    outputs.write(console, figures, lambda path: write_benchmark(path, report, averages=averages))
    if outputs.csv is not None:
        write_text(outputs.csv, benchmark_csv(rows))
    for table in benchmark_tables(title, rows, averages):
        print_table(console, table)
    for line in notes:
        console.print(line, style="dim", markup=False)
    if outputs.replay is not None:
        name = next(name for name, lm in variants.items() if lm.drafter is not None)
        prompts = [(f"{each.name} {n}", tokens) for each in datasets for n, tokens in enumerate(each.prompts[:REPLAYED], 1)]
        write_replay_page(outputs.replay, variants[name], (target.model, name), prompts, sampling, console)


def left_out(datasets: Sequence[DatasetPrompts]) -> list[str]:
    """Returns a line for each file with turns that do not fit the context."""
    skipped_turns = ((each.name, each.skipped, len(each.prompts) + each.skipped) for each in datasets if each.skipped)
    return [
        f"{name}: {skipped} of {all_} turns do not fit the model's context and were left out"
        for name, skipped, all_ in skipped_turns
    ]


def read_sets(data: Sequence[Path], samples: int) -> dict[str, list[Example]]:
    """Reads the first `samples` records of each file, by file name without suffix."""
    if not data:
        return {"held-out code": read_examples(common.packaged_prompts_file())[:samples]}
    sets = {path.stem: read_examples(path)[:samples] for path in data}
    if len(sets) < len(data):
        raise ValueError(f"expected data files of different names, found {', '.join(path.name for path in data)}")
    return sets


def run_all(
    variants: Mapping[str, LanguageModel],
    sets: Mapping[str, Sequence[Example]],
    template: ChatTemplate | None,
    measuring: Measuring,
    console: Console,
) -> tuple[list[DatasetPrompts], list[DecodingRun]]:
    """Builds the prompts and measures every dataset.

    Raises:
        ValueError: No prompt of a dataset fits the model's context. Raised before any measurement.
    """
    sampling = measuring.sampling()
    repetitions = measuring.repetitions
    batch_sizes = measuring.batch_size
    datasets: list[DatasetPrompts] = []
    runs: list[DecodingRun] = []
    total = sum(map(len, sets.values())) + len(sets) * len(variants) * (repetitions + 2) * len(batch_sizes)
    with progress(console, total) as step:
        for name, examples in sets.items():
            datasets.append(
                build_prompts(variants[BASELINE], name, examples, template, sampling, partial(step, f"{name}: prompts"))
            )
            if not datasets[-1].prompts:
                raise ValueError(f"{name}: no prompt fits the model's context with {sampling.max_new_tokens} new tokens")
        for each in datasets:
            for batch_size in batch_sizes:
                runs += measure(variants, each, sampling, batch_size, repetitions, partial(step, each.name))
    return datasets, runs
