"""`tilewright train`: language models, DFlash drafters for them, and the demo pair."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
from cyclopts import App, Parameter
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import JsonFile, check_json_file, human_console, write_json
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
    END_OF_TEXT,
    Stream,
    encode_documents,
    read_documents,
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
        f"{result.tokens_per_s:,.0f} tokens/s"
    )
    write_json(json_file, {**result.figures(), **more, "chip": chip_name(), "out": str(out)})


@app.command
def lm(
    *data: Path,
    out: Path,
    tokenizer: Path | None = None,
    vocab_size: int = 4096,
    hidden_size: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate_size: int = 768,
    context: int = 1024,
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
    context
        The longest sequence that the model will accept.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    if not data:
        raise ValueError("expected files or folders to train on, found none")
    trained, held_out = split_documents(read_documents(data), loop.held_out, loop.seed)
    out.mkdir(parents=True, exist_ok=True)
    bpe = prepare_tokenizer(out, tokenizer, trained, vocab_size)
    end = bpe.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"the tokenizer lacks the token {END_OF_TEXT} that separates documents")
    config = DecoderConfig(
        "qwen3", bpe.get_vocab_size(), hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, rope_theta=10000.0,
        tie_word_embeddings=True, max_position_embeddings=context, eos_token_ids=(end,),
    )  # fmt: skip
    streams = [encode_documents(bpe, documents, end) for documents in (trained, held_out)]
    result = train_lm(config, streams[0], streams[1], loop.options(), out / "training", console)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, jnp.float32)
    bpe.save(str(out / "tokenizer.json"))
    finish(result, out, console, json_file, training_tokens=len(streams[0].tokens))


def prepare_tokenizer(out: Path, given: Path | None, documents: list[str], vocab_size: int) -> Tokenizer:
    """The given tokenizer, the one that an interrupted run left, or a new one."""
    if given is not None:
        return load_tokenizer(given)
    if (out / "tokenizer.json").exists():
        return load_tokenizer(out)
    tokenizer = train_tokenizer(documents, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    return tokenizer


@app.command
def drafter(
    *data: Path,
    target: str,
    out: Path,
    block_size: int = 16,
    layers: int = 2,
    taps: tuple[int, ...] = (),
    mask_token_id: int | None = None,
    anchors: int = 32,
    gamma: float | None = None,
    regenerated: int = 0,
    prompt_tokens: int = 64,
    response_tokens: int = 192,
    temperature: float = 1.0,
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
    taps
        The target's layers whose outputs the drafter reads, from 0; by default the published choice for five, or all of fewer.
    mask_token_id
        The token that stands for a position to be drafted; by default <|mask|>, else the last of the vocabulary.
    anchors
        Blocks drawn from each sequence at each step.
    gamma
        Decay of the loss weights exp(-(k-1)/gamma); by default the published one for the block size.
    regenerated
        Let the target continue this many stretches of the data and train on what it writes instead of on the data.
    prompt_tokens, response_tokens
        Lengths of such a stretch and of its continuation.
    temperature
        Of the continuations; half of them are always greedy.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    console = human_console(json_file)
    if not data:
        raise ValueError("expected files or folders to train on, found none")
    options = loop.options()
    folder = hub.resolve(target, console=console)
    tokenizer = load_tokenizer(folder)
    config, params = load_decoder(folder, jnp.float32, console)
    draft_config = drafter_config(config, tokenizer, block_size, layers, taps, mask_token_id)
    documents = split_documents(read_documents(data), loop.held_out, loop.seed)
    end = config.eos_token_ids[0] if config.eos_token_ids else 0
    streams = [encode_documents(tokenizer, part, end) for part in documents]
    if regenerated:
        model = LanguageModel(config, Models(params, None), tokenizer, None, "float32")
        samplings = [Sampling(response_tokens, 0.0), Sampling(response_tokens, temperature)]
        streams = [
            continuation(model, stream, count, prompt_tokens, samplings, out / "training" / f"responses_{name}.jsonl", end, console)
            for name, stream, count in zip(("trained", "held_out"), streams, (regenerated, max(64, regenerated // 32)), strict=True)
        ]
    result = train_drafter(
        config, params, draft_config, streams[0], streams[1], options, DrafterOptions(anchors, gamma), out / "training", console
    )
    save_params(out, dflash.config_to_hf(draft_config), dflash.declare(draft_config), result.params, jnp.float32)
    finish(result, out, console, json_file, training_tokens=int(streams[0].in_loss.sum()), target=target)


def drafter_config(
    config: DecoderConfig, tokenizer: Tokenizer, block_size: int, layers: int, taps: tuple[int, ...], mask_token_id: int | None
) -> DFlashConfig:
    """A drafter with the target's own layer sizes."""
    if mask_token_id is None:
        mask_token_id = tokenizer.token_to_id("<|mask|>")
        mask_token_id = config.vocab_size - 1 if mask_token_id is None else mask_token_id
    if not taps:
        taps = tuple(range(config.num_layers)) if config.num_layers < 9 else default_target_layers(config.num_layers, 5)
    if block_size < 2:
        raise ValueError(f"expected a block size of at least 2, found {block_size}")
    drafter = DFlashConfig(
        config.vocab_size, config.hidden_size, config.intermediate_size, layers, config.num_heads, config.num_kv_heads,
        config.head_dim, block_size, mask_token_id, taps, config.num_layers, config.rms_norm_eps, config.rope_theta,
    )  # fmt: skip
    dflash.check_fits(drafter, config)
    return drafter


def continuation(
    model: LanguageModel, stream: Stream, count: int, prompt_tokens: int, samplings: list[Sampling], path: Path, end: int,
    console: Console,
) -> Stream:  # fmt: skip
    prompts = cut_prompts(stream, count, prompt_tokens, seed=0)
    return regenerate(model, prompts, samplings, path, end, console)


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
