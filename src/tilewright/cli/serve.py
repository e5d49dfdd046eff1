"""`tilewright serve`: an HTTP server for OpenAI clients."""

import logging
import math
import os
import signal
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import SSLContext
from typing import Annotated, Any, Literal

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright import __version__
from tilewright.cli.common import DEMO, DeviceOptions, MemoryOptions, ModelOptions, decoding_text, given, named_model
from tilewright.cli.diffusion_options import ABOUT_DENOISING, is_diffusion
from tilewright.cli.diffusion_options import DEMO as DEMO_DIFFUSION
from tilewright.cli.options import (
    COMMON,
    DIFFUSION,
    HTTP,
    MEMORY,
    MODEL,
    Flag,
    Repeated,
    TemplateOptions,
    changed_options,
    option_class,
    settings,
)
from tilewright.cli.outputs import progress_console
from tilewright.cli.serve_diffusion import ServedDenoising, diffusion_engine
from tilewright.grammar.matcher import is_installed
from tilewright.models.chat import ChatTemplate
from tilewright.parallel.mesh import is_first_process
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions, Guard
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.shape_file import read_table
from tilewright.server.api import Api, ServerOptions
from tilewright.server.defaults import SamplingDefaults, embedding_dimensions
from tilewright.server.middleware import access
from tilewright.server.run import SIGNALS, Server, listen, server_url
from tilewright.server.structured import Constrain
from tilewright.server.tls import CertReqs, tls_context
from tilewright.server.tracing import Tracer

GRAMMAR_S = 5.0
"""Limit of CPU seconds for compiling the grammar of a request."""

log = logging.getLogger("tilewright.serve")

LogLevel = Literal["debug", "info", "warning", "error"]
DenoisingOption = Annotated[ServedDenoising, settings(ServedDenoising, ABOUT_DENOISING), Parameter(group=DIFFUSION)]

DEMO_TEMPLATES = {
    DEMO: ChatTemplate.compiled(
        "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\n' }}{% endfor %}", "the demo's template"
    ),
    DEMO_DIFFUSION: ChatTemplate.compiled("{{ messages[-1].content + '\n' }}", "the demo's template"),
}
"""Chat templates of the packaged models, which know no roles: all messages as lines for `demo`, the last message for
`demo-diffusion`."""


