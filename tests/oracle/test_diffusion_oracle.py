"""Dream's backbone against transformers' Qwen2 with the causal mask removed, live, on random models of a fresh seed.

Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import json
import os
import secrets
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models import diffusion
from tilewright.models.diffusion import load_diffusion

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
LENGTHS = (40, 27)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_logits(kv_heads: int, tmp_path: Path):
    """Rows of different lengths; the mask lets every query see all keys but padding."""
    print(f"ORACLE_SEED={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    sizes = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = transformers.Qwen2ForCausalLM(sizes).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.4 if weight.ndim == 1 else 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            weight.copy_(("norm" in name) + scale * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "Dream", "mask_token_id": 127}))

    tokens = np.random.default_rng(SEED).integers(0, 128, (2, max(LENGTHS)))
    valid = np.asarray(LENGTHS)
    seen = np.arange(max(LENGTHS)) < valid[:, None]
    mask = torch.from_numpy(np.where(seen, 0.0, -1e30).astype(np.float32))[:, None, None].expand(-1, 1, max(LENGTHS), -1)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens), attention_mask=mask, use_cache=False).logits.numpy()

    config, params = load_diffusion(tmp_path, jnp.float32)
    hidden = jax.jit(
        lambda p: diffusion.forward_full(config, PLAIN, p, jnp.asarray(tokens, jnp.int32), jnp.asarray(valid)).hidden
    )
    found = np.asarray(diffusion.logits(config, PLAIN, params, hidden(params)))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :length], expected[row, :length], rtol=0, atol=1e-4)
