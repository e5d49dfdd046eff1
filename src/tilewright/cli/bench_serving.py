"""`tilewright bench serving`: a workload against a running server, and what its clients would see."""

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

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilewright import __version__
from tilewright.bench import workload as workloads
from tilewright.bench.datasets import Example, read_examples
from tilewright.bench.http_client import Address, Connections
from tilewright.bench.lengths import RequestTrace, read_trace
from tilewright.bench.serving import NoModel, Outcome, Peer, characters_per_token, first_model, replay
from tilewright.bench.serving_figures import OBJECTIVES, latencies, request_rows, serving_figures, tokens_over_time
from tilewright.cli.common import packaged_prompts_file
from tilewright.cli.options import Flag, Several, check_least, option_class, told
from tilewright.cli.outputs import PageFiles, now_and_then
from tilewright.metrics.tables import print_table
from tilewright.report.serving import ServingReport, latency_table, notes, summary, write_serving

NEW_TOKENS = 128
"""Tokens to generate behind a prompt of a file."""
ASSUMED_CHARACTERS = 4.0
"""Characters of a token, where neither the user nor the server says; English in today's vocabularies."""
SAMPLE_CHARACTERS = 2000
"""Of the text by which the server is asked how it counts."""
LATE_SECONDS = 0.01
"""A request that this client sent later than this may have its own load in the figures."""


