"""`tilewright shapes`: which shapes to declare, from the lengths of requests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tilewright.bench.lengths import read_lengths
from tilewright.cli.common import TargetOptions
from tilewright.cli.options import Several, check_least, option_class
from tilewright.cli.outputs import JsonFile, check_output_files, human_console, write_file, write_json
from tilewright.compiled.ledger import Ledger
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.shapes import SHAPES
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.runtime import advice
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.layout import Layout
from tilewright.runtime.programs import ProgramKey, Programs
from tilewright.runtime.shape_file import read_table, table_text
from tilewright.runtime.shapes import ShapeTable


@option_class
class ShapeOptions:
    """Options of the shapes to choose from, and of what decides.

    Attributes:
        max_buckets: the most capacities, and the most chunk lengths, to look at.
        least_saving: the share of the work that one more bucket must save to be recommended. Work is counted in positions.
        multiple: the shortest chunk; the others are this doubled. 16 suits CPUs, 128 TPUs.
        longest_chunk: the longest chunk; capacities are multiples of it.
        chunk_overhead: what running a chunk costs besides its own positions, in positions: the dispatch, reading the weights.
        context: positions of the longest request that the model takes; that of --model, or of the trace, by default.
        batches: numbers of rows in the table.
        compile_seconds: that a program takes to compile; otherwise, with --model, measured.
        model: a folder, a Hugging Face id, or "demo": compiles one program of each kind, and gives the context.
        drafter: that the model serves with, named as for `generate`; none by default.
    """

    max_buckets: int = 8
    least_saving: float = 0.05
    multiple: int = 16
    longest_chunk: int = 256
    chunk_overhead: int = 64
    context: int | None = None
    batches: Several[int] = ShapeTable.batches
    compile_seconds: float | None = None
    model: str | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        check_least(self, max_buckets=1, chunk_overhead=0, context=1)
        if not 0 <= self.least_saving < 1:
            raise ValueError(f"expected least_saving from 0 to below 1, found {self.least_saving:g}")
        if self.compile_seconds is not None and not 0 < self.compile_seconds < math.inf:
            raise ValueError(f"expected compile_seconds above 0, found {self.compile_seconds:g}")
        if self.drafter is not None and self.model is None:
            raise ValueError("--drafter needs --model")
        advice.chunk_lengths(self.multiple, self.longest_chunk)
        ShapeTable(self.batches, (self.longest_chunk,), (self.longest_chunk,))

    def load(self, console: Console) -> LanguageModel | None:
        """The model, if one is named; programs are not kept on disk, so that they are compiled when they are timed."""
        if self.model is None:
            return None
        return TargetOptions(self.model, compile_cache=False).load_with(self.drafter, console)

    def limit(self, lm: LanguageModel | None) -> int | None:
        """Positions of the longest request that counts; None for the trace's longest.

        Raises:
            ValueError: the model's context has fewer than were asked for.
        """
        if lm is None:
            return self.context
        most = lm.target.max_position_embeddings
        if self.context is not None and self.context > most:
            raise ValueError(f"expected a context of at most {most}, which the model has, found {self.context}")
        return self.context or most


@dataclass(frozen=True)
class Requests:
    """The requests that count.

    Attributes:
        positions: that each takes in a cache: prompt and output.
        prefilled: tokens that each prefills: all of its prompt but the last.
        beyond: how many others are longer than the context.
        context: positions; None where nothing limits them.
    """

    positions: advice.Lengths
    prefilled: advice.Lengths
    beyond: int
    context: int | None

    @classmethod
    def within(cls, context: int | None, prompts: advice.Lengths, outputs: advice.Lengths) -> "Requests":
        positions = prompts + outputs
        fits = positions <= (positions.max() if context is None else context)
        if not fits.any():
            raise ValueError(
                f"expected requests of at most {context} positions, the context; the shortest has {positions.min()}"
            )
        return cls(positions[fits], prompts[fits] - 1, int(np.sum(~fits)), context)

    @property
    def longest(self) -> int:
        return int(self.positions.max())


@dataclass(frozen=True)
class CompileEstimate:
    """Number of programs of tables, and the time that these take to compile.

    Attributes:
        longest: positions of the longest request.
        each: seconds of a program, by its name; empty where nothing is known.
        source: "given", "measured", or None.
        loaded: of those measured, how many came from JAX's compilation cache on disk.
    """

    longest: int
    drafter: Drafter | None
    each: Mapping[str, float]
    source: str | None = None
    loaded: int = 0

    @classmethod
    def make(
        cls, options: ShapeOptions, lm: LanguageModel | None, longest: int, table: ShapeTable, console: Console
    ) -> "CompileEstimate":
        """With seconds as given, or of one program of each name of a table."""
        drafter = lm and lm.drafter
        first = dict[str, ProgramKey]()
        for key in advice.programs_of(table, longest, drafter):
            first.setdefault(key.name, key)
        if options.compile_seconds is not None:
            return cls(longest, drafter, dict.fromkeys(first, options.compile_seconds), "given")
        if lm is None:
            return cls(longest, drafter, {})
        with Ledger() as ledger, console.status("compiling one program of each kind"):
            model = lm.model
            layout = Layout.full(table.batches[-1], table.capacities[-1], model.target.config.windows, table.chunks[-1])
            programs = Programs(model.target, model.models, model.dtype, model.drafter, table, layout)
            for key in first.values():
                programs.get(key)
        seconds = {name: programs.seconds[key] for name, key in first.items()}
        return cls(longest, drafter, seconds, "measured", ledger.loaded)

    def figures(self, table: ShapeTable) -> dict[str, Any]:
        programs = advice.programs_of(table, self.longest, self.drafter)
        seconds = advice.compile_seconds(programs, self.each) if self.each else None
        return {"programs": len(programs), "compile_seconds": seconds}


def suggest(
    *,
    trace: Path,
    options: ShapeOptions = ShapeOptions(),
    shapes: Path | None = None,
    out: Path | None = None,
    force: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Proposes capacities and prefill chunks for requests of known lengths, with padding, programs and compile time.

    Args:
        trace: the requests: .csv or .jsonl with prompt_tokens and output_tokens, or ContextTokens and GeneratedTokens.
        shapes: a table to compare with, in a file as --out writes it; the default one otherwise.
        out: write the recommended table to this file, as JSON.
        force: let --out replace a file.
    """
    console = human_console(json_file)
    check_output_files({"--json": json_file, "--out": out})
    if out is not None and out.exists() and not force:
        raise ValueError(f"--out {out}: it exists; --force replaces it")
    present = ShapeTable() if shapes is None else read_table(shapes)
    prompts, outputs = read_lengths(trace)
    lm = options.load(console)
    requests = Requests.within(options.limit(lm), prompts, outputs)
    figures, table = advise(options, requests, lm, present, "default" if shapes is None else str(shapes), console)
    lengths = {"prompt_tokens": spread(prompts), "output_tokens": spread(outputs)}
    figures = {"trace": str(trace), "requests": len(prompts), **lengths, **figures}
    show(figures, console)
    write_file(console, out, lambda path: path.write_text(table_text(table), encoding="utf-8"))
    write_json(json_file, figures)


