"""Logits, taps and checkpoints against transformers, live, on random models of a fresh seed.

Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams, config_to_hf, declare, forward_full
from tilewright.models.layers import Llama3Scaling, RopeScaling
from tilewright.models.params import initialise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "truncate": False,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PROPORTIONAL_ROPE = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}

# (family, tied head, heads, key heads, head size or None for hidden / heads, RoPE)
CASES: dict[str, tuple[str, bool, int, int, int | None, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", True, 8, 2, 32, PLAIN_ROPE),
    "qwen3-untied": ("qwen3", False, 4, 1, 24, PLAIN_ROPE),
    "qwen3-scaled": ("qwen3", True, 4, 4, 16, LLAMA3_ROPE),
    "qwen2-tied": ("qwen2", True, 4, 2, None, PLAIN_ROPE),
    "qwen2-scaled": ("qwen2", False, 6, 6, None, LLAMA3_ROPE),
    "llama-tied": ("llama", True, 6, 2, None, PLAIN_ROPE),
    "llama-untied": ("llama", False, 4, 4, 20, PLAIN_ROPE),
    "llama-scaled": ("llama", False, 8, 4, None, LLAMA3_ROPE),
    "llama-linear": ("llama", False, 4, 2, None, LINEAR_ROPE),
    "mistral": ("mistral", False, 4, 2, 16, PLAIN_ROPE),
    "mistral-yarn": ("mistral", False, 4, 2, 16, YARN_ROPE),
    "qwen3-yarn": ("qwen3", True, 4, 2, 32, {**YARN_ROPE, "attention_factor": 1.3}),
    "phi3": ("phi3", False, 6, 2, None, PLAIN_ROPE),
    "phi3-partial": ("phi3", True, 3, 3, None, PARTIAL_ROPE),
    "smollm3": ("smollm3", True, 3, 1, None, PLAIN_ROPE),
    "mistral-window": ("mistral", False, 4, 2, 16, PLAIN_ROPE),
    "ministral-window": ("ministral", False, 4, 2, 16, PLAIN_ROPE),
    "qwen2-window": ("qwen2", False, 6, 2, None, PLAIN_ROPE),
    "gemma2": ("gemma2", True, 4, 2, 16, PLAIN_ROPE),
    "gemma3": ("gemma3_text", True, 4, 2, 16, {"full_attention": LINEAR_ROPE, "sliding_attention": PLAIN_ROPE}),
    "gemma4": ("gemma4_text", True, 4, 2, 16, {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": PLAIN_ROPE}),
    "gemma4-moe": ("gemma4_text", True, 4, 2, 16, {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": PLAIN_ROPE}),
    "gemma4-unified": (
        "gemma4_unified_text",
        True,
        4,
        2,
        16,
        {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": PLAIN_ROPE},
    ),
    "gemma4-values": ("gemma4_text", False, 4, 4, 16, {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": PLAIN_ROPE}),
}
GEMMA4 = {
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "mistral-window": {"sliding_window": 11},
    "ministral-window": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2},
    "gemma2": {"sliding_window": 11, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0},
    "gemma4": {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 3.0},
    "gemma4-moe": {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "gemma4-unified": {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
    "gemma4-values": GEMMA4,
    "gemma3": {"sliding_window": 11, "query_pre_attn_scalar": 10, "sliding_window_pattern": 3},
}
CLASSES = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3", "gemma4_text": "Gemma4", "gemma4_unified_text": "Gemma4Unified"}
CONFIGS = {"gemma3_text": "Gemma3Text", "gemma4_text": "Gemma4Text", "gemma4_unified_text": "Gemma4UnifiedText"}
"""What transformers calls families whose names are not theirs with a capital."""


def torch_model(case: str, generator: Any) -> Any:
    """A model of transformers' with random weights, the norms included."""
    family, tied, heads, kv_heads, head_dim, rope = CASES[case]
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_parameters": dict(rope),
    }
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    if family in ("mistral", "phi3"):
        sizes |= {"sliding_window": None, "pad_token_id": None}
    if family == "smollm3":
        sizes |= {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": None}
    sizes |= MORE.get(case, {})
    if sizes.get("enable_moe_block"):
        sizes["experts_implementation"] = "eager"  # the others have no float64
    name = CLASSES.get(family, family.capitalize())
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{CONFIGS.get(family, name)}Config")(**sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            shift = 1.0 if weight.ndim == 1 and "norm" in name else 0.0
            weight.copy_(shift + (0.4 if weight.ndim == 1 else scale) * drawn)
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number.copy_(0.5 + torch.rand(1, generator=generator))
    return model.eval()


def loaded(folder: Path, dtype: str) -> Any:
    """Read from its files: `model.to(...)` would round the rotary frequencies as well."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def torch_outputs(model: Any, tokens: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The residual stream after each layer, and the logits."""
    after: list[np.ndarray] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: after.append(out.float().numpy())) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens), use_cache=False).logits.float().numpy()
    for hook in hooks:
        hook.remove()
    return after, logits


