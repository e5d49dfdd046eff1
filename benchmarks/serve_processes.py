"""Checks that several processes serve a model with the same answers as one process.

    python benchmarks/serve_processes.py --requests 200 --json processes.json

Starts `tilewright serve` twice, in one process and in several processes that share the model, and sends the same concurrent
requests to both: greedy and sampled, filtered and penalised, with log-probabilities, under a grammar, streamed and whole, with
some clients that disconnect. Exit status 1 if an answer differs, a program was compiled while serving, or a server did not end
with status 0.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

import tilewright
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES
from tilewright.compiled.machine import cores, cpu_facts
from tilewright.grammar.matcher import is_installed
from tilewright.runtime.shape_file import table_text
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(4,), capacities=(128,), chunks=(64,), widths=(4,))
CLIENTS = 6
ANSWER_S = 120.0
END_S = 60.0
GONE = 10
"""Every tenth request is also sent by a client that disconnects, whose answer is not compared."""
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


def request_bodies(count: int, vocab_size: int = 256, grammars: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    """Returns bodies for `/v1/completions`, which depend on the seed only."""
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
    """A server, in one process or more.

    Attributes:
        process: the first process, which serves.
        followers: the other processes.
    """

    process: subprocess.Popen[str]
    followers: list[subprocess.Popen[str]]
    url: str

    def post(self, body: dict[str, Any], reads: int = -1) -> bytes:
        """Posts a completion. Returns the first `reads` bytes of the response, or all."""
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read(reads)

    def choices(self, body: dict[str, Any]) -> Any:
        """Returns texts, tokens and finish reasons. Log-probabilities are left out: their sums have another order."""
        response = self.post(body)
        if not body.get("stream"):
            return [{**choice, "logprobs": None} for choice in json.loads(response)["choices"]]
        events = [json.loads(line[6:]) for line in response.decode().splitlines() if line.startswith("data: {")]
        parts = [choice for event in events for choice in event["choices"]]
        return ["".join(part["text"] for part in parts), parts[-1]["finish_reason"]]

    def leave(self, body: dict[str, Any]) -> None:
        """Posts a streaming completion and disconnects after the first byte."""
        self.post({**body, "stream": True, "max_tokens": 60, "ignore_eos": True}, reads=1)

    def metric(self, name: str, label: str = "") -> float:
        """Sums the lines of a metric that contain a label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    def end(self) -> int:
        """Ends the server by SIGTERM to the first process. Returns the first status that is not 0."""
        self.process.send_signal(signal.SIGTERM)
        return next(filter(None, (each.wait(END_S) for each in (self.process, *self.followers))), 0)


def environments(processes: int) -> list[dict[str, str]]:
    """Returns the environment of each process of one server."""
    path = os.pathsep.join([str(Path(tilewright.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = os.environ | {"PYTHONPATH": path}
    if processes == 1:
        return [common]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    common |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
    }
    common |= {"JAX_COORDINATOR_BIND_ADDRESS": address, COORDINATOR: address, PROCESSES: str(processes)}
    return [{**common, INDEX: str(index)} for index in range(processes)]


@contextmanager
def serving(model: str, drafter: str, processes: int = 1) -> Iterator[Started]:
    """Starts a server in one process or several, and ends all of them at the exit."""
    sharding = ["--tensor-parallel", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        (shapes := Path(folder) / "shapes.json").write_text(table_text(TABLE), encoding="utf-8")
        options = ["--drafter", drafter, "--dtype", "float32", "--compile", f"shapes={shapes}", "--port", "0", *sharding]
        words = [sys.executable, "-m", "tilewright", "serve", model, *options, "--log", "level=warning"]
        first, *others = [
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment)
            for environment in environments(processes)
        ]
        try:
            assert first.stdout is not None
            line = first.stdout.readline()
            urls = [word for word in line.split() if word.startswith("http")]
            if not urls:
                raise RuntimeError(f"expected a URL from tilewright serve, found exit status {first.wait(END_S)}")
            yield Started(first, others, urls[0])
        finally:
            first.terminate()
            for process in (first, *others):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                process.communicate()


def answers(server: Started, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Sends all bodies concurrently, besides clients that disconnect. Returns the answers."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        gone = [threads.submit(server.leave, body) for body in bodies[::GONE]]
        found = list(threads.map(server.choices, bodies))
        for each in gone:
            each.result()
    return found


def run(model: str, drafter: str, processes: int, bodies: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Starts a server, sends all bodies and ends the server. Returns the answers and figures of the server."""
    with serving(model, drafter, processes) as server:
        began = time.perf_counter()
        found = answers(server, bodies)
        seconds = time.perf_counter() - began
        compiled = server.metric("tilewright_xla_compilations_total", 'phase="serving"')
        drafts, accepted = (server.metric(f"vllm:spec_decode_num_{kind}_total") for kind in ("drafts", "accepted_tokens"))
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
    """Compares the answers of both servers.

    Parameters
    ----------
    vocab_size
        Number of token ids that prompts are drawn from.
    """
    console = human_console(json_file)
    bodies = request_bodies(requests, vocab_size, is_installed())
    ask = partial(run, model, drafter, bodies=bodies)
    (alone, one), (together, several) = ask(processes=1), ask(processes=processes)
    different = [n for n, pair in enumerate(zip(alone, together, strict=True)) if pair[0] != pair[1]]
    print_figures(console, bodies, different, {"1 process": one, f"{processes} processes": several})
    about = {"cpu": cpu_facts("model name", "Model"), "cores": cores(), "jax": version("jax")}
    about |= {"model": model, "drafter": drafter}
    figures = {"requests": requests, "different": different, "one": one, "several": several, "processes": processes}
    write_json(json_file, figures | about)
    if different or any(each["compiled"] or each["status"] for each in (one, several)):
        sys.exit(1)


def print_figures(console: Console, bodies: Sequence[Any], different: Sequence[int], servers: dict[str, Any]) -> None:
    console.print(f"{len(bodies) - len(different)} of {len(bodies)} requests have the same answer")
    for name, figures in servers.items():
        console.print(f"{name}: {', '.join(f'{key} {value:g}' for key, value in figures.items())}")


if __name__ == "__main__":
    App(default_command=main)()
