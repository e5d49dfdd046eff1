"""Compares `auto` with plain decoding and with every fixed choice, at several numbers of concurrent requests.

    python benchmarks/auto_choice.py smollm2-135m --data gsm8k_test.jsonl humaneval.jsonl ... [--concurrency 1 4] [--json FILE]

All run in this process, in engines as `tilewright serve` has them: one without a drafter ("plain"), and one with the drafters,
in which the policy chooses ("auto"), or every round is of one kind (a fixed choice). "Plain, with drafters" shows the cost of
drafters that are off. The first requests of a file begin together; the next one begins when one ends. Seconds are those of
decoding, from the end of the first requests' prefill to the last token; later prefills are among them.

In a repetition all files run in turn, and on each file all variants; every second repetition runs in reverse order. So `auto`
comes to each file from another one. Tables show medians and ranges of ratios within a repetition. The best fixed choice of a
file, plain decoding among them, has the most tokens per second by medians; of nearly equal choices, noise selects the one that
it favours. On a busy machine, tokens per processor second vary less than tokens per second.
"""

import datetime
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.compare import environment
from tilewright.bench.datasets import read_examples
from tilewright.bench.speculative import build_prompts
from tilewright.cli.common import AUTO, TargetOptions
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.timing import REPETITIONS, alternate, quotients
from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.options import WIDTHS, EngineOptions
from tilewright.runtime.pace import FixedRounds
from tilewright.runtime.programs import STEPS_PER_DISPATCH
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import DrafterOptions

BASELINE = "plain"
OFF = "plain, with drafters"
FEWEST = 4
"""Requests of each file at least, also at lower concurrency."""


class FixedChoice(FixedRounds):
    """Chooses rounds of one kind of a team, in dispatches of the engine's usual length."""

    def __init__(self, choice: Choice, dispatch_s: float):
        super().__init__(dispatch_s, STEPS_PER_DISPATCH)
        self.choice = choice

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        return self.choice, min(most, self.most(self.seconds.get((rows, self.choice)), hurried))


class Decoded(NamedTuple):
    """Result of decoding the prompts of a file.

    Attributes:
        seconds: seconds of decoding.
        cpu_seconds: processor seconds of this process meanwhile.
        prefill_seconds: seconds before it, in which the first requests were prefilled.
        tokens: tokens of each request.
        rounds: rounds of each kind.
    """

    seconds: float
    cpu_seconds: float
    prefill_seconds: float
    tokens: list[list[int]]
    rounds: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Tokens per processor second."""
        return sum(map(len, self.tokens)) / self.cpu_seconds


@dataclass
class Variant:
    """An engine and its way of choosing rounds; None for the engine's own chooser."""

    engine: Engine
    chooser: Any = None

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling, concurrency: int) -> Decoded:
        """Decodes the prompts, `concurrency` at a time."""
        engine = self.engine
        own = engine.decoding.chooser
        engine.decoding.chooser = self.chooser or own
        before = Counter(engine.stats().widths)
        waiting = list(enumerate(prompts))[::-1]
        tokens: list[list[int]] = [[] for _ in prompts]

        def begin() -> None:
            number, prompt = waiting.pop()

            def listen(update: RequestOutput) -> None:
                tokens[number] += [each.token for each in update.tokens]
                if update.error:
                    raise SystemExit(f"a request failed: {update.error}")
                if update.end is not None and waiting:
                    begin()

            engine.add(GenerateRequest(prompt, replace(sampling, seed=number)), listen)

        started = time.perf_counter()
        for _ in range(min(concurrency, len(waiting))):
            begin()
        engine.fill(everything=True)
        engine.runner.wait()
        began = time.perf_counter()
        cpu = time.process_time()
        while engine.busy:
            engine.step()
        ended = time.perf_counter()
        rounds = Counter(engine.stats().widths) - before
        engine.decoding.chooser = own
        return Decoded(ended - began, time.process_time() - cpu, began - started, tokens, dict(rounds))


def variants(lm: LanguageModel, options: EngineOptions, words: Sequence[str], console: Console) -> dict[str, Variant]:
    """Returns plain decoding, auto, and the fixed choices whose names have one of these words.

    All programs are compiled, and all costs of rounds measured.
    """
    plain = lm.with_drafter(None).engine(options)
    drafting = lm.engine(options)
    plain.warm(console)
    drafting.warm(console)
    found = {}
    for choice in drafting.decoding.programs.choices:
        assert choice is not None, "auto chooses among several kinds of rounds"
        fixed = FixedChoice(choice, options.dispatch_s)
        found[OFF if choice == PLAIN else str(choice)] = Variant(drafting, fixed)
    chosen = {name: each for name, each in found.items() if any(word in name for word in words)}
    return {BASELINE: Variant(plain), **chosen, AUTO: Variant(drafting)}


def prompts_of(
    lm: LanguageModel, path: Path, template: ChatTemplate | None, sampling: Sampling, context: int, count: int
) -> list[list[int]]:
    """Returns the first prompts of a file, first turns only, that leave room for the answer in the context."""
    examples = [replace(each, turns=each.turns[:1]) for each in read_examples(path)[: 4 * count]]
    prompts = build_prompts(lm, path.stem, examples, template, sampling).prompts
    prompts = [prompt for prompt in prompts if len(prompt) + sampling.max_new_tokens <= context][:count]
    if len(prompts) < count:
        raise ValueError(f"{path}: expected {count} prompts that fit the context of {context}, found {len(prompts)}")
    return prompts


