"""`tilewright train lm`, and the options and functions that all `tilewright train` commands share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import Group, Parameter
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import check_decodes, given, keep_programs, mesh_axes
from tilewright.cli.options import COMMON, MODEL, option_class, settings
from tilewright.cli.outputs import JsonFile, check_output_folder, human_console, progress_console, write_json
from tilewright.compiled.machine import chip_name
from tilewright.models import decoder, hub
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import CONFIG, WEIGHTS, decoder_config, load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.exchanges import FullyShardedPlan, Sublayers
from tilewright.parallel.mesh import is_first_process
from tilewright.train.balance import balanced
from tilewright.train.checkpoint import saved_steps
from tilewright.train.data import (
    Document,
    Split,
    TokenStream,
    encode_documents,
    encode_each,
    end_of_text,
    find_files,
    read_documents,
    split_documents,
    split_windows,
    train_tokenizer,
)
from tilewright.train.grow import grow
from tilewright.train.lm import check_segments, language_model, train_predictor
from tilewright.train.log import LogOptions
from tilewright.train.loop import TrainResult
from tilewright.train.step import EVERYTHING, NOTHING, Remat, TrainingPlacement, model_shardings, training_mesh
from tilewright.train.text import Batches, Packing, StreamOptions, TextOptions, Windows, text_metrics

if TYPE_CHECKING:
    from tilewright.train.stream import StreamBatches, StreamSources

TEXT = Group("Text", sort_key=3)
TRAINING = Group("Training", sort_key=4)
PERFORMANCE = Group("Performance", sort_key=5)
"""Groups of options in the help of the commands, in this order."""

JsonOption = Annotated[JsonFile, Parameter(group=COMMON)]


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of `--optimizer`.

    Attributes:
        kind: AdamW, or Muon for the matrices inside the layers and AdamW for the rest. [default: adamw]
        muon_learning_rate: peak learning rate of Muon. [default: 0.02]
        schedule: learning rate after the warm-up; cosine decays to a twentieth of the peak, wsd stays constant and decays
            linearly to 0 at the end. [default: cosine]
        cooldown: share of the steps over which wsd decays; 0 if another run continues from the model. [default: 0.2]
        warmup: share of the steps over which the learning rate rises. [default: 0.04]
        weight_decay: decoupled weight decay of matrices, without norms and embeddings. [default: 0.01]
        clip: largest global norm of a gradient. [default: 1]
        state_dtype: dtype of the moving averages; bfloat16 halves their memory. [default: float32]
    """

    kind: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate: float = 0.02
    schedule: Literal["cosine", "wsd"] = "cosine"
    cooldown: float = 0.2
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    state_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class SaveSettings:
    """Settings of `--save`.

    Attributes:
        every: steps between checkpoints; epochs for graphs. [default: 100, graphs 50]
        keep: number of checkpoints to keep, the last ones. [default: 1]
        folder: folder or URL of the checkpoints, such as gs://bucket/run. [default: `training/checkpoints` of --out]
    """

    every: int | None = None
    keep: int = 1
    folder: str | None = None

    def options(self, every: int) -> dict[str, Any]:
        """Returns the fields of `TrainOptions`, with a default number of steps between checkpoints."""
        return {"save_every": given(self.every, every), "keep": self.keep, "checkpoints": self.folder}


SaveOption = Annotated[SaveSettings, settings(SaveSettings, "checkpoints, which are written while training goes on")]
LogOption = Annotated[LogOptions, settings(LogOptions, "log of the metrics, beside `training/metrics.jsonl` of --out")]


