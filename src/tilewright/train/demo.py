"""The demo pair: what it is trained on, its sizes, and the whole training from those inputs.

The text is the Python standard library's own source on the training machine, whole modules of it held out, and GSM8K's training
questions with their answers.
"""

import json
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.decode.language_model import LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.decode.shapes import ShapeTable
from tilewright.kernels import native
from tilewright.models import decoder, dflash
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dflash import DFlashConfig
from tilewright.models.params import count
from tilewright.train.data import Document, Stream, encode_documents, end_of_text, read_documents, train_tokenizer
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.lm import train_lm
from tilewright.train.regenerate import cut_prompts, regenerate
from tilewright.train.text import TextOptions, text_figures

HELD_OUT_MODULES = frozenset(
    "calendar configparser csv fractions heapq json mailbox queue sched shutil statistics textwrap wsgiref zipfile".split()
)
"""Modules and packages of the standard library that are never trained on."""

NOT_CODE = frozenset(("site-packages", "test", "tests", "encodings", "pydoc_data", "__phello__", "__pycache__"))
"""Folders of tables, tests and installed packages."""

VOCAB_SIZE = 4096
MASK_TOKEN_ID = 1

TARGET_OPTIONS = TextOptions(
    steps=1000,
    batch_size=8,
    sequence_length=512,
    learning_rate=3e-3,
    optimizer="muon",
    muon_learning_rate=0.02,
    evaluate_every=200,
    save_every=50,
)


DRAFTER_OPTIONS = TextOptions(
    steps=2900,
    batch_size=4,
    sequence_length=512,
    learning_rate=1e-3,
    optimizer="muon",
    muon_learning_rate=0.01,
    seed=1,
    evaluate_every=100,
    save_every=50,
)
ANCHOR_OPTIONS = DFlashOptions(anchors=48)

PROMPT_TOKENS = 64
REGENERATED = 6400
REGENERATION_BATCH = 64
REGENERATION_SAMPLING = (
    *3 * (Sampling(max_new_tokens=191, temperature=0.0, ignore_eos=True),),
    Sampling(max_new_tokens=191, temperature=1.0, top_p=0.9, ignore_eos=True),
)
"""Three of four responses are greedy, one is drawn: the two ways in which the pair is judged, the first one more so."""


def drafter_config(target: DecoderConfig) -> DFlashConfig:
    """The drafter: two layers of the target's own sizes, which read the target after each of its layers."""
    return DFlashConfig(
        **{**target.sizes(), "num_layers": 2},
        block_size=16,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=tuple(range(target.num_layers)),
        num_target_layers=target.num_layers,
    )


def target_config(tokenizer: Tokenizer) -> DecoderConfig:
    """The target: Qwen3's architecture, small enough for two CPU cores to train in under an hour."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_ids=(end_of_text(tokenizer),),
    )


def library_sources() -> tuple[list[Path], list[Path]]:
    """The standard library's source files on this machine: those to train on, and the held-out modules'."""
    root = Path(sysconfig.get_paths()["stdlib"])
    trained, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if NOT_CODE.intersection(parts):
            continue
        (held_out if parts[0].removesuffix(".py") in HELD_OUT_MODULES else trained).append(path)
    return trained, held_out


def demo_documents(gsm8k: Path) -> tuple[list[Document], list[Document]]:
    """Training documents, shuffled, and held-out ones. A twentieth of GSM8K's training questions is held out too."""
    questions = read_documents([gsm8k])
    trained, held_out = library_sources()
    cut = len(questions) // 20
    documents = read_documents(trained) + questions[cut:]
    order = np.random.default_rng(0).permutation(len(documents))
    return [documents[i] for i in order], read_documents(held_out) + questions[:cut]


@dataclass(frozen=True)
class DemoText:
    """The demo's text, tokenised."""

    tokenizer: Tokenizer
    trained: Stream
    held_out: Stream

    @property
    def end(self) -> int:
        return end_of_text(self.tokenizer)


def prepare_text(gsm8k: Path, out: Path) -> DemoText:
    """Reads the text and trains its tokenizer, or reads the tokenizer that an interrupted run left in `out`."""
    trained, held_out = demo_documents(gsm8k)
    path = out / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(trained, VOCAB_SIZE)
        tokenizer.save(str(path))
    end = end_of_text(tokenizer)
    return DemoText(tokenizer, encode_documents(tokenizer, trained, end), encode_documents(tokenizer, held_out, end))


def continue_text(
    text: DemoText, target: DecoderConfig, params: DecoderParams, out: Path, console: Console
) -> tuple[Stream, Stream]:
    """What the target itself writes after stretches of the training text, and after stretches of the held-out text."""
    table = ShapeTable(batches=(REGENERATION_BATCH,))
    lm = LanguageModel(target, params, text.tokenizer, table=table)
    streams = []
    for name, stream, wanted in (("trained", text.trained, REGENERATED), ("held_out", text.held_out, REGENERATED // 32)):
        prompts = cut_prompts(stream, wanted, PROMPT_TOKENS, seed=0)
        streams.append(regenerate(lm, prompts, REGENERATION_SAMPLING, out / f"responses_{name}.jsonl", text.end, console))
    return streams[0], streams[1]


def held_out_prompts(paths: Sequence[Path], each: int = 3, characters: int = 480) -> list[dict[str, str]]:
    """Stretches of the held-out modules that end with the head of a function: what is to be continued in the demo.

    Args:
        each: prompts taken from one file, evenly over it.
        characters: about how much text comes before the function, from the start of a line.
    """
    records = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        heads = [m for m in re.finditer(r"\n *def [^\n]*:\n", source) if m.start() > 2 * characters]
        for head in heads[:: max(1, len(heads) // each)][:each]:
            first = source.find("\n", head.start() - characters) + 1
            records.append({"prompt": source[first : head.end()], "source": path.name})
    return records


def train_demo(gsm8k: Path, out: Path, console: Console) -> dict[str, Any]:
    """Trains target and drafter and writes both as checkpoints below `out`. Resumes where an earlier run stopped.

    Returns:
        what was reached, for the model card and `--json`.
    """
    text = prepare_text(gsm8k, out)
    target = target_config(text.tokenizer)
    console.print(f"{len(text.trained.tokens):,} training tokens, {len(text.held_out.tokens):,} held out")
    first = train_lm(target, text.trained, text.held_out, TARGET_OPTIONS, out / "training" / "target", console)
    folder = out / "target"
    save_params(folder, decoder.config_to_hf(target), decoder.declare(target), first.params, ml_dtypes.bfloat16)
    text.tokenizer.save(str(folder / "tokenizer.json"))
    # What the drafter learns from is the target as it ships: rounded to bfloat16.
    _, params = load_decoder(folder, np.float32)
    written, written_held_out = continue_text(text, target, params, out / "training", console)
    drafter = drafter_config(target)
    options = replace(DRAFTER_OPTIONS, products="float32" if native.kernels().isa is None else "bfloat16")
    second = train_drafter(
        target, params, drafter, written, written_held_out, options, ANCHOR_OPTIONS, out / "training" / "drafter", console
    )
    save_params(out / "drafter", dflash.config_to_hf(drafter), dflash.declare(drafter), second.params, ml_dtypes.bfloat16)
    lines = [json.dumps(record) for record in held_out_prompts(library_sources()[1])]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "target": text_figures(first),
        "drafter": text_figures(second),
        "training_tokens": len(text.trained.tokens),
        "regenerated_tokens": int(written.in_loss.sum()),
        "target_parameters": count(decoder.declare(target)),
        "drafter_parameters": count(dflash.declare(drafter)),
    }