def figures(file: str, concurrency: int, decoded: Mapping[str, Sequence[Decoded]]) -> dict[str, Any]:
    """Returns the figures of one file at one concurrency: tokens per second, and their ratios within a repetition."""
    rates = {name: [each.rate for each in runs] for name, runs in decoded.items()}
    fixed = [name for name in rates if name not in (AUTO, OFF)]
    best = max(fixed, key=lambda name: median(rates[name]))
    wanted = decoded[BASELINE][0].tokens
    rows: dict[str, Any] = {}
    for name, runs in decoded.items():
        ratios = {other: quotients(rates[name], rates[under]) for other, under in (("plain", BASELINE), ("best", best))}
        last = runs[-1]
        rows[name] = {
            "tokens_per_s": rates[name],
            **{f"over_{other}": ratio.median for other, ratio in ratios.items()},
            **{f"over_{other}_range": ratio.range for other, ratio in ratios.items()},
            "cpu_over_plain": quotients([each.cpu_rate for each in runs], [each.cpu_rate for each in decoded[BASELINE]]).median,
            "prefill_seconds": [each.prefill_seconds for each in runs],
            "rounds": last.rounds,
            "tokens_per_round": sum(map(len, last.tokens)) / sum(last.rounds.values()),
            "equal_texts": fmean(ours == plain for ours, plain in zip(last.tokens, wanted, strict=True)),
        }
    return {"dataset": file, "concurrency": concurrency, "best": best, "variants": rows}


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each concurrency, and the means over all files."""
    for concurrency in dict.fromkeys(row["concurrency"] for row in rows):
        some = [row for row in rows if row["concurrency"] == concurrency]
        table = Table(title=f"{concurrency} requests at a time", caption="medians and ranges over the repetitions")
        for name in (
            "data",
            "rounds",
            "tokens/s",
            "tokens/round",
            "over plain",
            "over best fixed",
            "over plain, by processor time",
        ):
            table.add_column(name, justify="left" if name in ("data", "rounds") else "right")
        for row in some:
            for name, one in row["variants"].items():
                shown = f"{name} *" if name == row["best"] else name
                rates = f"{median(one['tokens_per_s']):,.0f}", f"{one['tokens_per_round']:.2f}"
                ratios = (with_range(one, over) for over in ("over_plain", "over_best"))
                table.add_row(row["dataset"], shown, *rates, *ratios, f"{one['cpu_over_plain']:.3f}")
            table.add_section()
        for name in some[0]["variants"]:
            over = ("over_plain", "over_best", "cpu_over_plain")
            means = (fmean(row["variants"][name][key] for row in some) for key in over)
            table.add_row("mean", name, "", "", *(f"{mean:.3f}" for mean in means))
        console.print(table)


def with_range(row: Mapping[str, Any], over: str) -> str:
    return "{:.3f} ({:.2f} to {:.2f})".format(row[over], *row[f"{over}_range"])


def main(
    model: str,
    *,
    data: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())],
    concurrency: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 4, 8, 16),
    drafter: str = AUTO,
    choices: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = ("block", OFF),
    temperature: float = 0.0,
    top_p: float = 0.9,
    max_new_tokens: int = 96,
    context: int = 2048,
    widths: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = WIDTHS,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Compares auto with plain decoding and with every fixed choice.

    Parameters
    ----------
    model
        "smollm2-135m", a folder or a GGUF file.
    data
        JSONL files of prompts.
    concurrency
        Numbers of requests that run at once.
    drafter
        "auto" for n-grams and the model's packaged drafters, or a name or folder as of `tilewright serve`.
    choices
        Fixed choices to run: those with one of these texts in their names.
    top_p
        Sampling from the most likely tokens with this total probability, at a temperature above 0.
    context
        Most positions of a request. Longer prompts are left out.
    widths
        Widths of blocks below a drafter's own.
    repetitions
        Timed runs of each variant; one more is not timed.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1 or not concurrency or min(concurrency) < 1:
        raise ValueError(f"expected repetitions and concurrency of at least 1, found {repetitions} and {concurrency}")
    console = human_console(json_file)
    target = TargetOptions(model)
    lm = target.load_with(drafter, console, options=DrafterOptions(block_size=AUTO))
    template = target.prompt_template(None, console)
    sampling = Sampling(max_new_tokens, temperature, top_p if temperature else 1.0)
    options = EngineOptions(slots=max(concurrency), context=context, prefix_cache=False)
    options = replace(options, table=replace(options.shapes(context), widths=widths))
    prompts = {path.stem: prompts_of(lm, path, template, sampling, context, max(FEWEST, *concurrency)) for path in data}
    compared = variants(lm, options, choices, console)
    runs: dict[tuple[int, str, str], Callable[[], Decoded]] = {
        (rows, file, name): partial(variant.decode, texts[: max(FEWEST, rows)], sampling, rows)
        for rows in concurrency
        for file, texts in prompts.items()
        for name, variant in compared.items()
    }
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(runs) * (repetitions + 1))
        results = alternate(runs, repetitions, lambda: bar.advance(task), warm=True)
    rows = [
        figures(file, some, {name: results[some, file, name] for name in compared}) for some in concurrency for file in prompts
    ]
    show(console, rows)
    about = {"model": model, "drafter": drafter, "temperature": temperature, "top_p": sampling.top_p, "context": context}
    about |= {"widths": widths}
    about |= {"max_new_tokens": max_new_tokens, "repetitions": repetitions}
    write_json(json_file, {"date": datetime.date.today().isoformat(), **environment(lm), **about, "data": rows})


if __name__ == "__main__":
    app = App(name="auto_choice", help=__doc__)
    app.default(main)
    app()
