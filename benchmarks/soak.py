"""Runs a server under mixed load for minutes, and checks that the server does not leak, slow down, change answers or fail.

    python benchmarks/soak.py --minutes 10 --json soak.json

Starts `tilewright serve` in another process, with a small queue and few pages, so that requests are rejected and preempted. The
load has valid requests of every kind, clients that disconnect, invalid and oversized bodies, bursts and slow readers. Repeated
requests ("canaries") must have the same answers each time. Prints a verdict; exit status 1 if a rule is broken.
"""

import asyncio
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from soak_load import Drawer, Limits, Load, canaries, metrics_of, reached
from soak_verdict import (
    Bounds,
    Check,
    Sample,
    between,
    equal_check,
    latency_check,
    lines_check,
    memory_checks,
    positive_checks,
    quarter_medians,
    theil_sen,
)

import tilewright
from tilewright.bench.datasets import read_examples
from tilewright.cli.common import packaged_prompts_file
from tilewright.cli.outputs import JsonFile, check_output_file, human_console
from tilewright.compiled.machine import cores, cpu_facts
from tilewright.runtime.shape_file import table_text
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 2, 4), capacities=(512,), chunks=(16, 64), widths=(4,))
PAGE_SIZE = 16
PAGES = 56
"""Fewer pages than the 128 that four requests of the whole context need."""
QUEUE_REQUESTS = 32
BODY_MB = 0.25
READY_S = 600.0
END_S = 60.0
IDLE_S = 30.0
"""Seconds within which the server must be ready, exit after SIGTERM, and become idle after the load."""


@dataclass(frozen=True)
class Settings:
    """Settings of a soak.

    Attributes:
        clients: number of sequential clients, besides samples, canaries and bursts.
        sample_s, canary_s, burst_s: seconds between two samples, canaries or bursts.
    """

    minutes: float = 10.0
    model: str = "demo"
    drafter: str = "ngram"
    seed: int = 0
    clients: int = 6
    sample_s: float = 2.0
    canary_s: float = 0.3
    burst_s: float = 20.0
    bounds: Bounds = field(default_factory=Bounds)


@dataclass
class Server:
    """A server in another process.

    Attributes:
        err: file with its standard error.
    """

    process: subprocess.Popen[str]
    command: list[str]
    url: str
    err: Path

    @property
    def memory(self) -> dict[str, int]:
        """Numeric lines of /proc/PID/status: `VmRSS` and others in kB, `Threads`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        fields = ((name, value.split()) for name, _, value in (line.partition(":") for line in lines))
        return {name: int(value[0]) for name, value in fields if value and value[0].isdecimal()}

    @property
    def files(self) -> int:
        """Number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> int:
        """Sends SIGTERM. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # a killed process has the status of SIGKILL
            return self.process.wait(END_S)
        self.process.kill()
        return self.process.wait()


@contextmanager
def serving(settings: Settings) -> Iterator[Server]:
    """Starts a server, and ends it at the exit."""
    with tempfile.TemporaryDirectory() as folder:
        shapes = Path(folder) / "shapes.json"
        err = Path(folder) / "stderr"
        shapes.write_text(table_text(TABLE), encoding="utf-8")
        options = {
            "model": settings.model,
            "drafter": settings.drafter,
            "compile": f"shapes={shapes}",
            "memory": f"page_size={PAGE_SIZE},pages={PAGES}",
            "limits": f"queue_requests={QUEUE_REQUESTS},body_mb={BODY_MB}",
            "port": 0,
        }
        named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "tilewright", "serve", "--wait-for-programs", *named]
        # The server imports the same package as this process, from any working folder.
        path = os.pathsep.join([str(Path(tilewright.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with err.open("w", encoding="utf-8") as to:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=to,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            shown = ["tilewright", "serve", "--wait-for-programs", *(part.replace(str(shapes), "SHAPES") for part in named)]
            yield Server(process, shown, url_of(process, err), err)
        finally:
            process.kill()
            process.communicate()


def url_of(process: subprocess.Popen[str], err: Path) -> str:
    """Returns the URL that the server prints once it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    url = next((word for word in line.split() if word.startswith("http://")), None)
    if url is None:
        raise ValueError(f"expected a URL from tilewright serve, found none: {err.read_text(encoding='utf-8')[-2000:] or line}")
    return url


