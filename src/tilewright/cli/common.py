"""Options that several commands share, which name models and devices and load them; their prompts, and what stops them."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar, cast

from cyclopts import App
from jax.sharding import Mesh
from rich.console import Console

from tilewright.bench.datasets import Example, read_examples
from tilewright.cli.options import CompileCache, KernelChoice, TemplateOptions, option_class
from tilewright.cli.outputs import progress_console, working
from tilewright.compiled import cache as compile_cache
from tilewright.kernels import native
from tilewright.kernels.build import cache_folder
from tilewright.kernels.select import DECODING, Selection, Weights, fallbacks, implementations
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import hub, published
from tilewright.models.chat import ChatTemplate
from tilewright.models.hub import PACKAGED, PUBLISHED
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.mesh import is_first_process, make_mesh
from tilewright.runtime.placement import Placement
from tilewright.runtime.state import KvDtype
from tilewright.speculation.costs import CostFiles
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions

DEMO = "demo"
SMOLLM2 = "smollm2-135m"
"""The published model that `generate`, `chat` and `serve` take where none is named."""
MEMORY_FRACTION = 0.9
"""Of the memory that is free, what `serve` and `chat` take unless told otherwise."""
PACKAGED_DRAFTERS = {
    DEMO: {"dflash": "demo-drafter", "dflash2": "demo-dflash2", "eagle3": "demo-eagle3"},
    "smollm2-135m": {"dflash2": "smollm2-dflash2"},
}
"""The drafters that come with the package: for each model by the names that they have beside it."""
DEMO_PROMPT = 32
"""The packaged prompt that stands in where the demo is given none; what follows it repeats itself less than most."""
AUTO = "auto"
"""Name of the drafter that stands for whichever promises most, round by round."""
BlockSize = int | Literal["auto"] | None


def default_drafter(model: str) -> str:
    """Drafter of a model for which none is named, in every command: n-grams; for SmolLM2 its DFlash 2 beside them."""
    return AUTO if model in PUBLISHED else NGRAM


def mesh_axes(text: str, names: Sequence[str] = ()) -> dict[str, int]:
    """The axes of a mesh, as `fsdp=4,tp=2` has them.

    Args:
        names: that axes may have; any without.

    Raises:
        ValueError: it is spelled otherwise, or has an axis of another name, or one twice.
    """
    found = re.fullmatch(r"(\w+=[1-9]\d*)(,\w+=[1-9]\d*)*", text)
    axes = [part.split("=") for part in text.split(",")]
    known = {name for name, *_ in axes}
    if found is None or len(known) < len(axes) or (names and not known <= set(names)):
        raise ValueError(f"expected --mesh as {','.join(f'{name}=N' for name in names) or 'fsdp=4,tp=2'}, found {text!r}")
    return {name: int(size) for name, size in axes}


def given(value: Any, default: Any) -> Any:
    """`value`, or `default` where there is none."""
    return default if value is None else value


def notice(line: str) -> None:
    """Says something on standard error; of several processes that run a command together, the first one does."""
    said = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=not is_first_process())
    with said.capture() as written:
        said.print(line, style="dim", markup=False)
    sys.stderr.write(written.get())  # which a bar or a spinner on display takes over, and puts above itself


def fetch_published(name: str, console: Console) -> None:
    """Has pip bring a published model that is named and not installed, and says so.

    Raises:
        ValueError: it cannot be had.
    """
    if name not in PUBLISHED or Path(name).exists():
        return
    try:
        published.find(name)
    except published.Absent:
        model = PUBLISHED[name]
        notice(f"{name}: {' '.join(model.command)} ({model.about})")
        with console.status(f"pip fetches {name}"):
            published.fetch(name)


def say_fallbacks(choices: Sequence[Selection]) -> None:
    """One line on standard error where kernels for the chip at hand do not run: which ones, and why."""
    if line := fallbacks(choices):
        notice(line)


def keep_programs(wanted: bool) -> Path | None:
    """Keeps compiled programs, if wanted, in a folder beside the CPU kernels; where it cannot, one line says why.

    Returns:
        the folder, if programs are kept there.
    """
    if not wanted:
        return None
    folder = cache_folder()
    try:
        return compile_cache.enable(folder, *native.library_names().values())
    except (ValueError, OSError) as error:
        notice(f"compiled programs are not kept: {error}")
    return None


def cpu_kernels(console: Console) -> native.Native:
    """The CPU kernels, or why they cannot be used."""
    with working(console, "CPU kernels: compiled at first use, then kept"):
        return native.kernels()


def cost_files() -> CostFiles:
    """Files that keep the costs of rounds from one process to the next."""
    return CostFiles(cache_folder() / "costs", sorted(native.library_names().values()), notice)


def say_schedules(placement: Placement | None, rows: Sequence[int], console: Console) -> None:
    """A line for each number of rows for which something was chosen: what, and why."""
    if placement is None:
        return
    for why in filter(None, map(placement.why, rows)):
        console.print(f"--schedule {placement.name}: {why}", style="dim", markup=False)


@option_class
class DeviceOptions:
    """Over which devices to divide the target, or the diffusion model.

    Attributes:
        tensor_parallel: the first so many devices share every layer; by default one computes all. They have to divide the
            model's heads, MLP columns and vocabulary.
        schedule: how these devices add up what each has: "sync" (the default), "sequence", "ring"; "domino", for an even
            number of rows; "column" and "exact", with --kernels xla; or "auto", what is estimated to be fastest for each number
            of rows. docs/overlap.md says what they do.
        compiler_options: tell the compiler of several TPUs to begin transfers earlier: options that were tuned on a model of
            time, and that no TPU has tried.
    """

    tensor_parallel: int | None = None
    schedule: str | None = None
    compiler_options: bool = False

    def mesh(self) -> Mesh | None:
        """The devices; None for the default one.

        Raises:
            ValueError: there are not so many, or a schedule or compiler options were named for a single one.
        """
        if self.tensor_parallel is None:
            if self.compiler_options:
                raise ValueError("--compiler-options needs --tensor-parallel: they are for programs over several TPUs")
            if self.schedule is not None:
                raise ValueError("--schedule needs --tensor-parallel: on one device nothing is added up")
            return None
        try:
            return make_mesh({"tp": self.tensor_parallel})
        except ValueError as error:
            raise ValueError(f"--tensor-parallel {self.tensor_parallel}: {error}") from error


@option_class
class LoadOptions:
    """Options that name the model to load, and say how it multiplies.

    Attributes:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m", which pip brings, or "demo", the small model that comes
            with the package and continues Python code.
        dtype: "float32", "bfloat16" or "auto": the checkpoint's, bfloat16 for float16, float32 on a CPU without our kernels.
        weights: "int8" keeps matrices in 8 bits; "int4" in blocks of 4 bits, of a quantised checkpoint those that it has; "fp8"
            as floats of 8 bits, where XLA computes; "auto" keeps them in dtype.
    """

    model: str = DEMO
    dtype: str = AUTO
    weights: Weights = "auto"
    kernels: KernelChoice = "auto"
    compile_cache: CompileCache = True

    def chat_template(self, console: Console, options: TemplateOptions = TemplateOptions()) -> ChatTemplate | None:
        """The model's chat template, or the one of `--chat-template`; None where there is none, as for base models."""
        return ChatTemplate.load(self.folder(console), options.chat_template, options.parse_special_in_content)

    def asked_template(
        self, chat: bool | None, console: Console, options: TemplateOptions = TemplateOptions()
    ) -> ChatTemplate | None:
        """The chat template that prompts go through, or None. By default prompts of published models do, which are for chats.

        Raises:
            ValueError: a template is asked for, and the model has none.
        """
        chat = self.model in PUBLISHED if chat is None else chat
        template = self.chat_template(console, options) if chat else None
        if chat and template is None:
            raise ValueError(f"--chat needs a model with a chat template; {self.model} has none")
        return template

    def loading(self, devices: DeviceOptions, console: Console) -> dict[str, Any]:
        """Arguments of loading any model, once its programs are kept and the CPU kernels are there."""
        self.fetch(console)
        taken = {
            "dtype": self.dtype,
            "weights": self.weights,
            "kernels": self.kernels,
            "mesh": devices.mesh(),
            "schedule": devices.schedule,
            "compiler_options": devices.compiler_options,
            "console": progress_console(console),
        }
        keep_programs(self.compile_cache)
        if self.kernels == "auto":
            cpu_kernels(console)
        return taken

    def folder(self, console: Console) -> Path:
        """The model's folder, fetched where it is named by its id, or published."""
        self.fetch(console)
        return hub.resolve(self.model, console=progress_console(console), check=load_tokenizer)

    def fetch(self, console: Console) -> None:
        """Fetches a published model. Raises a `ValueError` where it cannot be had, which names a model that can."""
        try:
            fetch_published(self.model, console)
        except ValueError as error:
            raise ValueError(
                f"{error}. --model names another one; --model {DEMO} comes with the package, and continues Python code"
            ) from error


