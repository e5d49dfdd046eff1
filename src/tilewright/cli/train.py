"""`tilewright train`: language models, drafters for them, the demo pair, and (in `train_gnn.py`) graph neural networks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from cyclopts import App, Parameter
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import JsonFile, check_json_file, human_console, progress_console, write_json
from tilewright.compiled.machine import chip_name
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.models import decoder, dflash, eagle3, hub
from tilewright.models.checkpoint import CONFIG, load_decoder, load_params, read_config, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dflash import DFlashConfig, DFlashParams, default_target_layers
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.data import (
    MASK,
    Stream,
    encode_documents,
    end_of_text,
    read_documents,
    split_documents,
    train_tokenizer,
)
from tilewright.train.demo import train_demo
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.eagle3 import Eagle3Options, default_draft_vocab, train_eagle3
from tilewright.train.lm import train_lm
from tilewright.train.loop import CHECKPOINT, TrainResult
from tilewright.train.regenerate import cut_prompts, regenerate
from tilewright.train.text import TextOptions, require_texts, text_figures

app = App(name="train", help="Training.")
app.command("tilewright.cli.train_gnn:gnn", help="Trains a graph neural network, on nodes or on graphs.")


@Parameter(name="*")
@dataclass(frozen=True)
class LoopOptions:
    """How to train.

    Attributes:
        steps: optimiser steps.
        batch_size: sequences a step.
        sequence_length: tokens a sequence.
        learning_rate: peak rate of AdamW (with muon, of embeddings and norms).
        optimizer: "adamw", or "muon" for the matrices inside the layers.
        muon_learning_rate: peak rate of Muon.
        seed: of the initialisation and of the data's order.
        held_out: share of the documents that is kept for the held-out loss.
        evaluate_every: steps from one held-out loss to the next.
        save_every: steps from one checkpoint to the next.
        products: float32, or bfloat16 with float32 sums by the CPU kernels, which is faster; weights are float32 either way.
    """

    steps: int = 1000
    batch_size: int = 8
    sequence_length: int = 512
    learning_rate: float = 6e-4
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate: float = 0.02
    seed: int = 0
    held_out: float = 0.02
    evaluate_every: int = 100
    save_every: int = 100
    products: Literal["float32", "bfloat16"] = "float32"

    def options(self) -> TextOptions:
        if not 0 < self.held_out < 1:
            raise ValueError(f"expected a held-out share between 0 and 1, found {self.held_out}")
        return TextOptions(**{k: v for k, v in vars(self).items() if k != "held_out"})


def require_data(data: Sequence[Path]) -> None:
    if not data:
        raise ValueError("expected files or folders to train on, found none")


def finish(result: TrainResult, out: Path, console: Console, json_file: str | None, **more: object) -> None:
    loss, held_out = result.last("loss"), result.last("held_out_loss")
    told = f"{out}: loss {loss:.3f}, held-out loss {held_out:.3f} nats a token, {result.rate:,.0f} tokens/s"
    console.print(told, markup=False)
    write_json(json_file, {**text_figures(result), **more, "chip": chip_name(), "out": str(out)})


@Parameter(name="*")
@dataclass(frozen=True)
class ModelSizes:
    """What language model to make; with --start, the model started from has its own.

    Attributes:
        hidden_size: width of the residual stream (256 by default).
        layers: the model's layers (4).
        heads: query heads of a layer (4).
        kv_heads: key/value heads of a layer; they divide the query heads (2).
        head_dim: size of a head (64).
        intermediate_size: width inside a layer's MLP (768).
        context: the longest sequence that the model will accept (1024).
        vocab_size: tokens of the byte-level BPE that is trained on the data, at most (4096).
    """

    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    context: int | None = None
    vocab_size: int | None = None

    @property
    def bpe_size(self) -> int:
        return given(self.vocab_size, 4096)

    def refuse(self, why: str, *names: str) -> None:
        """Raises a `ValueError` that lists which of these sizes were given."""
        if wrong := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]:
            raise ValueError(f"{why}, found {', '.join(wrong)} as well")

    def config(self, vocab_size: int, end: int) -> DecoderConfig:
        sizes = DecoderConfig(
            family="qwen3",
            vocab_size=vocab_size,
            hidden_size=given(self.hidden_size, 256),
            intermediate_size=given(self.intermediate_size, 768),
            num_layers=given(self.layers, 4),
            num_heads=given(self.heads, 4),
            num_kv_heads=given(self.kv_heads, 2),
            head_dim=given(self.head_dim, 64),
            rope_theta=10000.0,
            tie_word_embeddings=True,
            max_position_embeddings=given(self.context, 1024),
            eos_token_ids=(end,),
        )
        return decoder.config_from_hf(decoder.config_to_hf(sizes), "the model's sizes")


@dataclass(frozen=True)
class Beginning:
    """What the training of a language model begins with.

    Attributes:
        tokenizer: which splits the text.
        config: the model's; None where its sizes are still to be chosen.
        params: float32; None for random ones.
        files: what a tokenizer has beside it, a chat template say, for the new model's folder.
    """

    tokenizer: Tokenizer
    config: DecoderConfig | None = None
    params: DecoderParams | None = None
    files: tuple[Path, ...] = ()

    @classmethod
    def choose(cls, start: str | None, tokenizer: Path | None, sizes: ModelSizes, console: Console) -> "Beginning | None":
        """A model that is there already with its tokenizer, or a tokenizer alone; None where neither is named."""
        if start is not None:
            sizes.refuse("--start takes its sizes and its tokenizer along", *vars(sizes))
            if tokenizer is not None:
                raise ValueError("--start takes its tokenizer along, found --tokenizer as well")
            folder = hub.resolve(start, console=progress_console(console))
            config, params = load_decoder(folder, jnp.float32, progress_console(console))
            files = tuple(folder / name for name in hub.TOKENIZER[1:] if (folder / name).is_file())
            return cls(load_tokenizer(folder), config, params, files)
        if tokenizer is not None:
            sizes.refuse("--tokenizer has its own vocabulary", "vocab_size")
            return cls(load_tokenizer(tokenizer))
        return None


@app.command
def lm(
    *data: Path,
    out: Path,
    start: str | None = None,
    tokenizer: Path | None = None,
    sizes: ModelSizes = ModelSizes(),
    loop: LoopOptions = LoopOptions(),
    json_file: JsonFile = None,
) -> None:
    """Trains a language model: one of Qwen3's architecture from random weights, or one that is there already.

    Parameters
    ----------
    data
        Text files, JSONL files (text, prompt and response, or question and answer), or folders of both. Prompts are not in the
        loss.
    out
        Folder for the model; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
    start
        A model to go on from, with a fresh optimizer: a folder, a Hugging Face id, or "demo".
    tokenizer
        A folder with a tokenizer.json; by default a byte-level BPE is trained on the data.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    require_data(data)
    options = loop.options()
    documents = split_documents(read_documents(data), loop.held_out, loop.seed)
    kept = kept_tokenizer(out)
    begin = Beginning.choose(start, tokenizer, sizes, console)
    begin = begin or Beginning(kept or train_tokenizer(documents[0], sizes.bpe_size))
    bpe = begin.tokenizer
    if kept is not None and kept.to_str() != bpe.to_str():
        raise ValueError(f"{out} holds a run with another tokenizer; name another --out")
    config = begin.config or sizes.config(bpe.get_vocab_size(), end_of_text(bpe))
    end = config.eos_token_ids[0] if config.eos_token_ids else end_of_text(bpe)
    streams = [encode_documents(bpe, part, end) for part in documents]
    require_texts(streams[0], streams[1], options.sequence_length + 1, options)
    out.mkdir(parents=True, exist_ok=True)
    bpe.save(str(out / "tokenizer.json"))
    same = {"vocab_size": sizes.bpe_size}
    result = train_lm(config, streams[0], streams[1], options, out / "training", console, begin.params, same)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, jnp.float32)
    for file in begin.files:
        copyfile(file, out / file.name)
    finish(result, out, console, json_file, training_tokens=len(streams[0].tokens))