@option_class
class PeerOptions:
    """Options that name a server and say how it is asked.

    Attributes:
        url: the server's; its API is under /v1 unless the URL has a path.
        model: its name there; by default the first that the server lists.
        api_key: sent as a bearer token.
        chat: use /chat/completions, which applies the model's chat template.
        temperature: 0 takes the most likely token.
        ignore_eos: generate all tokens that were asked for, behind an end of sequence too; the default with --trace.
        continuous_usage: ask for token counts in every chunk; servers that refuse the field need --no-continuous-usage.
        timeout: seconds for a request, from its connection to the end of its answer.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None
    chat: Flag = False
    temperature: float = 0.0
    ignore_eos: bool | None = None
    continuous_usage: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        Address.from_url(self.url)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"expected a temperature of 0 or more, found {self.temperature:g}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"expected a timeout above 0 s, found {self.timeout:g}")
        if self.api_key and not re.fullmatch("[!-~]+", self.api_key):
            raise ValueError("expected an API key of visible ASCII characters")

    def connections(self) -> Connections:
        headers = {"User-Agent": f"tilewright/{__version__}", "Accept": "text/event-stream, application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return Connections(Address.from_url(self.url), headers)

    def peer(self, model: str, seed: int, ignore_eos: bool) -> Peer:
        ignore_eos = ignore_eos if self.ignore_eos is None else self.ignore_eos
        return Peer(model, self.chat, self.temperature, seed, ignore_eos, self.continuous_usage, self.timeout)


@option_class
class WorkloadOptions:
    """Options of the requests that are sent, and of their times.

    Attributes:
        trace: requests by their lengths: .csv or .jsonl with prompt_tokens and output_tokens, or ContextTokens and
            GeneratedTokens, and for their times arrival_s or TIMESTAMP.
        prompt_file: JSONL records as for `bench speculative`, of which the first turns are sent; with --trace, the text that
            prompts are cut from. By default the held-out code that comes with the demo pair.
        requests: how many count; by default all of the trace or file. A file begins again where it has fewer.
        warmup: requests before these, sent at once, that are in no figure.
        arrivals: "real" times of the trace (its default), a number that they are sped up by, or "burst", all at once (the
            default for files).
        rate: requests a second in their place, at random (Poisson).
        concurrency: the most requests under way; those that are due wait.
        context: scale the trace's lengths down so that its longest request fits so many positions.
        vocab_size: prompts of a trace are random token ids below it, of the exact length, in the place of text.
        characters_per_token: by which text is cut; by default the server is asked how it counts.
        max_new_tokens: for each prompt of a file, 128 by default; for a trace a limit of its outputs.
        seed: of prompts and times that are drawn, and with a temperature of the requests, each its own.
    """

    trace: Path | None = None
    prompt_file: Path | None = None
    requests: int | None = None
    warmup: int = 0
    arrivals: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    context: int | None = None
    vocab_size: int | None = None
    characters_per_token: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0

    def check(self, chat: bool) -> None:
        """Raises a `ValueError` for options that cannot be, or not together."""
        check_least(self, requests=1, warmup=0, concurrency=1, context=2, vocab_size=1, max_new_tokens=1, seed=0)
        for name in ("rate", "characters_per_token"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {name} above 0, found {value:g}")
        if self.arrivals is not None and self.rate is not None:
            raise ValueError("expected --arrivals or --rate, found both")
        if self.trace is None:
            if wrong := told(self, "context", "vocab_size", "characters_per_token"):
                raise ValueError(f"{wrong[0]} needs --trace")
            if self.arrivals not in (None, "burst"):
                raise ValueError(f"--arrivals {self.arrivals} needs --trace; the prompts of a file have no times")
        elif self.vocab_size is not None and (chat or self.prompt_file is not None):
            other = "--chat" if chat else "--prompt-file"
            raise ValueError(f"expected {other}, which is text, or --vocab-size, for prompts of token ids; found both")
        self.speed()

    def speed(self) -> float | None:
        """Factor by which requests are sent faster than in the trace; None where all are sent at once."""
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
        """Reads the files.

        Raises:
            ValueError: one cannot be read, or has fewer requests than are asked for, or no times where these are wanted.
        """
        examples = read_examples(self.prompt_file or packaged_prompts_file())
        trace = None if self.trace is None else read_trace(self.trace)
        if trace is None:
            total = (self.requests or max(len(examples) - self.warmup, 1)) + self.warmup
        else:
            total = len(trace.prompts) if self.requests is None else self.requests + self.warmup
            if not self.warmup < total <= len(trace.prompts):
                wanted = max(total, self.warmup + 1)
                raise ValueError(f"{self.trace}: expected {wanted} requests, warm-up included, found {len(trace.prompts)}")
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
    """The requests as the files have them, and when each is due, warm-up included."""

    options: WorkloadOptions
    trace: RequestTrace | None
    examples: Sequence[Example]
    due: workloads.Times

    @property
    def scale(self) -> float:
        return 1.0 if self.trace is None else workloads.context_scale(self.trace, self.options.context)

    def plan(self, characters: float) -> list[workloads.Planned]:
        """The requests, their texts cut by so many characters a token."""
        of = self.options
        if self.trace is None:
            return workloads.file_plan(self.examples, self.due, of.max_new_tokens or NEW_TOKENS)
        if of.vocab_size is not None:
            make = workloads.token_prompts(of.vocab_size, of.seed)
        else:
            make = workloads.text_prompts(workloads.joined(self.examples), characters, of.seed)
        return workloads.trace_plan(self.trace, self.due, make, scale=self.scale, most_new_tokens=of.max_new_tokens)

    async def characters(self, connections: Connections, peer: Peer) -> tuple[float, str | None]:
        """Characters of a token, and where the number comes from: "given", "measured", "assumed"; None where none is needed."""
        given = self.options.characters_per_token
        if self.trace is None or self.options.vocab_size is not None:  # nothing is cut from text
            return ASSUMED_CHARACTERS, None
        if given is not None:
            return given, "given"
        sample = workloads.joined(self.examples)[: min(SAMPLE_CHARACTERS, (self.options.context or SAMPLE_CHARACTERS) // 2)]
        measured = await characters_per_token(connections, peer, sample)
        return (ASSUMED_CHARACTERS, "assumed") if measured is None else (measured, "measured")


@option_class
class ServingFiles(PageFiles):
    """Options of what is reported, and where.

    Attributes:
        html: a page with every request on a line of time.
        goodput: objectives in milliseconds, as ttft:200 tpot:20 e2e:3000; counts the requests that meet all.
        percentiles: of each latency.
        detailed: with a record of each request in the JSON.
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
        """`--goodput` by name. Raises a `ValueError` where one is malformed or comes twice."""
        found: dict[str, float] = {}
        for each in self.goodput:
            name, _, most = each.partition(":")
            if name not in OBJECTIVES or name in found or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", most):
                known = ", ".join(f"{name}:MS" for name in OBJECTIVES)
                raise ValueError(f"expected --goodput of {known}, each at most once, found {' '.join(self.goodput)}")
            found[name] = float(most)
        return found


@dataclass(frozen=True)
class ServingRun:
    """Results of a run: `characters` as `Workload.characters`, `warmup_failed` requests."""

    peer: Peer
    outcomes: Sequence[Outcome]
    characters: tuple[float, str | None]
    warmup_failed: int


