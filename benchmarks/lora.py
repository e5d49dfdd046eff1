"""Times decode steps with LoRA adapters relative to decode steps without.

    python benchmarks/lora.py [--model smollm2-135m] [--rank 16] [--adapters 1 4] [--rows 1 8] [--turns 7] [--json FILE]

Adapters have random values for every projection of every layer; values do not change the time. Rows use the adapters in
rotation. The output has medians of the seconds per step (without prefill), and of their ratios to the model without adapters
within a repetition.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import tilewright as tw
from tilewright.bench.compare import environment
from tilewright.bench.datasets import prompt, read_examples
from tilewright.cli.common import keep_programs
from tilewright.compiled.timing import alternate
from tilewright.llm.language_model import LanguageModel
from tilewright.models.decoder import DecoderConfig
from tilewright.models.hub import PACKAGED

PROMPT_TOKENS = 64


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def write_adapter(folder: Path, config: DecoderConfig, rank: int, seed: int) -> Path:
    """Writes an adapter with random values for all projections, in PEFT's format."""
    rng = np.random.default_rng(seed)
    tensors = dict[str, Any]()
    hidden = config.hidden_size
    mlp = config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    for layer in range(config.num_layers):
        for name, (outputs, inputs) in sizes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.normal(0, 0.01, shape).astype(np.float32)
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    modules = [name.partition(".")[2] for name in sizes]
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def seconds_of_a_step(lm: LanguageModel, prompts: list[list[int]], new_tokens: int) -> float:
    names = [lm.adapters[row % len(lm.adapters)] for row in range(len(prompts))] if lm.adapters else None
    generation = lm.generate(prompts, tw.Sampling(new_tokens, ignore_eos=True), lora=names)
    return generation.decode_seconds / generation.rounds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    models = {0: tw.load(options.model, dtype=options.dtype)}
    adapters = [write_adapter(folder / str(n), models[0].target, options.rank, n) for n in range(max(options.adapters))]
    for count in options.adapters:
        models[count] = tw.load(options.model, dtype=options.dtype, lora={f"adapter {n}": adapters[n] for n in range(count)})
    examples = read_examples(PACKAGED["demo"].parent / "prompts.jsonl")
    found: dict[str, Any] = {"environment": environment(models[0])}
    for rows in options.rows:
        prompts = [models[0].encode(prompt(each, (), None))[:PROMPT_TOKENS] for each in examples[:rows]]
        runs = {
            n: lambda lm=lm, prompts=prompts: seconds_of_a_step(lm, prompts, options.new_tokens) for n, lm in models.items()
        }
        times = alternate(runs, options.turns, warm=True)
        found[f"rows {rows}"] = {
            f"adapters {n}": {
                "step_seconds": statistics.median(each),
                "over_none": statistics.median(ratios := [one / none for one, none in zip(each, times[0], strict=True)]),
                "over_none_by_turn": ratios,
            }
            for n, each in times.items()
        }
    return found


def main() -> None:
    options = parsed()
    keep_programs()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "asked": {key: value for key, value in vars(options).items() if key != "json"},
            **measure(options, Path(folder)),
        }
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
