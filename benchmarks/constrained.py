"""What a grammar costs a round: under masks of the device and of the host, over rounds without one, in turns.

    python benchmarks/constrained.py [--model demo] [--drafter ngram --block-size 4] [--turns 7] [--json FILE]

Eight rows run at once, all with the same grammar, in four ways by turns in one engine: `free` without it; `device` by its
automaton; `host` by masks of the matcher, one round to a dispatch; `unforced` as the device, but without drafts of text that
has to come. In two more ways only one row has the grammar, `one_device` and `one_host`: how long the seven others wait for it.
A free row makes as many tokens as the others may (`ignore_eos`). Printed are medians of the seconds of a round, prefill left
out, of their ratios to the free way, turn by turn, and acceptance lengths.
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


def ways(matcher: Matcher) -> dict[str, list[Constraint | None]]:
    """The constraints of the rows, in each way."""
    made = matcher.made
    if made is None:
        raise SystemExit("the schema has no automaton for this model")
    silent = made._replace(automaton=replace(made.automaton, forced=np.full_like(made.automaton.forced, -1)))
    host = Matcher(matcher.matcher, matcher.eos)
    alone: list[Constraint | None] = [None] * (ROWS - 1)
    return {
        "free": [None, *alone],
        "device": [matcher] * ROWS,
        "host": [host] * ROWS,
        "unforced": [Matcher(matcher.matcher, matcher.eos, silent)] * ROWS,
        "one_device": [matcher, *alone],
        "one_host": [host, *alone],
    }


def run(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, constraints: list[Constraint | None]
) -> tuple[float, list[Result]]:
    """The seconds of a round, and what came of it."""
    asks = [
        GenerateRequest(each, replace(sampling, ignore_eos=constraint is None), constraint=constraint)
        for each, constraint in zip(prompts, constraints, strict=True)
    ]
    handles = [engine.submit(ask, lambda _: None) for ask in asks]
    engine.take_in()
    engine.fill(everything=True)
    engine.runner.wait()
    before = engine.stats().rounds
    began = time.perf_counter()
    while engine.step():
        pass
    seconds = time.perf_counter() - began
    return seconds / (engine.stats().rounds - before), [handle.result for handle in handles if handle.result is not None]


def acceptance(results: list[Result]) -> float:
    """Tokens to a round of a row."""
    return sum(len(each.tokens) for each in results) / sum(len(each.acceptance_lengths) for each in results)


def measure(how: argparse.Namespace, lm: LanguageModel) -> dict[str, Any]:
    kinds = ways(lm.constrain(Grammar.json_schema(SCHEMA)))
    context = 512
    table = ShapeTable(batches=(ROWS,), capacities=(context,), chunks=(64, 256), widths=(how.block_size,))
    engine = lm.engine(EngineOptions(table=table, prefix_cache=False, constraints=True, guard="warn"))
    engine.warm()
    engine.open()
    examples = read_examples(PACKAGED["demo"].parent / "prompts.jsonl")[:ROWS]
    prompts = [lm.encode(prompt(each, (), None))[:PROMPT_TOKENS] for each in examples]
    sampling = Sampling(how.new_tokens, seed=1)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    results: dict[str, list[Result]] = {}
    for turn in range(-1, how.turns):  # the first is for warming up
        for name in list(kinds)[:: 1 if turn % 2 else -1]:
            took, results[name] = run(engine, prompts, sampling, kinds[name])
            seconds[name] += [took] if turn >= 0 else []
    texts = {name: [each.text for each in found] for name, found in results.items()}
    if not texts["device"] == texts["host"] == texts["unforced"] or not texts["one_device"] == texts["one_host"]:
        raise SystemExit("the ways gave different texts")
    assert engine.stats().compilations == 0, "something was compiled"

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
    how = parsed()
    keep_programs(True)
    drafter = {} if how.drafter == "none" else {"drafter": how.drafter, "block_size": how.block_size}
    lm = tilewright.load(how.model, dtype=how.dtype, **drafter)
    asked = {key: value for key, value in vars(how).items() if key != "json"}
    found = {"chip": chip_name(), "asked": asked, **measure(how, lm)}
    print(json.dumps(found, indent=2))
    if how.json is not None:
        how.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
