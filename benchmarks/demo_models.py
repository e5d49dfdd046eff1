"""Trains the packaged demo models (`demo`, `demo-drafter`, `demo-dflash2`, `demo-eagle3`), and evaluates models on their text.

    python benchmarks/demo_models.py train gsm8k_train.jsonl DIR [--steps N] [--drafter-steps N] [--json FILE]
    python benchmarks/demo_models.py evaluate gsm8k_train.jsonl [MODEL] [--json FILE]

`train` takes 25 minutes on two CPU cores and resumes an interrupted run. `evaluate` measures the loss on the held-out text, and
the repetition in greedy continuations of it. `demo_text.py` describes the text; the file holds GSM8K's training questions, as
JSONL.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cyclopts import App
from demo_text import DemoText, demo_documents, held_out_text, library_sources, prepare_text
from held_out import evaluate_target
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import keep_programs
from tilewright.cli.options import check_least
from tilewright.cli.outputs import JsonFile, human_console, progress_console, write_json
from tilewright.cli.train import check_out
from tilewright.compiled.machine import chip_name
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder, dflash, dflash2, eagle3, hub
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dflash import DFlashConfig
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import count
from tilewright.models.tokenizer import load_tokenizer
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream, end_of_text
from tilewright.train.dflash2 import DFlash2Options, train_dflash2
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.eagle3 import Eagle3Options, train_eagle3
from tilewright.train.lm import train_lm
from tilewright.train.regenerate import Writer, cut_prompts, regenerate
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
"""Sampling of the continuations, alternating: greedy, and at temperature 1."""


def tapped_layers(target: DecoderConfig) -> tuple[int, ...]:
    """Returns the target layers that the drafters read: all but the last."""
    return tuple(range(target.num_layers - 1))


def dflash_config(target: DecoderConfig, layers: int = 1) -> DFlashConfig:
    """Configures the DFlash drafter, by default with one layer of the target's sizes."""
    return DFlashConfig(
        **{**target.sizes(), "num_layers": layers},
        block_size=16,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=tapped_layers(target),
        num_target_layers=target.num_layers,
    )


def dflash2_config(target: DecoderConfig) -> DFlash2Config:
    """Configures the DFlash 2 drafter: two layers with convolutions, and a selector of rank 32."""
    return DFlash2Config(
        **vars(dflash_config(target, layers=2)),
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=32,
        selector_top_k=16,
    )


def eagle3_config(target: DecoderConfig) -> Eagle3Config:
    """Configures the EAGLE-3 drafter: one layer of the target's sizes, and a head over the frequent tokens."""
    return Eagle3Config(
        **{**target.sizes(), "num_layers": 1},
        draft_vocab_size=min(DRAFT_VOCAB, target.vocab_size),
        target_hidden_size=target.hidden_size,
        target_layer_ids=tapped_layers(target)[-3:],
    )