def advise(
    options: ShapeOptions, requests: Requests, lm: LanguageModel | None, present: ShapeTable, name: str, console: Console
) -> tuple[dict[str, Any], ShapeTable]:
    """The figures of every choice, and the table that is recommended."""
    candidates = advice.chunk_lengths(options.multiple, options.longest_chunk)
    chunks = advice.chunk_choices(requests.prefilled, options.max_buckets, candidates, options.chunk_overhead)
    capacities = advice.capacity_choices(requests.positions, options.max_buckets, options.longest_chunk)
    best = [advice.recommended(choices, options.least_saving) for choices in (chunks, capacities)]

    def table(these: advice.Buckets, those: advice.Buckets) -> ShapeTable:
        return ShapeTable(options.batches, these.sizes, those.sizes)

    chosen = table(capacities[best[1]], chunks[best[0]])
    estimate = CompileEstimate.make(options, lm, requests.longest, chosen, console)
    chunk_tables = [table(capacities[best[1]], one) for one in chunks]
    capacity_tables = [table(one, chunks[best[0]]) for one in capacities]
    return {
        "requests_beyond_context": requests.beyond,
        "context_positions": requests.context,
        "longest_request_positions": requests.longest,
        "multiple_positions": options.multiple,
        "longest_chunk_positions": options.longest_chunk,
        "chunk_overhead_positions": options.chunk_overhead,
        "least_saving_share": options.least_saving,
        "max_buckets": options.max_buckets,
        "model": options.model,
        "drafter": options.drafter,
        "compile_seconds_source": estimate.source,
        "compile_seconds_per_program": dict(estimate.each) or None,
        "compile_programs_loaded": estimate.loaded,
        "chunks": records("chunks", chunks, best[0], chunk_tables, estimate),
        "capacities": records("capacities", capacities, best[1], capacity_tables, estimate),
        "present": present_figures(present, name, requests, options.chunk_overhead, estimate),
        "recommended": asdict(chosen) | estimate.figures(chosen),
    }, chosen


