"""Writes the golden decoder checkpoints and their outputs, as computed by transformers in float32.

Needs the `oracle` extra. Run from the repository root: `python tests/golden/make_decoder_goldens.py`. Each folder under
`tests/golden/decoders/` is what `save_pretrained` wrote plus `outputs.npz`:

    tokens  [B, T]        the input ids
    hidden  [L, B, T, H]  the residual stream after each layer, before the final norm
    logits  [B, T, V]
    greedy  [B, 64]       what follows each of `PROMPTS` tokens of a row, by greedy decoding
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

FOLDER = Path(__file__).parent / "decoders"
ROWS = 2
LENGTH = 40
PROMPTS = (5, 23)
NEW = 64
"""Lengths of the prompts, each a row's first tokens, and how many tokens follow them."""
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

# A ramp that begins and ends within the frequencies of a head of 16, and an attention factor that is not the default.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
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
        "mistral-linear": MistralForCausalLM(
            MistralConfig(
                **narrow,
                num_hidden_layers=2,
                sliding_window=None,
                rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
            )
        ),
        "phi3-partial": Phi3ForCausalLM(
            Phi3Config(
                **SIZES,
                hidden_size=64,
                intermediate_size=56,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=2,
                eos_token_id=5,
                pad_token_id=None,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            )
        ),
        "qwen3-yarn": Qwen3ForCausalLM(
            Qwen3Config(**narrow, num_hidden_layers=2, tie_word_embeddings=True, eos_token_id=5, rope_parameters=YARN_ROPE)
        ),
        "smollm3-tied": SmolLM3ForCausalLM(
            SmolLM3Config(
                **SIZES,
                hidden_size=32,
                intermediate_size=56,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_hidden_layers=3,
                no_rope_layer_interval=2,
                eos_token_id=5,
                pad_token_id=None,
                rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            )
        ),
        "gemma2-tied": Gemma2ForCausalLM(
            Gemma2Config(
                **narrow,
                num_hidden_layers=3,
                sliding_window=12,
                query_pre_attn_scalar=24,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=8.0,
                eos_token_id=5,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        ),
        "gemma3-tied": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **narrow,
                num_hidden_layers=3,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                sliding_window=12,
                query_pre_attn_scalar=24,
                eos_token_id=5,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            )
        ),
        "mistral-window": MistralForCausalLM(
            MistralConfig(
                **narrow,
                num_hidden_layers=2,
                sliding_window=9,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        ),
        "qwen3-window": Qwen3ForCausalLM(
            Qwen3Config(
                **narrow,
                num_hidden_layers=3,
                use_sliding_window=True,
                sliding_window=20,
                max_window_layers=1,
                eos_token_id=5,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        ),
        **mixtures(narrow),
        **hybrids(narrow),
        # New models go to the end: a model's place is its seed.
        "gemma4-tied": Gemma4ForCausalLM(gemma4(narrow)),
        "gemma4-moe": Gemma4ForCausalLM(
            gemma4(narrow, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24)
        ),
    }


def gemma4(narrow: dict[str, Any], **more: Any) -> Gemma4TextConfig:
    """Layers without a window have one key head of 32, whose keys are the values too."""
    return Gemma4TextConfig(
        **narrow,
        **more,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=12,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=8.0,
        hidden_size_per_layer_input=0,
        eos_token_id=5,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


def mixtures(narrow: dict[str, Any]) -> dict[str, PreTrainedModel]:
    """Those with experts: weights that are normalised or not, and a layer with an MLP between others."""
    qwen: dict[str, Any] = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "qwen3-moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**narrow, **qwen, mlp_only_layers=[1], norm_topk_prob=True, eos_token_id=5, rope_parameters=rope)
        ),
        "qwen3-moe-sparse": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**narrow, **qwen, decoder_sparse_step=2, norm_topk_prob=False, eos_token_id=5, rope_parameters=rope)
        ),
        "mixtral-untied": MixtralForCausalLM(
            MixtralConfig(**narrow, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
        ),
        "gpt-oss": GptOssForCausalLM(
            GptOssConfig(
                **narrow,
                num_hidden_layers=3,
                num_local_experts=6,
                num_experts_per_tok=2,
                sliding_window=12,
                swiglu_limit=1.5,
                eos_token_id=5,
                pad_token_id=None,
                rope_parameters={**YARN_ROPE, "truncate": False},
            )
        ),
    }


def hybrids(narrow: dict[str, Any]) -> dict[str, PreTrainedModel]:
    """Those with layers of linear attention."""
    hybrid = dict(
        narrow,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        eos_token_id=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    moe = {name: value for name, value in hybrid.items() if name != "intermediate_size"}
    return {
        "qwen3-next": Qwen3NextForCausalLM(
            Qwen3NextConfig(**hybrid, num_hidden_layers=3, full_attention_interval=2, mlp_only_layers=[0, 1, 2], num_experts=0)
        ),
        "qwen3.5-tied": Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid, num_hidden_layers=4, tie_word_embeddings=True)),
        "qwen3-next-moe": Qwen3NextForCausalLM(
            Qwen3NextConfig(**hybrid, **experts, num_hidden_layers=3, full_attention_interval=3, mlp_only_layers=[1])
        ),
        "qwen3.5-moe": Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(**moe, **experts, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
        ),
    }


@torch.no_grad()
def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draws every weight anew: norms that are not ones, and matrices large enough for attention to be far from uniform.

    Norms of Gemma 2 and 3 and those of hybrids are stored as what they are more than one, but for the norms of linear
    attention. Of the states of such layers most stays from position to position. Gemma 4's scalars of layers are no parameters.
    """
    centred = model.config.model_type.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5"))
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.copy_(0.5 + torch.rand(1, generator=generator))
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            centre = 0.0 if name.endswith("bias") or (centred and "linear_attn" not in name) else 1.0
            weight.copy_(drawn - 3 if name.endswith("A_log") else centre + 0.4 * drawn)
        elif name.endswith("bias"):
            weight.copy_(0.4 * drawn)
        else:
            turned = model.config.model_type == "gpt_oss" or weight.ndim == 2
            weight.copy_(drawn if "embed" in name else drawn * weight.shape[1 if turned else 2] ** -0.5)


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
    greedy = [continuation(model, row[:length]) for row, length in zip(tokens, PROMPTS, strict=True)]
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "hidden": torch.stack(after).numpy(),
        "logits": result.logits.numpy(),
        "greedy": np.asarray(greedy, np.int32),
    }


def continuation(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    """The most likely tokens, one by one, whatever ends an answer; without a cache."""
    text = prompt[None]
    for _ in range(NEW):
        best = model(text, use_cache=False).logits[:, -1:].argmax(dim=-1)
        text = torch.cat([text, best], dim=1)
    return text[0, len(prompt) :].tolist()


def main() -> None:
    """Writes all of them; or those alone that are named on the command line."""
    named = sys.argv[1:]
    for seed, (name, model) in enumerate(models().items()):
        if named and name not in named:
            continue
        shutil.rmtree(FOLDER / name, ignore_errors=True)
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
