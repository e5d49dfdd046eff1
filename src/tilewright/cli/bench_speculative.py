"""`tilewright bench speculative`: drafters against plain decoding, and against each other."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from tilewright.bench.compare import environment
from tilewright.bench.datasets import Example, read_examples
from tilewright.bench.speculative import DatasetPrompts, ask, measure
from tilewright.bench.speculative_figures import BASELINE, DecodingRun, average_rows, benchmark_csv, benchmark_rows
from tilewright.cli import common
from tilewright.cli.options import Several, check_least, check_some, option_class
from tilewright.cli.outputs import TableFiles, circumstances, progress, progress_console, write_replay_page, write_text
from tilewright.compiled.timing import REPETITIONS
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.tables import print_table
from tilewright.models.chat import ChatTemplate
from tilewright.report.page import Report
from tilewright.report.speculative import benchmark_tables, write_benchmark
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions

TRAINED = "trained"
"""Block size that stands for each drafter's own."""
REPLAYED = 3
"""Prompts of each dataset that `--replay` shows."""


@option_class
class DrafterArguments:
    """Options of the drafters that are compared.

    Attributes:
        drafter: folders, Hugging Face ids, "ngram"; for the demo also "dflash", "dflash2" and "eagle3", for smollm2-135m
            "dflash2". "auto" takes whichever promises most, round by round: n-gram and those of the package. By default
            "dflash" for the demo, "auto" for smollm2-135m, "ngram" otherwise. Plain decoding always runs beside them; "none"
            with a block size adds plain decoding through a program of that width.
        block_size: tokens drafted at once by every drafter, the last token of the text included. "auto" chooses it round by
            round, as `generate` does, plain decoding among the choices; "auto-inexact" too, but never runs more rows than it
            chose, where that changes how the target rounds. "trained" is the size that each was trained for.
        draft_window: keep only this many last positions in the drafters' contexts.
        drafter_dtype: of the drafters alone.
        refine: further passes of a DFlash drafter over each block that it drafted.
        walk: how drafters with candidates (DFlash 2, DSpark, LiLiCorr) take one of a slot's: "greedy", the best, or "sampled"
            (the default), drawn at the request's temperature with the target's own noise; the output is the same either way.
    """

    drafter: Several[str] | None = None
    block_size: int | Literal["auto", "auto-inexact", "trained"] = common.AUTO
    draft_window: int | None = None
    drafter_dtype: str | None = None
    refine: int = 0
    walk: str | None = None

    @property
    def options(self) -> DrafterOptions:
        size = None if self.block_size == TRAINED else self.block_size
        return DrafterOptions(size, self.draft_window, self.drafter_dtype, self.refine, self.walk)

    def names(self, model: str) -> tuple[str, ...]:
        """The drafters, as they are named. Raises a `ValueError` where they cannot be measured."""
        names = self.drafter
        if names is None:
            names = ("dflash",) if model == common.DEMO else (common.AUTO,) if common.PACKAGED_DRAFTERS.get(model) else (NGRAM,)
        common.check_drafters(names, model)
        if not isinstance(self.block_size, int) and set(names) <= {BASELINE}:
            raise ValueError("this benchmark needs a drafter, or a block size for plain decoding of that width; found neither")
        if set(names) <= {BASELINE, NGRAM}:
            self.options.check(NGRAM)  # nothing here has weights
        return names

    def ways(self, names: Sequence[str], target: common.TargetOptions, console: Console) -> dict[str, LanguageModel]:
        """The baseline and every drafter, each under the name that it is shown with; all share the target."""
        base = target.load_with(None, console)
        ways = {BASELINE: base}
        for name, shown in common.short_names(names).items():
            if name != BASELINE:
                ways[shown] = base.with_drafter(*self.load(name, target, base, console))
            elif isinstance(self.block_size, int):
                ways[f"none, block {self.block_size}"] = base.with_drafter(*self.load(None, target, base, console))
        return ways

    def load(self, name: str | None, target: common.TargetOptions, base: LanguageModel, console: Console) -> tuple[Any, Any]:
        options = self.options if name == common.AUTO else self.options.fitting(name)
        if name == common.AUTO and options.block_size is None:
            options = replace(options, block_size=common.AUTO)
        return base.load_drafter(target.drafter_source(name), options, progress_console(console))


