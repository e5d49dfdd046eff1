"""`tilewright train diffusion`: a diffusion language model, on arithmetic written out in steps and on texts."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli import train
from tilewright.cli.common import given, keep_programs
from tilewright.cli.outputs import JsonFile, human_console, progress_console
from tilewright.models import diffusion as models
from tilewright.models import hub
from tilewright.models.checkpoint import save_params
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.arithmetic import problems
from tilewright.train.clean import Cleaner
from tilewright.train.data import MASK, Document, Split, end_of_text, train_tokenizer
from tilewright.train.demo_text import cleaned, library_sources
from tilewright.train.diffusion import Examples, Pairs, train_diffusion
from tilewright.train.sharded import model_shardings

SAMPLE = 2000
"""Problems that the tokenizer learns from."""


def diffusion(
    *data: Path,
    out: Path,
    start: str | None = None,
    arithmetic: float = 0.0,
    library: bool = False,
    dtype: Dtype = "float32",
    sizes: train.ModelSizes = train.ModelSizes(),
    loop: train.LoopOptions = train.LoopOptions(),
    over: train.MeshOptions = train.MeshOptions(),
    json_file: JsonFile = None,
) -> None:
    """Trains a diffusion language model: one of LLaDA's architecture from random weights, or one that is there already.

    Args:
        data: text files, JSONL or JSON files of records (see `tilewright train lm`), or folders of both. Prompts are never
            masked; of a text without one, each stretch that fills a sequence has its first quarter for its prompt.
        out: folder for the model; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        start: a LLaDA or Dream to go on from, with a fresh optimizer: a folder or a Hugging Face id.
        arithmetic: share of the sequences that are arithmetic problems, worked out in steps; 1 needs no data.
        library: train on the source of the Python standard library too, but for the modules that the demo holds out.
        dtype: of the saved weights.
    """
    console = human_console(json_file)
    train.check_out(out)
    options = loop.options()
    if arithmetic < 1 and not (data or library):
        raise ValueError("expected files or folders to train on, --library, or --arithmetic 1, found none of them")
    keep_programs(loop.compile_cache)
    documents, parts = train.read_split(data, loop, console) if data else ([], ([], []))
    source = library_documents() if library else ([], [])
    kept = train.kept_tokenizer(out)
    begun = begin(start, kept, sizes, over, console)
    bpe, config, params, folder = begun or fresh(
        [*(parts[0] if parts else documents), *source[0]], arithmetic, sizes, loop.seed
    )
    train.require_same(kept, bpe, out)
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
        found = encode(documents)
        pairs, unseen = found.split(loop.held_out, loop.seed)
        shown = f"{len(unseen.starts):,} of {len(found.starts):,} pairs of prompt and response"
        console.print(f"held out: {shown}, documents being few ({len(documents):,})", markup=False)
    else:
        pairs, unseen = (encode(part) for part in parts)
    pairs = pairs + encode(source[0])
    unseen = unseen + encode(source[1])
    train.say_left_out(left_out, console)
    examples = Examples(bpe, pairs, unseen, arithmetic, end, options)
    setup = over.setup(config.decoder, options)
    train.save_tokenizer(out, bpe)
    result = train_diffusion(config, examples, out / "training", console, params, {"vocab_size": sizes.bpe_size}, setup)
    save_params(out, models.config_to_hf(config), models.declare(config), result.params, DTYPES[dtype])
    train.copy_tokenizer_files(folder, out)
    train.finish(result, out, console, json_file, training_texts=len(examples.texts.starts), **over.figures())


def library_documents() -> Split:
    """The standard library's source: modules that are trained on, and those that are held out."""
    cleaner, (known, unknown) = Cleaner(), library_sources()
    held_out = cleaned(cleaner, unknown)  # first, so that what training text has of it is cut there
    return cleaned(cleaner, known), held_out


Beginning = tuple[Tokenizer, DiffusionConfig, DecoderParams | None, Path | None]
"""A tokenizer, a model's sizes, its parameters, float32 (None for random ones), and its folder, if it has one."""


def begin(
    start: str | None, kept: Tokenizer | None, sizes: train.ModelSizes, over: train.MeshOptions, console: Console
) -> Beginning | None:
    """Model that an interrupted run left or `start` names; None where neither is there."""
    if start is not None:
        sizes.refuse("--start takes its sizes and its tokenizer along", *vars(sizes))
        folder = hub.resolve(start, console=progress_console(console), check=load_tokenizer)
        mesh = over.of(models.read_diffusion(folder).decoder)
        shard = None if mesh is None else partial(model_shardings, mesh)
        config, params = models.load_diffusion(folder, jnp.float32, progress_console(console), shard)
        return load_tokenizer(folder), config, params, folder
    return None if kept is None else (kept, llada_config(sizes, kept), None, None)


def fresh(trained: list[Document], arithmetic: float, sizes: train.ModelSizes, seed: int) -> Beginning:
    """A tokenizer for the texts and the problems, and a model for it."""
    drawn = islice(problems(np.random.default_rng(seed), held_out=False), SAMPLE if arithmetic else 0)
    worked = [Document(problem.response, problem.prompt) for problem in drawn]
    bpe = train.agreed_tokenizer(train_tokenizer([*trained, *worked], sizes.bpe_size))
    return bpe, llada_config(sizes, bpe), None, None


def llada_config(sizes: train.ModelSizes, bpe: Tokenizer) -> DiffusionConfig:
    """The sizes under LLaDA's rule that the heads make up the hidden size."""
    hidden = given(sizes.hidden_size, 256)
    heads = given(sizes.heads, 4)
    end = end_of_text(bpe)
    layers = replace(sizes, head_dim=given(sizes.head_dim, max(hidden // heads, 1))).config(bpe.get_vocab_size(), end)
    mask = bpe.token_to_id(MASK)
    assert mask is not None, "`train_tokenizer` makes it a token"
    config = DiffusionConfig(family="llada", decoder=replace(layers, family="llama"), mask_token_id=mask, pad_token_id=end)
    return models.config_from_hf(models.config_to_hf(config), "the model's sizes")
