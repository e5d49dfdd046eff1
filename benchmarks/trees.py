"""Compares trees of drafts with chains: tokens per round, cost of a round in decode steps, and their quotient.

    python benchmarks/trees.py FILE ... [--model smollm2-135m] [--drafter smollm2-dflash2] [--samples N] [--tokens N]

Every kind of round runs alone over the same prompts, greedily and at temperature 1, several prompts together: acceptance does
not depend on the batch. Tokens must equal those of plain decoding. Costs are those that the policy uses: all kinds are timed in
alternation, for a batch of one row (`speculation/costs.py`). A quotient of 1.5 is a speed of 1.5 times plain decoding.
"""

import json
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import App
from rich.console import Console
from rich.table import Table

from tilewright.bench.datasets import read_examples
from tilewright.cli.options import SEVERAL
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.tokenizer import encode
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.speculation.costs import RoundTimer, measure
from tilewright.speculation.policy import estimated
from tilewright.speculation.team import Team

CONTEXT = 512
ROUNDS = 8
"""Rounds of a dispatch."""

app = App(help=__doc__)


def tokens_per_round(lm: LanguageModel, prompts: list[list[int]], sampling: list[Sampling], choice: Choice) -> dict[str, Any]:
    """Runs rounds of one kind to the end. Returns the tokens, and tokens per round."""
    session = lm.start(prompts, sampling)
    while not session.finished:
        session.advance(ROUNDS, choice)
    results = session.results()
    rounds = sum(len(result.acceptance_lengths) for result in results)
    return {"tokens": [result.tokens for result in results], "mean": sum(len(result.tokens) for result in results) / rounds}


@app.default
def compare(
    *files: Path,
    model: str = "smollm2-135m",
    drafter: str = "smollm2-dflash2",
    dtype: str = "auto",
    widths: Annotated[tuple[int, ...], SEVERAL] = (4, 8),
    nodes: Annotated[tuple[int, ...], SEVERAL] = (8, 16, 32, 64),
    samples: int = 2,
    tokens: int = 64,
    together: int = 8,
    costs: bool = True,
    out: Path | None = None,
) -> None:
    """Args:
    files: JSONL records of prompts, as for `bench speculative`.
    widths: blocks of chains, besides the drafter's own.
    nodes: nodes of trees.
    samples: records of each file.
    tokens: new tokens of each text.
    together: prompts that are decoded together.
    costs: measures costs; needs an otherwise idle machine.
    out: JSON file of the figures.
    """
    table = ShapeTable(batches=(1, together), capacities=(CONTEXT,), chunks=(64,), widths=tuple(sorted(widths)))
    lm = load(model, [drafter], dtype=dtype, table=table, tree_nodes=nodes)
    team = cast(Team, lm.drafter)
    cost = {}
    if costs:
        programs = lm.programs_for(team, Shape(1, CONTEXT))
        timer = RoundTimer(ModelRunner(programs, "any"), 1)
        cost = measure(timer, team.choices).rounds
        step = cost[PLAIN].drafting
        print(
            json.dumps({"step_ms": 1000 * step, **{str(choice): each.drafting / step for choice, each in cost.items()}}),
            flush=True,
        )
    rows = []
    for file in files:
        texts = [example.turns[0] for example in read_examples(file)[:samples]]
        chats = [lm.chat_template.render([{"role": "user", "content": text}]) for text in texts]
        prompts = [lm.encode(encode(lm.tokenizer, chat, add_special_tokens=False)) for chat in chats]
        prompts = [prompt[: CONTEXT - tokens - max(nodes)] for prompt in prompts]
        for temperature in (0.0, 1.0):
            each = [Sampling(tokens, temperature=temperature, seed=seed) for seed in range(len(prompts))]
            wanted: list[list[int]] = []
            for choice in team.choices:
                found: list[list[int]] = []
                means = []
                for first in range(0, len(prompts), together):
                    some = slice(first, first + together)
                    run = tokens_per_round(lm, prompts[some], each[some], choice)
                    found += run["tokens"]
                    means.append(run["mean"])
                wanted = wanted or found
                mean = sum(means) / len(means)
                steps = estimated(cost, choice).drafting / cost[PLAIN].drafting if cost else None
                rows.append(
                    {
                        "file": file.stem,
                        "temperature": temperature,
                        "choice": str(choice),
                        "equal": found == wanted,
                        "tokens_per_round": mean,
                        "steps_per_round": steps,
                        "speed": None if steps is None else mean / steps,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    shown = Table("file", "temperature", "round", "equal", "tokens", "steps", "speed")
    for row in rows:
        shown.add_row(
            *("" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console().print(shown)
    if out is not None:
        out.write_text(json.dumps({"model": model, "drafter": drafter, "dtype": lm.dtype, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    app()
