"""Time from the start of `tilewright serve` to its first answer, and gaps between tokens while programs compile.

    python benchmarks/ready_in_stages.py --json FILE [--runs 5] [-- OPTIONS OF SERVE]

Each run starts a server in a new process. "From nothing" has no cache of compiled programs and no stored costs; the CPU kernels
are built beforehand. `--wait-for-programs` is the comparison. The gaps are those of one client that streams all the time: until
all programs are compiled, and for a minute after.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np

from tilewright.kernels.build import cache_folder

ANSWER_S = 1800.0
"""Limit of seconds for the first answer."""
AFTER_S = 60.0
"""Seconds of streaming after the last program."""
PROMPT = "List ten facts about the sea, and explain each of them in two sentences."


@contextmanager
def served(cache: Path, options: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yields the URL of a new server, and when its process was started."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tilewright", "serve", "--port", "0", "--api", "name=served", *options]
    with (cache / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"TILEWRIGHT_CACHE": str(cache)}
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            raise ValueError(f"expected a URL from {' '.join(command)}, found {line!r}")
        yield url, began
    except httpx2.HTTPError:
        print((cache / "log").read_text(encoding="utf-8")[-4000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def fresh_cache(folder: Path) -> Path:
    """Returns a new cache folder with the CPU kernels alone."""
    cache = Path(tempfile.mkdtemp(dir=folder))
    for path in cache_folder().glob("*.so*"):
        shutil.copy2(path, cache)
    return cache


def body(tokens: int, stream: bool) -> dict[str, Any]:
    message = {"role": "user", "content": PROMPT}
    return {"model": "served", "messages": [message], "max_tokens": tokens, "temperature": 0, "stream": stream}


def first_answer(cache: Path, options: Sequence[str]) -> float:
    """Returns the seconds from the start of a server to its first answer."""
    with served(cache, options) as (url, began), httpx2.Client(base_url=url, timeout=ANSWER_S) as client:
        answer = client.post("/v1/chat/completions", json=body(1, stream=False))
        answer.raise_for_status()
        return time.perf_counter() - began


def streamed(client: httpx2.Client, tokens: int) -> Iterator[float]:
    """Yields the arrival times of a stream's chunks with text."""
    with client.stream("POST", "/v1/chat/completions", json=body(tokens, stream=True) | {"ignore_eos": True}) as answer:
        if answer.is_error:
            raise httpx2.HTTPError(f"{answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {") and '"content":"' in line.replace('": "', '":"'):
                yield time.perf_counter()


def gaps(cache: Path, options: Sequence[str]) -> dict[str, Any]:
    """Streams all the time, while programs compile and after. Returns the gaps of both parts in milliseconds."""
    found: dict[str, list[float]] = {"compiling": [], "after": []}
    with served(cache, options) as (url, began), httpx2.Client(base_url=url, timeout=ANSWER_S) as client:
        ready_s = all_s = None
        until = np.inf
        programs = 0
        while time.perf_counter() < until:
            health = client.get("/health").raise_for_status().json()
            programs = health["programs_declared"]
            compiling = health["programs_ready"] < programs
            if not compiling and all_s is None:
                all_s = time.perf_counter() - began
                until = time.perf_counter() + AFTER_S
            last = None
            for at in streamed(client, 64):
                ready_s = ready_s or at - began
                if last is not None:
                    found["compiling" if compiling else "after"].append(1e3 * (at - last))
                last = at
    figures: dict[str, Any] = {"first_token_s": ready_s, "all_programs_s": all_s, "programs": programs}
    for name, each in found.items():
        p50, p99 = np.percentile(each, [50, 99]) if each else (None, None)
        figures[name] = {"gaps": len(each), "p50_ms": p50, "p99_ms": p99, "most_ms": max(each, default=None)}
    figures["p99_ratio"] = figures["compiling"]["p99_ms"] / figures["after"]["p99_ms"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=["times", "gaps"])
    parser.add_argument("options", nargs="*", help="options of tilewright serve, behind --")
    given = parser.parse_args()
    result: dict[str, Any] = {"options": given.options}
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "times":
            result["gaps"] = gaps(fresh_cache(Path(folder)), given.options)
            print(json.dumps(result["gaps"], indent=1), flush=True)
        times: dict[str, list[float]] = {}
        for _ in range(0 if given.only == "gaps" else given.runs):
            for name, more in (("stages", []), ("waiting", ["--wait-for-programs"])):
                cache = fresh_cache(Path(folder))
                for start in ("nothing", "cache"):
                    times.setdefault(f"{name}, from {start}", []).append(first_answer(cache, [*given.options, *more]))
                    print(name, start, round(times[f"{name}, from {start}"][-1], 2), flush=True)
                shutil.rmtree(cache)
        result["first_answer_s"] = times
        result["medians_s"] = {name: median(each) for name, each in times.items()}
    given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
