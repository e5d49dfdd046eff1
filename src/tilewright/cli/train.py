"""`tilewright train`: language models; drafters, the demo's models and graph neural networks have files of their own."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from shutil import copyfile
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import given, keep_programs, mesh_axes
from tilewright.cli.options import CompileCache, flag, option_class, told
from tilewright.cli.outputs import JsonFile, check_output_folder, human_console, progress_console, write_json
from tilewright.compiled.machine import chip_name
from tilewright.models import decoder, hub
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import CONFIG, WEIGHTS, decoder_config, load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.exchanges import FullyShardedPlan, Halves
from tilewright.parallel.mesh import is_first_process
from tilewright.train.checkpoint import steps_in
from tilewright.train.data import (
    Document,
    Split,
    TokenStream,
    encode_documents,
    end_of_text,
    read_documents,
    split_documents,
    split_windows,
    train_tokenizer,
)
from tilewright.train.grow import grow
from tilewright.train.lm import train_lm
from tilewright.train.loop import TrainResult
from tilewright.train.sharded import ShardedSetup, model_shardings, training_mesh
from tilewright.train.text import TextOptions, require_texts, text_metrics


@option_class
class LoopOptions:
    """Options of training.

    Attributes:
        steps: optimiser steps.
        batch_size: sequences a step.
        sequence_length: tokens a sequence.
        learning_rate: peak rate of AdamW (with muon, of embeddings and norms).
        optimizer: "adamw", or "muon" for the matrices inside the layers.
        muon_learning_rate: peak rate of Muon.
        seed: of the initialisation and of the data's order.
        held_out: share of the documents that is kept for the held-out loss; of windows, where it is less than one document.
        evaluate_every: steps from one held-out loss to the next.
        save_every: steps from one checkpoint to the next.
        matmul_dtype: of matrix products: float32, bfloat16 with float32 sums, or auto, which is bfloat16 where the chip has
            instructions for it. Weights are float32 either way.
        schedule: of the rate after its warm-up: cosine falls to a twentieth; wsd stays, and falls over the last steps.
        cooldown: share of the steps over which wsd falls; 0 for a run that another one goes on from.
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
    matmul_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    schedule: Literal["cosine", "wsd"] = "cosine"
    cooldown: float = 0.2
    compile_cache: CompileCache = True

    def options(self) -> TextOptions:
        """Training options that these arguments stand for. Raises a `ValueError` where an option is out of its range."""
        if not 0 < self.held_out < 1:
            raise ValueError(f"expected a held-out share between 0 and 1, found {self.held_out}")
        return TextOptions(**{k: v for k, v in vars(self).items() if k not in ("held_out", "compile_cache")})


def require_data(data: Sequence[Path]) -> None:
    if not data:
        raise ValueError("expected files or folders to train on, found none")


def say_left_out(left_out: Mapping[str, int], console: Console) -> None:
    """Prints how much is left out of the training data, by reason; nothing where that is nothing."""
    if reasons := ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count):
        console.print(f"left out: {reasons}", markup=False)


def read_split(data: Sequence[Path], loop: LoopOptions, console: Console) -> tuple[list[Document], Split | None]:
    """Documents of the data, and how they are split; None where windows are to be held out (see `split_documents`)."""
    left_out: Counter[str] = Counter()
    documents = read_documents(data, left_out)
    say_left_out(left_out, console)
    parts = split_documents(documents, loop.held_out, loop.seed)
    if parts is not None:
        console.print(f"held out: {len(parts[1]):,} of {len(documents):,} documents", markup=False)
    return documents, parts


def chat_template(folder: Path | None, documents: Sequence[Document], console: Console) -> ChatTemplate | None:
    """The chat template of a model, if there are conversations among the documents and the model has one."""
    if all(document.chat is None for document in documents):
        return None
    template = None if folder is None else ChatTemplate.load(folder)
    if template is None:
        console.print("conversations are written as plain text, for the model has no chat template")
    return template