def kept_tokenizer(out: Path) -> Tokenizer | None:
    """The tokenizer that an interrupted run left with its checkpoint."""
    there = (out / "training" / CHECKPOINT).exists() and (out / "tokenizer.json").exists()
    return load_tokenizer(out) if there else None


@Parameter(name="*")
@dataclass(frozen=True)
class DrafterSizes:
    """What drafter to make; its layers have the target's own sizes.

    Attributes:
        block_size: tokens drafted at once, the known one included; by default 16 for dflash, 8 for eagle3.
        taps: the target's layers whose outputs the drafter reads, from 0. By default the published choice for the kind; of a
            target with few layers, all (dflash, fewer than nine) or three (eagle3, fewer than seven).
    """

    block_size: int | None = None
    taps: tuple[int, ...] = ()


@Parameter(name="*")
@dataclass(frozen=True)
class DFlashArguments:
    """What only --kind dflash knows.

    Attributes:
        layers: dflash: the drafter's layers (2 by default).
        mask_token_id: dflash: the token that stands for a position to be drafted; by default <|mask|>, else the vocabulary's
            last.
        anchors: dflash: blocks drawn from each sequence at each step (32 by default).
        gamma: dflash: decay of the loss weights exp(-(k-1)/gamma); by default the published one for the block size.
        start: dflash: a drafter to go on from, a folder, a Hugging Face id or "demo-drafter"; its block size may be another. By
            default training starts from the target's last layers.
    """

    layers: int | None = None
    mask_token_id: int | None = None
    anchors: int | None = None
    gamma: float | None = None
    start: str | None = None

    def options(self) -> DFlashOptions:
        return DFlashOptions(given(self.anchors, 32), self.gamma)

    def start_params(self, config: DFlashConfig | Eagle3Config, console: Console) -> DFlashParams | None:
        """The parameters to go on from, float32, if any were named."""
        if self.start is None or isinstance(config, Eagle3Config):
            return None
        folder = hub.resolve(self.start, console=progress_console(console))
        found = dflash.config_from_hf(read_config(folder), str(folder / CONFIG), config.num_target_layers)
        if replace(found, block_size=config.block_size) != config:
            raise ValueError(f"expected --start to be a drafter of these sizes: {config}; found {found}")
        return load_params(folder, dflash.declare(config), jnp.float32)

    def config(self, sizes: DrafterSizes, target: DecoderConfig, tokenizer: Tokenizer) -> DFlashConfig:
        mask = tokenizer.token_to_id(MASK) if self.mask_token_id is None else self.mask_token_id
        every_layer = tuple(range(target.num_layers))
        made = DFlashConfig(
            **{**target.sizes(), "num_layers": given(self.layers, 2), "rope_scaling": None},
            block_size=given(sizes.block_size, 16),
            mask_token_id=target.vocab_size - 1 if mask is None else mask,
            target_layer_ids=sizes.taps
            or (every_layer if len(every_layer) < 9 else default_target_layers(len(every_layer), 5)),
            num_target_layers=target.num_layers,
        )
        config = dflash.config_from_hf(dflash.config_to_hf(made), "the drafter's sizes")
        dflash.check_fits(config, target)
        return config


