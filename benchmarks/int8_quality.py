"""Measures the quality of lower precision: each format of weights and KV cache against float32, on the same text.

Teacher forcing predicts every token of the text from the tokens before it in its window. Figures per position: loss (nats),
KL divergence from the float32 prediction, and agreement of the most likely token. Greedy generation then continues the
packaged prompts, or with `--prompt-tokens` the beginnings of the windows. Its figures are the first token that differs from
float32 and the logit margin of float32 there (near 0: both tokens were about equally likely). Needs the CPU kernels, as 8-bit
and 4-bit weights do.

    python benchmarks/int8_quality.py [TEXT ...] [--model FOLDER] [--llama-python PYTHON] [--json FILE]

Without TEXT, the text is the packaged prompts: code that the demo pair was not trained on. Every position reads keys and
values from pages, as in decoding, in the format of the cache: 8 bits with `--ways "kv int8" "bfloat16, kv int8"`. `--window`
limits the distance of keys; `--bands` separates figures by position. For a GGUF file, `--llama-python` adds llama.cpp's loss
on the same tokens.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int
from llama_cpp_peer import Peer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tilewright as tw
from tilewright.compiled.machine import chip_name, cores
from tilewright.kernels.operations import Operations
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.hub import PACKAGED
from tilewright.models.params import count
from tilewright.runtime.cache import PAGE_MULTIPLE
from tilewright.runtime.layout import Layout
from tilewright.runtime.programs import allocate_caches
from tilewright.runtime.state import Span, Target, cached_attend

REFERENCE = "float32"
# With 8-bit or 4-bit weights, activations and the embedding may have bfloat16 to save memory.
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32", "weights": "dequantised"},
    "bfloat16": {"dtype": "bfloat16", "weights": "dequantised"},
    "auto": {"dtype": "float32"},
    "auto, bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "float32", "weights": "int4"},
    "int4, bfloat16": {"dtype": "bfloat16", "weights": "int4"},
    "kv int8": {"dtype": "float32", "weights": "dequantised", "kv_dtype": "int8"},
    "bfloat16, kv int8": {"dtype": "bfloat16", "weights": "dequantised", "kv_dtype": "int8"},
}
WEIGHTS = tuple(name for name, settings in WAYS.items() if "kv_dtype" not in settings)
SLICE = 256
"""Positions whose logits are in memory at the same time."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="*", help="text files (default: the packaged prompts)")
    parser.add_argument("--model", default="demo", help="folder or hub id of the target (default: the demo target)")
    parser.add_argument("--window", type=int, default=256, help="tokens per window (default: 256)")
    parser.add_argument("--bands", type=int, nargs="*", default=[], help="first positions of further bands of a window")
    parser.add_argument("--prompts", type=int, default=32, help="prompts to generate from; 0 for none (default: 32)")
    parser.add_argument("--prompt-tokens", type=int, help="generate from this many first tokens of each window of the text")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate per prompt (default: 64)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=WEIGHTS,
        help="formats to compare with float32 (default: the formats of weights)",
    )
    parser.add_argument(
        "--llama-python", type=Path, help="a Python interpreter with llama-cpp-python, if the model is a GGUF file"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.window < 2 or args.prompts < 0 or args.new_tokens < 1:
        parser.error("expected --window of at least 2, --prompts of at least 0 and --new-tokens of at least 1")
    if args.bands and not all(0 < first < last for first, last in pairwise([*args.bands, args.window])):
        parser.error(f"expected --bands in order, between 0 and the window {args.window}, found {args.bands}")
    return args


def packaged_prompts() -> list[str]:
    lines = (PACKAGED["demo"].parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def windows(texts: Sequence[list[int]], size: int) -> list[list[int]]:
    """Cuts every text into windows. A rest of one token predicts nothing and is left out."""
    cut = [tokens[i : i + size] for tokens in texts for i in range(0, len(tokens), size)]
    return [window for window in cut if len(window) > 1]


def padded(tokens: Sequence[int], size: int) -> Int[Array, "1 T"]:
    """Pads a text at its end, which changes no earlier position."""
    return jnp.asarray([[*tokens, *[0] * (size - len(tokens))]], jnp.int32)


def hidden_states(lm: LanguageModel, tokens: Int[Array, "1 T"]) -> Float[Array, "T H"]:
    return hidden_over_pages(lm.model.target, jnp.dtype(lm.model.dtype), lm.model.models.target, tokens)


@partial(jax.jit, static_argnums=(0, 1))
def hidden_over_pages(target: Target, dtype: Any, params: DecoderParams, tokens: Int[Array, "1 T"]) -> Float[Array, "T H"]:
    """Returns the final hidden states of a text, computed in one piece over pages."""
    size = tokens.shape[1]
    layout = Layout.full(1, -(-size // PAGE_MULTIPLE) * PAGE_MULTIPLE)
    caches, _ = allocate_caches(target, layout, None, dtype)
    table = jnp.arange(layout.pages, dtype=jnp.int32)[None]
    caches_on_pages = tuple(replace(cache, table=table) for cache in caches)
    span = Span(jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32))
    positions = jnp.arange(size)[None]
    return decoder.forward(target.config, target.ops, params, tokens, positions, cached_attend, span, caches_on_pages).hidden[0]


def log_probabilities(lm: LanguageModel, hidden: Float[Array, "T H"]) -> Float[Array, "T V"]:
    return predicted(lm.target, lm.ops, lm.model.models.target, hidden)


@partial(jax.jit, static_argnums=(0, 1))
def predicted(
    config: DecoderConfig, ops: Operations, params: DecoderParams, hidden: Float[Array, "T H"]
) -> Float[Array, "T V"]:
    return jax.nn.log_softmax(decoder.logits(config, ops, params, hidden))


@jax.jit
def measures(want: Float[Array, "T V"], found: Float[Array, "T V"], following: Int[Array, " T"]) -> Float[Array, "3 T"]:
    """Returns loss, KL divergence and agreement at each position, given the next tokens."""
    loss = -jnp.take_along_axis(found, following[:, None], axis=1)[:, 0]
    kl = jnp.sum(jnp.exp(want) * (want - found), axis=1)
    agree = jnp.argmax(want, axis=1) == jnp.argmax(found, axis=1)
    return jnp.stack([loss, kl, agree])


def mean_and_error(values: np.ndarray) -> list[float]:
    """Returns the mean and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))]


def predictions(
    models: dict[str, LanguageModel], texts: Sequence[list[int]], size: int, bands: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Returns the teacher-forced figures of each format, in total and per band of positions."""
    rows: dict[str, list[np.ndarray]] = {name: [] for name in models}
    positions_in_window = np.concatenate([np.arange(len(window) - 1) for window in texts])
    for window in track(texts, "predicting", console=Console(stderr=True), transient=True):
        tokens = padded(window, -(-size // SLICE) * SLICE)
        hidden = {name: hidden_states(lm, tokens) for name, lm in models.items()}
        following = jnp.roll(tokens[0], -1)
        for first in range(0, len(window) - 1, SLICE):  # the last position has no next token
            selection = slice(first, first + SLICE)
            want = log_probabilities(models[REFERENCE], hidden[REFERENCE][selection])
            for name, lm in models.items():
                each = want if name == REFERENCE else log_probabilities(lm, hidden[name][selection])
                found = np.asarray(measures(want, each, following[selection]), np.float64)
                rows[name].append(found[:, : len(window) - 1 - first])
    values = {name: np.concatenate(each, axis=1) for name, each in rows.items()}
    figures = {name: measured(each, values[REFERENCE]) for name, each in values.items()}
    edges = [0, *bands, size] if bands else []
    for name, each in values.items():
        band_masks = [
            (first, last, (positions_in_window >= first) & (positions_in_window < last)) for first, last in pairwise(edges)
        ]
        figures[name]["bands"] = [
            {"positions": [first, last], "predictions": int(selection.sum())}
            | measured(each[:, selection], values[REFERENCE][:, selection])
            for first, last, selection in band_masks
            if selection.sum() > 1
        ]
    return figures


def measured(values: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Summarises loss, KL divergence and agreement of some positions, `[3, T]` each."""
    (loss, kl, agree), more = values, values[0] - reference[0]
    return {
        "loss_nats": mean_and_error(loss),
        "loss_more_than_float32_nats": mean_and_error(more),
        "perplexity_ratio": float(np.exp(more.mean())),
        "kl_nats": mean_and_error(kl),
        "kl_99th_percentile_nats": float(np.percentile(kl, 99)),
        "same_most_likely_token": mean_and_error(agree),
    }


def theirs(python: Path, model: Path, cut: Sequence[list[int]], size: int) -> dict[str, Any]:
    """Returns llama.cpp's loss on the windows with the same file, in nats per token."""
    losses = []
    counts = []
    with Peer(python) as peer:
        peer.ask("open", model=str(model), threads=cores(), rows=1, positions=size, flash=False)
        for window in track(cut, "llama.cpp", console=Console(stderr=True), transient=True):
            losses.append(-peer.ask("score", tokens=window, start=1))
            counts.append(len(window) - 1)
        version = peer.ask("about")["version"]
    return {"version": version, "loss_nats": sum(losses) / sum(counts)}


def generations(models: dict[str, LanguageModel], prompts: Sequence[list[int]], new: int) -> dict[str, dict[str, Any]]:
    """Generates greedily. Returns the number of tokens before the first difference from float32, and its margin there."""
    sampling = tw.Sampling(max_new_tokens=new, ignore_eos=True)
    tokens = {name: [result.tokens for result in lm.generate(prompts, sampling)] for name, lm in models.items()}
    size = max(len(prompt) for prompt in prompts) + new
    reference = models[REFERENCE]
    figures = {}
    for name, rows in tokens.items():
        same = []
        margins = []
        for prompt, want, found in zip(prompts, tokens[REFERENCE], rows, strict=True):
            first = next((i for i, pair in enumerate(zip(want, found, strict=True)) if pair[0] != pair[1]), new)
            same.append(first)
            if first < new:
                text = padded([*prompt, *want[:first]], size)
                last = len(prompt) + first - 1
                at = log_probabilities(reference, hidden_states(reference, text)[last : last + 1])[0]
                margins.append(float(at[want[first]] - at[found[first]]))
        figures[name] = {
            "equal_rows": sum(n == new for n in same),
            "tokens_before_first_difference": same,
            "margins_there_nats": margins,
        }
    return figures


def model_of(name: str, settings: dict[str, Any], others: dict[str, LanguageModel]) -> LanguageModel:
    """Loads the model in a format, or shares the weights of a loaded model with the same format of weights."""
    wanted = settings["dtype"], settings.get("weights", "auto")
    same_weights = next((lm for lm in others.values() if (lm.dtype, lm.weights) == wanted), None)
    if same_weights is None:
        return tw.load(name, **settings)
    params = same_weights.model.models.target
    kv_dtype = settings.get("kv_dtype", "auto")
    return LanguageModel(same_weights.target, params, same_weights.tokenizer, *wanted, prepared=True, kv_dtype=kv_dtype)


def weight_bytes(lm: LanguageModel) -> int:
    """Returns the bytes of the weights that a decode step reads: all but the embedding."""
    target = lm.model.models.target
    return sum(leaf.nbytes for leaf in jax.tree.leaves((target.layers, target.head, target.norm)))


def show(report: dict[str, Any]) -> None:
    generated = f"{report['prompts']} x {report['new_tokens']} tokens generated"
    table = Table(
        title=f"{report['model']}: {report['positions']:,} predictions, {generated}",
        caption="loss and KL in nats; same until and margin: medians over prompts",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    for column in ("", "MB", "loss", "perpl. ratio", "KL", "same top", "equal rows", "same until", "margin"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for name, each in report["ways"].items():
        predicted = each["predictions"]
        generated_figures = each.get("generations")
        cells = ["", "", ""]
        if generated_figures is not None:
            margins = generated_figures["margins_there_nats"]
            cells = [
                str(generated_figures["equal_rows"]),
                f"{np.median(generated_figures['tokens_before_first_difference']):.0f}",
            ]
            cells.append(f"{np.median(margins):.3f}" if margins else "")
        table.add_row(
            name,
            f"{each['weight_bytes'] / 1e6:.1f}",
            f"{predicted['loss_nats'][0]:.4f}",
            f"{predicted['perplexity_ratio']:.5f}",
            f"{predicted['kl_nats'][0]:.1e}",
            f"{predicted['same_most_likely_token'][0]:.1%}",
            *cells,
        )
    Console().print(table)
    if report["llama_cpp"] is not None:
        Console().print(
            f"llama.cpp {report['llama_cpp']['version']}, the same file: loss {report['llama_cpp']['loss_nats']:.4f}"
        )


def main() -> None:
    args = arguments()
    models: dict[str, LanguageModel] = {}
    for name in dict.fromkeys([REFERENCE, *args.ways]):
        models[name] = model_of(args.model, WAYS[name], models)
    reference = models[REFERENCE]
    prompts = packaged_prompts()
    texts = [path.read_text(encoding="utf-8") for path in args.text] or prompts
    cut = windows([reference.encode(text) for text in texts], args.window)
    if not cut:
        raise SystemExit("expected a text of at least two tokens, found none")
    predicted = predictions(models, cut, args.window, args.bands)
    if args.prompt_tokens is None:
        chosen = [reference.encode(prompt) for prompt in prompts[: args.prompts]]
    else:
        chosen = [window[: args.prompt_tokens] for window in cut if len(window) >= args.prompt_tokens][: args.prompts]
    generated_figures = generations(models, chosen, args.new_tokens) if chosen else {}
    report = {
        "chip": chip_name(),
        "versions": {"python": platform.python_version(), "tilewright": tw.__version__, "jax": jax.__version__},
        "kernels": reference.kernels,
        "model": str(args.model),
        "parameters": count(decoder.declare(reference.target)),
        "text": [path.name for path in args.text] or "the packaged prompts",
        "window": args.window,
        "positions": sum(len(window) - 1 for window in cut),
        "llama_cpp": theirs(args.llama_python, Path(args.model), cut, args.window) if args.llama_python else None,
        "prompts": len(chosen),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "ways": {
            name: {"weight_bytes": weight_bytes(lm), "predictions": predicted[name]}
            | ({"generations": generated_figures[name]} if generated_figures else {})
            for name, lm in models.items()
        },
    }
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
