"""`tilewright bench speculative`: drafters against plain decoding, and against each other."""

import datetime
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from tilewright.bench.compare import environment
from tilewright.bench.datasets import Example, read_examples
from tilewright.bench.figures import BASELINE, DecodingRun, average_rows, benchmark_rows, csv_text
from tilewright.bench.speculative import PARTS, DatasetPrompts, ask, measure
from tilewright.cli.common import (
    AUTO,
    JsonFile,
    TargetOptions,
    check_output_file,
    check_packaged,
    human_console,
    packaged_prompts_file,
    progress_console,
    whole_file,
    write_json,
    write_replay_page,
    write_text,
)
from tilewright.compiled.figures import print_table
from tilewright.compiled.timing import REPETITIONS
from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.report import terminal
from tilewright.report.benchmark import BenchmarkReport, CategoryTau, DrafterFigures, write_benchmark
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions

REPLAYED = 3
"""Prompts of each dataset that `--replay` shows."""


@Parameter(name="*")
@dataclass(frozen=True)
class DrafterArguments:
    """Options of the drafters that are compared.

    Attributes:
        drafter: folders, Hugging Face ids, "ngram"; for the demo also "dflash", "dflash2" and "eagle3"; "auto" takes
            whichever promises most, round by round. Plain decoding always runs beside them; "none" with a block size adds plain
            decoding through a program of that width.
        block_size: tokens drafted at once by every drafter, the known one included; by default what each was trained for.
            "auto" chooses it round by round, as `generate` does, and "auto-inexact" too, but never runs more rows than it
            chose, where that changes how the target rounds.
        draft_window: keep only this many last positions in the drafters' contexts.
        drafter_dtype: of the drafters alone.
        refine: further passes of a DFlash drafter over each block that it drafted.
        walk: how drafters with candidates (DFlash 2, DSpark, LiLiCorr) take one of a slot's: "greedy", the best, or "sampled"
            (the default), drawn at the request's temperature with the target's own noise; the output is the same either way.
    """

    drafter: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = ("dflash",)
    block_size: int | Literal["auto", "auto-inexact"] | None = None
    draft_window: int | None = None
    drafter_dtype: str | None = None
    refine: int = 0
    walk: str | None = None

    @property
    def options(self) -> DrafterOptions:
        return DrafterOptions(self.block_size, self.draft_window, self.drafter_dtype, self.refine, self.walk)

    def check(self, model: str) -> None:
        """Raises a `ValueError` if the drafters cannot be measured."""
        if len(set(self.drafter)) < len(self.drafter):
            raise ValueError(f"expected different drafters, found {', '.join(self.drafter)}")
        if not isinstance(self.block_size, int) and set(self.drafter) <= {BASELINE}:
            raise ValueError("this benchmark needs a drafter, or a block size for plain decoding of that width; found neither")
        if set(self.drafter) <= {BASELINE, NGRAM}:
            self.options.check(NGRAM)  # nothing here has weights
        check_packaged(self.drafter, model)

    def ways(self, target: TargetOptions, console: Console) -> dict[str, LanguageModel]:
        """The baseline and every drafter, each under the name that it is shown with; all share the target."""
        base = target.load_with(None, DrafterOptions(), console)
        ways = {BASELINE: base}
        short = [Path(name).name for name in self.drafter]
        for name in self.drafter:
            if name != BASELINE:
                shown = name if short.count(Path(name).name) > 1 else Path(name).name
                ways[shown] = base.with_drafter(*self.load(name, target, base, console))
            elif isinstance(self.block_size, int):
                ways[f"none, block {self.block_size}"] = base.with_drafter(*self.load(None, target, base, console))
        return ways

    def load(self, name: str | None, target: TargetOptions, base: LanguageModel, console: Console) -> tuple[Any, Any]:
        options = self.options if name == AUTO else self.options.fitting(name)
        if name == AUTO and options.block_size is None:
            options = replace(options, block_size=AUTO)
        return base.load_drafter(target.drafter_source(name), options, progress_console(console))


@Parameter(name="*")
@dataclass(frozen=True)
class SpeculativeOutputs:
    """Places where figures go, besides the terminal.

    Attributes:
        json_file: the figures as JSON; "-" is standard output.
        csv: the table as CSV.
        html: a page with the table and what explains it.
        replay: a page that plays the first prompts token by token, with the first drafter and without.
        price_per_hour: of the machine; adds the cost of a million tokens.
    """

    json_file: JsonFile = None
    csv: Path | None = None
    html: Path | None = None
    replay: Path | None = None
    price_per_hour: float | None = None

    def check(self) -> None:
        check_output_file("--json", self.json_file)
        for name in ("csv", "html", "replay"):
            path = getattr(self, name)
            if path is not None:
                check_output_file(f"--{name}", str(path))
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ValueError(f"expected a price per hour above 0, found {self.price_per_hour}")


@Parameter(name="*")
@dataclass(frozen=True)
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

    data: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = ()
    samples: int = 20
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1,)
    repetitions: int = REPETITIONS

    def check(self) -> None:
        for name in ("samples", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, found {getattr(self, name)}")
        sizes = self.batch_size
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            found = ", ".join(map(str, sizes)) or "none"
            raise ValueError(f"expected batch sizes of at least 1, each once, found {found}")

    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)