def own_outputs(config: DecoderConfig, params: DecoderParams, tokens: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    @jax.jit
    def run(params: DecoderParams, tokens: jax.Array) -> tuple[Any, jax.Array]:
        out = forward_full(config, PLAIN, params, tokens, tuple(range(config.num_layers)))
        return out.taps, decoder.logits(config, PLAIN, params, out.hidden)

    taps, logits = run(params, jnp.asarray(tokens, jnp.int32))
    return [np.asarray(tap.astype(jnp.float32)) for tap in taps], np.asarray(logits)


def random_tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, vocab_size, (3, 70))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_and_taps(case: str, sharded: bool, tmp_path: Path):
    print(f"ORACLE_SEED={SEED}")
    model = torch_model(case, torch.Generator().manual_seed(SEED))
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not sharded
    config, params = load_decoder(tmp_path, jnp.float32)
    tokens = random_tokens(config.vocab_size)
    # In float64, so that the bound is of our own rounding: transformers' in float32 can be more than that.
    expected_taps, expected = torch_outputs(model.double(), tokens)
    taps, logits = own_outputs(config, params, tokens)
    assert np.max(np.abs(logits - expected)) <= TOLERANCE
    for tap, expected_tap in zip(taps, expected_taps, strict=True):
        assert np.max(np.abs(tap - expected_tap)) <= TOLERANCE


@pytest.mark.parametrize("case", sorted(case for case in CASES if "full_attention" not in CASES[case][5]))  # two tables
def test_rope_frequencies(case: str):
    """Against the table that transformers' own rotary embedding holds (float32)."""
    model = torch_model(case, torch.Generator().manual_seed(SEED))
    config = decoder.config_from_hf(model.config.to_dict())
    np.testing.assert_allclose(config.rope_frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


@pytest.mark.parametrize("case", ["qwen3-tied", "llama-untied"])
def test_bfloat16(case: str, tmp_path: Path):
    """A bfloat16 checkpoint loads bit for bit, and its logits are as near to float32's as transformers' own are."""
    print(f"ORACLE_SEED={SEED}")
    torch_model(case, torch.Generator().manual_seed(SEED)).to(torch.bfloat16).save_pretrained(tmp_path)
    config, params = load_decoder(tmp_path, jnp.bfloat16)
    model = loaded(tmp_path, "bfloat16")
    embed = model.model.embed_tokens.weight.detach()
    np.testing.assert_array_equal(np.asarray(params.embed).view(np.int16), embed.view(torch.int16).numpy())
    tokens = random_tokens(config.vocab_size)
    _, theirs = torch_outputs(model, tokens)
    _, exact = torch_outputs(loaded(tmp_path, "float32"), tokens)
    _, ours = own_outputs(config, params, tokens)

    def error(logits: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.square(logits - exact))))

    assert error(ours) < 1.5 * error(theirs)


def test_float32_of_a_bfloat16_checkpoint(tmp_path: Path):
    """Loading converts exactly, so the float32 logits are those of the widened weights."""
    torch_model("llama-scaled", torch.Generator().manual_seed(SEED)).to(torch.bfloat16).save_pretrained(tmp_path)
    config, params = load_decoder(tmp_path, jnp.float32)
    tokens = random_tokens(config.vocab_size)
    _, expected = torch_outputs(loaded(tmp_path, "float32"), tokens)
    _, logits = own_outputs(config, params, tokens)
    assert np.max(np.abs(logits - expected)) <= TOLERANCE


OWN = DecoderConfig(
    family="qwen3",
    vocab_size=77,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=30000.0,
    max_position_embeddings=256,
    eos_token_ids=(3, 4),
)


@pytest.mark.parametrize("case", ["gemma4", "gemma4-moe", "gemma4-unified", "gemma4-values"])
def test_transformers_reads_gemma4_as_we_write_it(case: str, tmp_path: Path):
    """Written with the fields of published configurations, which are not those that transformers writes."""
    model = torch_model(case, torch.Generator().manual_seed(SEED))
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_decoder(tmp_path / "theirs", jnp.float32)
    (tmp_path / "ours").mkdir()
    save_params(tmp_path / "ours", config_to_hf(config), declare(config), params, jnp.float32)
    tokens = random_tokens(config.vocab_size)
    _, expected = torch_outputs(model, tokens)
    _, logits = torch_outputs(loaded(tmp_path / "ours", "float32"), tokens)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 32)])
def test_transformers_reads_what_we_write(family: str, tied: bool, scaling: RopeScaling | None, tmp_path: Path):
    """A model made here, saved here and loaded by transformers, gives the same logits."""
    config = DecoderConfig(**{**vars(OWN), "family": family, "tie_word_embeddings": tied, "rope_scaling": scaling})
    specs = declare(config)
    params = jax.tree.map(lambda x: 6.0 * x if x.ndim == 2 else x, initialise(specs, jax.random.key(SEED)))
    save_params(tmp_path, config_to_hf(config), specs, params, jnp.float32)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.eos_token_id == [3, 4]
    tokens = random_tokens(config.vocab_size)
    _, expected = torch_outputs(model.eval(), tokens)
    _, logits = own_outputs(config, params, tokens)
    assert np.max(np.abs(logits - expected)) <= TOLERANCE
