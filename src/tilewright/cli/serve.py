"""`tilewright serve`: an HTTP server that OpenAI's clients can talk to."""

import logging
import math
import os
import signal
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright import __version__
from tilewright.cli.common import DEMO, MEMORY_FRACTION, DeviceOptions, ModelOptions, json_object, named_model
from tilewright.cli.diffusion_options import DEMO as DEMO_DIFFUSION
from tilewright.cli.options import Repeated, TemplateOptions, option_class, told
from tilewright.cli.outputs import progress_console
from tilewright.cli.serve_diffusion import DenoisingOptions, diffusion_engine, is_diffusion
from tilewright.diffusion.engine import DiffusionEngine
from tilewright.grammar.matcher import is_installed
from tilewright.models.chat import ChatTemplate
from tilewright.parallel.mesh import is_first_process
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.shape_file import read_table
from tilewright.server.api import Api, ServerOptions
from tilewright.server.defaults import SamplingDefaults, embedding_dimensions
from tilewright.server.middleware import access
from tilewright.server.run import SIGNALS, Server, listen, url_of
from tilewright.server.structured import Constrain
from tilewright.server.tls import CertReqs, tls_context
from tilewright.server.tracing import Tracer
from tilewright.speculation.drafters.load import NGRAM

SPECULATIVE_FIELDS = ("method", "model", "num_speculative_tokens")
GRAMMAR_S = 5.0
"""Seconds of a processor that compiling a request's grammar may take."""
METHODS = ("dflash", "dspark", "eagle3", NGRAM)

log = logging.getLogger("tilewright.serve")

LogLevel = Literal["debug", "info", "warning", "error"]

DEMO_TEMPLATES = {
    DEMO: ChatTemplate.compiled(
        "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\n' }}{% endfor %}", "the demo's template"
    ),
    DEMO_DIFFUSION: ChatTemplate.compiled("{{ messages[-1].content + '\n' }}", "the demo's template"),
}
"""The demos know no roles: the one that continues Python code is given what was said, line after line, the one that writes
arithmetic out in steps what was said last."""