def records(
    name: str, choices: Sequence[advice.Buckets], best: int, tables: Sequence[ShapeTable], estimate: CompileEstimate
) -> list[dict[str, Any]]:
    """The figures of each choice; programs are those of a table with it, and with what is recommended of the other kind."""
    return [
        {
            name: list(one.sizes),
            **bucket_figures(one),
            "saved_share": saved,
            **estimate.figures(table),
            "recommended": n == best,
        }
        for n, (one, saved, table) in enumerate(zip(choices, advice.saved_shares(choices), tables, strict=True))
    ]


def bucket_figures(one: advice.Buckets) -> dict[str, Any]:
    return {
        "padding_share": one.padding_share,
        "needed_positions": one.needed,
        "computed_positions": one.computed,
        "runs": one.runs,
        "work_positions": one.work,
    }


def present_figures(
    present: ShapeTable, name: str, requests: Requests, overhead: int, estimate: CompileEstimate
) -> dict[str, Any]:
    """Figures of another table, over the requests that it has a shape for."""
    fits = requests.positions <= present.capacities[-1]
    chunks = advice.chunk_choice(present.chunks, requests.prefilled[fits], overhead)
    capacities = advice.capacity_choice(present.capacities, requests.positions[fits])
    return {
        "table": name,
        **asdict(present),
        "requests_without_shape": int(np.sum(~fits)),
        "chunk_figures": bucket_figures(chunks),
        "capacity_figures": bucket_figures(capacities),
        **estimate.figures(present),
    }


def spread(lengths: advice.Lengths) -> dict[str, float]:
    return {"median": float(np.median(lengths)), "p99": float(np.quantile(lengths, 0.99)), "max": int(lengths.max())}


TITLES = {"chunks": "chunk lengths of prefill", "capacities": "capacities of caches"}


