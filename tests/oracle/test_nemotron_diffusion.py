"""Logits of Nemotron-Labs-Diffusion against transformers' Ministral3, which has the same layers and rotary settings.

transformers has no class of this family. Its model's weights are stored under the names of published checkpoints.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder
from tilewright.models.decoder import forward_full

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
TOLERANCE = 1e-4
ORIGINAL = 64
"""Positions up to which the scale of queries is 1."""
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16 * ORIGINAL,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OWN: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion",
    "dlm_paradigm": "bidirectional",
    "dlm_type": "llada",
    "mask_token_id": 100,
    "block_size": 32,
}
STORED = {"model.": "encoder.", "lm_head.": "diffusion_head."}


def torch_model(generator: Any) -> Any:
    """Makes a Ministral3 with random weights, the norms included."""
    config = transformers.Ministral3Config(**SIZES, rope_parameters=dict(ROPE), pad_token_id=None)
    model = transformers.Ministral3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            scale = 1.0 if "embed" in name else 0.4 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_((1.0 if weight.ndim == 1 else 0.0) + scale * drawn)
    return model.eval()


def stored_name(name: str) -> str:
    """Returns the name of a tensor in published checkpoints."""
    prefix = next(prefix for prefix in STORED if name.startswith(prefix))
    return STORED[prefix] + name.removeprefix(prefix)


def as_folder(folder: Path, model: Any) -> Path:
    """Writes the model as a published checkpoint."""
    tensors = {stored_name(name): weight.detach().numpy() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**SIZES, **OWN, "rope_parameters": ROPE}))
    return folder


def test_logits_up_to_the_original_length(tmp_path: Path):
    print(f"ORACLE_SEED={SEED}")
    model = torch_model(torch.Generator().manual_seed(SEED))
    config, params = load_decoder(as_folder(tmp_path, model), jnp.float32)
    assert config.max_position_embeddings == ORIGINAL
    np.testing.assert_allclose(config.rope_frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, (3, ORIGINAL))
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(tokens), use_cache=False).logits.numpy()

    @jax.jit
    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        return decoder.logits(config, PLAIN, params, forward_full(config, PLAIN, params, tokens).hidden)

    found = np.asarray(logits(params, jnp.asarray(tokens, jnp.int32)))
    assert np.max(np.abs(found - expected)) <= TOLERANCE


def test_the_scale_of_queries_begins_at_the_original_length():
    """So the context has to end there: the next position has other logits than without the scale."""
    model = torch_model(torch.Generator().manual_seed(SEED)).double()
    tokens = torch.from_numpy(np.random.default_rng(SEED).integers(0, SIZES["vocab_size"], (1, ORIGINAL + 1)))
    with torch.no_grad():
        scaled = model(tokens, use_cache=False).logits[0]
        model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
        unscaled = model(tokens, use_cache=False).logits[0]
    assert torch.equal(scaled[:ORIGINAL], unscaled[:ORIGINAL])
    assert (scaled[ORIGINAL] - unscaled[ORIGINAL]).abs().max() > 1e-3