@Parameter(name="*")
@dataclass(frozen=True)
class Eagle3Arguments:
    """What only --kind eagle3 knows.

    Attributes:
        draft_vocab: eagle3: tokens that the drafter can propose, the most frequent of the training text; by default all of a
            vocabulary up to 8,192, else at most 32,000.
        decay: eagle3: weight of a draft step's loss against that of the step before (0.8 by default).
    """

    draft_vocab: int | None = None
    decay: float | None = None

    def options(self) -> Eagle3Options:
        return Eagle3Options(given(self.decay, 0.8))

    def config(self, sizes: DrafterSizes, target: DecoderConfig) -> Eagle3Config:
        made = Eagle3Config(
            **{**target.sizes(), "num_layers": 1},
            draft_vocab_size=given(self.draft_vocab, default_draft_vocab(target.vocab_size)),
            target_hidden_size=target.hidden_size,
            target_layer_ids=sizes.taps or eagle3.default_target_layers(target.num_layers),
            block_size=given(sizes.block_size, eagle3.BLOCK_SIZE),
        )
        config = eagle3.config_from_hf(eagle3.config_to_hf(made), target.num_layers, "the drafter's sizes")
        eagle3.check_fits(config, target)
        return config


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def refuse_others(kind: str, of_kind: dict[str, object]) -> None:
    """Raises a `ValueError` that lists the arguments given for another kind of drafter."""
    wrong = [
        f"--{name.replace('_', '-')} (for {other})"
        for other, arguments in of_kind.items()
        for name, value in vars(arguments).items()
        if other != kind and value is not None
    ]
    if wrong:
        raise ValueError(f"--kind {kind} does not take {', '.join(wrong)}")


