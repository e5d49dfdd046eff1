"""The demo's models: their sizes, and their whole training from its inputs (see `demo_text.py`)."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder, dflash, dflash2, eagle3
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dflash import DFlashConfig
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import count
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream, end_of_text
from tilewright.train.demo_text import DemoText, library_sources, prepare_text
from tilewright.train.dflash2 import DFlash2Options, train_dflash2
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.eagle3 import Eagle3Options, train_eagle3
from tilewright.train.evaluate import evaluate_target
from tilewright.train.lm import train_lm
from tilewright.train.regenerate import BatchWriter, cut_prompts, regenerate
from tilewright.train.text import TextOptions, text_metrics

MASK_TOKEN_ID = 1

TARGET_OPTIONS = TextOptions(
    steps=1200,
    batch_size=4,
    sequence_length=512,
    learning_rate=3e-3,
    optimizer="muon",
    muon_learning_rate=0.02,
    evaluate_every=200,
    save_every=100,
)
DRAFTER_OPTIONS = TextOptions(
    steps=800,
    batch_size=2,
    sequence_length=512,
    learning_rate=2e-3,
    optimizer="muon",
    muon_learning_rate=0.015,
    seed=1,
    evaluate_every=100,
    save_every=100,
)
ANCHOR_OPTIONS = DFlashOptions(anchors=64)
DRAFT_VOCAB = 2048

PROMPT_TOKENS = 64
REGENERATED = 3200
REGENERATION_BATCH = 64
REGENERATION_SAMPLING = (
    Sampling(max_new_tokens=191, temperature=0.0, ignore_eos=True),
    Sampling(max_new_tokens=191, temperature=1.0, top_p=0.9, ignore_eos=True),
)
"""Every second response is greedy, the others are drawn: the two ways in which the models are judged."""


def tapped_layers(target: DecoderConfig) -> tuple[int, ...]:
    """Layers after which the drafters read their target: after every layer but the last."""
    return tuple(range(target.num_layers - 1))


def dflash_config(target: DecoderConfig, layers: int = 1) -> DFlashConfig:
    """The DFlash drafter: a layer of the target's own sizes, so that all that ships stays small."""
    return DFlashConfig(
        **{**target.sizes(), "num_layers": layers},
        block_size=16,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=tapped_layers(target),
        num_target_layers=target.num_layers,
    )


def dflash2_config(target: DecoderConfig) -> DFlash2Config:
    """The DFlash 2 drafter: a backbone of two layers with convolutions, and a selector that is small for the models' sake."""
    return DFlash2Config(
        **vars(dflash_config(target, layers=2)),
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=32,
        selector_top_k=16,
    )


def eagle3_config(target: DecoderConfig) -> Eagle3Config:
    """The EAGLE-3 drafter: one layer of the target's own sizes, and a head of its own over frequent tokens."""
    return Eagle3Config(
        **{**target.sizes(), "num_layers": 1},
        draft_vocab_size=min(DRAFT_VOCAB, target.vocab_size),
        target_hidden_size=target.hidden_size,
        target_layer_ids=tapped_layers(target)[-3:],
    )