@option_class(group=MODEL)
class ServedModelOptions(ModelOptions):
    """Options that name the target, its drafter and adapters.

    Attributes:
        lora: NAME=FOLDER, a LoRA adapter in PEFT's format for requests whose model is NAME; repeat the option for several.
    """

    lora: Repeated = ()

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of adapters by name. Raises a `ValueError` for other text than NAME=FOLDER, and for a repeated name."""
        folders: dict[str, str] = {}
        for each in self.lora:
            name, equals, folder = each.partition("=")
            if not equals or not name or not folder or name in folders:
                raise ValueError(f"--lora: expected NAME=FOLDER, each name once, found {each!r}")
            folders[name] = folder
        return folders


@dataclass(frozen=True)
class CompileSettings:
    """Settings of `--compile`.

    Attributes:
        shapes: a JSON table of the shapes to compile. By default up to 8 concurrent requests of the context.
        guard: reaction to a compilation of another program once the server is ready. By default fail.
        structured_output: compile the programs for structured output. By default true if the extra grammar is installed.
    """

    shapes: Path | None = None
    guard: Guard = "fail"
    structured_output: bool | None = None


@option_class(group=MEMORY)
class CapacityOptions(MemoryOptions):
    """Options of the engine's capacity.

    Attributes:
        slots: maximum number of concurrent requests. Programs are compiled for batch sizes 1, 2, 4, ... up to this.
        wait_for_programs: answer only once all programs are compiled and measured. By default the server answers with the first
            programs while the others are compiled.
    """

    slots: Annotated[int | None, Parameter(group=COMMON)] = None
    compile: Annotated[CompileSettings, settings(CompileSettings, "programs to compile")] = CompileSettings()
    wait_for_programs: Annotated[Flag, Parameter(group=COMMON)] = False

    @property
    def constraints(self) -> bool:
        """True if requests may have structured output. Raises a `ValueError` if that needs llguidance, which is missing."""
        structured_output = self.compile.structured_output
        if structured_output and not is_installed():
            raise ValueError("--compile structured_output=true needs llguidance: pip install 'tilewright[grammar]'")
        return is_installed() if structured_output is None else structured_output

    def options_for_denoising(self) -> dict[str, Any]:
        """Returns keyword arguments of `DiffusionEngineOptions`.

        Raises:
            ValueError: an option is not supported by diffusion models.
        """
        wrong = changed_options(self, "context")
        wrong += [
            f"--memory {name}" for name in ("fraction", "prefix_cache", "state_snapshots") if name in changed(self.memory)
        ]
        wrong += [f"--compile {name}" for name in ("shapes",) if name in changed(self.compile)]
        if wrong:
            raise ValueError(f"{wrong[0]} is for models that decode token by token; this one denoises")
        page_size = given(self.memory.page_size, EngineOptions.page_size)
        return {"guard": self.compile.guard, "pages": self.memory.pages, "page_size": page_size}

    def served_options(self, limits: "LimitSettings") -> EngineOptions:
        """Makes the options of an engine that decodes token by token."""
        return EngineOptions(
            None if self.compile.shapes is None else read_table(self.compile.shapes),
            slots=self.slots,
            constraints=self.constraints,
            guard=self.compile.guard,
            **self.engine_options(),
            **limits.queue,
        )


def changed(options: object) -> list[str]:
    """Returns the names of settings that differ from their defaults."""
    defaults = vars(type(options)())
    return [name for name, value in vars(options).items() if value != defaults[name]]


@dataclass(frozen=True)
class TlsSettings:
    """Settings of `--tls`.

    Attributes:
        cert: PEM file of the server's certificate and its chain.
        key: PEM file of the private key, if it is not in the file of the certificate.
        client_ca: PEM file of the authorities of clients' certificates.
        client_cert: check of clients' certificates. By default none.
    """

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    client_cert: Literal["none", "optional", "required"] = "none"

    def context(self) -> SSLContext | None:
        """Makes the TLS context; None without a certificate. Raises a `ValueError` for files that cannot be used."""
        requirement = CERT_REQS[self.client_cert]
        return tls_context(self.cert, self.key, self.client_ca, requirement)


CERT_REQS: dict[str, CertReqs] = {"none": 0, "optional": 1, "required": 2}


@dataclass(frozen=True)
class LimitSettings:
    """Settings of `--limits`.

    Attributes:
        queue_requests: requests that may wait. By default 256.
        queue_tokens: tokens of the prompts of waiting requests. By default 262144.
        body_mb: size of a request body in MiB. By default 4.
        deadline_s: seconds that a request may take, with its time in the queue. By default unlimited.
        drain_s: seconds that running requests may take after SIGTERM. By default 30.
        stored_responses: responses of /v1/responses that stay in memory. By default 1024.
    """

    queue_requests: int = EngineOptions.queue_requests
    queue_tokens: int = EngineOptions.queue_tokens
    body_mb: float = 4.0
    deadline_s: float | None = None
    drain_s: float = 30.0
    stored_responses: int = ServerOptions.stored_responses

    def __post_init__(self) -> None:
        if not self.drain_s >= 0:
            raise ValueError(f"expected drain_s of at least 0, found {self.drain_s:g}")
        if not 0 < self.body_mb < math.inf:
            raise ValueError(f"expected body_mb above 0, found {self.body_mb:g}")

    @property
    def queue(self) -> dict[str, Any]:
        """Keyword arguments of the options of every engine."""
        return {"queue_requests": self.queue_requests, "queue_tokens": self.queue_tokens}

    @property
    def body_bytes(self) -> int:
        """Maximum size of a request body in bytes."""
        return int(self.body_mb * 2**20)


@dataclass(frozen=True)
class ApiSettings:
    """Settings of `--api`.

    Attributes:
        name: name of the model for clients. By default its id, or the name of its folder.
        allow_origin: origins of web pages that may read answers (CORS), "*" for all.
        pooling: pooling of embeddings: "last", the last token's hidden state, or "mean". By default last.
        generation_config: sampling defaults of requests: "auto", the model's (generation_config.json, or the packaged values of
            smollm2-135m), or "none", OpenAI's: temperature 1 and all tokens. By default auto.
        parse_special_in_content: parse special tokens in messages and tools, such as <|im_end|>. By default they are text, so
            that no message can forge a turn.
        open_page: open the chat page in a browser once the server is ready, if there is a display. By default false.
    """

    name: str | None = None
    allow_origin: tuple[str, ...] = ()
    pooling: Pooling = "last"
    generation_config: Literal["auto", "none"] = "auto"
    parse_special_in_content: bool = False
    open_page: bool = False


@dataclass(frozen=True)
class LogSettings:
    """Settings of `--log`, which go to standard error.

    Attributes:
        level: lowest level to log. By default info.
        access: log each request: method, path, status, milliseconds and tokens. By default false.
        traces: URL of an OpenTelemetry collector that receives a span of each request, such as
            http://localhost:4318/v1/traces. Needs the extra otel.
    """

    level: LogLevel = "info"
    access: bool = False
    traces: str | None = None


@option_class(group=HTTP)
class HttpOptions:
    """Options of the HTTP server.

    Attributes:
        host: address to listen on; 0.0.0.0 for all networks.
        port: port to listen on; 0 for any free port.
        api_key: keys of which requests must send one; repeat the option for several.
    """

    host: Annotated[str, Parameter(group=COMMON)] = "127.0.0.1"
    port: Annotated[int, Parameter(alias="-p", group=COMMON)] = 8000
    api_key: Annotated[
        tuple[str, ...], Parameter(negative=(), env_var="TILEWRIGHT_API_KEY", show_default=False, group=COMMON)
    ] = ()
    tls: Annotated[TlsSettings, settings(TlsSettings, "TLS (https)")] = TlsSettings()
    limits: Annotated[LimitSettings, settings(LimitSettings, "limits of requests")] = LimitSettings()
    api: Annotated[ApiSettings, settings(ApiSettings, "behaviour of the HTTP API")] = ApiSettings()
    log: Annotated[LogSettings, settings(LogSettings, "log on standard error, and traces")] = LogSettings()

    def sampling(self, models: ModelOptions, console: Console) -> SamplingDefaults:
        """Sampling defaults of requests."""
        if self.api.generation_config == "none":
            return SamplingDefaults()
        return SamplingDefaults.from_folder(models.folder(console))

    def server_options(
        self, model: str, template: ChatTemplate | None, sampling: SamplingDefaults = SamplingDefaults()
    ) -> ServerOptions:
        """Makes the options of the server."""
        path = Path(model).resolve()
        name = path.name if path.is_dir() else path.stem if path.is_file() else model
        return ServerOptions(
            name=given(self.api.name, name),
            version=__version__,
            template=template,
            sampling=sampling,
            api_keys=self.api_key,
            origins=self.api.allow_origin,
            max_body_bytes=self.limits.body_bytes,
            deadline_s=self.limits.deadline_s,
            pooling=self.api.pooling,
            tracer=None if self.log.traces is None else Tracer.for_endpoint(self.log.traces, __version__),
            tls=self.tls.context(),
            stored_responses=self.limits.stored_responses,
        )


def serve(
    model: str | None = None,
    /,
    *,
    models: ServedModelOptions = ServedModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    capacity: CapacityOptions = CapacityOptions(),
    denoising: DenoisingOption = ServedDenoising(),
    http: HttpOptions = HttpOptions(),
    templates: TemplateOptions = TemplateOptions(),
) -> None:
    """Serves a model over HTTP for OpenAI clients.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (the default), "demo" or "demo-diffusion", as --model.
    """
    start_logging(http.log)
    models = named_model(model, models)
    console = Console(stderr=True, highlight=False, emoji=False, quiet=not is_first_process())
    if not is_first_process():
        follow(models, devices, capacity, denoising, http.limits, console)
        return
    with listen(http.host, http.port) as listening:
        api = make_api(models, devices, capacity, denoising, http, templates, console)
        if api.engine.decoding.denoising is None:
            print_defaults(api.options.sampling, console)
        on_ready = ready_line(api, models, server_url(listening, api.options.tls is not None), http.api.open_page)
        progress = progress_console(console)
        Server(api, http.limits.drain_s, on_ready, progress, capacity.wait_for_programs).run(listening)


def make_api(
    models: ModelOptions,
    devices: DeviceOptions,
    capacity: CapacityOptions,
    denoising: ServedDenoising,
    http: HttpOptions,
    templates: TemplateOptions,
    console: Console,
) -> Api:
    """Makes the API of a server, with an engine that is not warm yet."""
    template = template_of(models, templates, http.api.parse_special_in_content, console)
    options = http.server_options(models.model, template, http.sampling(models, console))
    if options.name in models.adapter_folders:
        raise ValueError(f"--lora: expected another name than the model's, found {options.name!r}")
    engine, constrain = engine_of(models, devices, capacity, denoising, http.limits, console)
    if engine.decoding.denoising is None:
        options = replace(options, embedding_dimensions=embedding_dimensions(models.folder(console)))
    return Api(engine, replace(options, constrain=constrain))


def template_of(models: ModelOptions, templates: TemplateOptions, parse_special: bool, console: Console) -> ChatTemplate | None:
    """Loads the chat template. With an unusable template of the model, the server answers completions and refuses chats."""
    if templates.chat_template is None and models.model in DEMO_TEMPLATES:
        return DEMO_TEMPLATES[models.model]
    try:
        return models.chat_template(console, templates, parse_special)
    except ValueError as error:
        if templates.chat_template is not None:
            raise
        log.warning("%s: the server refuses chats. Name another template with --chat-template FILE", error)
        return ChatTemplate.refusing(str(error))


def follow(
    models: ModelOptions,
    devices: DeviceOptions,
    capacity: CapacityOptions,
    denoising: ServedDenoising,
    limits: LimitSettings,
    console: Console,
) -> None:
    """Runs the dispatches of the first process until that process ends; only the first process handles signals."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    engine, _ = engine_of(models, devices, capacity, denoising, limits, console)
    engine.warm()
    engine.follow()