@option_class
class SpeculativeFiles(TableFiles):
    """Places where figures go, besides the terminal.

    Attributes:
        replay: a page that plays the first prompts token by token, with the first drafter and without.
        price_per_hour: of the machine; adds the cost of a million tokens.
    """

    replay: Path | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ValueError(f"expected a price per hour above 0, found {self.price_per_hour}")


@option_class
class Measuring:
    """Options of what is decoded, and how.

    Attributes:
        data: JSONL files (GSM8K, MATH-500, HumanEval, MBPP, MT-Bench, SWE-bench, or records with a prompt or messages); by
            default the held-out code that comes with the demo pair.
        samples: how many records of each file, from its beginning.
        max_new_tokens: the length limit of each text.
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens with this much probability.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: the same seed gives the same text.
        batch_size: rows decoded together; several are measured one after the other.
        repetitions: how often each way is timed.
    """

    data: Several[Path] = ()
    samples: int = 20
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
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
    """Decodes the prompts of each file with every drafter and without one, alternating, and prints the papers' table.

    Every figure is defined in docs/metrics.md.
    """
    console = outputs.console()
    sampling = measuring.sampling()
    names = drafted.names(target.model)
    sets = read_sets(measuring.data, measuring.samples)
    template = target.chat_template(console)
    ways = drafted.ways(names, target, console)
    asked, runs = run_all(ways, sets, template, measuring, console)
    rows = benchmark_rows(runs, outputs.price_per_hour)
    averages = average_rows(rows)
    settings = {name: value for name, value in vars(measuring).items() if name != "data"}
    facts = {
        "date": datetime.date.today().isoformat(),
        **environment(ways[BASELINE]),
        "model": target.model,
        **settings,
        "draft_window": drafted.draft_window,
        "drafter_dtype": drafted.drafter_dtype or target.dtype,
        "refine": drafted.refine,
        "walk": drafted.walk,
        "chat_template": template is not None,
    }
    title = "temperature {temperature:g}, top-p {top_p:g}, {max_new_tokens} new tokens, batch ".format(**settings)
    title += " and ".join(map(str, measuring.batch_size))
    notes = left_out(asked)
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
        name = next(way for way, lm in ways.items() if lm.drafter is not None)
        prompts = [(f"{each.name} {n}", tokens) for each in asked for n, tokens in enumerate(each.prompts[:REPLAYED], 1)]
        write_replay_page(outputs.replay, ways[name], (target.model, name), prompts, sampling, console)


def left_out(asked: Sequence[DatasetPrompts]) -> list[str]:
    """A line for each file of which some turns do not fit the context."""
    turns = ((each.name, each.skipped, len(each.prompts) + each.skipped) for each in asked if each.skipped)
    return [
        f"{name}: {skipped} of {all_} turns do not fit the model's context and were left out" for name, skipped, all_ in turns
    ]


def read_sets(data: Sequence[Path], samples: int) -> dict[str, list[Example]]:
    """The first `samples` records of each file, under its name without the suffix."""
    if not data:
        return {"held-out code": read_examples(common.packaged_prompts_file())[:samples]}
    sets = {path.stem: read_examples(path)[:samples] for path in data}
    if len(sets) < len(data):
        raise ValueError(f"expected data files of different names, found {', '.join(path.name for path in data)}")
    return sets


def run_all(
    ways: Mapping[str, LanguageModel],
    sets: Mapping[str, Sequence[Example]],
    template: ChatTemplate | None,
    measuring: Measuring,
    console: Console,
) -> tuple[list[DatasetPrompts], list[DecodingRun]]:
    """Asks and measures every set.

    Raises:
        ValueError: no prompt of a set fits the model's context; before anything is timed.
    """
    sampling = measuring.sampling()
    repetitions = measuring.repetitions
    batch_sizes = measuring.batch_size
    asked: list[DatasetPrompts] = []
    runs: list[DecodingRun] = []
    total = sum(map(len, sets.values())) + len(sets) * len(ways) * (repetitions + 2) * len(batch_sizes)
    with progress(console, total) as step:
        for name, examples in sets.items():
            asked.append(ask(ways[BASELINE], name, examples, template, sampling, partial(step, f"{name}: prompts")))
            if not asked[-1].prompts:
                raise ValueError(f"{name}: no prompt fits the model's context with {sampling.max_new_tokens} new tokens")
        for each in asked:
            for batch_size in batch_sizes:
                runs += measure(ways, each, sampling, batch_size, repetitions, partial(step, each.name))
    return asked, runs