@option_class
class ServedModelOptions(ModelOptions):
    """Options that name the models to load, and say how.

    Attributes:
        lora: NAME=FOLDER, a low-rank adapter as PEFT writes it, for requests whose model is NAME; may be given several times.
    """

    lora: Repeated = ()

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of adapters, by their names. Raises a `ValueError` for what is not NAME=FOLDER, or a name given twice."""
        found: dict[str, str] = {}
        for each in self.lora:
            name, equals, folder = each.partition("=")
            if not equals or not name or not folder or name in found:
                raise ValueError(f"--lora: expected NAME=FOLDER, each name once, found {each!r}")
            found[name] = folder
        return found


@option_class
class SpeculationOptions:
    """Options of drafting, as vLLM's users write it.

    Attributes:
        speculative_config: a JSON object with method (dflash, dspark, eagle3 or ngram), model, and num_speculative_tokens,
            which is one less than the block size; instead of --drafter and --block-size.
    """

    speculative_config: str | None = None

    def applied(self, models: ModelOptions) -> ModelOptions:
        """The models with what the object says.

        Raises:
            ValueError: it is not such an object, or something of it is said twice.
        """
        if self.speculative_config is None:
            return models
        if models.drafter is not None or models.block_size is not None:
            raise ValueError("--speculative-config names the drafter: leave --drafter and --block-size out")
        fields = json_object("--speculative-config", self.speculative_config)
        if unknown := [name for name in fields if name not in SPECULATIVE_FIELDS]:
            known = ", ".join(SPECULATIVE_FIELDS)
            raise ValueError(f"--speculative-config: expected the fields {known}, found {unknown[0]!a}")
        method, model, tokens = (fields.get(name) for name in SPECULATIVE_FIELDS)
        if method is not None and method not in METHODS:
            raise ValueError(f"--speculative-config: expected a method among {', '.join(METHODS)}, found {method!r}")
        if method == NGRAM or (method is None and model == "[ngram]"):
            model = NGRAM
        if not isinstance(model, str) or not model:
            raise ValueError(f"--speculative-config: expected the drafter's folder or id as model, found {model!r}")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"--speculative-config: expected num_speculative_tokens of at least 1, found {tokens!r}")
        return replace(models, drafter=model, block_size=None if tokens is None else tokens + 1)


@option_class
class CapacityOptions:
    """Options of what the engine may use.

    Attributes:
        shapes: a table of shapes, as `shapes suggest` writes it; by default up to 8 requests at once of the context.
        slots: how many requests run at once; programs are compiled for 1, 2, 4 and so on up to so many rows.
        page_size: positions of a page of keys and values, a multiple of 16.
        pages: in the pool; by default as many as there is memory for, and no more than all slots can fill.
        context: the most tokens of a request, prompt and answer; by default the model's context, or what the pages hold.
        memory_fraction: the share of the memory that is free once the weights are loaded, of the host or of each device, that
            pages and what programs compute with may take.
        prefix_cache: keep pages for later requests that begin alike; by default wherever there is no --draft-window.
        state_snapshots: of the states of layers with linear attention, for the prefix cache; by default as many as slots, and
            4 at least.
        guard: what a compile does once the server is ready: "off", "warn" or "fail".
        queue_requests: how many requests may wait.
        queue_tokens: how many tokens their prompts may have.
        structured_output: offer answers that follow a grammar, for which there are more programs to compile; by default where
            the extra grammar is installed.
    """

    shapes: Path | None = None
    slots: int | None = None
    page_size: int = EngineOptions.page_size
    pages: int | None = None
    context: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    prefix_cache: bool | None = None
    state_snapshots: int | None = None
    guard: Literal["off", "warn", "fail"] = "fail"
    queue_requests: int = EngineOptions.queue_requests
    queue_tokens: int = EngineOptions.queue_tokens
    structured_output: bool | None = None

    @property
    def shared(self) -> dict[str, Any]:
        """Options that every engine takes."""
        return {"queue_requests": self.queue_requests, "queue_tokens": self.queue_tokens, "guard": self.guard}

    def refuse_paging(self) -> None:
        """Raises a `ValueError` for anything that was said of pages, for a model that has none."""
        paging = ("shapes", "page_size", "pages", "context", "memory_fraction", "prefix_cache", "state_snapshots")
        if wrong := told(self, *paging, "structured_output"):
            raise ValueError(f"{wrong[0]} is for models that decode token by token; this one denoises")

    def engine_options(self) -> EngineOptions:
        """Engine options that these arguments stand for."""
        if self.structured_output and not is_installed():
            raise ValueError("--structured-output needs llguidance: pip install 'tilewright[grammar]'")
        constraints = is_installed() if self.structured_output is None else self.structured_output
        return EngineOptions(
            None if self.shapes is None else read_table(self.shapes),
            self.page_size,
            self.pages,
            self.prefix_cache,
            slots=self.slots,
            context=self.context,
            memory_fraction=self.memory_fraction,
            constraints=constraints,
            state_snapshots=self.state_snapshots,
            **self.shared,
        )


@option_class
class HttpOptions:
    """Options that say who may ask, and how much.

    Attributes:
        host: where to listen; 0.0.0.0 for every network that this machine is in.
        port: 0 for any that is free.
        api_key: which requests must bring one of; may be given several times.
        allow_origin: of web pages that may read the answers (CORS), "*" for all; may be given several times.
        served_model_name: what clients call the model; by default its id, or its folder's name.
        ssl_certfile: the server's certificate in PEM, with those that lead to its authority, for TLS (https).
        ssl_keyfile: its private key in PEM, where that is another file.
        ssl_ca_certs: authorities of clients' certificates, in PEM.
        ssl_cert_reqs: whether clients must have a certificate: 0 none is asked for, 1 if they have one, 2 always.
        max_body_mb: how long a body may be.
        deadline: seconds that a request may take, waiting included.
        pooling: what embeddings are made of: "last" takes the last token's hidden state, "mean" the mean of all.
        stored_responses: of /v1/responses, how many are kept in memory for clients to come back to.
        drain: seconds that running requests get to end once the server is told to.
        generation_config: sampling defaults of requests: "auto" for the model's own (generation_config.json, or what comes with
            smollm2-135m), "none" for OpenAI's, temperature 1 and all tokens.
        otlp_traces_endpoint: URL of a collector of OpenTelemetry's, such as http://localhost:4318/v1/traces, which gets a span
            of each request (the extra otel).
        access_log: write a line for each request to standard error: method, path, status, milliseconds, tokens.
        open_page: open the page to chat in a browser once the server is ready, where there is a display.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[tuple[str, ...], Parameter(negative=(), env_var="TILEWRIGHT_API_KEY")] = ()
    allow_origin: Repeated = ()
    served_model_name: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    ssl_cert_reqs: CertReqs = 0
    max_body_mb: float = 4.0
    deadline: float | None = None
    pooling: Pooling = "last"
    stored_responses: int = ServerOptions.stored_responses
    drain: float = 30.0
    generation_config: Literal["auto", "none"] = "auto"
    otlp_traces_endpoint: str | None = None
    access_log: bool = False
    open_page: Annotated[bool, Parameter(name="--open", negative=())] = False

    def sampling(self, models: ModelOptions, console: Console) -> SamplingDefaults:
        """Sampling defaults of requests that do not say."""
        return SamplingDefaults.of_model(models.folder(console)) if self.generation_config == "auto" else SamplingDefaults()

    def server_options(
        self, model: str, template: ChatTemplate | None, sampling: SamplingDefaults = SamplingDefaults()
    ) -> ServerOptions:
        path = Path(model).resolve()
        name = path.name if path.is_dir() else path.stem if path.is_file() else model
        if not self.drain >= 0:
            raise ValueError(f"expected --drain of at least 0, found {self.drain}")
        if not 0 < self.max_body_mb < math.inf:
            raise ValueError(f"expected --max-body-mb above 0, found {self.max_body_mb:g}")
        return ServerOptions(
            name=name if self.served_model_name is None else self.served_model_name,
            version=__version__,
            template=template,
            sampling=sampling,
            api_keys=self.api_key,
            origins=self.allow_origin,
            max_body_bytes=int(self.max_body_mb * 2**20),
            deadline_s=self.deadline,
            pooling=self.pooling,
            tracer=None if self.otlp_traces_endpoint is None else Tracer.to(self.otlp_traces_endpoint, __version__),
            tls=tls_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs),
            stored_responses=self.stored_responses,
        )


