"""`tilewright train diffusion`: trains diffusion language models on arithmetic problems and texts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
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
from tilewright.cli.outputs import human_console, progress_console
from tilewright.models import diffusion as models
from tilewright.models import hub
from tilewright.models.checkpoint import save_params
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.arithmetic import problems
from tilewright.train.data import MASK, Document, end_of_text, train_tokenizer
from tilewright.train.diffusion import Examples, Pairs, train_diffusion
from tilewright.train.sharded import model_shardings

SAMPLE = 2000
"""Arithmetic problems that a new tokenizer is trained on."""


def diffusion(
    *data: Path,
    out: Annotated[Path, Parameter(alias="-o", group=train.COMMON)],
    start: Annotated[str | None, Parameter(alias="-m", group=train.COMMON)] = None,
    arithmetic: Annotated[float, Parameter(group=train.COMMON)] = 0.0,
    dtype: Annotated[Dtype, Parameter(group=train.MODEL)] = "float32",
    sizes: train.SizesOption = train.ModelSizes(),
    loop: train.LoopOptions = train.LoopOptions(),
    devices: train.MeshOptions = train.MeshOptions(),
    json_file: train.JsonOption = None,
) -> None:
    """Trains a diffusion language model: a new one of LLaDA's architecture, or an existing one.

    Args:
        data: text files, JSONL or JSON files of records (see `tilewright train lm`), or folders of both. Prompts are never
            masked. A text without a prompt is cut into sequences, and the first quarter of each sequence is its prompt.
        out: folder for the model. Its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: existing LLaDA or Dream model to train further, with a fresh optimizer: a folder or a Hugging Face id.
        arithmetic: share of arithmetic problems, solved step by step, among the sequences; 1 needs no data.
        dtype: dtype of the saved model. Training keeps float32 weights.
    """
    console = human_console(json_file)
    train.check_out(out)
    options = loop.options()
    if arithmetic < 1 and not data:
        raise ValueError("expected files or folders to train on, or --arithmetic 1, found neither")
    keep_programs()
    documents, parts = train.read_split(data, loop, console) if data else ([], ([], []))
    saved = train.saved_tokenizer(out)
    initial = load_initial(start, saved, sizes, devices, console)
    bpe, config, params, folder = initial or new_model(parts[0] if parts else documents, arithmetic, sizes, loop.seed)
    train.check_same_tokenizer(saved, bpe, out)
    train.check_context(options.sequence_length, config.decoder.max_position_embeddings)
    end = given(config.pad_token_id, config.eos_token_ids[0] if config.eos_token_ids else None)
    end = end_of_text(bpe) if end is None else end
    left_out: Counter[str] = Counter()
    encode = partial(
        Pairs.encode,
        bpe,
        window=options.sequence_length,
        ends=(end, *config.eos_token_ids),
        template=train.chat_template(folder, documents, console),
        left_out=left_out,
    )
    if parts is None:
        pairs = encode(documents)
        trained, held_out = pairs.split(loop.held_out, loop.seed)
        shares = f"{len(held_out.starts):,} of {len(pairs.starts):,} pairs of prompt and response"
        console.print(f"held out: {shares}; too few documents ({len(documents):,}) to hold out a whole one", markup=False)
    else:
        trained, held_out = (encode(part) for part in parts)
    train.print_left_out(left_out, console)
    examples = Examples(bpe, trained, held_out, arithmetic, end, options)
    setup = devices.setup(config.decoder, options)
    train.save_tokenizer(out, bpe)
    result = train_diffusion(config, examples, out / "training", console, params, {"vocab_size": sizes.bpe_size}, setup)
    save_params(out, models.config_to_hf(config), models.declare(config), result.params, DTYPES[dtype])
    train.copy_tokenizer_files(folder, out)
    train.report(result, out, console, json_file, training_texts=len(examples.texts.starts), **devices.metrics())


InitialModel = tuple[Tokenizer, DiffusionConfig, DecoderParams | None, Path | None]
"""Tokenizer, configuration, float32 parameters (None for random ones), and folder (None for a new model)."""


def load_initial(
    start: str | None, saved: Tokenizer | None, sizes: train.ModelSizes, devices: train.MeshOptions, console: Console
) -> InitialModel | None:
    """Loads the model of `--start`, or the sizes of an interrupted run; None for a new run without `--start`.

    Args:
        start: value of `--start`.
        saved: tokenizer of the interrupted run; None for a new run.
        sizes: sizes of a new model.
        devices: mesh that the parameters are sharded over.
        console: console for progress.
    """
    if start is not None:
        sizes.reject("expected no sizes with --start", *vars(sizes))
        folder = hub.resolve(start, console=progress_console(console), check=load_tokenizer)
        mesh = devices.build_mesh(models.read_diffusion(folder).decoder)
        shard = None if mesh is None else partial(model_shardings, mesh)
        config, params = models.load_diffusion(folder, jnp.float32, progress_console(console), shard)
        return load_tokenizer(folder), config, params, folder
    return None if saved is None else (saved, llada_config(sizes, saved), None, None)


def new_model(documents: Sequence[Document], arithmetic: float, sizes: train.ModelSizes, seed: int) -> InitialModel:
    """Trains a tokenizer on the documents and on arithmetic problems, and configures a model for it."""
    drawn = islice(problems(np.random.default_rng(seed), held_out=False), SAMPLE if arithmetic else 0)
    solved = [Document(problem.response, problem.prompt) for problem in drawn]
    bpe = train.broadcast_tokenizer(train_tokenizer([*documents, *solved], sizes.bpe_size))
    return bpe, llada_config(sizes, bpe), None, None


def llada_config(sizes: train.ModelSizes, bpe: Tokenizer) -> DiffusionConfig:
    """Configures a LLaDA model; by default `head_dim` is the hidden size divided by the heads, as LLaDA requires."""
    hidden = given(sizes.hidden_size, 256)
    heads = given(sizes.heads, 4)
    end = end_of_text(bpe)
    layers = replace(sizes, head_dim=given(sizes.head_dim, max(hidden // heads, 1))).config(bpe.get_vocab_size(), end)
    mask = bpe.token_to_id(MASK)
    assert mask is not None, "`train_tokenizer` adds the mask token"
    config = DiffusionConfig(family="llada", decoder=replace(layers, family="llama"), mask_token_id=mask, pad_token_id=end)
    return models.config_from_hf(models.config_to_hf(config), "the model's sizes")
