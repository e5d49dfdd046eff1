"""LLaDA2: logits of the layers against NumPy, published configurations, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llm.support import prompts
from models.test_config import problems
from reference.llada2_numpy import Model, random_model
from reference.self_speculation_numpy import as_folder
from tilewright.kernels.select import PLAIN, operations
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.config import MaskedBlocks
from tilewright.models.decoder import config_from_hf, config_to_hf, declare, forward_full, logits
from tilewright.models.experts import Mixture, SigmoidRouting, route

MINI: dict[str, Any] = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 157184,
}
"""LLaDA2.0-mini as published."""


def found_logits(model: Model, folder: Path, tokens: list[int], kernels: Any = PLAIN) -> np.ndarray:
    """Logits of a model whose blocks have one token, so that its attention is causal."""
    config, params = load_decoder(as_folder(folder, model), jnp.float32, ops=kernels)  # type: ignore[arg-type]
    hidden = forward_full(config, kernels, params, jnp.asarray([tokens])).hidden
    return np.asarray(logits(config, kernels, params, hidden))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
        {"num_experts_per_tok": 1, "num_shared_experts": 0, "first_k_dense_replace": 0},
        {"n_group": 8, "topk_group": 3, "num_shared_experts": 2, "partial_rotary_factor": 1.0},
    ],
    ids=["groups", "one group", "one expert", "pairs"],
)
def test_logits_are_those_of_the_published_layers(changes: dict[str, Any], tmp_path: Path):
    model = random_model(1, block=1, **changes)
    (tokens,) = prompts(0, (24,), 40)
    np.testing.assert_allclose(found_logits(model, tmp_path, tokens), model.logits(tokens), rtol=2e-4, atol=2e-4)


def test_the_kernels_give_the_logits_of_the_published_layers(tmp_path: Path):
    model = random_model(1, block=1)
    (tokens,) = prompts(0, (24,), 40)
    found = found_logits(model, tmp_path, tokens, operations())
    np.testing.assert_allclose(found, model.logits(tokens), rtol=2e-4, atol=2e-4)


@given(st.integers(0, 2**31 - 1), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (8, 3)]), st.integers(1, 4), st.booleans())
def test_experts_are_chosen_within_groups(seed: int, groups: tuple[int, int], chosen: int, normalised: bool):
    """The correction changes the choice and not the weights."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((9, 16)).astype(np.float32)
    correction = (0.3 * rng.standard_normal(16)).astype(np.float32)
    mixture = Mixture(16, chosen, 8, normalised, sigmoid=SigmoidRouting(*groups, 2.5))
    experts, weights = jax.jit(lambda *given: route(mixture, *given))(scores, correction)
    each = 16 // groups[0]
    for row, chosen_experts, chosen_weights in zip(
        scores.astype(np.float64), np.asarray(experts), np.asarray(weights), strict=True
    ):
        affinities = 1 / (1 + np.exp(-row))
        ranked = affinities + correction
        sums = [sum(sorted(ranked[g * each : (g + 1) * each])[-2:]) for g in range(groups[0])]
        best = np.argsort(sums)[::-1][: groups[1]]
        allowed = [e for e in np.argsort(-ranked) if e // each in best]
        assert chosen_experts.tolist() == allowed[:chosen]
        want = affinities[chosen_experts] / (affinities[chosen_experts].sum() if normalised else 1) * 2.5
        np.testing.assert_allclose(chosen_weights, want, rtol=1e-5)


def test_a_published_configuration():
    config = config_from_hf(MINI)
    assert config.mixture == Mixture(256, 8, 512, shared=512, sigmoid=SigmoidRouting(8, 4, 2.5))
    assert config.masked_blocks == MaskedBlocks(156895, 32, causal=False, threshold=0.95)
    assert (config.dense_layers, config.eos_token_ids, config.denoises_blocks) == ((0,), (156892,), True)
    assert config.kind(0).mixture is None
    assert config.kind(1).mixture == config.mixture
    assert len(config.rope_frequencies) == 32
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(config_to_hf(replace(config, partial_rotary_factor=1.0))).partial_rotary_factor == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"expert_capacity": 48}, "expert_capacity=48 is not supported (LLaDA2.2, which inserts and deletes tokens)"),
        ({"delete_token_id": 156930}, "delete_token_id=156930 is not supported (LLaDA2.2, which inserts and deletes tokens)"),
        ({"use_qkv_bias": True}, "use_qkv_bias=True is not supported (only False)"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported (only True)"),
        ({"score_function": "softmax"}, "score_function='softmax' is not supported (only 'sigmoid')"),
        ({"first_k_dense_replace": 20}, "first_k_dense_replace must be from 0 to 19, found 20"),
        ({"num_shared_experts": -1}, "num_shared_experts must be a number of experts, found -1"),
        ({"n_group": 7}, "expected groups that divide 256 experts, with at least 2 each, found 7"),
        ({"topk_group": 9}, "expected from 1 to 8 groups for each token, found 9"),
        ({"num_experts": 8, "n_group": 4, "topk_group": 1}, "expected at most 2 experts for each token, found 8"),
        ({"mask_token_id": 157184}, "mask_token_id must be a token id below vocab_size, found 157184"),
    ],
)
def test_fields_that_are_not_supported_are_named(change: dict[str, Any], said: str):
    (found,) = problems({**MINI, **change})
    assert said in found


def test_a_saved_model_has_the_published_tensors(tmp_path: Path):
    model = random_model(2)
    config, params = load_decoder(as_folder(tmp_path / "a", model), jnp.float32)  # type: ignore[arg-type]
    save_params(tmp_path / "b", config_to_hf(config), declare(config), params, jnp.float32)
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        np.testing.assert_array_equal(written[name], tensor)