@Parameter(name="*")
@dataclass(frozen=True)
class Regeneration:
    """Whether the target writes the text that its drafter learns from, and how.

    Attributes:
        regenerated: let the target continue this many stretches of the data and train on what it writes instead of on the data.
        prompt_tokens: length of such a stretch.
        response_tokens: length of its continuation.
        temperature: of the continuations; half of them are always greedy.
    """

    regenerated: int = 0
    prompt_tokens: int = 64
    response_tokens: int = 192
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.regenerated < 0:
            raise ValueError(f"expected a number of continuations, found {self.regenerated}")
        if self.prompt_tokens < 1:
            raise ValueError(f"expected prompts of at least 1 token, found {self.prompt_tokens}")

    def samplings(self) -> list[Sampling]:
        return [Sampling(self.response_tokens, 0.0), Sampling(self.response_tokens, self.temperature)]

    def apply(self, lm: LanguageModel, streams: list[Stream], end: int, out: Path, console: Console) -> list[Stream]:
        """Training and held-out text as the target continues them; as they are where nothing is to be regenerated."""
        if not self.regenerated:
            return streams
        counts = (self.regenerated, max(64, self.regenerated // 32))
        written = []
        for name, stream, count in zip(("trained", "held_out"), streams, counts, strict=True):
            prompts = cut_prompts(stream, count, self.prompt_tokens, seed=0)
            written.append(regenerate(lm, prompts, self.samplings(), out / f"responses_{name}.jsonl", end, console))
        return written


def drafter_text(
    data: Sequence[Path], loop: LoopOptions, regeneration: Regeneration, lm: LanguageModel, out: Path, console: Console
) -> list[Stream]:
    """What a drafter of `lm` is trained on, and what is held out."""
    end = lm.target.eos_token_ids[0] if lm.target.eos_token_ids else 0
    parts = split_documents(read_documents(data), loop.held_out, loop.seed)
    streams = [encode_documents(lm.tokenizer, part, end) for part in parts]
    return regeneration.apply(lm, streams, end, out / "training", console)


@app.command
def drafter(
    *data: Path,
    target: str,
    out: Path,
    kind: Literal["dflash", "eagle3"] = "dflash",
    sizes: DrafterSizes = DrafterSizes(),
    for_dflash: DFlashArguments = DFlashArguments(),
    for_eagle3: Eagle3Arguments = Eagle3Arguments(),
    regeneration: Regeneration = Regeneration(),
    loop: LoopOptions = LoopOptions(),
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Trains a drafter for a target, which stays as it is.

    Parameters
    ----------
    data
        Text files, JSONL files or folders, of the kind of text that will be generated; prompts are not in the loss.
    target
        A folder, a Hugging Face id, or "demo".
    out
        Folder for the drafter; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
    kind
        A block-diffusion drafter (dflash), which drafts a block in one pass, or a chain (eagle3), one token after another.
    dtype
        Of the drafter as it is written; it is trained in float32.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    require_data(data)
    refuse_others(kind, {"dflash": for_dflash, "eagle3": for_eagle3})
    options, anchors, chain = loop.options(), for_dflash.options(), for_eagle3.options()
    folder = hub.resolve(target, console=progress_console(console))
    tokenizer = load_tokenizer(folder)
    config, params = load_decoder(folder, jnp.float32, progress_console(console))
    made = for_dflash.config(sizes, config, tokenizer) if kind == "dflash" else for_eagle3.config(sizes, config)
    start = for_dflash.start_params(made, console)
    text, held_out = drafter_text(data, loop, regeneration, LanguageModel(config, params, tokenizer), out, console)
    figures: dict[str, object] = {"training_tokens": int(text.in_loss.sum()), "target": target}
    if isinstance(made, DFlashConfig):
        result = train_drafter(config, params, made, text, held_out, options, anchors, out / "training", console, start)
        save_params(out, dflash.config_to_hf(made), dflash.declare(made), result.params, DTYPES[dtype])
    else:
        result, agreed = train_eagle3(config, params, made, text, held_out, options, chain, out / "training", console)
        eagle3.save(out, made, result.params, DTYPES[dtype])
        figures["agreement"] = agreed
    finish(result, out, console, json_file, **figures)


@app.command
def demo(
    *,
    gsm8k: Annotated[Path, Parameter(name="--gsm8k")],
    out: Path = Path("runs/demo"),
    json_file: JsonFile = None,
) -> None:
    """Repeats the training of the demo pair: the standard library's source and GSM8K's training questions.

    Parameters
    ----------
    gsm8k
        GSM8K's training questions, as JSONL.
    out
        Folder for both models and for the checkpoints that an interrupted run resumes from.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    figures = train_demo(gsm8k, out, console)
    console.print(f"wrote {out / 'target'} and {out / 'drafter'}")
    write_json(json_file, {**figures, "chip": chip_name()})
