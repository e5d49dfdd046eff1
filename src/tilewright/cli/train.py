"""`tilewright train`: language models, DFlash drafters for them, and the demo pair."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
from cyclopts import App, Parameter
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import JsonFile, check_json_file, human_console, progress_console, write_json
from tilewright.compiled.machine import chip_name
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.decode.state import Models
from tilewright.models import decoder, dflash, hub
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, default_target_layers
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.data import (
    MASK,
    Stream,
    encode_documents,
    end_of_text,
    read_documents,
    require_windows,
    split_documents,
    train_tokenizer,
)
from tilewright.train.demo import train_demo
from tilewright.train.drafter import DrafterOptions, train_drafter
from tilewright.train.lm import train_lm
from tilewright.train.loop import TrainOptions, TrainResult
from tilewright.train.regenerate import cut_prompts, regenerate

app = App(name="train", help="Training.")


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

    def options(self) -> TrainOptions:
        if not 0 < self.held_out < 1:
            raise ValueError(f"expected a held-out share between 0 and 1, found {self.held_out}")
        return TrainOptions(**{k: v for k, v in vars(self).items() if k != "held_out"})


def finish(result: TrainResult, out: Path, console: Console, json_file: str | None, **more: object) -> None:
    console.print(
        f"{out}: loss {result.loss:.3f}, held-out loss {result.held_out_loss:.3f} nats a token, "
        f"{result.tokens_per_s:,.0f} tokens/s",
        markup=False,
    )
    write_json(json_file, {**result.figures(), **more, "chip": chip_name(), "out": str(out)})


@Parameter(name="*")
@dataclass(frozen=True)
class ModelSizes:
    """What language model to make.

    Attributes:
        hidden_size: width of the residual stream.
        layers: the model's layers.
        heads: query heads of a layer.
        kv_heads: key/value heads of a layer; they divide the query heads.
        head_dim: size of a head.
        intermediate_size: width inside a layer's MLP.
        context: the longest sequence that the model will accept.
    """

    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    context: int = 1024

    def config(self, vocab_size: int, end: int) -> DecoderConfig:
        sizes = DecoderConfig(
            "qwen3", vocab_size, self.hidden_size, self.intermediate_size, self.layers, self.heads, self.kv_heads,
            self.head_dim, rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=self.context,
            eos_token_ids=(end,),
        )  # fmt: skip
        return decoder.config_from_hf(decoder.config_to_hf(sizes), "the model's sizes")


@app.command
def lm(
    *data: Path,
    out: Path,
    tokenizer: Path | None = None,
    vocab_size: int = 4096,
    sizes: ModelSizes = ModelSizes(),
    loop: LoopOptions = LoopOptions(),
    json_file: JsonFile = None,
) -> None:
    """Trains a Qwen3-architecture language model from random weights.

    Parameters
    ----------
    data
        Text files, JSONL files (text, prompt and response, or question and answer), or folders of both.
    out
        Folder for the model; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
    tokenizer
        A folder with a tokenizer.json; by default a byte-level BPE is trained on the data.
    vocab_size
        Tokens of that BPE, at most.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    if not data:
        raise ValueError("expected files or folders to train on, found none")
    options = loop.options()
    documents = split_documents(read_documents(data), loop.held_out, loop.seed)
    bpe = prepare_tokenizer(out, tokenizer, documents[0], vocab_size)
    end = end_of_text(bpe)
    config = sizes.config(bpe.get_vocab_size(), end)
    streams = [encode_documents(bpe, part, end) for part in documents]
    for stream, what in zip(streams, ("the training text", "the held-out text"), strict=True):
        require_windows(stream, options.sequence_length + 1, options.batch_size, what)
    out.mkdir(parents=True, exist_ok=True)
    bpe.save(str(out / "tokenizer.json"))
    result = train_lm(config, streams[0], streams[1], options, out / "training", console)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, jnp.float32)
    finish(result, out, console, json_file, training_tokens=len(streams[0].tokens))


def prepare_tokenizer(out: Path, given: Path | None, documents: list[str], vocab_size: int) -> Tokenizer:
    """The given tokenizer, the one that an interrupted run left, or a new one."""
    if given is not None:
        return load_tokenizer(given)
    if (out / "tokenizer.json").exists():
        return load_tokenizer(out)
    return train_tokenizer(documents, vocab_size)


@Parameter(name="*")
@dataclass(frozen=True)
class DrafterSizes:
    """What drafter to make; its layers have the target's own sizes.

    Attributes:
        block_size: tokens drafted at once, the known one included.
        layers: the drafter's layers.
        taps: the target's layers whose outputs the drafter reads, from 0; by default the published choice for five, or all of
            fewer than nine.
        mask_token_id: the token that stands for a position to be drafted; by default <|mask|>, else the vocabulary's last.
    """

    block_size: int = 16
    layers: int = 2
    taps: tuple[int, ...] = ()
    mask_token_id: int | None = None

    def config(self, target: DecoderConfig, tokenizer: Tokenizer) -> DFlashConfig:
        mask = tokenizer.token_to_id(MASK) if self.mask_token_id is None else self.mask_token_id
        every_layer = tuple(range(target.num_layers))
        sizes = DFlashConfig(
            target.vocab_size, target.hidden_size, target.intermediate_size, self.layers, target.num_heads, target.num_kv_heads,
            target.head_dim, self.block_size, target.vocab_size - 1 if mask is None else mask,
            self.taps or (every_layer if len(every_layer) < 9 else default_target_layers(len(every_layer), 5)),
            target.num_layers, target.rms_norm_eps, target.rope_theta,
        )  # fmt: skip
        config = dflash.config_from_hf(dflash.config_to_hf(sizes), "the drafter's sizes")
        dflash.check_fits(config, target)
        return config


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


@app.command
def drafter(
    *data: Path,
    target: str,
    out: Path,
    sizes: DrafterSizes = DrafterSizes(),
    anchors: int = 32,
    gamma: float | None = None,
    regeneration: Regeneration = Regeneration(),
    loop: LoopOptions = LoopOptions(),
    json_file: JsonFile = None,
) -> None:
    """Trains a DFlash drafter for a target, which stays as it is.

    Parameters
    ----------
    data
        Text files, JSONL files or folders, of the kind of text that will be generated.
    target
        A folder, a Hugging Face id, or "demo".
    out
        Folder for the drafter; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
    anchors
        Blocks drawn from each sequence at each step.
    gamma
        Decay of the loss weights exp(-(k-1)/gamma); by default the published one for the block size.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    if not data:
        raise ValueError("expected files or folders to train on, found none")
    options, drafter_options = loop.options(), DrafterOptions(anchors, gamma)
    folder = hub.resolve(target, console=progress_console(console))
    tokenizer = load_tokenizer(folder)
    config, params = load_decoder(folder, jnp.float32, progress_console(console))
    draft_config = sizes.config(config, tokenizer)
    end = config.eos_token_ids[0] if config.eos_token_ids else 0
    parts = split_documents(read_documents(data), loop.held_out, loop.seed)
    streams = [encode_documents(tokenizer, part, end) for part in parts]
    lm = LanguageModel(config, Models(params, None), tokenizer, None, "float32")
    trained, held_out = regeneration.apply(lm, streams, end, out / "training", console)
    result = train_drafter(config, params, draft_config, trained, held_out, options, drafter_options, out / "training", console)
    save_params(out, dflash.config_to_hf(draft_config), dflash.declare(draft_config), result.params, jnp.float32)
    finish(result, out, console, json_file, training_tokens=int(trained.in_loss.sum()), target=target)


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
