"""Measures the cost of a grammar per round, with masks of the device and of the host, relative to rounds without a grammar.

    python benchmarks/constrained.py [--model demo] [--drafter ngram --block-size 4] [--turns 7] [--json FILE]

Eight rows run concurrently in one engine, in six modes that alternate. In four modes all rows have the same constraint:
`free` has no grammar, `device` uses the automaton, `host` uses masks of the matcher, with one round per dispatch, and
`unforced` uses the automaton without drafting forced tokens. In `one_device` and `one_host` only one row has the grammar,
which shows the delay of the other seven. Rows without a grammar generate the maximum number of tokens (`ignore_eos`). The
output has medians of the seconds per round (without prefill), of their ratios to `free` within a repetition, and acceptance
lengths.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tilewright
from tilewright.bench.datasets import prompt, read_examples
from tilewright.cli.common import keep_programs
from tilewright.compiled.machine import chip_name
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Matcher
from tilewright.llm.language_model import LanguageModel
from tilewright.models.hub import PACKAGED
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Result
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

ROWS = 8
PROMPT_TOKENS = 64
PERSON = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 12},
        "favourite colour": {"enum": ["red", "green", "blue", "violet"]},
        "age in years": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["first name", "favourite colour", "age in years"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def modes(matcher: Matcher) -> dict[str, list[Constraint | None]]:
    """Returns the constraints of the rows for each mode."""
    automaton = matcher.token_automaton
    if automaton is None:
        raise SystemExit("expected a schema with an automaton for this model, found none")
    without_forced = automaton._replace(
        automaton=replace(automaton.automaton, forced=np.full_like(automaton.automaton.forced, -1))
    )
    host = Matcher(matcher.matcher, matcher.eos)
    free_rows: list[Constraint | None] = [None] * (ROWS - 1)
    return {
        "free": [None, *free_rows],
        "device": [matcher] * ROWS,
        "host": [host] * ROWS,
        "unforced": [Matcher(matcher.matcher, matcher.eos, without_forced)] * ROWS,
        "one_device": [matcher, *free_rows],
        "one_host": [host, *free_rows],
    }


def run(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, constraints: list[Constraint | None]
) -> tuple[float, list[Result]]:
    """Runs the requests to the end. Returns the seconds per round and the results."""
    requests = [
        GenerateRequest(each, replace(sampling, ignore_eos=constraint is None), constraint=constraint)
        for each, constraint in zip(prompts, constraints, strict=True)
    ]
    handles = [engine.submit(request, lambda _: None) for request in requests]
    engine.take_submissions()
    engine.fill(everything=True)
    engine.runner.wait()
    before = engine.stats().rounds
    began = time.perf_counter()
    while engine.step():
        pass
    seconds = time.perf_counter() - began
    return seconds / (engine.stats().rounds - before), [handle.result for handle in handles if handle.result is not None]


def acceptance(results: list[Result]) -> float:
    """Returns the tokens per round and row."""
    return sum(len(each.tokens) for each in results) / sum(len(each.acceptance_lengths) for each in results)


def measure(options: argparse.Namespace, lm: LanguageModel) -> dict[str, Any]:
    kinds = modes(lm.constrain(Grammar.json_schema(SCHEMA)))
    context = 512
    table = ShapeTable(batches=(ROWS,), capacities=(context,), chunks=(64, 256), widths=(options.block_size,))
    engine = lm.engine(EngineOptions(table=table, prefix_cache=False, constraints=True, guard="warn"))
    engine.warm()
    engine.accept_requests()
    examples = read_examples(PACKAGED["demo"].parent / "prompts.jsonl")[:ROWS]
    prompts = [lm.encode(prompt(each, (), None))[:PROMPT_TOKENS] for each in examples]
    sampling = Sampling(options.new_tokens, seed=1)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    results: dict[str, list[Result]] = {}
    for repetition in range(-1, options.turns):  # the first repetition warms up
        for name in list(kinds)[:: 1 if repetition % 2 else -1]:
            round_s, results[name] = run(engine, prompts, sampling, kinds[name])
            seconds[name] += [round_s] if repetition >= 0 else []
    texts = {name: [each.text for each in found] for name, found in results.items()}
    if not texts["device"] == texts["host"] == texts["unforced"] or not texts["one_device"] == texts["one_host"]:
        raise SystemExit("expected the same texts in all modes, found different ones")
    assert engine.stats().compilations == 0, "expected no compilations while measuring"

    def ratios(name: str) -> list[float]:
        return [one / free for one, free in zip(seconds[name], seconds["free"], strict=True)]

    return {
        "rows": ROWS,
        "texts_equal": True,
        "round_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "over_free": {name: statistics.median(ratios(name)) for name in kinds if name != "free"},
        "over_free_by_turn": {name: ratios(name) for name in kinds if name != "free"},
        "acceptance_length": {name: acceptance(each) for name, each in results.items()},
    }


def main() -> None:
    options = parsed()
    keep_programs()
    drafter = {} if options.drafter == "none" else {"drafter": options.drafter, "block_size": options.block_size}
    lm = tilewright.load(options.model, dtype=options.dtype, **drafter)
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    found = {"chip": chip_name(), "asked": settings, **measure(options, lm)}
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
