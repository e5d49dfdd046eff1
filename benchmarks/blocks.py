"""Compares ways to decode one set of weights that decodes token by token and denoises blocks, on arithmetic problems.

    python benchmarks/blocks.py [--model demo-blocks] [--asked 256] [--timed 8] [--rows 1 --rows 8] [--json FILE]

All ways answer the same held-out problems: token by token; with the model as its own drafter, whose tokens must be those of
decoding; blocks with several thresholds, static quotas, and a token a pass; and `demo-diffusion`, whose positions all see each
other, with the same thresholds and blocks.

A pass runs the layers once for a row: over a token, a drafted block or its verification (two passes a round), a block, or a
finished block and the next one. Passes that only store a block count. Times include prompts; they are medians of alternating
runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np
from cyclopts import App

import tilewright as tw
from tilewright.cli.options import Numbers, Several
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, spread
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.runtime.sampling import Sampling
from tilewright.train.arithmetic import Problem, is_right, problems

LONGEST = 160
"""Tokens of the longest answers."""
DRAFTED = 16
"""Block size of the model as its own drafter: the length of its blocks in training."""
MASKED = "masked"
"""Name of the ways of the other model, `demo-diffusion`."""
BATCH = 8
"""Rows that answer together where only answers count."""


@dataclass(frozen=True)
class Answers:
    """Answers to some prompts.

    Attributes:
        texts, tokens: texts, and their token ids.
        passes: passes of all rows together.
        seconds: time with prompts.
    """

    texts: list[str]
    tokens: list[list[int]]
    passes: int
    seconds: float


Way = Callable[[Sequence[str]], Answers]


def decoded(lm: LanguageModel, prompts: Sequence[str], denoising: tw.BlockDenoising | None = None) -> Answers:
    """Answers by decoding: token by token, with drafts, or in blocks."""
    began = time.perf_counter()
    with lm.start(list(prompts), Sampling(LONGEST), denoising=denoising) as stream:
        while not stream.finished:
            stream.advance()
    seconds = time.perf_counter() - began
    results = stream.results()
    passes = stream.engine.counters.row_rounds * (1 if lm.drafter is None else 2)
    return Answers([each.text for each in results], [list(each.tokens) for each in results], passes, seconds)


def masked(model: DiffusionModel, prompts: Sequence[str], options: tw.Denoising) -> Answers:
    """Answers by denoising whole sequences."""
    began = time.perf_counter()
    results = model.generate(list(prompts), options)
    seconds = time.perf_counter() - began
    return Answers(
        [each.text for each in results], [list(each.tokens) for each in results], sum(each.steps for each in results), seconds
    )


def ways(model: str, thresholds: Sequence[float]) -> dict[str, Way]:
    """Returns the ways by name."""
    plain = tw.load(model)
    itself = tw.load(model, "self", block_size=DRAFTED)
    blocks = tw.load(model, decoding="blocks")
    whole = tw.load("demo-diffusion")
    assert isinstance(plain, LanguageModel)
    assert isinstance(itself, LanguageModel)
    assert isinstance(blocks, LanguageModel)
    assert isinstance(whole, DiffusionModel)
    length = blocks.block_length
    assert length is not None
    found: dict[str, Way] = {
        "token by token": lambda prompts: decoded(plain, prompts),
        "its own drafter": lambda prompts: decoded(itself, prompts),
        "blocks with a token a pass": lambda prompts: decoded(blocks, prompts, tw.BlockDenoising("sequential")),
        "blocks in 4 passes": lambda prompts: decoded(blocks, prompts, tw.BlockDenoising("low_confidence_static", steps=4)),
    }
    for threshold in thresholds:
        options = tw.BlockDenoising(threshold=threshold)
        found[f"blocks above {threshold:g}"] = lambda prompts, options=options: decoded(blocks, prompts, options)
    for threshold in thresholds:
        request = tw.Denoising(LONGEST, block_length=length, threshold=threshold)
        found[f"{MASKED} above {threshold:g}"] = lambda prompts, request=request: masked(whole, prompts, request)
    return found


METRICS = (
    Metric("way", head="way", words=True),
    Metric("right", head="right", form=".1%"),
    Metric("as_decoded", head="as decoded", form=".1%"),
    Metric("tokens_per_pass", head="tokens a pass", form=".2f"),
)


def speed_metrics(rows: Sequence[int]) -> tuple[Metric, ...]:
    each = [
        (
            Metric(f"tokens_per_s_{n}", head=f"tokens/s, {n} rows" if n > 1 else "tokens/s, 1 row", form=",.0f"),
            Metric(f"passes_per_s_{n}", head="passes/s", form=",.0f"),
            Metric(f"speedup_{n}", head="over token by token", form=".2f"),
        )
        for n in rows
    ]
    return tuple(metric for group in each for metric in group)


def in_batches(way: Way, given: Sequence[Problem], advance: Callable[[], None]) -> tuple[list[str], list[list[int]], int]:
    """Returns texts and tokens of all answers, and the passes."""
    texts: list[str] = []
    tokens: list[list[int]] = []
    passes = 0
    for begin in range(0, len(given), BATCH):
        some = way([problem.prompt for problem in given[begin : begin + BATCH]])
        texts += some.texts
        tokens += some.tokens
        passes += some.passes
        advance()
    return texts, tokens, passes


def main(
    *,
    model: str = "demo-blocks",
    asked: int = 256,
    thresholds: Several[float] = (0.5, 0.7, 0.9, 0.97),
    timed: int = 8,
    repetitions: int = 5,
    rows: Numbers = (1, 8),
    json: JsonFile = None,
) -> None:
    """Compares ways to decode a model that decodes token by token and denoises blocks.

    Args:
        model: name or folder of a model that denoises blocks of 16 tokens, from `tilewright train diffusion --block-causal`.
        asked: number of problems whose answers are checked.
        thresholds: thresholds of blocks.
        timed: number of problems that are timed, a multiple of the rows.
        repetitions: number of timed runs.
        rows: numbers of rows that answer together in timed runs.
        json: file for all figures.
    """
    if wrong := [count for count in rows if timed % count]:
        raise ValueError(f"expected --timed that is a multiple of the rows, found {timed} with {wrong[0]}")
    console = human_console(json)
    problems_asked = list(islice(problems(np.random.default_rng(0), held_out=True), asked))
    each = ways(model, thresholds)
    records: dict[str, dict[str, Any]] = {name: {"way": name} for name in each}
    batches = -(-asked // BATCH)
    plain: list[list[int]] = []
    with progress(console, len(each) * batches, "batches answered") as advance:
        for name, way in each.items():
            texts, tokens, passes = in_batches(way, problems_asked, advance)
            plain = plain or tokens
            records[name] |= {
                "right": float(np.mean([is_right(problem, text) for problem, text in zip(problems_asked, texts, strict=True)])),
                "as_decoded": None
                if name.startswith(MASKED)
                else float(np.mean([x == y for x, y in zip(tokens, plain, strict=True)])),
                "tokens_per_pass": sum(map(len, tokens)) / passes,
                "problems": asked,
            }
    for count in rows:
        prompts = [problem.prompt for problem in problems_asked[:timed]]

        def run(way: Way, count: int = count, prompts: Sequence[str] = prompts) -> tuple[int, int, float]:
            parts = [way(prompts[begin : begin + count]) for begin in range(0, len(prompts), count)]
            tokens = sum(len(row) for part in parts for row in part.tokens)
            return tokens, sum(part.passes for part in parts), sum(part.seconds for part in parts)

        runs = {name: (lambda way=way: run(way)) for name, way in each.items()}
        found = alternate(runs, repetitions, warm=True)
        base = [seconds / tokens for tokens, _, seconds in found["token by token"]]
        for name, results in found.items():
            rates = [tokens / seconds for tokens, _, seconds in results]
            records[name] |= {
                f"tokens_per_s_{count}": spread(rates).median,
                f"passes_per_s_{count}": spread([passes / count / seconds for _, passes, seconds in results]).median,
                f"speedup_{count}": spread([one * rate for one, rate in zip(base, rates, strict=True)]).median,
                f"speedups_{count}": [one * rate for one, rate in zip(base, rates, strict=True)],
            }
    title = f"{model}: {asked} problems"
    print_table(console, FigureTable(title, "", {"": list(records.values())}, (*METRICS, *speed_metrics(rows)), unknown=""))
    write_json(json, {"chip": chip_name(), "jax": jax.__version__, "records": list(records.values())})


if __name__ == "__main__":
    app = App(help=__doc__)
    app.default(main)
    app()