def serve(
    model: str | None = None,
    /,
    *,
    models: ServedModelOptions = ServedModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    speculation: SpeculationOptions = SpeculationOptions(),
    capacity: CapacityOptions = CapacityOptions(),
    denoising: DenoisingOptions = DenoisingOptions(),
    http: HttpOptions = HttpOptions(),
    templates: TemplateOptions = TemplateOptions(),
    log_level: LogLevel = "info",
) -> None:
    """Serves a model over HTTP, for any OpenAI client.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (the default), "demo" or "demo-diffusion", as --model.
        log_level: what is logged to standard error: how far warming up is, and what goes wrong.
    """
    start_logging(log_level)
    chosen = speculation.applied(named_model(model, models))
    console = Console(stderr=True, highlight=False, emoji=False, quiet=not is_first_process())
    if not is_first_process():
        follow(chosen, devices, capacity, denoising, console)
        return
    if http.access_log:
        log_access()
    with listen(http.host, http.port) as listening:
        api = served(chosen, devices, capacity, denoising, http, templates, console)
        if not isinstance(api.engine, DiffusionEngine):
            say_defaults(api.options.sampling, console)
        said = ready_line(api, chosen, url_of(listening, api.options.tls is not None), http.open_page)
        Server(api, http.drain, said, progress_console(console)).run(listening)


def served(
    models: ModelOptions,
    devices: DeviceOptions,
    capacity: CapacityOptions,
    denoising: DenoisingOptions,
    http: HttpOptions,
    templates: TemplateOptions,
    console: Console,
) -> Api:
    """Makes the API of a server: an engine, which is not warm yet, and how requests reach it."""
    template = template_of(models, templates, console)
    options = http.server_options(models.model, template, http.sampling(models, console))
    if options.name in models.adapter_folders:
        raise ValueError(f"--lora: expected another name than the model's, found {options.name!r}")
    engine, constrain = engine_of(models, devices, capacity, denoising, console)
    if not isinstance(engine, DiffusionEngine):
        options = replace(options, embedding_dimensions=embedding_dimensions(models.folder(console)))
    return Api(engine, replace(options, constrain=constrain))