@dataclass
class Samples:
    """Measurements over time.

    Attributes:
        rows: figures of the process and `/health`: seconds, resident and anonymous memory in MB, threads, open files, step
            age, seconds of `/health`, running and waiting requests, share of pages in use, load average.
        metrics: latest values of `/metrics`.
        unhealthy: number of failed health checks.
    """

    COLUMNS = (
        "at_s",
        "rss_mb",
        "anonymous_mb",
        "threads",
        "files",
        "step_age_s",
        "health_s",
        "running",
        "waiting",
        "pages_used",
        "load_average",
    )
    rows: list[tuple[float, ...]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    unhealthy: int = 0

    def column(self, name: str) -> list[Sample]:
        place = self.COLUMNS.index(name)
        return [Sample(row[0], row[place]) for row in self.rows]

    async def take(self, load: Load, server: Server) -> str:
        began = time.monotonic()
        at = load.now
        status, _, body = await load.exchange("GET", "/health")
        took = time.monotonic() - began
        age = json.loads(body).get("step_age_s")
        if status != 200 or age is None:
            self.unhealthy += 1
            raise ValueError(f"/health: status {status}: {body[:200]!r}")
        status, _, text = await load.exchange("GET", "/metrics")
        if status != 200:
            raise ValueError(f"/metrics: status {status}")
        self.metrics = metrics_of(text.decode())
        memory = server.memory
        found = self.metrics
        megabytes = (round(memory.get(name, 0) / 1024, 3) for name in ("VmRSS", "RssAnon"))
        self.rows.append(
            (
                round(at, 2),
                *megabytes,
                memory["Threads"],
                server.files,
                round(age, 4),
                round(took, 4),
                found["vllm:num_requests_running"],
                found["vllm:num_requests_waiting"],
                round(found["vllm:kv_cache_usage_perc"], 3),
                round(os.getloadavg()[0], 2),
            )
        )
        return "samples"


async def soak(settings: Settings, server: Server, show: Callable[[Load, Samples], None]) -> tuple[Load, Samples]:
    """Runs the load until its end and until the server is idle."""
    load = Load(server.url, limits_of(settings), settings.seed)
    samples = Samples()
    prompts = [example.turns[0] for example in read_examples(packaged_prompts_file())]
    texts, chats = await load.texts(prompts)
    drawer = Drawer(settings.seed + 1, texts, chats, load.limits)
    repeated = canaries(texts, chats)
    for name, wanted in repeated:  # alone, before any other request runs
        await load.attempt(f"canary {name}", load.canary(name, wanted))
    load.ttft.clear()
    load.tpot.clear()
    load.began = time.monotonic()
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(settings.clients):
            group.create_task(load.client(Drawer(settings.seed + 2 + number, texts, chats, load.limits), ended))
        group.create_task(load.bursts_of(drawer, settings.burst_s, ended))
        group.create_task(load.canaries_of(repeated, settings.canary_s, ended))
        while load.now < settings.minutes * 60:
            await load.attempt("sample", samples.take(load, server))
            show(load, samples)
            await reached(ended, settings.sample_s)
        ended.set()
    await load.attempt("end", idle(load, samples))
    await load.http.aclose()
    return load, samples


def limits_of(settings: Settings) -> Limits:
    return Limits(settings.model, TABLE.capacities[-1], QUEUE_REQUESTS, int(BODY_MB * 2**20))


async def idle(load: Load, samples: Samples) -> str:
    """Waits until no request runs or waits, and reads the metrics. Cancelled requests end with the next dispatch."""
    until = time.monotonic() + IDLE_S
    while True:
        _, _, text = await load.exchange("GET", "/metrics")
        samples.metrics = metrics_of(text.decode())
        busy = samples.metrics["vllm:num_requests_running"] + samples.metrics["vllm:num_requests_waiting"]
        if not busy or time.monotonic() > until:
            return "ends"
        await asyncio.sleep(0.1)


def verdict(load: Load, samples: Samples, length_s: float, status: int, err: str, bounds: Bounds) -> list[Check]:
    """Checks every rule."""
    # Metrics of a dead server are NaN, which breaks every rule on metrics.
    found = defaultdict(lambda: float("nan"), samples.metrics)
    ages = [each.value for each in samples.column("step_age_s")]
    ttft, tpot = ([Sample(*each) for each in values] for values in (load.ttft, load.tpot))
    reasons = ("stop", "length", "abort", "error")
    ended = {reason: found[f'vllm:request_success_total{{finished_reason="{reason}"}}'] for reason in reasons}
    success = ended["stop"] + ended["length"]
    most = load.finished + load.abandoned
    busy = found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]
    oldest = max(ages, default=float("inf"))
    met = {
        "preemptions": found["vllm:num_preemptions_total"],
        "prefix cache hits": found["vllm:prefix_cache_hits_total"],
        "accepted drafts": found["vllm:spec_decode_num_accepted_tokens_total"],
        "turned away": load.counts["turned away"],
        "given up": ended["abort"],
        "refused": load.counts["refused"],
    }
    return [
        equal_check("wrong answers", load.wrong, 0),
        equal_check("health checks that failed", samples.unhealthy, 0),
        Check("oldest step", oldest <= bounds.step_age_s, f"{oldest:.2f} s", f"≤ {bounds.step_age_s} s"),
        *memory_checks(samples.column("rss_mb"), length_s, bounds),
        latency_check("canaries' time to first token", ttft, length_s, bounds),
        latency_check("canaries' time per output token", tpot, length_s, bounds),
        equal_check("running and waiting at the end", busy, (0, 0)),
        equal_check("pages used at the end", found["vllm:kv_cache_usage_perc"], 0),
        equal_check("prompt tokens waiting at the end", found["tilewright_waiting_tokens"], 0),
        equal_check("compilations while serving", found['tilewright_xla_compilations_total{phase="serving"}'], 0),
        equal_check("requests that failed in the engine", ended["error"], 0),
        Check("requests that succeeded", load.finished <= success <= most, f"{success:g}", f"{load.finished} to {most}"),
        *positive_checks(met),
        equal_check("status after SIGTERM", status, 0),
        lines_check(err),
    ]


