"""`tilewright bench serving`: sends a workload to a running server and measures latencies and throughput."""

import asyncio
import datetime
import math
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilewright import __version__
from tilewright.bench import workload as workloads
from tilewright.bench.datasets import Example, read_examples
from tilewright.bench.lengths import RequestTrace, read_trace
from tilewright.bench.serving import (
    NoModel,
    Outcome,
    RequestSettings,
    api_url,
    characters_per_token,
    first_model,
    http_client,
    replay,
)
from tilewright.bench.serving_figures import OBJECTIVES, request_rows, serving_figures
from tilewright.cli.common import packaged_prompts_file
from tilewright.cli.options import COMMON, Flag, Group, Several, changed_options, check_least, option_class
from tilewright.cli.outputs import OutputFiles, now_and_then, write_json
from tilewright.metrics.tables import print_table
from tilewright.report.serving import latency_table, notes, summary

NEW_TOKENS = 128
"""Tokens to generate for each prompt of a file."""
ASSUMED_CHARACTERS = 4.0
"""Characters per token of English text, if neither the user nor the server gives a number."""
SAMPLE_CHARACTERS = 2000
"""Length of the text that measures the server's characters per token."""
LATE_SECONDS = 0.01
"""Requests sent later than this are reported: this client's own load may be in the figures."""


SERVER = Group("Server", sort_key=2)
WORKLOAD = Group("Requests", sort_key=3)
REPORT = Group("Report", sort_key=4)


