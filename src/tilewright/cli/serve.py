"""`tilewright serve`: an HTTP server that OpenAI's clients can talk to."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from tilewright import __version__
from tilewright.cli.common import DEMO, DeviceOptions, ModelOptions, named_model, progress_console
from tilewright.cli.diffusion_options import DEMO as DEMO_DIFFUSION
from tilewright.cli.serve_diffusion import DenoisingOptions, diffusion_engine, is_diffusion
from tilewright.decode.drafters.load import NGRAM
from tilewright.engine.diffusion import DiffusionEngine
from tilewright.engine.engine import Engine
from tilewright.engine.options import EngineOptions
from tilewright.engine.shape_file import read_table
from tilewright.models.chat import ChatTemplate
from tilewright.server.api import Api, ServerOptions
from tilewright.server.run import Server, listen, url_of

SPECULATIVE_FIELDS = ("method", "model", "num_speculative_tokens")
METHODS = ("dflash", "eagle3", NGRAM)

DEMO_TEMPLATES = {
    DEMO: ChatTemplate.compiled(
        "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\n' }}{% endfor %}", "the demo's template"
    ),
    DEMO_DIFFUSION: ChatTemplate.compiled("{{ messages[-1].content + '\n' }}", "the demo's template"),
}
"""The demos know no roles: the one that continues Python code is given what was said, line after line, the one that writes
arithmetic out in steps what was said last."""


@Parameter(name="*")
@dataclass(frozen=True)
class SpeculationOptions:
    """How to draft, as vLLM's users write it.

    Attributes:
        speculative_config: a JSON object with method (dflash, eagle3 or ngram), model, and num_speculative_tokens, which is one
            less than the block size; instead of --drafter and --block-size.
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
        fields = speculative_fields(self.speculative_config)
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


def speculative_fields(text: str) -> dict[str, Any]:
    """The object that `--speculative-config` gives."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--speculative-config: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--speculative-config: expected a JSON object, found {text[:60]}")
    if unknown := [name for name in fields if name not in SPECULATIVE_FIELDS]:
        raise ValueError(f"--speculative-config: expected the fields {', '.join(SPECULATIVE_FIELDS)}, found {unknown[0]!a}")
    return fields


@Parameter(name="*")
@dataclass(frozen=True)
class CapacityOptions:
    """What the engine may use.

    Attributes:
        shapes: a table of shapes, as `shapes suggest` writes it; by default up to 8 requests at once of the model's context.
        slots: how many requests run at once; the rows of the table's largest batch.
        page_size: positions of a page of keys and values, a multiple of 16.
        pages: in the pool; by default as many as all slots can fill.
        prefix_cache: keep pages for later requests that begin alike.
        guard: what a compile does once the server is ready: "off", "warn" or "fail".
        queue_requests: how many requests may wait.
        queue_tokens: how many tokens their prompts may have.
    """

    shapes: Path | None = None
    slots: int | None = None
    page_size: int = EngineOptions.page_size
    pages: int | None = None
    prefix_cache: bool = True
    guard: Literal["off", "warn", "fail"] = "fail"
    queue_requests: int = EngineOptions.queue_requests
    queue_tokens: int = EngineOptions.queue_tokens

    @property
    def shared(self) -> dict[str, Any]:
        """What every engine takes."""
        return {"queue_requests": self.queue_requests, "queue_tokens": self.queue_tokens, "guard": self.guard}

    def refuse_paging(self) -> None:
        """Raises a `ValueError` for anything that was said of pages, for a model that has none."""
        for name in ("shapes", "page_size", "pages", "prefix_cache"):
            if getattr(self, name) != getattr(CapacityOptions, name):
                raise ValueError(f"--{name.replace('_', '-')} is for models that decode token by token; this one denoises")

    def engine_options(self, context: int) -> EngineOptions:
        """As the engine takes them, for a model of this context."""
        table = None if self.shapes is None else read_table(self.shapes)
        options = EngineOptions(table, self.page_size, self.pages, self.prefix_cache, **self.shared)
        if self.slots is None:
            return options
        if self.slots < 1:
            raise ValueError(f"expected --slots of at least 1, found {self.slots}")
        shapes = options.shapes(context)
        batches = (*(rows for rows in shapes.batches if rows < self.slots), self.slots)
        return replace(options, table=replace(shapes, batches=batches))


@Parameter(name="*")
@dataclass(frozen=True)
class HttpOptions:
    """Who may ask, and how much.

    Attributes:
        host: where to listen; 0.0.0.0 for every network that this machine is in.
        port: 0 for any that is free.
        api_key: which requests must bring one of; may be given several times.
        allow_origin: of web pages that may read the answers (CORS), "*" for all; may be given several times.
        served_model_name: what clients call the model; by default its id, or its folder's name.
        max_body_mb: how long a body may be.
        deadline: seconds that a request may take, waiting included.
        drain: seconds that running requests get to end once the server is told to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[tuple[str, ...], Parameter(negative=(), env_var="TILEWRIGHT_API_KEY")] = ()
    allow_origin: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    served_model_name: str | None = None
    max_body_mb: float = 4.0
    deadline: float | None = None
    drain: float = 30.0

    def server_options(self, model: str, template: ChatTemplate | None) -> ServerOptions:
        name = Path(model).resolve().name if Path(model).is_dir() else model
        if not self.drain >= 0:
            raise ValueError(f"expected --drain of at least 0, found {self.drain}")
        return ServerOptions(
            name=name if self.served_model_name is None else self.served_model_name,
            version=__version__,
            template=template,
            api_keys=self.api_key,
            origins=self.allow_origin,
            max_body_bytes=int(self.max_body_mb * 2**20),
            deadline_s=self.deadline,
        )