def target_config(tokenizer: Tokenizer) -> DecoderConfig:
    """The target: Qwen3's architecture, as small as tests need it."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_ids=(end_of_text(tokenizer),),
    )


def continue_text(
    text: DemoText, target: DecoderConfig, params: DecoderParams, out: Path, console: Console
) -> tuple[TokenStream, TokenStream]:
    """Continuations that the target itself writes of stretches of the training text, and of stretches of the held-out text."""
    table = ShapeTable(batches=(REGENERATION_BATCH,))
    writer = BatchWriter(LanguageModel(target, params, text.tokenizer, table=table), fingerprint(params))
    streams = []
    for name, stream, wanted in (("trained", text.trained, REGENERATED), ("held_out", text.watched, REGENERATED // 32)):
        prompts = cut_prompts(stream, wanted, PROMPT_TOKENS, seed=0)
        streams.append(regenerate(writer, prompts, REGENERATION_SAMPLING, out / f"responses_{name}.jsonl", text.end, console))
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


def train_target(
    text: DemoText, options: TextOptions, out: Path, console: Console
) -> tuple[DecoderConfig, DecoderParams, dict[str, Any]]:
    """Trains the target and writes it to `out / "target"`.

    Returns:
        its configuration, its parameters as they ship, rounded to bfloat16, and what was reached.
    """
    config = target_config(text.tokenizer)
    result = train_lm(config, text.trained, text.watched, options, out / "training" / "target", console)
    folder = out / "target"
    save_params(folder, decoder.config_to_hf(config), decoder.declare(config), result.params, ml_dtypes.bfloat16)
    text.tokenizer.save(str(folder / "tokenizer.json"))
    _, params = load_decoder(folder, np.float32)
    figures = {
        **text_metrics(result),
        "parameters": count(decoder.declare(config)),
        "held_out": evaluate_target(config, params, text.tokenizer, text.held_out),
    }
    return config, params, figures


@dataclass(frozen=True)
class Lesson:
    """Material that every drafter learns from: the target as it ships, and what it wrote.

    Attributes:
        held_out: what it wrote after held-out text.
        out: the folder of all that is trained.
    """

    target: DecoderConfig
    params: DecoderParams
    written: TokenStream
    held_out: TokenStream
    out: Path
    console: Console

    def training(self, name: str) -> Path:
        return self.out / "training" / name


def train_demo_dflash(lesson: Lesson, options: TextOptions) -> dict[str, Any]:
    config = dflash_config(lesson.target)
    result = train_drafter(
        lesson.target,
        lesson.params,
        config,
        lesson.written,
        lesson.held_out,
        options,
        ANCHOR_OPTIONS,
        lesson.training("drafter"),
        lesson.console,
    )
    folder = lesson.out / "drafter"
    declared = dflash.declare(config)
    save_params(folder, dflash.config_to_hf(config), declared, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(declared)}


def train_demo_dflash2(lesson: Lesson, options: TextOptions) -> dict[str, Any]:
    config = dflash2_config(lesson.target)
    result = train_dflash2(
        lesson.target,
        lesson.params,
        config,
        lesson.written,
        lesson.held_out,
        options,
        DFlash2Options(**vars(ANCHOR_OPTIONS)),
        lesson.training("dflash2"),
        lesson.console,
    )
    folder = lesson.out / "dflash2"
    declared = dflash2.declare(config)
    save_params(folder, dflash2.config_to_hf(config), declared, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(declared)}


def train_demo_eagle3(lesson: Lesson, options: TextOptions) -> dict[str, Any]:
    config = eagle3_config(lesson.target)
    result, agreed = train_eagle3(
        lesson.target,
        lesson.params,
        config,
        lesson.written,
        lesson.held_out,
        options,
        Eagle3Options(),
        lesson.training("eagle3"),
        lesson.console,
    )
    eagle3.save(lesson.out / "eagle3", config, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(eagle3.declare(config)), "agreement": agreed}


DRAFTERS: dict[str, tuple[Callable[[Lesson, TextOptions], dict[str, Any]], TextOptions]] = {
    "drafter": (train_demo_dflash, DRAFTER_OPTIONS),
    "dflash2": (train_demo_dflash2, replace(DRAFTER_OPTIONS, steps=1200)),
    "eagle3": (train_demo_eagle3, replace(DRAFTER_OPTIONS, steps=500)),
}
"""The folder of each drafter, what trains it, and how. Another kind is another row."""


def train_demo(
    gsm8k: Path,
    out: Path,
    tokenizer: Tokenizer,
    console: Console,
    steps: int = TARGET_OPTIONS.steps,
    drafter_steps: int | None = None,
) -> dict[str, Any]:
    """Trains target and drafters and writes them as checkpoints below `out`. Resumes where an earlier run stopped.

    Args:
        steps: of the target.
        drafter_steps: of each drafter; None for those in `DRAFTERS`.

    Returns:
        what was reached, for the model card and `--json`.
    """
    text = prepare_text(gsm8k, tokenizer)
    console.print(text.summary(), markup=False)
    target, params, figures = train_target(text, replace(TARGET_OPTIONS, steps=steps), out, console)
    # What the drafters learn from is the target as it ships.
    written, written_held_out = continue_text(text, target, params, out / "training", console)
    lesson = Lesson(target, params, written, written_held_out, out, console)
    drafters = {
        name: train(lesson, replace(options, steps=drafter_steps or options.steps))
        for name, (train, options) in DRAFTERS.items()
    }
    lines = [json.dumps(record) for record in held_out_prompts(library_sources()[1])]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "text": text.metadata,
        "training_tokens": len(text.trained.tokens),
        "regenerated_tokens": int(written.in_loss.sum()),
        "target": figures,
        **drafters,
    }