def check_processes(devices: DeviceOptions) -> None:
    """Raises a `ValueError` for several processes without `--tensor-parallel`."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    if devices.tensor_parallel is None:
        count = jax.device_count()
        processes = jax.process_count()
        raise ValueError(f"expected --tensor-parallel {count}, the devices of all {processes} processes, found none")


def print_defaults(sampling: SamplingDefaults, console: Console) -> None:
    """Prints the default sampling parameters that differ from OpenAI's."""
    if sampling.changed_options:
        values = ", ".join(f"{name} {value:g}" for name, value in sampling.changed_options.items())
        console.print(f"default sampling of the model: {values} (--api generation_config=none for OpenAI's)", soft_wrap=True)


class StandardError(logging.StreamHandler[Any]):
    """Log handler that writes to the current `sys.stderr`, which a progress bar redirects to print lines above itself."""

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


def start_logging(settings: LogSettings) -> None:
    """Starts the log of this package on standard error, with warnings of other libraries and, if set, the access log."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[StandardError()])
    logging.getLogger("tilewright").setLevel(settings.level.upper())
    if settings.access:
        log_access()


def engine_of(
    models: ModelOptions,
    devices: DeviceOptions,
    capacity: CapacityOptions,
    denoising: ServedDenoising,
    limits: LimitSettings,
    console: Console,
) -> tuple[Engine, Constrain | None]:
    """Makes the engine for a model of either kind, and the maker of grammar constraints if structured output is on."""
    denoises = is_diffusion(models, console)
    check_processes(devices)
    if denoises:
        shared = {**capacity.options_for_denoising(), **limits.queue}
        constraints = capacity.constraints
        engine, model = diffusion_engine(models, devices, denoising, capacity.slots, shared, console)
        return engine, Constrain(model, GRAMMAR_S) if constraints else None
    blocks = denoising.for_decoder(models.folder(console))
    options = capacity.served_options(limits)
    lm = models.load(console, devices, capacity.context, None if blocks is None else "blocks")
    lm.denoising = given(blocks, lm.denoising)
    engine = lm.engine(options)
    log.info(engine.decoding.sizes_line)
    if capacity.memory.prefix_cache is None and not engine.decoding.prefix_cache:
        log.info("no prefix cache: %s", engine.decoding.programs.outside_pages)
    return engine, Constrain(lm, GRAMMAR_S) if options.constraints else None


def ready_line(api: Api, models: ModelOptions, url: str, open_page: bool = False) -> Callable[[], None]:
    """Returns a function that prints that the server is ready and opens the chat page."""
    options = api.options
    engine = api.engine

    def announce() -> None:
        print(f"{options.name} with {decoding_text(models, engine.decoding)} at {url} (context {engine.context})", flush=True)
        stats = engine.stats()
        if stats.programs < stats.programs_declared:
            log.info("%d of %d programs are ready; the others are compiled now", stats.programs, stats.programs_declared)
        if open_page and has_display():
            webbrowser.open(url)

    return announce


def has_display() -> bool:
    """True if a browser can show a page; without a display, Python would start a browser in the terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
