"""Time to the first token of prompts that begin alike, of a hybrid with random weights: what snapshots save, and cost.

    python benchmarks/hybrid_prefix.py [--alike 1024] [--rest 128] [--repetitions 7] [--json FILE]

Three prompts share their beginning, and go through an engine with a prefix cache and, in turns, through one without. The first
one stops for a snapshot at its last page. The second one finds pages but no state, and stops once more where it parts
from the first. The third one begins there. Each repetition has a beginning of its own. Printed are medians of milliseconds, and
of ratios taken prompt by prompt.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models

from tilewright.compiled.machine import chip_name, cores
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.delta import DeltaSizes
from tilewright.models.params import DTYPES, initialise
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling

CONFIG = DecoderConfig(
    family="qwen3_5_text", vocab_size=4096, hidden_size=768, intermediate_size=2304, num_layers=8, num_heads=6, num_kv_heads=2,
    head_dim=128, partial_rotary_factor=0.25, max_position_embeddings=4096, delta=DeltaSizes(8, 16, 64, 64, 4),
    delta_layers=tuple(n for n in range(8) if n % 4 != 3),
)  # fmt: skip
"""Qwen3.5's layers, smaller."""
PROMPTS = ("first", "second", "third")


def loaded(dtype: str) -> LanguageModel:
    params = initialise(decoder.declare(CONFIG), jax.random.key(0), DTYPES[dtype])
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(CONFIG.vocab_size)}, unk_token="t0"))
    return LanguageModel(CONFIG, params, tokenizer, dtype)


def opened(lm: LanguageModel, context: int, prefix_cache: bool) -> Engine:
    engine = lm.engine(EngineOptions(slots=1, context=context, prefix_cache=prefix_cache, state_snapshots=4, guard="off"))
    engine.warm()
    engine.open()
    return engine


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    """Seconds until a prompt's only token is there."""
    told: list[RequestOutput] = []
    began = time.perf_counter()
    engine.submit(GenerateRequest(prompt, Sampling(1, ignore_eos=True)), told.append)
    while not any(update.end is not None for update in told):
        engine.step()
    return time.perf_counter() - began


def measured(how: argparse.Namespace) -> dict[str, Any]:
    lm, context = loaded(how.dtype), how.alike + how.rest + 64
    engines = {name: opened(lm, context, name == "shared") for name in ("shared", "alone")}
    rng = np.random.default_rng(0)
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(how.repetitions):
        alike = rng.integers(0, CONFIG.vocab_size, how.alike).tolist()
        prompts = [[*alike, *rng.integers(0, CONFIG.vocab_size, how.rest).tolist()] for _ in PROMPTS]
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                taken[name].append(first_token_s(engine, prompt))
        for name, own in taken.items():
            seconds[name].append(own)
    found = engines["shared"].stats().prefix_hits
    assert found >= how.repetitions * (how.alike - 64), f"expected the third prompts to be found, found {found} positions"
    rows = []
    for n, which in enumerate(PROMPTS):
        shared, alone = ([own[n] for own in seconds[name]] for name in ("shared", "alone"))
        ratios = [one / other for one, other in zip(shared, alone, strict=True)]
        rows.append({
            "prompt": which, "shared_ms": 1e3 * statistics.median(shared), "alone_ms": 1e3 * statistics.median(alone),
            "ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)],
        })  # fmt: skip
    return {"rows": rows, "prefix_hits": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alike", type=int, default=1024, help="tokens that prompts have in common")
    parser.add_argument("--rest", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    found = measured(how)
    table = Table("prompt", "with snapshots, ms", "without a prefix cache, ms", "ratio", "from", "to", box=box.SIMPLE)
    for row in found["rows"]:
        numbers = (row["ratio"], *row["ratios"])
        table.add_row(row["prompt"], f"{row['shared_ms']:.0f}", f"{row['alone_ms']:.0f}", *(f"{n:.2f}" for n in numbers))
    Console(width=120).print(table)
    if how.json is not None:
        about = {"machine": chip_name(), "cores": cores(), "jax": jax.__version__, "dtype": how.dtype}
        sizes = {"alike": how.alike, "rest": how.rest, "repetitions": how.repetitions}
        how.json.write_text(json.dumps({**about, **sizes, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