@Parameter(group=TRAINING)
@option_class
class LoopOptions:
    """Options of the training loop.

    Attributes:
        steps: number of optimizer steps. An interrupted or finished run can be extended by more.
        batch_size: sequences per step.
        sequence_length: tokens per sequence.
        learning_rate: peak learning rate of AdamW.
        seed: seed of the initial weights and of the order of the data.
        held_out: share of the documents that is held out for evaluation, or a file or folder of held-out documents; a share of
            less than one document holds out windows.
        evaluate_every: steps between evaluations of the held-out loss.
        accumulate: parts of a batch that run one after another, which takes less memory; the result is that of the batch at
            once.
        matmul_dtype: dtype of matrix products. auto takes bfloat16 with float32 sums if the chip has instructions for it,
            else float32. Weights are float32.
        compute_dtype: dtype of activations, and of weights as forward and backward passes read them. bfloat16 halves the memory
            traffic of accelerators; stored weights, optimizer state and sums of gradients over devices stay float32.
    """

    steps: Annotated[int, Parameter(alias="-n", group=COMMON)] = 1000
    batch_size: Annotated[int, Parameter(alias="-b", group=COMMON)] = 8
    sequence_length: Annotated[int, Parameter(alias="-l", group=COMMON)] = 512
    learning_rate: Annotated[float, Parameter(group=COMMON)] = 6e-4
    optimizer: Annotated[OptimizerSettings, settings(OptimizerSettings, "optimizer and learning rate schedule")] = (
        OptimizerSettings()
    )
    seed: int = 0
    held_out: Annotated[float | Path, Parameter(group=TEXT)] = 0.02
    evaluate_every: int = 100
    save: SaveOption = SaveSettings()
    log: LogOption = LogOptions()
    accumulate: Annotated[int, Parameter(group=PERFORMANCE)] = 1
    matmul_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Parameter(group=PERFORMANCE)] = "auto"
    compute_dtype: Annotated[Literal["float32", "bfloat16"], Parameter(group=PERFORMANCE)] = "float32"

    def options(self) -> TextOptions:
        """Builds the options of the training loop. Raises a `ValueError` for an option out of its range."""
        if not isinstance(self.held_out, Path) and not 0 < self.held_out < 1:
            raise ValueError(f"expected a held-out share between 0 and 1, found {self.held_out}")
        left_out = ("optimizer", "held_out", "save")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        optimizer = {**vars(self.optimizer)}
        return TextOptions(optimizer=optimizer.pop("kind"), **optimizer, **self.save.options(100), **fields)

    @property
    def held_out_share(self) -> float:
        """The share of `held_out`. Raises a `ValueError` for a file or folder, where only a share is possible."""
        if isinstance(self.held_out, Path):
            raise ValueError(f"expected a share of the records for --held-out, found {self.held_out}")
        return self.held_out


def require_data(data: Sequence[Path]) -> None:
    if not data:
        raise ValueError("expected files or folders to train on, found none")


def print_left_out(left_out: Mapping[str, int], console: Console) -> None:
    """Prints how much training data is left out, by reason; prints nothing if all data is used."""
    if reasons := ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count):
        console.print(f"left out: {reasons}", markup=False)


def read_split(data: Sequence[Path], loop: LoopOptions, console: Console) -> tuple[list[Document], Split | None]:
    """Reads the documents of the data, and splits them; the split is None to hold out windows (see `split_documents`)."""
    left_out: Counter[str] = Counter()
    documents = read_documents(data, left_out)
    if isinstance(loop.held_out, Path):
        parts: Split | None = (documents, read_documents([loop.held_out], left_out))
        total = f"documents of {loop.held_out}"
    else:
        parts = split_documents(documents, loop.held_out, loop.seed)
        total = f"of {len(documents):,} documents"
    print_left_out(left_out, console)
    if parts is not None:
        console.print(f"held out: {len(parts[1]):,} {total}", markup=False)
    return documents, parts


def chat_template(folder: Path | None, documents: Sequence[Document], console: Console) -> ChatTemplate | None:
    """Loads the model's chat template; None without one, with a message if the documents contain conversations."""
    template = None if folder is None else ChatTemplate.load(folder)
    if template is None and any(document.chat is not None for document in documents):
        console.print("the model has no chat template: conversations become plain text")
    return template


