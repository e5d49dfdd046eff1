"""What the engine and its server cost beside the standalone loop, and what they gain by running requests together.

    python benchmarks/engine_speed.py [--drafter none|ngram|... --block-size N|auto] [--temperature 0] [--json FILE]

One prompt after another goes, in turns, through the standalone loop (`LanguageModel.generate`), through an engine in this
process, and over HTTP through `tilewright serve` in another one; then eight at once through the engine. All tokens are made
(`ignore_eos`), the prefix cache is off, prefill counts on all sides. Printed are medians of tokens a second, and of ratios
taken prompt by prompt.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax

import tilewright
from tilewright.bench.datasets import prompt, read_examples
from tilewright.cli.common import cost_files, keep_programs
from tilewright.compiled.machine import chip_name
from tilewright.llm.language_model import LanguageModel
from tilewright.models.hub import PACKAGED
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling

PROMPTS = PACKAGED["demo"].parent / "prompts.jsonl"
PROMPT_TOKENS = 100
TOGETHER = 8


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--block-size", default="auto", help="of the drafter; auto chooses round by round")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 with top-p 0.9")
    parser.add_argument("--prompts", type=int, default=8, help="that are asked one by one")
    parser.add_argument("--repetitions", type=int, default=5, help=f"of {TOGETHER} at once")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def loaded(how: argparse.Namespace) -> LanguageModel:
    keep_programs(True)
    if how.drafter == "none":
        return tilewright.load(how.model, dtype=how.dtype)
    size = how.block_size if how.block_size == "auto" else int(how.block_size)
    return tilewright.load(how.model, how.drafter, dtype=how.dtype, block_size=size).keep_costs(cost_files())


@contextmanager
def served(how: argparse.Namespace) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server of its own."""
    drafting = ["--drafter", how.drafter] + ([] if how.drafter == "none" else ["--block-size", how.block_size])
    command = [sys.executable, "-m", "tilewright", "serve", how.model, "--dtype", how.dtype, "--port", "0", "--no-prefix-cache"]
    with subprocess.Popen([*command, *drafting], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = next((word for word in line.split() if word.startswith("http")), None)
            if url is None:
                raise SystemExit("the server did not start")
            yield http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        finally:
            process.terminate()


def over_http(connection: http.client.HTTPConnection, tokens: list[int], sampling: Sampling) -> list[int]:
    """How many tokens came, of how many were asked for."""
    body = {"prompt": tokens, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "ignore_eos": True}
    body |= {"top_p": sampling.top_p, "seed": sampling.seed}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    return [answer["usage"]["completion_tokens"]]


def through_engine(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[int]:
    """The tokens of each, all asked at once."""
    counts = [0] * len(prompts)
    ends = [threading.Event() for _ in prompts]

    def listen(index: int, update: RequestOutput) -> None:
        counts[index] += len(update.tokens)
        if update.end is not None:
            ends[index].set()

    for index, tokens in enumerate(prompts):
        engine.submit(GenerateRequest(tokens, sampling), lambda update, index=index: listen(index, update))
    for end in ends:
        end.wait()
    return counts


def rate(run: Any, *given: Any) -> float:
    """Tokens a second."""
    began = time.perf_counter()
    counts = run(*given)
    return sum(counts) / (time.perf_counter() - began)


def measure(
    how: argparse.Namespace, lm: LanguageModel, engine: Engine, connection: http.client.HTTPConnection
) -> dict[str, Any]:
    sampling = Sampling(how.new_tokens, how.temperature, 0.9 if how.temperature else 1.0, seed=1, ignore_eos=True)
    texts = [lm.encode(prompt(each, (), None))[:PROMPT_TOKENS] for each in read_examples(PROMPTS)]
    ways = {
        "standalone": lambda tokens: [len(lm.generate([tokens], sampling)[0].tokens)],
        "engine": lambda tokens: through_engine(engine, [tokens], sampling),
        "http": lambda tokens: over_http(connection, tokens, sampling),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in (*ways.values(), *ways.values()):
        way(texts[0])
    for turn, tokens in enumerate(texts[: how.prompts]):
        names = list(ways) if turn % 2 else list(ways)[::-1]
        for name in names:
            found[name].append(rate(ways[name], tokens))
    through_engine(engine, texts[:TOGETHER], sampling)
    together = [rate(through_engine, engine, texts[n : n + TOGETHER], sampling) for n in range(how.repetitions)]
    medians = {f"{name}_tokens_per_s": statistics.median(rates) for name, rates in found.items()}
    ratios = {
        f"{name}_over_standalone": statistics.median(a / b for a, b in zip(found[name], found["standalone"], strict=True))
        for name in ("engine", "http")
    }
    eight = statistics.median(together)
    return {**medians, **ratios, "eight_tokens_per_s": eight, "eight_over_one": eight / medians["engine_tokens_per_s"]}


def main() -> None:
    how = parsed()
    lm = loaded(how)
    engine = lm.engine(EngineOptions(prefix_cache=False, guard="off"))
    engine.warm()
    engine.start()
    with served(how) as connection:
        figures = measure(how, lm, engine, connection)
    widths = engine.stats().widths
    engine.stop()
    about = {key: value for key, value in vars(how).items() if key != "json"}
    record = {"chip": chip_name(), "jax": jax.__version__, **about, **figures, "rounds_by_width": widths}
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}" if "over" in name else f"{name:28} {value:10.0f}")
    if how.json is not None:
        how.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
