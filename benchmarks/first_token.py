"""Measures the time from the start of `tilewright generate` to its first text, with checkouts in alternation.

    python benchmarks/first_token.py MODEL --checkout FOLDER [--checkout FOLDER] [--weights int4] [--json FILE]

Each run is a process with the checkout's package, on the caches of `--cache`; every second repetition runs in reverse
order. The first run of each checkout fills the caches, and is reported separately. CPU seconds are those of the whole process
until its last token; they depend less on other work of the machine than the time does.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

from cyclopts import App, Parameter

RUN = "from tilewright.cli.main import main; main()"
Run = dict[str, float | str]


def run(checkout: Path, cache: Path, arguments: list[str]) -> Run:
    """Runs `generate` once. Returns the seconds to the first byte of its text, the CPU seconds, and the text."""
    variables = {**os.environ, "PYTHONPATH": str(checkout / "src"), "TILEWRIGHT_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-c", RUN, "generate", *arguments]
    # Without a buffer: `communicate` would lose what reading one byte had read ahead.
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1) or b""
        seconds = time.perf_counter() - began
        text, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors.decode())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": used, "text": (first + text).decode()}


def measure(
    model: str,
    checkout: Annotated[tuple[Path, ...], Parameter(negative=())],
    weights: str = "auto",
    new_tokens: int = 24,
    cache: Path = Path("build/first_token"),
    repetitions: int = 5,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Measures checkouts in alternation, each with caches of its own."""
    arguments = ["hi", "--model", model, "--weights", weights, "-n", str(new_tokens)]
    caches = [cache.absolute() / str(n) for n in range(len(checkout))]
    first = [run(folder, each, arguments) for folder, each in zip(checkout, caches, strict=True)]
    later: list[list[Run]] = [[] for _ in checkout]
    for repetition in range(repetitions):
        for n in sorted(range(len(checkout)), reverse=repetition % 2 == 1):
            later[n].append(run(checkout[n], caches[n], arguments))
    results = []
    for folder, one, others in zip(checkout, first, later, strict=True):
        same = all(each["text"] == first[0]["text"] for each in (one, *others))
        results.append({"checkout": folder.name, "first": one, "later": others, "same_text": same})
        times = [float(each["seconds"]) for each in others]
        used = [float(each["cpu_seconds"]) for each in others]
        print(
            f"{folder}: first run {one['seconds']:.2f} s ({one['cpu_seconds']:.1f} CPU s); later {median(times):.2f} s, "
            f"{min(times):.2f} to {max(times):.2f} ({median(used):.2f} CPU s); {'same' if same else 'OTHER'} text"
        )
    if json_file is not None:
        json_file.write_text(json.dumps({"model": Path(model).name, "weights": weights, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    app = App()
    app.default(measure)
    app()
