"""Writes the golden decoder checkpoints and their outputs, as computed by transformers in float32.

Needs the `oracle` extra. Run from the repository root: `python tests/golden/make_decoder_goldens.py`. Each folder under
`tests/golden/decoders/` is what `save_pretrained` wrote plus `outputs.npz`:

    tokens  [B, T]        the input ids
    hidden  [L, B, T, H]  the residual stream after each layer, before the final norm
    logits  [B, T, V]
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).parent / "decoders"
ROWS, LENGTH = 2, 40
SIZES: dict[str, Any] = {"vocab_size": 96, "max_position_embeddings": 256}

# Real Llama 3 factors; the original length is so small that tokens of 40 positions lie in all three frequency bands.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def models() -> dict[str, PreTrainedModel]:
    """The models by name: all families, both kinds of head, several ratios of heads, with and without RoPE scaling."""
    narrow = dict(SIZES, hidden_size=32, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return {
        "qwen3-tied": Qwen3ForCausalLM(
            Qwen3Config(
                **narrow,
                num_hidden_layers=3,
                tie_word_embeddings=True,
                eos_token_id=5,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        ),
        "qwen3-untied": Qwen3ForCausalLM(
            Qwen3Config(
                **SIZES,
                hidden_size=40,
                intermediate_size=48,
                num_attention_heads=5,
                num_key_value_heads=1,
                head_dim=12,
                num_hidden_layers=2,
                eos_token_id=[2, 5],
                rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            )
        ),
        "llama-untied": LlamaForCausalLM(
            LlamaConfig(
                **SIZES,
                hidden_size=48,
                intermediate_size=64,
                num_attention_heads=6,
                num_key_value_heads=3,
                num_hidden_layers=2,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            )
        ),
        "llama-scaled": LlamaForCausalLM(
            LlamaConfig(**narrow, num_hidden_layers=3, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE)
        ),
        "qwen2-untied": Qwen2ForCausalLM(
            Qwen2Config(
                **SIZES,
                hidden_size=48,
                intermediate_size=64,
                num_attention_heads=6,
                num_key_value_heads=2,
                num_hidden_layers=2,
                eos_token_id=5,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        ),
    }


@torch.no_grad()
def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draws every weight anew: norms that are not ones, and matrices large enough for attention to be far from uniform."""
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(0.4 * drawn if name.endswith("bias") else 1.0 + 0.4 * drawn)
        else:
            weight.copy_(drawn if "embed" in name else drawn * weight.shape[1] ** -0.5)


@torch.no_grad()
def outputs(model: PreTrainedModel, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Runs random tokens; the streams come from hooks, as `hidden_states` has the last one only after the final norm."""
    tokens = torch.randint(model.config.vocab_size, (ROWS, LENGTH), generator=generator)
    after: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: after.append(out)) for layer in model.model.layers]
    result = model(tokens, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for stream, reported in zip(after[:-1], result.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(stream, reported, rtol=0, atol=0)
    return {"tokens": tokens.numpy().astype(np.int32), "hidden": torch.stack(after).numpy(), "logits": result.logits.numpy()}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, model) in enumerate(models().items()):
        generator = torch.Generator().manual_seed(seed)
        model.set_attn_implementation("eager")
        model.eval()
        randomise(model, generator)
        # One of them in shards, for the reader of `model.safetensors.index.json`.
        model.save_pretrained(FOLDER / name, max_shard_size="50KB" if name == "qwen3-untied" else "1GB")
        np.savez_compressed(FOLDER / name / "outputs.npz", **outputs(model, generator))
        print(name, f"{sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
