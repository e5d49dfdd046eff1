"""Measures tokens per round of drafts without a model, with SmolLM2-135M-Instruct.

    python benchmarks/suffix_corpus.py FILE ... [--json FILE]

For each file of prompts, the first answers are the corpus and those behind them are measured: n-grams of at most 4 tokens,
suffixes of at most 24 tokens of the row's own text, and suffixes of the row and of the corpus. Plain decoding writes all
answers. Rounds follow from the text: `speculation/counterfactual.py` replays them, and tests hold it to rounds that ran. So
the figures do not depend on the load of the machine.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import App, Parameter

import tilewright as tw
from tilewright.bench.datasets import NOT_THINKING, prompt, read_examples
from tilewright.bench.speculative import encoded
from tilewright.cli.options import SEVERAL
from tilewright.speculation import suffix_index
from tilewright.speculation.counterfactual import CounterfactualNGram
from tilewright.speculation.drafters.ngram import NGram, Suffix

BATCH = 16
WIDTH = 16
"""Tokens in a block."""


def run(
    files: Annotated[list[Path], SEVERAL],
    /,
    corpus: int = 48,
    measured: int = 16,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    scores: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0),
    output: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Runs the measurement.

    Args:
        files: JSONL files of prompts.
        corpus: number of answers in a file's corpus.
        measured: number of measured answers behind them.
        max_new_tokens, temperature: sampling.
        scores: least scores of a match in the corpus.
        output: JSON file of the result.
    """
    lm = tw.load("smollm2-135m", dtype="bfloat16")
    sampling = tw.Sampling(max_new_tokens, temperature=temperature, seed=0)
    rows = []
    for file in files:
        examples = read_examples(file)[: corpus + measured]
        texts = [prompt(each, [], lm.chat_template, NOT_THINKING) for each in examples]
        prompts = [encoded(lm, text, lm.chat_template) for text in texts]
        prompts = [each for each in prompts if len(each) + max_new_tokens <= 1024]
        parts = [lm.generate(prompts[at : at + BATCH], sampling) for at in range(0, len(prompts), BATCH)]
        answers = [result.tokens for part in parts for result in part]
        index = suffix_index.build(answers[:-measured])
        pairs = list(zip(prompts[-measured:], answers[-measured:], strict=True))
        row: dict[str, Any] = {
            "file": file.stem,
            "measured": len(pairs),
            "tokens": sum(len(answer) for _, answer in pairs),
            "corpus_tokens": sum(map(len, answers[:-measured])),
            "index_bytes": sum(each.nbytes for each in jax.tree.leaves(index)),
            "ngram": rounds_of(NGram(WIDTH), pairs),
            "suffix": rounds_of(Suffix(WIDTH), pairs),
        }
        for score in scores:
            drafter = Suffix(WIDTH, min_score=score)
            row[f"corpus, score {score:g}"] = rounds_of(drafter, pairs, suffix_index.HostIndex(index))
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    if output is not None:
        facts = {"temperature": temperature, "max_new_tokens": max_new_tokens, "block_size": WIDTH, "dtype": "bfloat16"}
        output.write_text(json.dumps({**facts, "files": rows}, indent=1) + "\n")


def rounds_of(
    drafter: NGram, pairs: list[tuple[list[int], list[int]]], index: suffix_index.HostIndex | None = None
) -> dict[str, float]:
    """Returns figures of the rounds that a drafter would have run for some answers."""
    rounds = []
    for prompt_tokens, answer in pairs:
        rounds += CounterfactualNGram(drafter, prompt_tokens, (WIDTH,), index).push(answer)[WIDTH]
    drafted = [accepted for drafts, accepted in rounds if drafts]
    return {
        "tokens_per_round": sum(accepted + 1 for _, accepted in rounds) / len(rounds),
        "share_of_rounds_with_drafts": len(drafted) / len(rounds),
        "tokens_per_drafted_round": sum(accepted + 1 for accepted in drafted) / max(len(drafted), 1),
        "acceptance_rate": sum(drafted) / max(sum(drafts for drafts, _ in rounds), 1),
    }


if __name__ == "__main__":
    app = App(help_format="plaintext")
    app.default(run)
    app()