@option_class(group=SERVER)
class ServerOptions:
    """Options of the server and of its requests.

    Attributes:
        url: URL of the server; its API is under /v1 unless the URL has a path.
        model: model name on the server; by default the first that the server lists.
        api_key: key to send as a bearer token.
        chat: use /chat/completions, which applies the model's chat template.
        temperature: sampling temperature; 0 takes the most likely token.
        ignore_eos: generate all requested tokens, past an end-of-sequence token; the default with --trace.
        continuous_usage: request token counts in every chunk; --no-continuous-usage for servers that refuse the field.
        timeout: seconds for a request, from connecting to the end of its response.
    """

    url: Annotated[str, Parameter(group=COMMON)] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Parameter(alias="-m", group=COMMON)] = None
    api_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None
    chat: Annotated[Flag, Parameter(group=COMMON)] = False
    temperature: float = 0.0
    ignore_eos: bool | None = None
    continuous_usage: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        api_url(self.url)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"expected a temperature of 0 or more, found {self.temperature:g}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"expected a timeout above 0 s, found {self.timeout:g}")
        if self.api_key and not re.fullmatch("[!-~]+", self.api_key):
            raise ValueError("expected an API key of visible ASCII characters")

    def client(self) -> httpx2.AsyncClient:
        headers = {"User-Agent": f"tilewright/{__version__}", "Accept": "text/event-stream, application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return http_client(api_url(self.url), headers)

    def settings(self, model: str, seed: int, ignore_eos: bool) -> RequestSettings:
        ignore_eos = ignore_eos if self.ignore_eos is None else self.ignore_eos
        return RequestSettings(model, self.chat, self.temperature, seed, ignore_eos, self.continuous_usage, self.timeout)


@option_class(group=WORKLOAD)
class WorkloadOptions:
    """Options of the requests and their arrival times.

    Attributes:
        trace: request lengths: .csv or .jsonl with prompt_tokens and output_tokens, or ContextTokens and GeneratedTokens;
            arrival times in arrival_s or TIMESTAMP.
        prompt_file: JSONL records as for `bench speculative`, whose first turns are sent; with --trace, the text from which
            prompts are cut. By default the demo model's held-out code.
        requests: number of measured requests; by default all of the trace or file. A shorter file repeats.
        warmup: number of requests before these, sent at once and excluded from the figures.
        arrivals: "real" times of the trace (the default with --trace), a factor that speeds them up, or "burst", all at once
            (the default for files).
        rate: requests per second at random times (Poisson), instead of --arrivals.
        concurrency: maximum number of concurrent requests; further requests wait.
        context: scale the trace's lengths down so that its longest request fits this number of positions.
        vocab_size: send random token ids below this number, of exact length, instead of text; with --trace.
        characters_per_token: characters per token for cutting text; by default measured with the server.
        max_new_tokens: tokens to generate for each prompt of a file, 128 by default; with --trace, an upper limit.
        seed: seed of random prompts and times, and of sampling.
    """

    trace: Annotated[Path | None, Parameter(group=COMMON)] = None
    prompt_file: Annotated[Path | None, Parameter(group=COMMON)] = None
    requests: Annotated[int | None, Parameter(group=COMMON)] = None
    warmup: int = 0
    arrivals: str | None = None
    rate: Annotated[float | None, Parameter(group=COMMON)] = None
    concurrency: Annotated[int | None, Parameter(group=COMMON)] = None
    context: int | None = None
    vocab_size: int | None = None
    characters_per_token: float | None = None
    max_new_tokens: Annotated[int | None, Parameter(alias="-n", group=COMMON)] = None
    seed: int = 0

    def check(self, chat: bool) -> None:
        """Raises a `ValueError` for options that are out of range or exclude each other."""
        check_least(self, requests=1, warmup=0, concurrency=1, context=2, vocab_size=1, max_new_tokens=1, seed=0)
        for name in ("rate", "characters_per_token"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {name} above 0, found {value:g}")
        if self.arrivals is not None and self.rate is not None:
            raise ValueError("expected --arrivals or --rate, found both")
        if self.trace is None:
            if wrong := changed_options(self, "context", "vocab_size", "characters_per_token"):
                raise ValueError(f"{wrong[0]} needs --trace")
            if self.arrivals not in (None, "burst"):
                raise ValueError(f"--arrivals {self.arrivals} needs --trace; prompts of a file have no arrival times")
        elif self.vocab_size is not None and (chat or self.prompt_file is not None):
            other = "--chat" if chat else "--prompt-file"
            raise ValueError(f"expected {other} (text prompts) or --vocab-size (prompts of token ids), found both")
        self.speed()

    def speed(self) -> float | None:
        """Returns the factor that speeds up the trace's arrival times; None for all requests at once."""
        arrivals = self.arrivals or ("burst" if self.trace is None else "real")
        if arrivals == "burst":
            return None
        try:
            factor = 1.0 if arrivals == "real" else float(arrivals)
        except ValueError:
            factor = math.nan
        if not 0 < factor < math.inf:
            raise ValueError(f"expected --arrivals real, burst or a factor above 0, found {arrivals}")
        return factor

    def read(self) -> "Workload":
        """Reads the trace and the prompts.

        Raises:
            ValueError: A file cannot be read, has too few requests, or has no arrival times.
        """
        examples = read_examples(self.prompt_file or packaged_prompts_file())
        trace = None if self.trace is None else read_trace(self.trace)
        if trace is None:
            total = (self.requests or max(len(examples) - self.warmup, 1)) + self.warmup
        else:
            total = len(trace.prompts) if self.requests is None else self.requests + self.warmup
            if not self.warmup < total <= len(trace.prompts):
                least = max(total, self.warmup + 1)
                raise ValueError(f"{self.trace}: expected {least} requests including warm-up, found {len(trace.prompts)}")
        speed = self.speed()
        if self.rate is not None:
            due = workloads.poisson_times(total, self.rate, self.seed)
        elif trace is None or speed is None:
            due = workloads.at_once(total)
        else:
            due = workloads.trace_times(trace, total, speed)
        return Workload(self, trace, examples, due)


@dataclass(frozen=True)
class Workload:
    """Requests from the files with their due times, including warm-up."""

    options: WorkloadOptions
    trace: RequestTrace | None
    examples: Sequence[Example]
    due: workloads.Times

    @property
    def scale(self) -> float:
        return 1.0 if self.trace is None else workloads.context_scale(self.trace, self.options.context)

    def plan(self, characters: float) -> list[workloads.PlannedRequest]:
        """Plans the requests. `characters` is the number of characters per token for cutting text."""
        options = self.options
        if self.trace is None:
            return workloads.file_plan(self.examples, self.due, options.max_new_tokens or NEW_TOKENS)
        if options.vocab_size is not None:
            make = workloads.token_prompts(options.vocab_size, options.seed)
        else:
            make = workloads.text_prompts(workloads.joined(self.examples), characters, options.seed)
        return workloads.trace_plan(self.trace, self.due, make, scale=self.scale, max_new_tokens=options.max_new_tokens)

    async def characters(self, client: httpx2.AsyncClient, settings: RequestSettings) -> tuple[float, str | None]:
        """Returns characters per token and the source of the number: "given", "measured" or "assumed"; None if unused."""
        option = self.options.characters_per_token
        if self.trace is None or self.options.vocab_size is not None:  # no text to cut
            return ASSUMED_CHARACTERS, None
        if option is not None:
            return option, "given"
        sample = workloads.joined(self.examples)[: min(SAMPLE_CHARACTERS, (self.options.context or SAMPLE_CHARACTERS) // 2)]
        measured = await characters_per_token(client, settings, sample)
        return (ASSUMED_CHARACTERS, "assumed") if measured is None else (measured, "measured")


@option_class(group=REPORT)
class ServingFiles(OutputFiles):
    """Options of the report.

    Attributes:
        goodput: objectives in milliseconds such as ttft:200 tpot:20 e2e:3000; goodput counts requests that meet all.
        percentiles: percentiles of each latency.
        detailed: add a record of each request to the JSON.
    """

    goodput: Several[str] = ()
    percentiles: Several[float] = (50, 90, 95, 99)
    detailed: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objectives()
        if len(set(self.percentiles)) < len(self.percentiles) or not all(0 <= each <= 100 for each in self.percentiles):
            found = ", ".join(f"{each:g}" for each in self.percentiles)
            raise ValueError(f"expected percentiles from 0 to 100, each once, found {found}")
        if self.detailed and self.json_file is None:
            raise ValueError("--detailed needs --json")

    def objectives(self) -> dict[str, float]:
        """Returns the limits of `--goodput` by name. Raises a `ValueError` for a malformed or repeated objective."""
        limits: dict[str, float] = {}
        for each in self.goodput:
            name, _, most = each.partition(":")
            if name not in OBJECTIVES or name in limits or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", most):
                names = ", ".join(f"{name}:MS" for name in OBJECTIVES)
                raise ValueError(f"expected --goodput of {names}, each at most once, found {' '.join(self.goodput)}")
            limits[name] = float(most)
        return limits


@dataclass(frozen=True)
class ServingRun:
    """Results of a run; `characters` is the result of `Workload.characters`."""

    settings: RequestSettings
    outcomes: Sequence[Outcome]
    characters: tuple[float, str | None]
    warmup_failed: int


def serving(
    *,
    server: ServerOptions = ServerOptions(),
    workload: WorkloadOptions = WorkloadOptions(),
    outputs: ServingFiles = ServingFiles(),
) -> None:
    """Sends requests to an OpenAI-compatible server and measures latencies, throughput, goodput and τ.

    Requests come from a trace or from a file of prompts. The exit status is 1 if every request failed. docs/metrics.md defines
    every figure.
    """
    console = outputs.console()
    workload.check(server.chat)
    requests = workload.read()
    try:
        ran = asyncio.run(run(server, requests))
    except NoModel as error:
        console = Console(stderr=True, soft_wrap=True, emoji=False)
        console.print(f"tilewright: {error}; name a model with --model", style="red", markup=False, highlight=False)
        sys.exit(1)
    facts = settings(server, workload, requests, ran)
    figures = serving_figures(ran.outcomes, outputs.percentiles, outputs.objectives())
    figures["goodput"] = outputs.objectives() or None
    figures["warmup_failed"] = ran.warmup_failed
    detail = {"request_records": request_rows(ran.outcomes)} if outputs.detailed else {}
    write_json(outputs.json_file, {**facts, **figures, **detail})
    for line in summary(figures, facts):
        console.print(line, markup=False, soft_wrap=True)
    print_table(console, latency_table(figures, outputs.percentiles))
    for line in notes(figures, facts, sum(outcome.slip_s > LATE_SECONDS for outcome in ran.outcomes)):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if not figures["completed"]:
        sys.exit(1)


async def run(options: ServerOptions, workload: Workload) -> ServingRun:
    """Sends the warm-up requests, then the measured requests.

    Raises:
        NoModel: No model was given and the server lists none.
    """
    planned = workload.options
    async with options.client() as client:
        model = options.model or await first_model(client, options.timeout)
        sent = options.settings(model, planned.seed, ignore_eos=workload.trace is not None)
        characters = await workload.characters(client, sent)
        warmup, measured = workloads.split_warmup(workload.plan(characters[0]), planned.warmup)
        warmed = await replay_shown("warm-up", client, sent, warmup, planned.concurrency) if warmup else []
        outcomes = await replay_shown("requests", client, sent, measured, planned.concurrency)
    return ServingRun(sent, outcomes, characters, sum(outcome.failure is not None for outcome in warmed))


async def replay_shown(
    name: str,
    client: httpx2.AsyncClient,
    settings: RequestSettings,
    plan: Sequence[workloads.PlannedRequest],
    concurrency: int | None,
) -> list[Outcome]:
    """Replays a plan with a progress bar on standard error, or with a progress line now and then."""
    console = Console(stderr=True)
    report = now_and_then(console)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[under_way]} in flight, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    under_way = failed = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(name, total=len(plan), under_way=0, failed=0)

        def changed(outcome: Outcome, sent: bool) -> None:
            nonlocal under_way, failed
            under_way += 1 if sent else -1
            failed += outcome.failure is not None
            bar.update(row, advance=0 if sent else 1, under_way=under_way, failed=failed)
            report(f"{name}: {bar.tasks[row].completed:.0f} of {len(plan)}, {under_way} in flight, {failed} failed")

        return await replay(client, settings, plan, concurrency, changed)


def settings(options: ServerOptions, workload: WorkloadOptions, requests: Workload, ran: ServingRun) -> dict[str, Any]:
    """Returns the settings that the figures depend on, without the API key."""
    trace = workload.trace is not None
    arrivals = None if workload.rate is not None else workload.arrivals or ("real" if trace else "burst")
    per_request = ("model", "route", "temperature", "ignore_eos", "continuous_usage", "timeout_s")
    per_run = ("concurrency", "warmup", "context", "vocab_size", "seed")
    return {
        "date": datetime.date.today().isoformat(),
        "tilewright_version": __version__,
        "python_version": platform.python_version(),
        "url": str(api_url(options.url)),
        **{name: getattr(ran.settings, name) for name in per_request},
        "trace": str(workload.trace) if trace else None,
        "prompt_file": None if workload.prompt_file is None else str(workload.prompt_file),
        "records": None if trace else len(requests.examples),
        "arrivals": arrivals,
        "rate_per_s": workload.rate,
        **{name: getattr(workload, name) for name in per_run},
        "length_scale": requests.scale if trace else None,
        "characters_per_token": ran.characters[0] if ran.characters[1] else None,
        "characters_per_token_source": ran.characters[1],
        "max_new_tokens": workload.max_new_tokens if trace else workload.max_new_tokens or NEW_TOKENS,
    }