def encode_split(
    encode: Callable[[Sequence[Document]], TokenStream],
    documents: Sequence[Document],
    parts: Split | None,
    length: int,
    loop: LoopOptions,
    console: Console,
) -> tuple[TokenStream, TokenStream]:
    """Tokenises training text and held-out text.

    Args:
        encode: tokenises documents.
        documents: all documents.
        parts: training documents and held-out documents; None holds out windows of `length` tokens of all documents.
        length: tokens per window.
        loop: options with the share and the seed.
        console: console for the number of held-out windows.
    """
    if parts is not None:
        return encode(parts[0]), encode(parts[1])
    streams = split_windows(encode(documents), length, loop.held_out_share, loop.seed)
    windows = [len(stream.tokens) // length for stream in streams]
    shares = f"{windows[1]:,} of {sum(windows):,} windows of {length} tokens"
    console.print(f"held out: {shares}; too few documents ({len(documents):,}) to hold out a whole one", markup=False)
    return streams


def check_context(length: int, context: int) -> None:
    """Raises a `ValueError` for sequences longer than the model's context."""
    if length > context:
        raise ValueError(f"expected sequences of at most the model's context of {context} tokens, found {length}")


def check_out(out: Path, save: SaveSettings = SaveSettings(), names: Sequence[str] = (CONFIG, WEIGHTS)) -> None:
    """Raises a `ValueError` if a folder is not writable, or has a model without a checkpoint to resume.

    Args:
        out: the folder.
        save: settings of checkpoints.
        names: files of the model that training writes.
    """
    training = out / "training"
    check_output_folder("--out", training)
    if not saved_steps(training, save.folder) and any((out / name).exists() for name in names):
        raise ValueError(
            f"expected --out without a model, or with a checkpoint to resume, found a model in {out}; name another folder"
        )


def report(result: TrainResult, out: Path, console: Console, json_file: str | None, **more: object) -> None:
    """Prints loss and speed of a finished run, and writes its metrics to the file of `--json`."""
    loss, held_out = ("–" if np.isnan(result.last(name)) else f"{result.last(name):.3f}" for name in ("loss", "held_out_loss"))
    summary = f"{out}: loss {loss}, held-out loss {held_out} nats/token, {result.rate:,.0f} tokens/s"
    console.print(summary, markup=False)
    write_json(json_file, {**text_metrics(result), **more, "chip": chip_name(), "out": str(out)})


@dataclass(frozen=True)
class ModelSizes:
    """Settings of `--sizes`: sizes of a language model. Only layers and context are allowed with --start.

    Attributes:
        hidden_size: width of the residual stream. [default: 256]
        layers: number of layers. With --start at least the model's number; new layers start as copies with no effect on the
            output. [default: 4]
        heads: query heads per layer. [default: 4]
        kv_heads: key/value heads per layer, a divisor of heads. [default: 2]
        head_dim: size of a head. [default: 64]
        intermediate_size: width inside the MLP of a layer. [default: 768]
        context: longest sequence of the model in tokens. With --start at least the model's context. [default: 1024]
        vocab_size: largest vocabulary of the byte-level BPE that is trained on the data. [default: 4096]
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

    def reject(self, reason: str, *names: str) -> None:
        """Raises a `ValueError` if one of the named sizes is set."""
        if wrong := [name for name in names if getattr(self, name) is not None]:
            raise ValueError(f"{reason}, found {', '.join(wrong)} in --sizes")

    def config(self, vocab_size: int, end: int) -> DecoderConfig:
        """Builds the configuration of a model of Qwen3's architecture.

        Args:
            vocab_size: tokens in the vocabulary.
            end: token that ends a text.
        """
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


SizesOption = Annotated[ModelSizes, settings(ModelSizes, "sizes of the model"), Parameter(group=MODEL)]


@dataclass(frozen=True)
class ShardingSettings:
    """Settings of `--sharding`: communication and memory of training over a mesh.

    Attributes:
        prefetch_distance: layers between the all-gather of weights and their use; two values are for attention and MLP.
            [default: 1]
        scatter_delay: layers between a gradient and its reduce-scatter; two values are for attention and MLP. [default: 1]
        scan_layers: run the layers in a loop, which compiles faster. [default: false]
        rings: decompose collectives of weights and activations into hops between neighbours. [default: false]
        strategy: explicit places the collectives as the other settings say; auto leaves them to XLA's partitioner, for
            comparison. [default: explicit]
    """

    prefetch_distance: tuple[int, ...] = (1,)
    scatter_delay: tuple[int, ...] = (1,)
    scan_layers: bool = False
    rings: bool = False
    strategy: Literal["explicit", "auto"] = "explicit"


@Parameter(group=PERFORMANCE)
@option_class
class MeshOptions:
    """Options of training over several devices.

    Attributes:
        mesh: devices along "fsdp", which shards batches and weights, and "tp", which shards layers, such as fsdp=4,tp=2; and
            replicas of these along "dp", which shards batches. By default one device. A run can resume on another mesh.
        remat: activations of a layer that are saved for the backward pass, by JAX's policies; others are computed again.
            nothing_saveable also gathers weights again. By default everything_saveable, over a mesh nothing_saveable; explicit
            collectives have these two.
    """

    mesh: Annotated[str | None, Parameter(group=COMMON)] = None
    sharding: Annotated[ShardingSettings, settings(ShardingSettings, "communication and memory, with --mesh")] = (
        ShardingSettings()
    )
    remat: Remat | None = None

    def build_mesh(self, config: DecoderConfig) -> Mesh | None:
        """Builds the mesh for a model; None for one device.

        Raises:
            ValueError: the mesh does not fit the devices or the model, or several processes have no mesh.
        """
        if self.mesh is not None:
            return training_mesh(mesh_axes(self.mesh), config)
        if jax.process_count() > 1:
            raise ValueError(f"expected --mesh for {jax.process_count()} processes, found none")
        return None

    def placement(self, config: DecoderConfig, options: TextOptions) -> TrainingPlacement:
        """Plans the training of a model on the mesh, or on one device.

        Raises:
            ValueError: an option does not fit the devices, the model or the batch, or needs a mesh.
        """
        mesh = self.build_mesh(config)
        if mesh is None:
            if self.sharding != ShardingSettings():
                raise ValueError("expected --mesh with --sharding, found none")
            return TrainingPlacement(remat=self.remat or EVERYTHING)
        sharding = self.sharding
        if sharding.strategy == "auto" and sharding != ShardingSettings(strategy="auto"):
            raise ValueError("expected --sharding strategy=auto without settings of the explicit strategy, found others")
        remat = self.remat or NOTHING
        if sharding.strategy == "explicit" and remat not in (EVERYTHING, NOTHING):
            raise ValueError(f"expected --remat {EVERYTHING} or {NOTHING} with explicit collectives, found {remat}")
        form = "ring" if sharding.rings else "whole"
        plan = FullyShardedPlan(
            parse_sublayers("prefetch_distance", sharding.prefetch_distance),
            parse_sublayers("scatter_delay", sharding.scatter_delay),
            remat=remat == NOTHING,
            scan=sharding.scan_layers,
            weights=form,
            gradients=form,
            activations=form,
            dtype="bfloat16" if options.compute_dtype == "bfloat16" else "float32",
        )
        plan.check(config.num_layers, balanced(config) is not None)
        placement = TrainingPlacement(mesh, plan if sharding.strategy == "explicit" else None, remat)
        placement.check_batch(options.batch_size, options.sequence_length, options.accumulate)
        return placement

    def metrics(self) -> dict[str, object]:
        """Number of devices and mesh for `--json`; empty for one device."""
        return {} if self.mesh is None else {"devices": prod(mesh_axes(self.mesh).values()), "mesh": self.mesh}


def parse_sublayers(name: str, layers: Sequence[int]) -> Sublayers:
    """Returns one number of layers for attention and MLP each, from one or two. Raises a `ValueError` for more numbers."""
    if len(layers) not in (1, 2):
        raise ValueError(f"expected {name} as one number of layers, or two for attention and MLP, found {len(layers)}")
    return Sublayers(layers[0], layers[-1])


@dataclass(frozen=True)
class InitialModel:
    """Tokenizer, configuration and parameters at the start of the training of a language model.

    Attributes:
        tokenizer: tokenizer of the text.
        config: configuration; None for a new model whose sizes are not built yet.
        params: float32 parameters, sharded over the mesh; None for random parameters.
        folder: folder of the model or the tokenizer; None for a tokenizer that was trained on the data.
    """

    tokenizer: Tokenizer
    config: DecoderConfig | None = None
    params: DecoderParams | None = None
    folder: Path | None = None

    @classmethod
    def load(
        cls, start: str | None, tokenizer: Path | None, sizes: ModelSizes, devices: MeshOptions, console: Console
    ) -> "InitialModel | None":
        """Loads the model of `--start` or the tokenizer of `--tokenizer`; None without both options."""
        if start is not None:
            fixed = [name for name in vars(sizes) if name not in ("layers", "context")]
            sizes.reject("expected no other sizes than layers and context with --start", *fixed)
            if tokenizer is not None:
                raise ValueError("expected --start or --tokenizer, found both: --start brings its own tokenizer")
            folder = hub.resolve(start, console=progress_console(console), check=load_tokenizer)
            check_decodes(folder)
            mesh = devices.build_mesh(decoder_config(folder))
            shard = None if mesh is None else partial(model_shardings, mesh)
            config, params = load_decoder(folder, jnp.float32, progress_console(console), shard)
            config, params = grow(config, params, sizes.layers, sizes.context)
            return cls(load_tokenizer(folder), config, params, folder)
        if tokenizer is not None:
            sizes.reject("expected no vocabulary size with --tokenizer", "vocab_size")
            return cls(load_tokenizer(tokenizer), folder=tokenizer)
        return None


@dataclass(frozen=True)
class StreamSettings:
    """Settings of `--text` of models that learn from one document at a time.

    Attributes:
        stream: read and tokenise the data during the training, in bounded memory, not all before. [default: false]
        shuffle: sequences of a stream in memory, of which batches are drawn at random; 1 keeps the order. [default: 1024]
        shards: parts of a stream, each of which fills its rows of a batch. A run can resume in any number of processes of which
            each has whole parts. [default: number of processes]
    """

    stream: bool = False
    shuffle: int | None = None
    shards: int | None = None

    def stream_options(self) -> StreamOptions | None:
        """Builds the options of a stream; None without one. Raises a `ValueError` for a stream's settings without one."""
        chosen = [name for name, value in vars(self).items() if name not in ("segments", "stream") and value is not None]
        if self.stream:
            return StreamOptions(given(self.shuffle, StreamOptions.shuffle), given(self.shards, jax.process_count()))
        if chosen:
            raise ValueError(f"expected --text stream=true with {', '.join(chosen)}, found none")
        return None


@dataclass(frozen=True)
class TextSettings(StreamSettings):
    """Settings of `--text`.

    Attributes:
        segments: documents of a sequence do not see each other. [default: true, but false for models with linear attention]
        packing: how documents of a stream fill sequences. concatenate cuts them where a sequence ends; first-fit and best-fit
            cut only those longer than a sequence, and pad. [default: concatenate]
    """

    segments: bool | None = None
    packing: Packing | None = None


TextOption = Annotated[TextSettings, settings(TextSettings, "reading and packing of the data"), Parameter(group=TEXT)]

SAMPLE = 16 << 20
"""Characters of a stream that a new tokenizer is trained on."""
GLANCE = 1 << 16
"""Characters of a stream that are read beforehand where the tokenizer exists, to see whether they are conversations."""


@dataclass(frozen=True)
class TrainingData:
    """Data of a run: documents in memory, or a stream.

    Attributes:
        documents: all documents; of a stream a sample of its training documents.
        parts: training documents and held-out documents; None to hold out windows, and for a stream.
        stream: options of the stream; None for documents in memory.
        sources: blocks of the stream.
    """

    documents: list[Document]
    parts: Split | None
    stream: StreamOptions | None = None
    sources: "StreamSources | None" = None

    @classmethod
    def read(
        cls, data: Sequence[Path], loop: LoopOptions, text: StreamSettings, sample: int, console: Console
    ) -> "TrainingData":
        """Reads the documents, or of a stream a sample of this many characters."""
        stream = text.stream_options()
        if stream is None:
            return cls(*read_split(data, loop, console))
        sources = stream_sources(data, loop, stream, console)
        return cls(sources.sample(sample, loop.seed), None, stream, sources)

    @property
    def training_documents(self) -> list[Document]:
        return self.parts[0] if self.parts else self.documents

    def batches(
        self,
        tokenizer: Tokenizer,
        ends: Sequence[int],
        template: ChatTemplate | None,
        loop: LoopOptions,
        text: TextSettings,
        segments: bool,
        placement: TrainingPlacement,
        console: Console,
    ) -> "Windows | StreamBatches":
        """Returns the batches of this process of a model that predicts the next token.

        Args:
            tokenizer: tokenizer of the model.
            ends: tokens that end a message; the first one ends a document.
            template: chat template for conversations.
            loop: options of the training loop.
            text: settings of packing.
            segments: documents of a sequence do not see each other.
            placement: devices.
            console: console for what is held out.

        Raises:
            ValueError: the text is too short for a batch, or has no tokens in the loss.
        """
        options = loop.options()
        length = options.sequence_length + 1
        rows = placement.local_rows(options.batch_size)
        if self.stream is None or self.sources is None:
            encode = partial(encode_documents, tokenizer, end=ends[0], template=template, other_ends=ends[1:])
            streams = encode_split(encode, self.documents, self.parts, length, loop, console)
            return Windows(*streams, length, options, rows, segments)
        from tilewright.train.stream import PackedText, StreamBatches

        encode_some = partial(encode_each, tokenizer, ends=ends, template=template)
        form = PackedText(encode_some, length, text.packing or "concatenate", segments)
        return StreamBatches(self.sources, form, options, self.stream, rows)


def print_read(batches: Batches, console: Console) -> dict[str, object]:
    """Prints how much a run read of a stream; returns the metrics of its data for `--json`."""
    if isinstance(batches, Windows):
        return {"training_tokens": len(batches.stream.tokens)}
    from tilewright.train.stream import StreamBatches

    if not isinstance(batches, StreamBatches):
        return {}
    print_left_out(batches.left_out, console)
    console.print(f"read: {batches.tokens:,} tokens, of which {batches.padding_share:.1%} padding", markup=False)
    return {"tokens_read": batches.tokens, "padding_share": batches.padding_share}


def lm(
    *data: Path,
    out: Annotated[Path, Parameter(alias="-o", group=COMMON)],
    start: Annotated[str | None, Parameter(alias="-m", group=COMMON)] = None,
    tokenizer: Annotated[Path | None, Parameter(group=COMMON)] = None,
    sizes: SizesOption = ModelSizes(),
    loop: LoopOptions = LoopOptions(),
    devices: MeshOptions = MeshOptions(),
    dtype: Annotated[Dtype, Parameter(group=MODEL)] = "float32",
    router_aux_loss_coef: Annotated[float | None, Parameter(group=MODEL)] = None,
    text: TextOption = TextSettings(),
    json_file: JsonOption = None,
) -> None:
    """Trains a language model: a new one of Qwen3's architecture, or an existing one.

    Args:
        data: text files, files of records (JSON lines, also compressed; JSON, Parquet, Arrow, ArrayRecord), or folders of both.
            Records are chats (messages or conversations), instruction and output, prompt and completion or response, question
            and answer, or text. Prompts and messages of other roles than the assistant are not in the loss.
        out: folder for the model. Its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: existing model to train further, with a fresh optimizer: a folder, a Hugging Face id, or "demo".
        tokenizer: folder with a tokenizer.json. By default a byte-level BPE is trained on the data.
        dtype: dtype of the saved model. Training keeps float32 weights.
        router_aux_loss_coef: weight of the loss that balances the experts of a mixture, 0 for none; by default the model's.
    """
    console = human_console(json_file)
    require_data(data)
    check_out(out, loop.save)
    options = loop.options()
    keep_programs()
    found = TrainingData.read(data, loop, text, GLANCE if start or tokenizer else SAMPLE, console)
    saved = saved_tokenizer(out, loop.save)
    initial = InitialModel.load(start, tokenizer, sizes, devices, console)
    if initial is None:
        initial = InitialModel(saved or broadcast_tokenizer(train_tokenizer(found.training_documents, sizes.bpe_size)))
    bpe = initial.tokenizer
    run_fingerprint = {"vocab_size": sizes.bpe_size}
    check_same_tokenizer(saved, bpe, out)
    config = with_balance(initial.config or sizes.config(bpe.get_vocab_size(), end_of_text(bpe)), router_aux_loss_coef)
    check_context(options.sequence_length, config.max_position_embeddings)
    end = config.eos_token_ids[0] if config.eos_token_ids else end_of_text(bpe)
    template = chat_template(initial.folder, found.documents, console)
    apart = given(text.segments, config.delta is None)
    check_segments(config, apart)
    placement = devices.placement(config, options)
    ends = (end, *config.eos_token_ids)
    batches = found.batches(bpe, ends, template, loop, text, apart, placement, console)
    save_tokenizer(out, bpe)
    shared = (out / "training", console, initial.params, run_fingerprint, placement)
    result = train_predictor("language model", language_model(config), batches, *shared)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, DTYPES[dtype])
    copy_tokenizer_files(initial.folder, out)
    report(result, out, console, json_file, **print_read(batches, console), **devices.metrics())


