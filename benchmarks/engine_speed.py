"""Measures the overhead of engine and server over the standalone loop, and the gain of concurrent requests.

    python benchmarks/engine_speed.py [--drafter none|ngram|... --block-size N|auto] [--temperature 0] [--json FILE]

Each prompt runs through the standalone loop (`LanguageModel.generate`), through an engine in this process, and over HTTP
through `tilewright serve` in another process, in alternation; then eight prompts run concurrently through the engine.
Requests generate the maximum number of tokens (`ignore_eos`), the prefix cache is off, and times include prefill. The output
has medians of tokens per second, and medians of ratios per prompt.
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
    parser.add_argument("--block-size", default="auto", help="block size of the drafter; auto chooses round by round")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; above 0 top-p is 0.9")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts that run one by one")
    parser.add_argument("--repetitions", type=int, default=5, help=f"repetitions of {TOGETHER} concurrent requests")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def loaded(options: argparse.Namespace) -> LanguageModel:
    keep_programs()
    if options.drafter == "none":
        return tilewright.load(options.model, dtype=options.dtype)
    size = options.block_size if options.block_size == "auto" else int(options.block_size)
    return tilewright.load(options.model, options.drafter, dtype=options.dtype, block_size=size).keep_costs(cost_files())


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[http.client.HTTPConnection]:
    """Starts a server in another process. Yields a connection."""
    drafting = ["--drafter", options.drafter] + ([] if options.drafter == "none" else ["--block-size", options.block_size])
    command = [sys.executable, "-m", "tilewright", "serve", options.model, "--dtype", options.dtype, "--port", "0"]
    command += ["--memory", "prefix_cache=false", "--wait-for-programs"]
    with subprocess.Popen([*command, *drafting], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = next((word for word in line.split() if word.startswith("http")), None)
            if url is None:
                raise SystemExit("expected a URL from tilewright serve, found none: the server did not start")
            yield http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        finally:
            process.terminate()


def over_http(connection: http.client.HTTPConnection, tokens: list[int], sampling: Sampling) -> list[int]:
    """Completes a prompt over HTTP. Returns the number of generated tokens, in a list."""
    body = {"prompt": tokens, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "ignore_eos": True}
    body |= {"top_p": sampling.top_p, "seed": sampling.seed}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    return [answer["usage"]["completion_tokens"]]


def through_engine(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[int]:
    """Runs the prompts concurrently. Returns the number of tokens of each."""
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


def rate(run: Any, *arguments: Any) -> float:
    """Returns the tokens per second of `run`."""
    start = time.perf_counter()
    counts = run(*arguments)
    return sum(counts) / (time.perf_counter() - start)


def measure(
    options: argparse.Namespace, lm: LanguageModel, engine: Engine, connection: http.client.HTTPConnection
) -> dict[str, Any]:
    sampling = Sampling(options.new_tokens, options.temperature, 0.9 if options.temperature else 1.0, seed=1, ignore_eos=True)
    texts = [lm.encode(prompt(each, (), None))[:PROMPT_TOKENS] for each in read_examples(PROMPTS)]
    runs = {
        "standalone": lambda tokens: [len(lm.generate([tokens], sampling)[0].tokens)],
        "engine": lambda tokens: through_engine(engine, [tokens], sampling),
        "http": lambda tokens: over_http(connection, tokens, sampling),
    }
    rates_of: dict[str, list[float]] = {name: [] for name in runs}
    for run_prompt in (*runs.values(), *runs.values()):
        run_prompt(texts[0])
    for index, tokens in enumerate(texts[: options.prompts]):
        names = list(runs) if index % 2 else list(runs)[::-1]
        for name in names:
            rates_of[name].append(rate(runs[name], tokens))
    through_engine(engine, texts[:TOGETHER], sampling)
    concurrent = [rate(through_engine, engine, texts[n : n + TOGETHER], sampling) for n in range(options.repetitions)]
    medians = {f"{name}_tokens_per_s": statistics.median(rates) for name, rates in rates_of.items()}
    ratios = {
        f"{name}_over_standalone": statistics.median(a / b for a, b in zip(rates_of[name], rates_of["standalone"], strict=True))
        for name in ("engine", "http")
    }
    eight = statistics.median(concurrent)
    return {**medians, **ratios, "eight_tokens_per_s": eight, "eight_over_one": eight / medians["engine_tokens_per_s"]}


def main() -> None:
    options = parsed()
    lm = loaded(options)
    engine = lm.engine(EngineOptions(prefix_cache=False, guard="off"))
    engine.warm()
    engine.start()
    with serving(options) as connection:
        figures = measure(options, lm, engine, connection)
    widths = engine.stats().widths
    engine.stop()
    about = {key: value for key, value in vars(options).items() if key != "json"}
    record = {"chip": chip_name(), "jax": jax.__version__, **about, **figures, "rounds_by_width": widths}
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}" if "over" in name else f"{name:28} {value:10.0f}")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