def encode_split(
    encode: Callable[[Sequence[Document]], TokenStream],
    documents: Sequence[Document],
    parts: Split | None,
    length: int,
    loop: LoopOptions,
    console: Console,
) -> tuple[TokenStream, TokenStream]:
    """Tokenised text to train on, and held-out text: of `parts`, or windows of `length` tokens of all documents."""
    if parts is not None:
        return encode(parts[0]), encode(parts[1])
    streams = split_windows(encode(documents), length, loop.held_out, loop.seed)
    windows = [len(stream.tokens) // length for stream in streams]
    shown = f"{windows[1]:,} of {sum(windows):,} windows of {length} tokens, documents being few ({len(documents):,})"
    console.print(f"held out: {shown}", markup=False)
    return streams


def check_context(length: int, context: int) -> None:
    """Raises a `ValueError` where sequences are longer than a model's context."""
    if length > context:
        raise ValueError(f"expected sequences of at most the model's context of {context} tokens, found {length}")


def check_out(out: Path) -> None:
    """Raises a `ValueError` where a run cannot write to a folder, or would write over a model that is not its own."""
    training = out / "training"
    check_output_folder("--out", training)
    if not steps_in(training) and any((out / name).exists() for name in (CONFIG, WEIGHTS)):
        raise ValueError(f"--out {out}: it holds a model and no run to go on with; name another folder")


def finish(result: TrainResult, out: Path, console: Console, json_file: str | None, **more: object) -> None:
    loss, held_out = ("–" if np.isnan(result.last(name)) else f"{result.last(name):.3f}" for name in ("loss", "held_out_loss"))
    summary = f"{out}: loss {loss}, held-out loss {held_out} nats a token, {result.rate:,.0f} tokens/s"
    console.print(summary, markup=False)
    write_json(json_file, {**text_metrics(result), **more, "chip": chip_name(), "out": str(out)})


@option_class
class ModelSizes:
    """Sizes of a language model; with --start, the model started from has its own, and can grow in layers and context.

    Attributes:
        hidden_size: width of the residual stream (256 by default).
        layers: the model's layers (4). With --start as many as there are; more of them begin as copies that add nothing yet.
        heads: query heads of a layer (4).
        kv_heads: key/value heads of a layer; they divide the query heads (2).
        head_dim: size of a head (64).
        intermediate_size: width inside a layer's MLP (768).
        context: the longest sequence that the model will accept (1024; with --start what it was, or more).
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
        if wrong := told(self, *names):
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


@option_class
class MeshOptions:
    """Options of training over several devices.

    Attributes:
        mesh: devices along "fsdp", which divides batches and weights, and "tp", which divides layers: fsdp=4,tp=2. By default
            one device. A run may go on over another mesh.
        prefetch_distance: by how many layers weights are gathered before their turn; two numbers are for attention and MLP.
        scatter_delay: by how many layers gradients are scattered after their turn.
        remat: the backward pass gathers weights and computes activations again.
        scan_layers: layers run in a loop, which compiles faster.
        rings: collectives go hop by hop, weights' and activations'.
        compute_dtype: of the stream, of products and of weights on their way. Weights are float32 where they lie, and gradients
            are summed so.
        accumulate: into how many parts a batch is divided, one after another.
    """

    mesh: str | None = None
    prefetch_distance: str = "1"
    scatter_delay: str = "1"
    remat: bool = True
    scan_layers: bool = False
    rings: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    accumulate: int = 1

    def of(self, config: DecoderConfig) -> Mesh | None:
        """The mesh for a model; None without one.

        Raises:
            ValueError: it does not fit the devices or the model, or there is none and several processes.
        """
        if self.mesh is not None:
            return training_mesh(mesh_axes(self.mesh), config)
        if jax.process_count() > 1:
            raise ValueError(f"expected --mesh for {jax.process_count()} processes, found none")
        return None

    def setup(self, config: DecoderConfig, options: TextOptions) -> ShardedSetup | None:
        """The model on the mesh; None without one.

        Raises:
            ValueError: an option that does not fit the devices, the model or the batch, or that says nothing without a mesh.
        """
        mesh = self.of(config)
        if mesh is None:
            if without := told(self):
                raise ValueError(f"expected --mesh with {', '.join(without)}, found none")
            return None
        import orbax.checkpoint  # noqa: F401 (of the extra that checkpoints need: where it is absent, this is when to say so)

        form = "ring" if self.rings else "whole"
        plan = FullyShardedPlan(
            halves("prefetch_distance", self.prefetch_distance),
            halves("scatter_delay", self.scatter_delay),
            remat=self.remat,
            scan=self.scan_layers,
            weights=form,
            gradients=form,
            activations=form,
            dtype=self.compute_dtype,
        )
        made = ShardedSetup(config, options.ops, mesh, plan, self.accumulate)
        made.check_batch((options.batch_size, options.sequence_length + 1))
        return made

    def figures(self) -> dict[str, object]:
        """For `--json`: the devices and how they stand; nothing without a mesh."""
        return {} if self.mesh is None else {"devices": prod(mesh_axes(self.mesh).values()), "mesh": self.mesh}


def halves(name: str, text: str) -> Halves:
    """A shift of both halves, or one of each: `1` or `1,2`."""
    if re.fullmatch(r"\d+(,\d+)?", text) is None:
        raise ValueError(f"expected {flag(name)} as a number of layers, or two for attention and MLP, found {text!r}")
    first, _, second = text.partition(",")
    return Halves(int(first), int(second or first))


@dataclass(frozen=True)
class Beginning:
    """Tokenizer, configuration and parameters that the training of a language model begins with.

    Attributes:
        tokenizer: which splits the text.
        config: the model's; None where its sizes are still to be chosen.
        params: float32, over a mesh divided; None for random ones.
        folder: of the model or the tokenizer; None for a tokenizer that is made for the data.
    """

    tokenizer: Tokenizer
    config: DecoderConfig | None = None
    params: DecoderParams | None = None
    folder: Path | None = None

    @classmethod
    def choose(
        cls, start: str | None, tokenizer: Path | None, sizes: ModelSizes, over: MeshOptions, console: Console
    ) -> "Beginning | None":
        """A model that is there already with its tokenizer, or a tokenizer alone; None where neither is named."""
        if start is not None:
            fixed = [name for name in vars(sizes) if name not in ("layers", "context")]
            sizes.refuse("--start takes its sizes and its tokenizer along", *fixed)
            if tokenizer is not None:
                raise ValueError("--start takes its tokenizer along, found --tokenizer as well")
            folder = hub.resolve(start, console=progress_console(console), check=load_tokenizer)
            mesh = over.of(decoder_config(folder))
            shard = None if mesh is None else partial(model_shardings, mesh)
            config, params = load_decoder(folder, jnp.float32, progress_console(console), shard)
            config, params = grow(config, params, sizes.layers, sizes.context)
            return cls(load_tokenizer(folder), config, params, folder)
        if tokenizer is not None:
            sizes.refuse("--tokenizer has its own vocabulary", "vocab_size")
            return cls(load_tokenizer(tokenizer), folder=tokenizer)
        return None


def lm(
    *data: Path,
    out: Path,
    start: str | None = None,
    tokenizer: Path | None = None,
    sizes: ModelSizes = ModelSizes(),
    loop: LoopOptions = LoopOptions(),
    over: MeshOptions = MeshOptions(),
    dtype: Dtype = "float32",
    router_aux_loss_coef: float | None = None,
    json_file: JsonFile = None,
) -> None:
    """Trains a language model: one of Qwen3's architecture from random weights, or one that is there already.

    Args:
        data: text files, JSONL or JSON files of records, or folders of both. Records are chats (messages or conversations),
            instruction and output, prompt and completion or response, question and answer, or text. What is given is not in the
            loss: prompts, and all but the assistant's messages.
        out: folder for the model; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: a model to go on from, with a fresh optimizer: a folder, a Hugging Face id, or "demo".
        tokenizer: a folder with a tokenizer.json; by default a byte-level BPE is trained on the data.
        dtype: of the model as it is written; it is trained in float32.
        router_aux_loss_coef: of a mixture of experts: what the loss that balances experts is multiplied with, 0 for none; by
            default the model's.
    """
    console = human_console(json_file)
    require_data(data)
    check_out(out)
    options = loop.options()
    keep_programs(loop.compile_cache)
    documents, parts = read_split(data, loop, console)
    kept = kept_tokenizer(out)
    begin = Beginning.choose(start, tokenizer, sizes, over, console)
    if begin is None:
        begin = Beginning(kept or agreed_tokenizer(train_tokenizer(parts[0] if parts else documents, sizes.bpe_size)))
    bpe = begin.tokenizer
    run_fingerprint = {"vocab_size": sizes.bpe_size}
    require_same(kept, bpe, out)
    config = with_balance(begin.config or sizes.config(bpe.get_vocab_size(), end_of_text(bpe)), router_aux_loss_coef)
    check_context(options.sequence_length, config.max_position_embeddings)
    last_token = config.eos_token_ids[0] if config.eos_token_ids else end_of_text(bpe)
    template = chat_template(begin.folder, documents, console)
    encode = partial(encode_documents, bpe, end=last_token, template=template, other_ends=config.eos_token_ids)
    streams = encode_split(encode, documents, parts, options.sequence_length + 1, loop, console)
    require_texts(streams[0], streams[1], options.sequence_length + 1, options)
    setup = over.setup(config, options)
    save_tokenizer(out, bpe)
    result = train_lm(config, streams[0], streams[1], options, out / "training", console, begin.params, run_fingerprint, setup)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, DTYPES[dtype])
    copy_tokenizer_files(begin.folder, out)
    finish(result, out, console, json_file, training_tokens=len(streams[0].tokens), **over.figures())


def require_same(kept: Tokenizer | None, tokenizer: Tokenizer, out: Path) -> None:
    """Raises a `ValueError` where a run was begun with another tokenizer."""
    if kept is not None and kept.to_str() != tokenizer.to_str():
        raise ValueError(f"{out} holds a run with another tokenizer; name another --out")


def with_balance(config: DecoderConfig, weight: float | None) -> DecoderConfig:
    """The configuration with another weight of the loss that balances experts, if one is given.

    Raises:
        ValueError: it is negative, or there are no experts.
    """
    if weight is None:
        return config
    if config.mixture is None or not 0 <= weight < float("inf"):
        found = f"{weight:g} for a model {'without experts' if config.mixture is None else 'with experts'}"
        raise ValueError(f"expected --router-aux-loss-coef of at least 0, for a model with experts, found {found}")
    return replace(config, balance=weight)


def agreed_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The first process's: nothing promises that training gives each the same."""
    if jax.process_count() == 1:
        return tokenizer
    own = np.frombuffer(tokenizer.to_str().encode(), np.uint8)
    found = np.zeros(int(multihost_utils.broadcast_one_to_all(np.int32(len(own)))), np.uint8)
    found[: len(own)] = own[: len(found)]
    return Tokenizer.from_str(np.asarray(multihost_utils.broadcast_one_to_all(found)).tobytes().decode())


def save_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Writes a tokenizer into a model's folder, which it makes. Of processes, the first one does."""
    if is_first_process():
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(out / "tokenizer.json"))


def copy_tokenizer_files(folder: Path | None, out: Path) -> None:
    """Copies what a tokenizer has beside it, a chat template say, to a new model's folder, behind the run."""
    if folder is None or not is_first_process():
        return
    for name in hub.TOKENIZER[1:]:
        if (folder / name).is_file():
            copyfile(folder / name, out / name)


def kept_tokenizer(out: Path) -> Tokenizer | None:
    """The tokenizer that an interrupted run left with its checkpoint."""
    there = steps_in(out / "training") and (out / "tokenizer.json").exists()
    return load_tokenizer(out) if there else None