def stream_sources(data: Sequence[Path], loop: LoopOptions, stream: StreamOptions, console: Console) -> "StreamSources":
    """Finds the files of a stream, and divides them and their documents."""
    from tilewright.train.stream import StreamSources  # grain takes a second to import

    left_out: Counter[str] = Counter()
    files = find_files(data, left_out)
    held_out = find_files([loop.held_out], left_out) if isinstance(loop.held_out, Path) else loop.held_out
    print_left_out(left_out, console)
    sources = StreamSources.divide(files, held_out, stream.shards, loop.seed)
    size = sum(file.path.stat().st_size for file in files)
    console.print(
        f"streaming {len(files):,} files of {size / 1e6:,.1f} MB, in {len(sources.trained.blocks):,} blocks", markup=False
    )
    return sources


def check_same_tokenizer(saved: Tokenizer | None, tokenizer: Tokenizer, out: Path) -> None:
    """Raises a `ValueError` if the run to resume has another tokenizer.

    Args:
        saved: tokenizer of the run to resume; None for a new run.
        tokenizer: tokenizer of this run.
        out: folder of the run.
    """
    if saved is not None and saved.to_str() != tokenizer.to_str():
        raise ValueError(f"expected --out without a run of another tokenizer, found one in {out}; name another folder")