M = TypeVar("M", bound=LoadOptions)


@option_class
class TargetOptions(LoadOptions):
    """Options that name the target to load, and say how it multiplies.

    Attributes:
        kv_dtype: "int8" keeps keys and values in 8 bits, about twice the positions of bfloat16 in the same memory; "auto" in
            dtype. A drafter keeps its own in its dtype.
    """

    kv_dtype: KvDtype = "auto"

    def load_with(
        self,
        drafter: str | None,
        console: Console,
        devices: DeviceOptions = DeviceOptions(),
        context: int | None = None,
        options: DrafterOptions = DrafterOptions(),
    ) -> LanguageModel:
        """The target with a drafter: a folder, a Hugging Face id, "ngram", "auto", or one of `PACKAGED_DRAFTERS`."""
        lm = load(
            self.model,
            self.drafter_source(drafter),
            **self.loading(devices, console),
            kv_dtype=self.kv_dtype,
            context=context,
            block_size=options.block_size,
            draft_window=options.draft_window,
            drafter_dtype=options.drafter_dtype,
            lora=self.adapter_folders,
        )
        runs = implementations(lm.target, lm.model.dtype, kernels=self.kernels, operations=DECODING, kv_dtype=self.kv_dtype)
        say_fallbacks(runs)
        say_schedules(lm.placement, (1, max(lm.table.chunks)), console)
        return lm.keep_costs(cost_files()) if self.compile_cache else lm

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of low-rank adapters, by their names."""
        return {}

    def drafter_source(self, drafter: str | None) -> str | list[str] | None:
        """The drafter as `load` takes it: the package's have names; "none" is none, "auto" n-grams and the model's own."""
        if drafter in (None, "none"):
            return None
        packaged = PACKAGED_DRAFTERS.get(self.model, {})
        if drafter == AUTO:
            return [NGRAM, *packaged.values()]
        if drafter in packaged and Path(drafter).is_dir():
            notice(f"{drafter} is the drafter that comes with {self.model}; the folder of that name would be ./{drafter}")
        return packaged.get(drafter, drafter)


@option_class
class ModelOptions(TargetOptions):
    """Options that name the models to load, and say how.

    Attributes:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m", which pip brings, or "demo", the small model that comes
            with the package and continues Python code.
        drafter: a folder, a Hugging Face id, "ngram" or "none"; for the demo also "dflash", "dflash2" and "eagle3", for
            smollm2-135m "dflash2". "auto" takes whichever promises most, round by round: n-gram and those of the package. The
            default is "auto" for smollm2-135m, "ngram" for any other model.
        block_size: tokens drafted at once, the known one included. "auto", the default, takes the width that promises most,
            round by round, plain decoding among them; where narrower programs round differently all run at the widest.
            With --drafter none: plain decoding through a program of this width.
        draft_window: keep only this many last positions in the drafter's context, so that drafting never gets slower.
        drafter_dtype: of the drafter alone; the output is the same either way. By default as dtype.
    """

    model: str = SMOLLM2
    drafter: str | None = None
    block_size: BlockSize = None
    draft_window: int | None = None
    drafter_dtype: str | None = None

    @property
    def drafter_name(self) -> str:
        """The drafter that is meant."""
        return default_drafter(self.model) if self.drafter is None else self.drafter

    @property
    def drafter_text(self) -> str:
        """Words on the drafter."""
        return "no drafter" if self.drafter_name == "none" else f"drafter {self.drafter_name}"

    def load(self, console: Console, devices: DeviceOptions = DeviceOptions(), context: int | None = None) -> LanguageModel:
        options = DrafterOptions(self.block_size, self.draft_window, self.drafter_dtype)
        return self.load_with(self.drafter_name, console, devices, context, options)


@option_class
class AdaptedModelOptions(ModelOptions):
    """Options that name the models to load, with an adapter.

    Attributes:
        lora: a folder with a low-rank adapter of the target, as PEFT writes it.
    """

    lora: Path | None = None

    @property
    def adapter_folders(self) -> dict[str, str]:
        return {} if self.lora is None else {str(self.lora): str(self.lora)}

    def load(self, console: Console, devices: DeviceOptions = DeviceOptions(), context: int | None = None) -> LanguageModel:
        lm = super().load(console, devices, context)
        lm.default_adapter = next(iter(self.adapter_folders), None)
        return lm


def check_drafters(names: Sequence[str], model: str) -> None:
    """Raises a `ValueError` if a drafter is named twice, or comes with other models and not with this one."""
    if len(set(names)) < len(names):
        raise ValueError(f"expected different drafters, found {', '.join(names)}")
    for name in names:
        others = [other for other, packaged in PACKAGED_DRAFTERS.items() if name in packaged]
        if others and model not in others and not Path(name).is_dir():
            *several, last = (AUTO, "none", NGRAM, *PACKAGED_DRAFTERS.get(model, {}))
            known = f"expected a folder, a Hugging Face id, {', '.join(several)} or {last} as drafter of {model}"
            raise ValueError(f"{known}, found {name}, which comes with {', '.join(others)}")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name to show for each folder, file or id: its last part, or the whole where several end alike."""
    last = [Path(name).name for name in names]
    return {name: name if last.count(short) > 1 else short for name, short in zip(names, last, strict=True)}