def speculative(
    *,
    measuring: Measuring = Measuring(),
    target: TargetOptions = TargetOptions(),
    drafted: DrafterArguments = DrafterArguments(),
    outputs: SpeculativeOutputs = SpeculativeOutputs(),
) -> None:
    """Decodes the prompts of each file with every drafter and without one, alternating, and prints the papers' table.

    Every figure is defined in docs/metrics.md.
    """
    outputs.check()
    measuring.check()
    sampling = measuring.sampling()
    drafted.check(target.model)
    sets = read_sets(measuring.data, measuring.samples)
    console = human_console(outputs.json_file)
    template = target.chat_template(console)
    ways = drafted.ways(target, console)
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
    for table in terminal.benchmark_tables(title, rows, averages):
        print_table(console, table)
    for each in (each for each in asked if each.skipped):
        turns = len(each.prompts) + each.skipped
        line = f"{each.name}: {each.skipped} of {turns} turns do not fit the model's context and were left out"
        console.print(line, style="dim", markup=False)
    write_json(outputs.json_file, {**facts, "price_per_hour": outputs.price_per_hour, "data": rows, "averages": averages})
    write_files(outputs, facts, rows, ways, asked, sampling, console)


def read_sets(data: Sequence[Path], samples: int) -> dict[str, list[Example]]:
    """The first `samples` records of each file, under its name without the suffix."""
    if not data:
        return {"held-out code": read_examples(packaged_prompts_file())[:samples]}
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
    sampling, repetitions, batch_sizes = measuring.sampling(), measuring.repetitions, measuring.batch_size
    asked: list[DatasetPrompts] = []
    runs: list[DecodingRun] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        each_way = (repetitions + 2) * len(batch_sizes)
        rows = {name: bar.add_task(escape(name), total=len(each) + len(ways) * each_way) for name, each in sets.items()}
        for name, examples in sets.items():
            asked.append(ask(ways[BASELINE], name, examples, template, sampling, lambda row=rows[name]: bar.advance(row)))
            if not asked[-1].prompts:
                raise ValueError(f"{name}: no prompt fits the model's context with {sampling.max_new_tokens} new tokens")
        for each in asked:
            advance = partial(bar.advance, rows[each.name])
            for batch_size in batch_sizes:
                runs += measure(ways, each, sampling, batch_size, repetitions, advance)
    return asked, runs


def write_files(
    outputs: SpeculativeOutputs,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    ways: Mapping[str, LanguageModel],
    asked: Sequence[DatasetPrompts],
    sampling: Sampling,
    console: Console,
) -> None:
    """Writes the files that were asked for."""
    if outputs.csv is not None:
        write_text(outputs.csv, csv_text([dict(row) for row in rows]))
    if outputs.html is not None:
        with whole_file(outputs.html) as path:
            write_benchmark(path, benchmark_report(facts, rows))
    if outputs.replay is not None:
        name = next(way for way, lm in ways.items() if lm.drafter is not None)
        prompts = [(f"{each.name} {n}", tokens) for each in asked for n, tokens in enumerate(each.prompts[:REPLAYED], 1)]
        write_replay_page(outputs.replay, ways[name], (str(facts["model"]), name), prompts, sampling, console)


def benchmark_report(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> BenchmarkReport:
    """The page's data from the figures."""
    measured, categories = [], []
    for row in terminal.with_names([row for row in rows if row["drafter"] != BASELINE]):
        parts: dict[str, Any] = {f"{part}_seconds": row[f"{part}_ms"] and row[f"{part}_ms"] / 1000 for part in PARTS}
        measured.append(
            DrafterFigures(
                row["data"],
                row["drafter"],
                row["responses"],
                row["baseline_tokens_per_s"],
                row["tokens_per_s"],
                row["speedup"],
                row["tokens_per_round"],
                cost_per_million_tokens=row["cost_per_million_tokens"],
                acceptance_by_position=[each["rate"] for each in row["acceptance_by_position"] if each["rate"] is not None],
                tau_by_position=[(each["from"], each["tau"]) for each in row["tau_by_position"]],
                chosen=[
                    (terminal.choice_name(each), each["share_of_rounds"]) for each in (row["chosen"] or {}).get("choices", ())
                ],
                **parts,
            )
        )
        categories += [
            CategoryTau(row["data"], part["category"], row["drafter"], part["responses"], part["tokens_per_round"])
            for part in row["categories"]
        ]
    left_out = {row["dataset"]: (row["skipped"], row["skipped"] + row["responses"]) for row in rows if row["skipped"]}
    notes = [f"{name}: {n} of {turns} turns left out, too long for the context." for name, (n, turns) in left_out.items()]
    environment = {**facts, "command": shlex.join(["tilewright", *sys.argv[1:]])}
    title = "Speculative decoding"
    lead = f"Model {facts['model']}, temperature {facts['temperature']:g}, {facts['max_new_tokens']} new tokens."
    return BenchmarkReport(title, measured, categories, lead, environment, notes)