def target_config(tokenizer: Tokenizer) -> DecoderConfig:
    """Configures the target: Qwen3's architecture with 1.1 million parameters."""
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
    """Lets the target continue stretches of the training text and of the held-out text."""
    table = ShapeTable(batches=(REGENERATION_BATCH,))
    writer = Writer(LanguageModel(target, params, text.tokenizer, table=table), fingerprint(params))
    streams = []
    for name, stream, wanted in (("trained", text.trained, REGENERATED), ("held_out", text.watched, REGENERATED // 32)):
        prompts = cut_prompts(stream, wanted, PROMPT_TOKENS, seed=0)
        streams.append(regenerate(writer, prompts, REGENERATION_SAMPLING, out / f"responses_{name}.jsonl", text.end, console))
    return streams[0], streams[1]


def held_out_prompts(paths: Sequence[Path], each: int = 3, characters: int = 480) -> list[dict[str, str]]:
    """Cuts the demo's prompts from held-out modules; each prompt ends with the head of a function.

    Args:
        paths: source files.
        each: prompts per file, spread evenly over the file.
        characters: approximate length of the text before the function; it begins at the start of a line.
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
        the configuration, the saved parameters (rounded to bfloat16) and the metrics.
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
class DrafterData:
    """Target and text that every drafter is trained on.

    Attributes:
        target: configuration of the target.
        params: saved parameters of the target.
        written: the target's continuations of training text.
        held_out: the target's continuations of held-out text.
        out: folder of all models.
        console: console for progress.
    """

    target: DecoderConfig
    params: DecoderParams
    written: TokenStream
    held_out: TokenStream
    out: Path
    console: Console

    def training(self, name: str) -> Path:
        return self.out / "training" / name


def train_demo_dflash(data: DrafterData, options: TextOptions) -> dict[str, Any]:
    config = dflash_config(data.target)
    result = train_drafter(
        data.target,
        data.params,
        config,
        data.written,
        data.held_out,
        options,
        ANCHOR_OPTIONS,
        data.training("drafter"),
        data.console,
    )
    folder = data.out / "drafter"
    declared = dflash.declare(config)
    save_params(folder, dflash.config_to_hf(config), declared, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(declared)}


def train_demo_dflash2(data: DrafterData, options: TextOptions) -> dict[str, Any]:
    config = dflash2_config(data.target)
    result = train_dflash2(
        data.target,
        data.params,
        config,
        data.written,
        data.held_out,
        options,
        DFlash2Options(**vars(ANCHOR_OPTIONS)),
        data.training("dflash2"),
        data.console,
    )
    folder = data.out / "dflash2"
    declared = dflash2.declare(config)
    save_params(folder, dflash2.config_to_hf(config), declared, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(declared)}


def train_demo_eagle3(data: DrafterData, options: TextOptions) -> dict[str, Any]:
    config = eagle3_config(data.target)
    result, agreed = train_eagle3(
        data.target,
        data.params,
        config,
        data.written,
        data.held_out,
        options,
        Eagle3Options(),
        data.training("eagle3"),
        data.console,
    )
    eagle3.save(data.out / "eagle3", config, result.params, ml_dtypes.bfloat16)
    return {**text_metrics(result), "parameters": count(eagle3.declare(config)), "agreement": agreed}


DRAFTERS: dict[str, tuple[Callable[[DrafterData, TextOptions], dict[str, Any]], TextOptions]] = {
    "drafter": (train_demo_dflash, DRAFTER_OPTIONS),
    "dflash2": (train_demo_dflash2, replace(DRAFTER_OPTIONS, steps=1200)),
    "eagle3": (train_demo_eagle3, replace(DRAFTER_OPTIONS, steps=500)),
}
"""Training function and options of each drafter, by the name of its folder."""


def train_demo(
    gsm8k: Path,
    out: Path,
    tokenizer: Tokenizer,
    console: Console,
    steps: int = TARGET_OPTIONS.steps,
    drafter_steps: int | None = None,
) -> dict[str, Any]:
    """Trains target and drafters, and writes them below `out`. Resumes an interrupted run.

    Args:
        gsm8k: JSONL file of GSM8K's training questions.
        out: folder for the models.
        tokenizer: tokenizer of the target.
        console: console for progress.
        steps: steps of the target.
        drafter_steps: steps of each drafter; None for those in `DRAFTERS`.

    Returns:
        metrics for the model card and `--json`.
    """
    text = prepare_text(gsm8k, tokenizer)
    console.print(text.summary(), markup=False)
    target, params, figures = train_target(text, replace(TARGET_OPTIONS, steps=steps), out, console)
    written, written_held_out = continue_text(text, target, params, out / "training", console)
    data = DrafterData(target, params, written, written_held_out, out, console)
    drafters = {
        name: train_drafter_kind(data, replace(options, steps=drafter_steps or options.steps))
        for name, (train_drafter_kind, options) in DRAFTERS.items()
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


app = App(help=__doc__)


@app.command
def train(
    gsm8k: Path,
    out: Path = Path("runs/demo"),
    *,
    steps: int | None = None,
    drafter_steps: int | None = None,
    json_file: JsonFile = None,
) -> None:
    """Trains the demo's target and drafters.

    Args:
        gsm8k: JSONL file of GSM8K's training questions.
        out: folder for the models and the checkpoints of an interrupted run.
        steps: steps of the target (default 1200).
        drafter_steps: steps of each drafter (default 800; DFlash 2: 1200, EAGLE-3: 500).
    """
    check_least(SimpleNamespace(steps=steps, drafter_steps=drafter_steps), steps=1, drafter_steps=1)
    console = human_console(json_file)
    check_out(out)
    keep_programs()
    tokenizer = load_tokenizer(hub.resolve("demo"))  # kept, so that losses of different runs compare
    figures = train_demo(gsm8k, out, tokenizer, console, steps or TARGET_OPTIONS.steps, drafter_steps)
    print_held_out(figures["target"]["held_out"], console)
    console.print(f"wrote {', '.join(str(out / name) for name in ('target', *DRAFTERS))}")
    write_json(json_file, {**figures, "chip": chip_name()})


@app.command
def evaluate(gsm8k: Path, model: str = "demo", *, json_file: JsonFile = None) -> None:
    """Measures a language model on the demo's held-out text.

    Args:
        gsm8k: JSONL file of GSM8K's training questions; a twentieth of them is held out.
        model: a folder, a Hugging Face id, or "demo". The tokenizer must be a byte-level BPE.
    """
    console = human_console(json_file)
    keep_programs()
    folder = hub.resolve(model, console=progress_console(console))
    config, params = load_decoder(folder, jnp.float32, progress_console(console))
    tokenizer = load_tokenizer(folder)
    documents = demo_documents(gsm8k, held_out_only=True)
    figures = evaluate_target(config, params, tokenizer, held_out_text(documents, tokenizer))
    print_held_out(figures, console)
    write_json(json_file, {"model": model, "held_out": figures, "text": documents.metadata(), "chip": chip_name()})


def print_held_out(figures: dict[str, dict[str, float]], console: Console) -> None:
    for name, row in figures.items():
        console.print(
            f"held-out {name}: {row['loss_nats_per_token']:.3f} nats/token, {row['bits_per_byte']:.3f} bits/byte, "
            f"{row['distinct_4gram_ratio']:.0%} distinct 4-grams"
        )


if __name__ == "__main__":
    app()