def serving(
    *,
    peer: PeerOptions = PeerOptions(),
    workload: WorkloadOptions = WorkloadOptions(),
    outputs: ServingFiles = ServingFiles(),
) -> None:
    """Sends a trace's requests or a file's prompts to an OpenAI-compatible server, and prints what a client sees.

    Times to the first token and between tokens, throughput, goodput, τ. Exit status 1 if every request failed. Every figure is
    defined in docs/metrics.md.
    """
    console = outputs.console()
    workload.check(peer.chat)
    requests = workload.read()
    try:
        ran = asyncio.run(run(peer, requests))
    except NoModel as error:
        console = Console(stderr=True, soft_wrap=True, emoji=False)
        console.print(f"tilewright: {error}; --model names one", style="red", markup=False, highlight=False)
        sys.exit(1)
    facts = settings(peer, workload, requests, ran)
    figures = serving_figures(ran.outcomes, outputs.percentiles, outputs.objectives())
    figures["goodput"] = outputs.objectives() or None
    figures["warmup_failed"] = ran.warmup_failed
    lines = summary(figures, facts)
    rows = request_rows(ran.outcomes)
    remarks = notes(figures, facts, sum(outcome.slip_s > LATE_SECONDS for outcome in ran.outcomes))
    detail = {"request_records": rows} if outputs.detailed else {}
    waits = {name: sorted(values) for name, values in latencies(ran.outcomes).items()}
    drawn = (outputs.percentiles, rows, *tokens_over_time(ran.outcomes), waits)

    def write_page(path: Path) -> None:
        write_serving(path, ServingReport(f"Serving {facts['model']}", lines[0], figures, *drawn, facts, remarks))

    outputs.write(console, {**facts, **figures, **detail}, write_page)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    print_table(console, latency_table(figures, outputs.percentiles))
    for line in remarks:
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if not figures["completed"]:
        sys.exit(1)


async def run(options: PeerOptions, workload: Workload) -> ServingRun:
    """Asks the server for its model, warms up, and sends the requests.

    Raises:
        NoModel: none was given, and the server names none.
    """
    of = workload.options
    connections = options.connections()
    try:
        model = options.model or await first_model(connections, options.timeout)
        peer = options.peer(model, of.seed, ignore_eos=workload.trace is not None)
        characters = await workload.characters(connections, peer)
        first, rest = workloads.split_warmup(workload.plan(characters[0]), of.warmup)
        warmed = await shown("warm-up", connections, peer, first, of.concurrency) if first else []
        outcomes = await shown("requests", connections, peer, rest, of.concurrency)
    finally:
        await connections.close()
    return ServingRun(peer, outcomes, characters, sum(outcome.failure is not None for outcome in warmed))


async def shown(
    name: str, connections: Connections, peer: Peer, plan: Sequence[workloads.Planned], concurrency: int | None
) -> list[Outcome]:
    """`replay` with a bar on standard error, or a line now and then."""
    console = Console(stderr=True)
    tell = now_and_then(console)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[under_way]} under way, {task.fields[failed]} failed"),
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
            tell(f"{name}: {bar.tasks[row].completed:.0f} of {len(plan)}, {under_way} under way, {failed} failed")

        return await replay(connections, peer, plan, concurrency, changed)


def settings(options: PeerOptions, workload: WorkloadOptions, requests: Workload, ran: ServingRun) -> dict[str, Any]:
    """Settings that the figures depend on. The API key is no part of it."""
    trace = workload.trace is not None
    arrivals = None if workload.rate is not None else workload.arrivals or ("real" if trace else "burst")
    asked = ("model", "route", "temperature", "ignore_eos", "continuous_usage", "timeout_s")
    sent = ("concurrency", "warmup", "context", "vocab_size", "seed")
    return {
        "date": datetime.date.today().isoformat(),
        "tilewright_version": __version__,
        "python_version": platform.python_version(),
        "url": Address.from_url(options.url).url,
        **{name: getattr(ran.peer, name) for name in asked},
        "trace": str(workload.trace) if trace else None,
        "prompt_file": None if workload.prompt_file is None else str(workload.prompt_file),
        "records": None if trace else len(requests.examples),
        "arrivals": arrivals,
        "rate_per_s": workload.rate,
        **{name: getattr(workload, name) for name in sent},
        "length_scale": requests.scale if trace else None,
        "characters_per_token": ran.characters[0] if ran.characters[1] else None,
        "characters_per_token_source": ran.characters[1],
        "max_new_tokens": workload.max_new_tokens if trace else workload.max_new_tokens or NEW_TOKENS,
    }
