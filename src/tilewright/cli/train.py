"""`tilewright train lm`, and the options and functions that all `tilewright train` commands share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Literal

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
    end_of_text,
    read_documents,
    split_documents,
    split_windows,
    train_tokenizer,
)
from tilewright.train.grow import grow
from tilewright.train.lm import train_lm
from tilewright.train.loop import TrainResult
from tilewright.train.step import EVERYTHING, NOTHING, Remat, TrainingPlacement, model_shardings, training_mesh
from tilewright.train.text import TextOptions, require_texts, text_metrics

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
        held_out: share of the documents that is held out for evaluation; a share of less than one document holds out windows.
        evaluate_every: steps between evaluations of the held-out loss.
        save_every: steps between checkpoints.
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
    held_out: Annotated[float, Parameter(group=TEXT)] = 0.02
    evaluate_every: int = 100
    save_every: int = 100
    accumulate: Annotated[int, Parameter(group=PERFORMANCE)] = 1
    matmul_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Parameter(group=PERFORMANCE)] = "auto"
    compute_dtype: Annotated[Literal["float32", "bfloat16"], Parameter(group=PERFORMANCE)] = "float32"

    def options(self) -> TextOptions:
        """Builds the options of the training loop. Raises a `ValueError` for an option out of its range."""
        if not 0 < self.held_out < 1:
            raise ValueError(f"expected a held-out share between 0 and 1, found {self.held_out}")
        left_out = ("optimizer", "held_out")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        optimizer = {**vars(self.optimizer)}
        return TextOptions(optimizer=optimizer.pop("kind"), **optimizer, **fields)


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
    print_left_out(left_out, console)
    parts = split_documents(documents, loop.held_out, loop.seed)
    if parts is not None:
        console.print(f"held out: {len(parts[1]):,} of {len(documents):,} documents", markup=False)
    return documents, parts


def chat_template(folder: Path | None, documents: Sequence[Document], console: Console) -> ChatTemplate | None:
    """Loads the model's chat template if the documents contain conversations; None without conversations or template."""
    if all(document.chat is None for document in documents):
        return None
    template = None if folder is None else ChatTemplate.load(folder)
    if template is None:
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
    streams = split_windows(encode(documents), length, loop.held_out, loop.seed)
    windows = [len(stream.tokens) // length for stream in streams]
    shares = f"{windows[1]:,} of {sum(windows):,} windows of {length} tokens"
    console.print(f"held out: {shares}; too few documents ({len(documents):,}) to hold out a whole one", markup=False)
    return streams


def check_context(length: int, context: int) -> None:
    """Raises a `ValueError` for sequences longer than the model's context."""
    if length > context:
        raise ValueError(f"expected sequences of at most the model's context of {context} tokens, found {length}")


def check_out(out: Path) -> None:
    """Raises a `ValueError` if a folder is not writable, or has a model without a checkpoint to resume."""
    training = out / "training"
    check_output_folder("--out", training)
    if not saved_steps(training) and any((out / name).exists() for name in (CONFIG, WEIGHTS)):
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
        mesh: devices along "fsdp", which shards batches and weights, and "tp", which shards layers, such as fsdp=4,tp=2; by
            default one device. A run can resume on another mesh.
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
        import orbax.checkpoint  # noqa: F401 (reports a missing extra before the training, not at the first checkpoint)

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
    segments: Annotated[bool | None, Parameter(group=TEXT)] = None,
    json_file: JsonOption = None,
) -> None:
    """Trains a language model: a new one of Qwen3's architecture, or an existing one.

    Args:
        data: text files, JSONL or JSON files of records, or folders of both. Records are chats (messages or conversations),
            instruction and output, prompt and completion or response, question and answer, or text. Prompts and messages of
            other roles than the assistant are not in the loss.
        out: folder for the model. Its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: existing model to train further, with a fresh optimizer: a folder, a Hugging Face id, or "demo".
        tokenizer: folder with a tokenizer.json. By default a byte-level BPE is trained on the data.
        dtype: dtype of the saved model. Training keeps float32 weights.
        segments: documents of a sequence do not see each other. By default so, except for models with linear attention.
        router_aux_loss_coef: weight of the loss that balances the experts of a mixture, 0 for none; by default the model's.
    """
    console = human_console(json_file)
    require_data(data)
    check_out(out)
    options = loop.options()
    keep_programs()
    documents, parts = read_split(data, loop, console)
    saved = saved_tokenizer(out)
    initial = InitialModel.load(start, tokenizer, sizes, devices, console)
    if initial is None:
        trained_on = parts[0] if parts else documents
        initial = InitialModel(saved or broadcast_tokenizer(train_tokenizer(trained_on, sizes.bpe_size)))
    bpe = initial.tokenizer
    run_fingerprint = {"vocab_size": sizes.bpe_size}
    check_same_tokenizer(saved, bpe, out)
    config = with_balance(initial.config or sizes.config(bpe.get_vocab_size(), end_of_text(bpe)), router_aux_loss_coef)
    check_context(options.sequence_length, config.max_position_embeddings)
    end = config.eos_token_ids[0] if config.eos_token_ids else end_of_text(bpe)
    template = chat_template(initial.folder, documents, console)
    encode = partial(encode_documents, bpe, end=end, template=template, other_ends=config.eos_token_ids)
    streams = encode_split(encode, documents, parts, options.sequence_length + 1, loop, console)
    require_texts(streams[0], streams[1], options.sequence_length + 1, options)
    placement = devices.placement(config, options)
    apart = given(segments, config.delta is None)
    save_tokenizer(out, bpe)
    result = train_lm(config, *streams, options, out / "training", console, initial.params, run_fingerprint, placement, apart)
    save_params(out, decoder.config_to_hf(config), decoder.declare(config), result.params, DTYPES[dtype])
    copy_tokenizer_files(initial.folder, out)
    report(result, out, console, json_file, training_tokens=len(streams[0].tokens), **devices.metrics())


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


def saved_tokenizer(out: Path) -> Tokenizer | None:
    """Loads the tokenizer of an interrupted run; None without a checkpoint."""
    resumable = saved_steps(out / "training") and (out / "tokenizer.json").exists()
    return load_tokenizer(out) if resumable else None
