"""Measures tokens per round of drafts without a model, with SmolLM2-135M-Instruct.

    python benchmarks/suffix_corpus.py FILE ... [--json FILE]

For each file of prompts, the first answers are the corpus and the prompts behind them are measured: n-grams of at most 4
tokens, suffixes of at most 24 tokens of the row's own text, and suffixes of the row and of the corpus. Every round runs a
block of 16 tokens. Tokens per round do not depend on the load of the machine.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

import tilewright as tw
from tilewright.bench.datasets import NOT_THINKING, prompt, read_examples
from tilewright.bench.speculative import encoded
from tilewright.cli.options import SEVERAL
from tilewright.speculation.drafters.load import DrafterOptions

BATCH = 8


def run(
    files: Annotated[list[Path], SEVERAL],
    /,
    corpus: int = 24,
    measured: int = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    block_size: int = 16,
    output: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Runs the measurement.

    Args:
        files: JSONL files of prompts.
        corpus: number of answers in a file's corpus.
        measured: number of measured prompts behind them.
        max_new_tokens, temperature: sampling.
        block_size: tokens in a block.
        output: JSON file of the result.
    """
    target = tw.load("smollm2-135m", dtype="bfloat16")
    sampling = tw.Sampling(max_new_tokens, temperature=temperature, seed=0)
    lms = {name: target.with_drafter(*target.load_drafter(name, DrafterOptions(block_size))) for name in ("ngram", "suffix")}
    rows = []
    for file in files:
        examples = read_examples(file)[: corpus + measured]
        texts = [prompt(each, [], target.chat_template, NOT_THINKING) for each in examples]
        prompts = [encoded(target, text, target.chat_template) for text in texts]
        first = generate(lms["ngram"], prompts[:corpus], sampling)
        row = {"file": file.stem, "corpus_tokens": sum(len(each.tokens) for each in first)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "answers.jsonl"
            path.write_text("".join(json.dumps({"text": each.text}) + "\n" for each in first))
            options = DrafterOptions(block_size, suffix_corpus=path)
            several = lms | {"suffix, corpus": target.with_drafter(*target.load_drafter("suffix", options))}
        answers = None
        for name, lm in several.items():
            results = generate(lm, prompts[corpus:], sampling)
            tokens = [each.tokens for each in results]
            row[name] = sum(map(len, tokens)) / sum(len(each.acceptance_lengths) for each in results)
            row[f"{name}, accepted"] = sum(sum(each.accepted) for each in results) / sum(sum(each.drafted) for each in results)
            row[f"{name}, same"] = answers is None or tokens == answers
            answers = tokens if answers is None else answers
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n")


def generate(lm: tw.LanguageModel, prompts: list[list[int]], sampling: tw.Sampling) -> list[tw.Result]:
    """Generates in batches."""
    return [result for at in range(0, len(prompts), BATCH) for result in lm.generate(prompts[at : at + BATCH], sampling)]


if __name__ == "__main__":
    app = App(help_format="plaintext")
    app.default(run)
    app()