def template_of(models: ModelOptions, templates: TemplateOptions, console: Console) -> ChatTemplate | None:
    """The chat template of a server. A model's own that cannot be used has chats refused, and completions answered."""
    if templates.chat_template is None and models.model in DEMO_TEMPLATES:
        return DEMO_TEMPLATES[models.model]
    try:
        return models.chat_template(console, templates)
    except ValueError as error:
        if templates.chat_template is not None:
            raise
        log.warning("%s: chats are refused, completions are not; --chat-template FILE takes another template", error)
        return ChatTemplate.refusing(str(error))


def follow(
    models: ModelOptions, devices: DeviceOptions, capacity: CapacityOptions, denoising: DenoisingOptions, console: Console
) -> None:
    """Computes with the first process, of several that serve a model, until that one ends: signals are for it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    engine, _ = engine_of(models, devices, capacity, denoising, console)
    assert isinstance(engine, Engine), "one process alone denoises"
    engine.warm()
    engine.follow()


def check_processes(devices: DeviceOptions, denoises: bool) -> None:
    """Raises a `ValueError` for what several processes cannot serve together."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    if denoises:
        raise ValueError("expected one process to serve a diffusion model, found several")
    if devices.tensor_parallel is None:
        count = jax.device_count()
        processes = jax.process_count()
        raise ValueError(f"expected --tensor-parallel {count}, the devices of all {processes} processes, found none")


def say_defaults(sampling: SamplingDefaults, console: Console) -> None:
    """Prints the default sampling values where they differ from OpenAI's."""
    if sampling.said:
        said = ", ".join(f"{name} {value:g}" for name, value in sampling.said.items())
        console.print(f"default sampling: {said} (the model's own; --generation-config none leaves it out)", soft_wrap=True)


class StandardError(logging.StreamHandler[Any]):
    """Handler that writes to what standard error is at that moment: a bar on display takes it over, and puts lines above."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr


def log_access() -> None:
    """Writes the access log to standard error."""
    handler = StandardError()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False


def start_logging(level: LogLevel) -> None:
    """Logs what this package has to say to standard error; of other libraries warnings and errors alone."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[StandardError()])
    logging.getLogger("tilewright").setLevel(level.upper())


def engine_of(
    models: ModelOptions, devices: DeviceOptions, capacity: CapacityOptions, denoising: DenoisingOptions, console: Console
) -> tuple[Engine | DiffusionEngine, Constrain | None]:
    """The engine for a model of either kind, and what makes constraints of grammars where it takes them."""
    denoises = is_diffusion(models, console)
    check_processes(devices, denoises)
    if denoises:
        capacity.refuse_paging()
        return diffusion_engine(models, devices, denoising, capacity.slots, capacity.shared, console), None
    denoising.refuse()
    options = capacity.engine_options()
    lm = models.load(console, devices, capacity.context)
    engine = lm.engine(options)
    log.info(engine.sizes_line)
    if capacity.prefix_cache is None and not engine.prefix_cache:
        log.info("no prefix cache: %s", engine.programs.outside_pages)
    return engine, Constrain(lm, GRAMMAR_S) if options.constraints else None


def ready_line(api: Api, models: ModelOptions, url: str, open_page: bool = False) -> Callable[[], None]:
    """Function that says that the server is ready, and opens its page."""
    options = api.options
    engine = api.engine

    def say() -> None:
        drafter = models.drafter_text
        if isinstance(engine, DiffusionEngine):
            drafter = f"{engine.options.defaults.mode} steps"
        print(f"{options.name} with {drafter} at {url} (context {engine.context})", flush=True)
        if open_page and has_display():
            webbrowser.open(url)

    return say


def has_display() -> bool:
    """True if a browser has where to show a page; Python would start one that takes the terminal otherwise."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