def figures_of(settings: Settings, server: Server, load: Load, samples: Samples, checks: list[Check]) -> dict[str, Any]:
    """Returns the JSON figures of a run."""
    length_s = settings.minutes * 60
    half = between(samples.column("rss_mb"), length_s / 2, length_s)
    quarters = {
        name: quarter_medians([Sample(*each) for each in values], length_s)
        for name, values in (("rss_mb", samples.column("rss_mb")), ("ttft_s", load.ttft), ("tpot_s", load.tpot))
    }
    packages = ("tilewright", "jax", "uvicorn", "fastapi")
    timed = {"ttft_s": load.ttft, "tpot_s": load.tpot}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cpu_facts('model name') or platform.machine()}, {cores()} cores",
        "versions": {"python": platform.python_version(), **{each: version(each) for each in packages}},
        "settings": asdict(settings),
        "command": server.command,
        "shapes": asdict(TABLE),
        "held": all(check.held for check in checks),
        "checks": [asdict(check) for check in checks],
        "counts": dict(load.counts),
        "problems": load.problems,
        "finished": load.finished,
        "abandoned": load.abandoned,
        "logprob_deviation": load.deviation,
        "rss_slope_mb_per_min": theil_sen(half) * 60,
        "quarter_medians": quarters,
        "metrics": {name: value for name, value in samples.metrics.items() if "_bucket" not in name and "_created" not in name},
        "columns": samples.COLUMNS,
        "samples": samples.rows,
        **{name: [[round(at, 1), round(value, 5)] for at, value in values] for name, values in timed.items()},
    }


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Runs a soak. Returns its figures with the verdict."""
    with serving(settings) as server:
        bar = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}")
        with Progress(*bar, console=console, disable=not console.is_terminal) as progress:
            row = progress.add_task("soaking", total=settings.minutes * 60, said="")

            def show(load: Load, samples: Samples) -> None:
                whole = sum(load.counts[each] for each in ("whole", "streamed", "read slowly"))
                disconnected = sum(count for name, count in load.counts.items() if name.startswith("gone"))
                canary, refused, rejected = (load.counts[each] for each in ("canaries", "refused", "turned away"))
                progress_text = (
                    f"{whole} answered, {canary} canaries, {refused} refused, {disconnected} gone, {rejected} turned away"
                )
                progress.update(
                    row, completed=min(load.now, settings.minutes * 60), said=f"{progress_text}, {load.wrong} wrong"
                )

            load, samples = asyncio.run(soak(settings, server, show))
        status = server.end()
        err = server.err.read_text(encoding="utf-8", errors="replace")
        checks = verdict(load, samples, settings.minutes * 60, status, err, settings.bounds)
        return figures_of(settings, server, load, samples, checks) | {"standard_error": err[-4000:]}


def show_verdict(figures: dict[str, Any], console: Console) -> None:
    table = Table("rule", "found", "expected", "", title=f"{figures['settings']['minutes']:g} minutes on {figures['machine']}")
    for check in figures["checks"]:
        table.add_row(check["name"], check["found"], check["expected"], "[green]held[/]" if check["held"] else "[red]broken[/]")
    console.print(table)
    for problem in figures["problems"][:10]:
        console.print(f"{problem['at_s']:8.1f} s  {problem['kind']}: {problem['what'][:200]}", markup=False)


def lines_of(figures: dict[str, Any]) -> str:
    """Formats JSON with a line for each figure and for each row of samples."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text(value)}" for name, value in figures.items()) + "\n}\n"


app = App(name="soak", help=__doc__, help_format="plaintext")


@app.default
def main(
    *,
    minutes: float = Settings.minutes,
    model: str = Settings.model,
    drafter: str = Settings.drafter,
    seed: int = Settings.seed,
    json_file: Annotated[JsonFile, Parameter(name="--json")] = None,
) -> int:
    """Runs a server under mixed load.

    Parameters
    ----------
    minutes
        Minutes of load.
    model
        A folder, a Hugging Face id, or "demo".
    drafter
        Drafter, as for `tilewright serve`.
    seed
        Seed of all random choices.
    json_file
        Write samples and verdict as JSON to this file, "-" for standard output.
    """
    if not minutes > 0:
        raise ValueError(f"expected --minutes above 0, found {minutes}")
    check_output_file("--json", json_file)
    console = human_console(json_file)
    figures = run(Settings(minutes, model, drafter, seed), console)
    show_verdict(figures, console)
    if json_file == "-":
        sys.stdout.write(lines_of(figures))
    elif json_file is not None:
        Path(json_file).write_text(lines_of(figures), encoding="utf-8")
    return 0 if figures["held"] else 1


if __name__ == "__main__":
    app()
