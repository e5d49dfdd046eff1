"""`tilewright train diffusion`: trains diffusion language models on arithmetic problems and texts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from cyclopts import Parameter
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli import train
from tilewright.cli.common import given, keep_programs
from tilewright.cli.options import settings
from tilewright.cli.outputs import human_console, progress_console
from tilewright.models import diffusion as models
from tilewright.models import hub
from tilewright.models.checkpoint import decoder_config, load_decoder, save_params
from tilewright.models.config import MaskedBlocks
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.families.nemotron_diffusion import NEMOTRON_DIFFUSION
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.arithmetic import problems
from tilewright.train.block_diffusion import block_denoiser
from tilewright.train.data import MASK, Document, end_of_text, train_tokenizer
from tilewright.train.diffusion import Examples, Pairs, masked_denoiser, train_diffusion
from tilewright.train.step import model_shardings
from tilewright.train.text import Batches

SAMPLE = 2000
"""Arithmetic problems that a new tokenizer is trained on."""
BLOCK = 16
"""Default positions of a block of a new model."""


def diffusion(
    *data: Path,
    out: Annotated[Path, Parameter(alias="-o", group=train.COMMON)],
    start: Annotated[str | None, Parameter(alias="-m", group=train.COMMON)] = None,
    arithmetic: Annotated[float, Parameter(group=train.COMMON)] = 0.0,
    block_causal: Annotated[bool, Parameter(group=train.COMMON, negative="")] = False,
    block_length: Annotated[int | None, Parameter(group=train.MODEL)] = None,
    dtype: Annotated[Dtype, Parameter(group=train.MODEL)] = "float32",
    sizes: train.SizesOption = train.ModelSizes(),
    loop: train.LoopOptions = train.LoopOptions(),
    devices: train.MeshOptions = train.MeshOptions(),
    text: Annotated[
        train.StreamSettings, settings(train.StreamSettings, "reading of the data"), Parameter(group=train.TEXT)
    ] = train.StreamSettings(),
    json_file: train.JsonOption = None,
) -> None:
    """Trains a diffusion language model: a new one of LLaDA's architecture, one whose blocks are denoised, or an existing one.

    Args:
        data: text files, JSONL or JSON files of records (see `tilewright train lm`), or folders of both. Prompts are never
            masked. A text without a prompt is cut into sequences, and the first quarter of each sequence is its prompt.
        out: folder for the model. Its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: existing LLaDA or Dream model to train further, with a fresh optimizer: a folder or a Hugging Face id. With
            --block-causal a LLaDA, Nemotron-Labs-Diffusion or SDAR model.
        arithmetic: share of arithmetic problems, solved step by step, among the sequences; 1 needs no data.
        block_causal: train a model of Nemotron-Labs-Diffusion's architecture, which decodes token by token and denoises blocks
            with the same weights. Each token is computed twice per step.
        block_length: positions of a block, with --block-causal. [default: 16, or that of --start]
        dtype: dtype of the saved model. Training keeps float32 weights.
    """
    console = human_console(json_file)
    train.check_out(out, loop.save)
    options = loop.options()
    if arithmetic < 1 and not data:
        raise ValueError("expected files or folders to train on, or --arithmetic 1, found neither")
    keep_programs()
    if text.stream and not data:
        raise ValueError("expected files or folders for --text stream=true, found none")
    sample = train.GLANCE if start else train.SAMPLE
    found = train.TrainingData.read(data, loop, text, sample, console) if data else train.TrainingData([], ([], []))
    saved = train.saved_tokenizer(out, loop.save)
    blocks = BlockOptions(block_length) if block_causal else None
    if block_length is not None and not block_causal:
        raise ValueError("expected --block-length with --block-causal, found it alone")
    initial = load_initial(start, saved, sizes, blocks, devices, console)
    bpe, config, params, folder = initial or new_model(found.training_documents, arithmetic, sizes, blocks, loop.seed)
    model = masked_denoiser(config) if isinstance(config, DiffusionConfig) else block_denoiser(config)
    train.check_same_tokenizer(saved, bpe, out)
    train.check_context(options.sequence_length, model.sizes.max_position_embeddings)
    pad = config.pad_token_id if isinstance(config, DiffusionConfig) else None
    end = given(pad, config.eos_token_ids[0] if config.eos_token_ids else None)
    end = end_of_text(bpe) if end is None else end
    left_out: Counter[str] = Counter()
    encode = partial(
        Pairs.encode,
        bpe,
        window=options.sequence_length,
        ends=(end, *config.eos_token_ids),
        template=train.chat_template(folder, found.documents, console),
        left_out=left_out,
    )
    placement = devices.placement(model.sizes, options)
    rows = placement.local_rows(options.batch_size)
    read: dict[str, object] = {}
    if found.stream is not None and found.sources is not None:
        from tilewright.train.pair_rows import PairRows
        from tilewright.train.stream import StreamBatches

        form = PairRows(bpe, encode, arithmetic, end, options)
        batches: Batches = StreamBatches(found.sources, form, options, found.stream, rows, left_out)
    else:
        if found.parts is None:
            pairs = encode(found.documents)
            trained, held_out = pairs.split(loop.held_out_share, loop.seed)
            shares = f"{len(held_out.starts):,} of {len(pairs.starts):,} pairs of prompt and response"
            count = f"too few documents ({len(found.documents):,}) to hold out a whole one"
            console.print(f"held out: {shares}; {count}", markup=False)
        else:
            trained, held_out = (encode(part) for part in found.parts)
        train.print_left_out(left_out, console)
        batches = Examples(bpe, trained, held_out, arithmetic, end, options, rows)
        read = {"training_texts": len(trained.starts)}
    train.save_tokenizer(out, bpe)
    result = train_diffusion(model, batches, out / "training", console, params, {"vocab_size": sizes.bpe_size}, placement)
    save_params(out, model.fields, model.specs, result.params, DTYPES[dtype])
    train.copy_tokenizer_files(folder, out)
    train.report(result, out, console, json_file, **read, **train.print_read(batches, console), **devices.metrics())


@dataclass(frozen=True)
class BlockOptions:
    """Options of a model whose blocks are denoised. `length`: positions of a block; None for the default."""

    length: int | None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 2:
            raise ValueError(f"expected a block length of at least 2, found {self.length}")

    def applied(self, config: DiffusionConfig | DecoderConfig) -> DecoderConfig:
        """Returns the configuration with blocks of a model that has the same layers. Raises a `ValueError` if there is none."""
        if isinstance(config, DecoderConfig):
            if config.masked_blocks is None:
                raise ValueError(
                    "expected a LLaDA, Nemotron-Labs-Diffusion or SDAR model for --start with --block-causal, "
                    f"found one of the family {config.family}"
                )
            return replace(
                config, masked_blocks=replace(config.masked_blocks, length=given(self.length, config.masked_blocks.length))
            )
        if config.family != "llada":
            raise ValueError(f"expected a LLaDA model for --start with --block-causal, found one of the family {config.family}")
        blocks = MaskedBlocks(config.mask_token_id, given(self.length, BLOCK))
        return replace(config.decoder, family=NEMOTRON_DIFFUSION.name, masked_blocks=blocks)


InitialModel = tuple[Tokenizer, DiffusionConfig | DecoderConfig, DecoderParams | None, Path | None]
"""Tokenizer, configuration, float32 parameters (None for random ones), and folder (None for a new model)."""


def load_initial(
    start: str | None,
    saved: Tokenizer | None,
    sizes: train.ModelSizes,
    blocks: BlockOptions | None,
    devices: train.MeshOptions,
    console: Console,
) -> InitialModel | None:
    """Loads the model of `--start`, or the sizes of an interrupted run; None for a new run without `--start`.

    Args:
        start: value of `--start`.
        saved: tokenizer of the interrupted run; None for a new run.
        sizes: sizes of a new model.
        blocks: options of blocks; None for a model without.
        devices: mesh that the parameters are sharded over.
        console: console for progress.
    """
    if start is None:
        return None if saved is None else (saved, new_config(sizes, saved, blocks), None, None)
    sizes.reject("expected no sizes with --start", *vars(sizes))
    folder = hub.resolve(start, console=progress_console(console), check=load_tokenizer)
    load = models.load_diffusion if blocks is None or models.is_diffusion(folder) else load_decoder
    mesh = devices.build_mesh(
        models.read_diffusion(folder).decoder if load is models.load_diffusion else decoder_config(folder)
    )
    shard = None if mesh is None else partial(model_shardings, mesh)
    config, params = load(folder, jnp.float32, progress_console(console), shard)
    return load_tokenizer(folder), config if blocks is None else blocks.applied(config), params, folder


def new_model(
    documents: Sequence[Document], arithmetic: float, sizes: train.ModelSizes, blocks: BlockOptions | None, seed: int
) -> InitialModel:
    """Trains a tokenizer on the documents and on arithmetic problems, and configures a model for it."""
    drawn = islice(problems(np.random.default_rng(seed), held_out=False), SAMPLE if arithmetic else 0)
    solved = [Document(problem.response, problem.prompt) for problem in drawn]
    bpe = train.broadcast_tokenizer(train_tokenizer([*documents, *solved], sizes.bpe_size))
    return bpe, new_config(sizes, bpe, blocks), None, None


def new_config(sizes: train.ModelSizes, bpe: Tokenizer, blocks: BlockOptions | None) -> DiffusionConfig | DecoderConfig:
    """Configures a new model; by default `head_dim` is the hidden size divided by the heads, as LLaDA requires."""
    hidden = given(sizes.hidden_size, 256)
    heads = given(sizes.heads, 4)
    end = end_of_text(bpe)
    layers = replace(sizes, head_dim=given(sizes.head_dim, max(hidden // heads, 1))).config(bpe.get_vocab_size(), end)
    mask = bpe.token_to_id(MASK)
    assert mask is not None, "`train_tokenizer` adds the mask token"
    config = DiffusionConfig(family="llada", decoder=replace(layers, family="llama"), mask_token_id=mask, pad_token_id=end)
    config = models.config_from_hf(models.config_to_hf(config), "the model's sizes")
    return config if blocks is None else blocks.applied(config)
