"""A step of a mixture of experts against its bytes at the rate of a kernel that only reads, and against transformers.

The model has random weights and layers of Qwen3-30B-A3B's shape, with half of the experts in each; every row has a token of its
own, so that rows choose different experts. Which experts a step reads is counted, not estimated. All sides run in turns on the
same cores; ratios are taken repetition by repetition. Needs the `oracle` extra, some 10 GB of memory, and less than 10 minutes:

    python tests/oracle/bench_experts.py [--rows 1 4 16] [--weights auto int8 int4] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

CORES = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, CORES)  # before JAX sizes its thread pool by them
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bandwidth import MemoryBuffers  # noqa: E402

from tilewright.compiled.timing import alternate, quotients  # noqa: E402
from tilewright.kernels import select  # noqa: E402
from tilewright.kernels.operations import Operations  # noqa: E402
from tilewright.models import decoder, params  # noqa: E402
from tilewright.models.decoder import DecoderConfig  # noqa: E402
from tilewright.models.experts import Mixture  # noqa: E402
from tilewright.runtime import cache  # noqa: E402
from tilewright.runtime.memory import held_bytes, step_bytes  # noqa: E402
from tilewright.runtime.rounds import autoregressive_step  # noqa: E402
from tilewright.runtime.sampling import Sampling, row_sampling  # noqa: E402
from tilewright.runtime.state import DecodeState, Models, Target  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
parser.add_argument("--weights", nargs="+", default=["auto"], choices=["auto", "int8", "int4"])
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--experts", type=int, default=64, help="of each layer")
parser.add_argument("--repetitions", type=int, default=7)
parser.add_argument("--json", type=Path)
ARGS = parser.parse_args()
MIXTURE = Mixture(ARGS.experts, 8, 768)
CONFIG = DecoderConfig(
    family="qwen3_moe",
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=ARGS.layers,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    mixture=MIXTURE,
    tie_word_embeddings=True,
)
CONTEXT = 64
CAPACITY = 128
REST_S = 0.3
"""how long torch's threads are left to themselves after a step: they spin on for a while, on cores that are timed next."""
Step = Callable[[], float]


def state_of(tokens: np.ndarray) -> DecodeState:
    """Rows whose next token is given, behind a context of zeros."""
    rows = jnp.zeros(len(tokens), jnp.int32)
    sizes = (CONFIG.num_layers, len(tokens), CONFIG.num_kv_heads, CAPACITY, CONFIG.head_dim)
    text = np.zeros((len(tokens), CAPACITY), np.int32)
    text[:, CONTEXT] = tokens
    return DecodeState(
        tokens=jnp.asarray(text),
        last_position=rows + CONTEXT,
        end=rows + CAPACITY,
        done=rows > 0,
        ignore_eos=rows == 0,
        sampling=row_sampling([Sampling()] * len(tokens), list(range(len(tokens)))),
        target_cache=cache.allocate(*sizes, jnp.bfloat16),
        draft_cache=None,
    )