def serve(
    model: str | None = None,
    /,
    *,
    models: ModelOptions = ModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    speculation: SpeculationOptions = SpeculationOptions(),
    capacity: CapacityOptions = CapacityOptions(),
    denoising: DenoisingOptions = DenoisingOptions(),
    http: HttpOptions = HttpOptions(),
) -> None:
    """Serves a model over HTTP, for any OpenAI client.

    Parameters
    ----------
    model
        A folder, a Hugging Face id, "demo" or "demo-diffusion", as --model; the demo drafts by n-grams unless --drafter says
        otherwise.
    """
    models = speculation.applied(named_model(model, models))
    if models.drafter is None and models.model == DEMO:
        models = replace(models, drafter=NGRAM)
    console = Console(stderr=True, highlight=False, emoji=False)
    with listen(http.host, http.port) as listening:
        template = DEMO_TEMPLATES.get(models.model) or models.chat_template(console)
        options = http.server_options(models.model, template)
        engine = engine_of(models, devices, capacity, denoising, console)
        said = ready_line(options, models, engine, url_of(listening))
        Server(Api(engine, options), http.drain, said, progress_console(console)).run(listening)


def engine_of(
    models: ModelOptions, devices: DeviceOptions, capacity: CapacityOptions, denoising: DenoisingOptions, console: Console
) -> Engine | DiffusionEngine:
    """The engine for a model of either kind."""
    if is_diffusion(models, console):
        capacity.refuse_paging()
        return diffusion_engine(models, devices, denoising, capacity.slots, capacity.shared, console)
    denoising.refuse()
    lm = models.load(console, devices)
    return Engine(lm, capacity.engine_options(lm.target.max_position_embeddings))


def ready_line(options: ServerOptions, models: ModelOptions, engine: Engine | DiffusionEngine, url: str) -> Callable[[], None]:
    """What says that the server is ready."""

    def say() -> None:
        drafter = "no drafter" if models.drafter in (None, "none") else f"drafter {models.drafter}"
        if isinstance(engine, DiffusionEngine):
            drafter = f"{engine.options.defaults.mode} steps"
        print(f"{options.name} with {drafter} at {url} (context {engine.context})", flush=True)

    return say