def with_balance(config: DecoderConfig, weight: float | None) -> DecoderConfig:
    """Returns the configuration with another weight of the loss that balances experts; unchanged for None.

    Raises:
        ValueError: the weight is negative, or the model has no experts.
    """
    if weight is None:
        return config
    if config.mixture is None or not 0 <= weight < float("inf"):
        found = f"{weight:g} for a model {'without experts' if config.mixture is None else 'with experts'}"
        raise ValueError(f"expected --router-aux-loss-coef of at least 0, for a model with experts, found {found}")
    return replace(config, balance=weight)


def broadcast_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the first process's tokenizer on all processes; a BPE that each trains may differ."""
    if jax.process_count() == 1:
        return tokenizer
    local = np.frombuffer(tokenizer.to_str().encode(), np.uint8)
    shared = np.zeros(int(multihost_utils.broadcast_one_to_all(np.int32(len(local)))), np.uint8)
    shared[: len(local)] = local[: len(shared)]
    return Tokenizer.from_str(np.asarray(multihost_utils.broadcast_one_to_all(shared)).tobytes().decode())


def save_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer into the model's folder, on the first process."""
    if is_first_process():
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(out / "tokenizer.json"))


def copy_tokenizer_files(folder: Path | None, out: Path) -> None:
    """Copies the files beside a tokenizer, such as the chat template, into the folder of the new model."""
    if folder is None or not is_first_process():
        return
    for name in hub.TOKENIZER[1:]:
        if (folder / name).is_file():
            copyfile(folder / name, out / name)


def saved_tokenizer(out: Path, save: SaveSettings) -> Tokenizer | None:
    """Loads the tokenizer of an interrupted run; None without a checkpoint."""
    resumable = saved_steps(out / "training", save.folder) and (out / "tokenizer.json").exists()
    return load_tokenizer(out) if resumable else None