def step_program(ops: Operations, models: Models, tokens: np.ndarray) -> tuple[Any, DecodeState]:
    """A step of plain decoding, compiled, that leaves the rows where they were."""

    def step(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        after, info = autoregressive_step(Target(CONFIG, ops), models, state)
        return replace(after, last_position=state.last_position, done=state.done), info

    state = state_of(tokens)
    return jax.jit(step, donate_argnums=1).lower(models, state).compile(), state


def experts_read(ops: Operations, models: Models, tokens: np.ndarray) -> int:
    """How many experts of all layers a step reads."""
    found: list[int] = []

    def counting(x: Any, w: Any, sizes: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda sizes: found.append(int((sizes > 0).sum())), sizes)
        return ops.grouped_linear(x, w, sizes, *rest)

    program, state = step_program(replace(ops, grouped_linear=counting), models, tokens)
    jax.block_until_ready(program(models, state))
    jax.effects_barrier()
    return sum(found)


def our_step(ops: Operations, models: Models, tokens: np.ndarray) -> Step:
    """Seconds of a step."""
    program, state = step_program(ops, models, tokens)

    def timed() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(5):
            state, info = program(models, state)
        jax.block_until_ready((state, info))
        return (time.perf_counter() - began) / 5

    timed()
    return timed


def their_model() -> Any:
    """A model of the same shape in transformers, with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        **{
            **decoder.config_to_hf(CONFIG),
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "eos_token_id": None,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def their_step(model: Any, tokens: np.ndarray, experts: str, threads: int) -> Step:
    """Seconds of a step behind a context, which grows by a position with each."""
    held = transformers.DynamicCache(config=model.config)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        model(input_ids=torch.zeros((len(tokens), CONTEXT), dtype=torch.long), cache=held, logits_to_keep=1)

    @torch.no_grad()
    def timed() -> float:
        torch.set_num_threads(threads)
        model.set_experts_implementation(experts)
        began = time.perf_counter()
        for _ in range(3):
            model(input_ids=torch.tensor(tokens[:, None].astype(np.int64)), cache=held, logits_to_keep=1)
        seconds = (time.perf_counter() - began) / 3
        time.sleep(REST_S)
        return seconds

    timed()
    return timed


def compare(rows: int, sides: dict[str, tuple[Operations, Models]], model: Any, repetitions: int) -> list[dict[str, Any]]:
    """Times all sides for so many rows."""
    tokens = np.random.default_rng(rows).permutation(CONFIG.vocab_size)[:rows].astype(np.int32)
    steps = {name: our_step(ops, models, tokens) for name, (ops, models) in sides.items()}
    theirs = [f"transformers, {name}" for name in ("eager", "grouped_mm")]
    for name in theirs:
        steps[name] = their_step(model, tokens, name.partition(", ")[2], len(CORES))
    buffers = MemoryBuffers()
    times = alternate({**steps, "memory": buffers.read}, repetitions)
    best = min(theirs, key=lambda name: statistics.median(times[name]))
    records = []
    for name, (ops, models) in sides.items():
        read = experts_read(ops, models, tokens)
        whole = CONFIG.num_layers * MIXTURE.experts
        of_experts = held_bytes([(layer.gate_up, layer.down) for layer in models.target.layers])
        nbytes = step_bytes(models.target, 0) + of_experts * read / whole
        ratios = [step / (nbytes / 1e9 / rate) for step, rate in zip(times[name], times["memory"], strict=True)]
        records.append(
            {
                "weights": name,
                "rows": rows,
                "experts": read,
                "gb": nbytes / 1e9,
                "expected_gb": step_bytes(models.target, rows) / 1e9,
                "ms": 1e3 * statistics.median(times[name]),
                "gb_per_s": statistics.median(times["memory"]),
                "of_its_bytes": statistics.median(ratios),
                "of_its_bytes_range": [min(ratios), max(ratios)],
                "transformers": best,
                "transformers_ms": 1e3 * statistics.median(times[best]),
                "speed_ratio": quotients(times[best], times[name]).median,
            }
        )
    return records


def main() -> None:
    specs = decoder.declare(CONFIG)
    drawn = params.initialise(specs, jax.random.key(0), jnp.bfloat16)
    sides = {}
    for name in ARGS.weights:
        ops = select.operations("cpu", name)
        sides[name] = ops, Models(decoder.prepare(CONFIG, ops, drawn), None)
    del drawn
    model = their_model()
    records = [record for rows in ARGS.rows for record in compare(rows, sides, model, ARGS.repetitions)]
    for each in records:
        least, most = each["of_its_bytes_range"]
        print(
            f"{each['weights']:>5} {each['rows']:>3} rows: {each['ms']:8.1f} ms, {each['gb']:.2f} GB of weights "
            f"({each['experts']} experts; {each['expected_gb']:.2f} GB expected) at {each['gb_per_s']:.1f} GB/s: "
            f"{each['of_its_bytes']:.2f} of the time to read them ({least:.2f} to {most:.2f}); "
            f"{each['transformers']}: {each['transformers_ms']:.1f} ms, ×{each['speed_ratio']:.2f}"
        )
    if ARGS.json is not None:
        names = [ops.name for ops, _ in sides.values()]
        whole = {"cores": len(CORES), "kernels": names[0], "weights_gb": params.count(specs) * 2 / 1e9, "records": records}
        ARGS.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