def named_model(model: str | None, models: M) -> M:
    """The options with the model that stands alone on the command line.

    Raises:
        ValueError: `--model` names another one.
    """
    if model is None:
        return models
    if models.model not in (type(models)().model, model):
        raise ValueError(f"expected one model, found {model} and --model {models.model}")
    return replace(models, model=model)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option gives. Raises a `ValueError` where it is none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{option}: expected a JSON object, found {text[:60]}")
    return fields


def packaged_prompts_file() -> Path:
    """Beginnings of functions from modules that the demo pair was never trained on."""
    return PACKAGED[DEMO].parent / "prompts.jsonl"


def standard_input() -> str:
    """All of standard input. Raises a `ValueError` where it is not UTF-8."""
    try:
        cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8", errors="strict")  # whatever the locale says
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def option_names(command: Callable[..., None]) -> list[str]:
    """Options of a command, as the command line has them."""
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
    """Prompts from the arguments, a file, or standard input; for the demo alone there is one to fall back on.

    Args:
        otherwise: what else to fall back on.
        command: takes the arguments; its options are those that a misspelt one may mean.

    Raises:
        ValueError: there is none, one is empty or not UTF-8, the file is malformed, or an argument is an option that does not
            exist.
    """
    for prompt in given:
        if prompt.startswith("-") and prompt != "-":
            near = get_close_matches(prompt.partition("=")[0], [] if command is None else option_names(command), 1)
            meant = f"Did you mean {near[0]}? " if near else ""
            where = "--prompt-file or standard input"
            raise ValueError(f'Unknown option: {prompt}. {meant}(A prompt that begins with "-" comes from {where}.)')
    texts = [standard_input() if prompt == "-" else prompt for prompt in given]
    if not texts and prompt_file is None:
        piped = "" if sys.stdin.isatty() else standard_input()
        texts = [piped] if piped else list(otherwise)
    for number, text in enumerate(texts, 1):
        if not text:
            raise ValueError(f"prompt {number} is empty")
        try:
            text.encode()  # of an argument's bytes that are not UTF-8 Python makes halves of surrogate pairs
        except UnicodeEncodeError:
            raise ValueError(f"prompt {number} is not UTF-8") from None
    prompts = [Example("prompt", "", (text,), number) for number, text in enumerate(texts, 1)]
    if prompt_file is not None:
        prompts += read_examples(prompt_file)
    if not prompts and model == DEMO:
        prompts = [read_examples(packaged_prompts_file())[DEMO_PROMPT]]
    if not prompts:
        raise ValueError("expected a prompt: as an argument, from --prompt-file, or on standard input")
    return prompts


@contextmanager
def stopped_by_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop`, and does no more than that; a second one interrupts as ever."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
