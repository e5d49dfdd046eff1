"""One model served by several processes: the same answers as by one.

    python benchmarks/serve_processes.py --requests 200 --json processes.json

Starts `tilewright serve` twice, once by itself and once by `tilewright launch`, where the processes divide the model, and asks
both for the same: greedy and drawn, filtered and penalised, with log-probabilities, under a grammar, streamed and whole,
several at a time, with some clients that go away. Ends with status 1 if an answer differs, anything was compiled, or a server
did not end with status 0.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

import tilewright
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.machine import cores, cpu_facts
from tilewright.grammar.matcher import is_installed
from tilewright.runtime.shape_file import table_text
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(4,), capacities=(128,), chunks=(64,), widths=(4,))
CLIENTS = 6
ANSWER_S = 120.0
END_S = 60.0
GONE = 10
"""Of so many clients one goes away; nobody compares what it would have got."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 1, "min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "n": 2},
    {"temperature": 0, "stream": True},
    {"temperature": 1, "structured_outputs": {"regex": "[a-z]{1,8}=[0-9]{1,4}"}},
)


def asked(count: int, vocab_size: int = 256, grammars: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    """Bodies for `/v1/completions`, the same for the same seed."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if grammars or "structured_outputs" not in kind]
    return [
        {
            "prompt": [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))],
            "max_tokens": rng.randrange(1, 40),
            "seed": rng.randrange(2**31),
            "return_token_ids": True,
            **kinds[n % len(kinds)],
        }
        for n in range(count)
    ]


@dataclass
class Started:
    """A server, in one process or more."""

    process: subprocess.Popen[str]
    url: str

    def post(self, body: dict[str, Any], reads: int = -1) -> bytes:
        """What comes back, as far as it is read."""
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read(reads)

    def choices(self, body: dict[str, Any]) -> Any:
        """Texts, tokens and ends of an answer. Log-probabilities come of sums in another order, and are left out."""
        said = self.post(body)
        if not body.get("stream"):
            return [{**choice, "logprobs": None} for choice in json.loads(said)["choices"]]
        events = [json.loads(line[6:]) for line in said.decode().splitlines() if line.startswith("data: {")]
        parts = [choice for event in events for choice in event["choices"]]
        return ["".join(part["text"] for part in parts), parts[-1]["finish_reason"]]

    def leave(self, body: dict[str, Any]) -> None:
        """Asks, and goes away after the first byte."""
        self.post({**body, "stream": True, "max_tokens": 60, "ignore_eos": True}, reads=1)

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a metric's lines that have a label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    def end(self) -> int:
        """Its status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def serving(model: str, drafter: str, processes: int = 1) -> Iterator[Started]:
    """A server that is ready; nothing of it is left behind."""
    path = os.pathsep.join([str(Path(tilewright.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    launched = ["launch", "-n", str(processes), "--"] if processes > 1 else []
    divided = ["--tensor-parallel", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        (shapes := Path(folder) / "shapes.json").write_text(table_text(TABLE), encoding="utf-8")
        options = ["--drafter", drafter, "--dtype", "float32", "--shapes", str(shapes), "--port", "0", *divided]
        words = [sys.executable, "-m", "tilewright", *launched, "serve", model, *options, "--log-level", "warning"]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            urls = [word for word in line.split() if word.startswith("http")]
            if not urls:
                raise RuntimeError(f"the server is not ready: it ended with status {process.wait(END_S)}")
            yield Started(process, urls[0])
        finally:
            if process.poll() is None:
                process.terminate()  # of `launch`, which ends the others
                process.wait(END_S)
            if process.stdout is not None:
                process.stdout.close()


def answers(server: Started, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """What a server answers to all, with clients between them that go away."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        gone = [threads.submit(server.leave, body) for body in bodies[::GONE]]
        found = list(threads.map(server.choices, bodies))
        for each in gone:
            each.result()
    return found


def run(model: str, drafter: str, processes: int, bodies: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Answers of a server from its start to its end, and figures of it."""
    with serving(model, drafter, processes) as server:
        began = time.perf_counter()
        found = answers(server, bodies)
        seconds = time.perf_counter() - began
        compiled = server.metric("tilewright_xla_compilations_total", 'phase="serving"')
        drafts, accepted = (server.metric(f"vllm:spec_decode_num_{of}_total") for of in ("drafts", "accepted_tokens"))
        status = server.end()
    figures = {"seconds": seconds, "compiled": compiled, "drafts": drafts, "accepted_drafts": accepted, "status": status}
    return found, figures


def main(
    *,
    model: str = "demo",
    drafter: str = "ngram",
    processes: int = 2,
    requests: int = 200,
    vocab_size: int = 256,
    json_file: JsonFile = None,
) -> None:
    """Compares the answers.

    Parameters
    ----------
    vocab_size
        Prompts are drawn from so many tokens.
    """
    console = human_console(json_file)
    bodies = asked(requests, vocab_size, is_installed())
    ask = partial(run, model, drafter, bodies=bodies)
    (alone, one), (together, several) = ask(processes=1), ask(processes=processes)
    different = [n for n, pair in enumerate(zip(alone, together, strict=True)) if pair[0] != pair[1]]
    say(console, bodies, different, {"1 process": one, f"{processes} processes": several})
    about = {"cpu": cpu_facts("model name", "Model"), "cores": cores(), "jax": version("jax")}
    about |= {"model": model, "drafter": drafter}
    figures = {"requests": requests, "different": different, "one": one, "several": several, "processes": processes}
    write_json(json_file, figures | about)
    if different or any(each["compiled"] or each["status"] for each in (one, several)):
        sys.exit(1)


def say(console: Console, bodies: Sequence[Any], different: Sequence[int], servers: dict[str, Any]) -> None:
    console.print(f"{len(bodies) - len(different)} of {len(bodies)} requests have the same answer")
    for name, figures in servers.items():
        console.print(f"{name}: {', '.join(f'{key} {value:g}' for key, value in figures.items())}")


if __name__ == "__main__":
    App(default_command=main)()