def show(figures: Mapping[str, Any], console: Console) -> None:
    """Prints the figures."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"{figures['trace']}: {figures['requests']:,} requests")
    for name in ("prompt_tokens", "output_tokens"):
        of = figures[name]
        say(f"  {name.replace('_', ' ')}: median {of['median']:,.0f}, 99 % {of['p99']:,.0f}, most {of['max']:,}")
    if figures["requests_beyond_context"]:
        beyond = figures["requests_beyond_context"]
        limit = figures["context_positions"]
        say(f"{beyond:,} requests are longer than the context of {limit:,} positions and are in no figure below", "yellow")
    for name in TITLES:
        print_table(console, choices_table(name, figures))
    for line in (*explanation(figures), *comparison(figures), compile_line(figures)):
        say(line)


def choices_table(name: str, figures: Mapping[str, Any]) -> FigureTable:
    """A line for each number of buckets; that which is recommended has a star."""
    requests = figures["requests"] - figures["requests_beyond_context"]
    rows = [
        {
            **one,
            "star": "*" if one["recommended"] else "",
            "positions": " ".join(map(str, one[name])),
            "runs_a_prompt": one["runs"] / requests,
            "compile_seconds": duration(one["compile_seconds"]),
        }
        for one in figures[name]
    ]
    padding, *others = chosen(SHAPES, "padding_share saved_share programs compile_seconds")
    runs = [Metric("runs_a_prompt", head="runs a prompt", short="runs a\nprompt", form=".2f")] if name == "chunks" else []
    columns = (Metric("star", words=True), Metric("positions", head="positions", words=True), padding, *runs, *others)
    return FigureTable(TITLES[name], "", {"": rows}, columns)


def explanation(figures: Mapping[str, Any]) -> list[str]:
    """Lines that explain the tables."""
    share = figures["least_saving_share"]
    overhead = figures["chunk_overhead_positions"]
    lines = [
        f"work: positions computed or held, and {overhead} more for each run of prefill",
        f"*: recommended, the first after which one more saves less than {share:.3g} of the work",
        "programs: of a table with this choice and with the one that has a star in the other list",
    ]
    for name in TITLES:
        if figures[name][-1]["recommended"] and len(figures[name]) == figures["max_buckets"]:
            lines.append(f"more than {figures['max_buckets']} {name} were not looked at; --max-buckets says how many are")
    return lines


def comparison(figures: Mapping[str, Any]) -> list[str]:
    """Lines that compare the recommended table and the present one over the requests."""
    best = {name: next(one for one in figures[name] if one["recommended"]) for name in TITLES}
    present = figures["present"]
    lines = []
    called = "the default table" if present["table"] == "default" else present["table"]
    for name, table, held, prefilled in (
        ("recommended", figures["recommended"], best["capacities"], best["chunks"]),
        (called, present, present["capacity_figures"], present["chunk_figures"]),
    ):
        padding = f"{held['padding_share']:.1%} of cache positions and {prefilled['padding_share']:.1%} of prefill are padding"
        seconds = table["compile_seconds"]
        compiling = "" if seconds is None else f", {duration(seconds)} to compile"
        lines.append(f"{name}: {padding}; {table['programs']:,} programs{compiling}")
    if present["requests_without_shape"]:
        lines[-1] += f"; no shape for {present['requests_without_shape']:,} requests"
    largest = figures["recommended"]["capacities"][-1]
    if largest < (figures["context_positions"] or math.inf):
        lines.append(f"requests of more than {largest:,} positions have no shape in the recommended table")
    return lines


def compile_line(figures: Mapping[str, Any]) -> str:
    """Line that says where compile times come from."""
    each = figures["compile_seconds_per_program"]
    loaded = figures["compile_programs_loaded"]
    if each is None:
        return "compile times: unknown without --compile-seconds or --model"
    told = ", ".join(f"{name} {significant(seconds, 2)} s" for name, seconds in each.items())
    where = f" ({loaded} of them read from JAX's cache on disk)" if loaded else ""
    return f"compile times: estimates, one program after another; {figures['compile_seconds_source']}: {told}{where}"


def duration(seconds: float | None) -> str:
    """A time for people, in the unit that suits it; a dash where it is not known."""
    if seconds is None:
        return "–"
    unit, size = next((each for each in (("h", 3600), ("min", 60)) if seconds >= 2 * each[1]), ("s", 1))
    return f"{significant(seconds / size, 2)} {unit}"
