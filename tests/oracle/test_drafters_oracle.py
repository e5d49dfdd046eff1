"""DFlash's layers against transformers' drafter for Muse Glimmer, live, on random models of a fresh seed.

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
from tilewright.models import decoder, dflash
from tilewright.models.checkpoint import read_config
from tilewright.runtime.cache import Sliding
from tilewright.speculation.drafters.load import load_dflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
DRAFTER = {**SIZES, "num_hidden_layers": 3, "block_size": 5, "mask_token_id": 29, "target_layer_ids": [0, 2, 3]}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
TARGET = {**SIZES, "model_type": "qwen3", "vocab_size": 30, "num_hidden_layers": 5, "max_position_embeddings": 64}


@pytest.mark.parametrize("window", [4, 9])
@pytest.mark.parametrize("context", [3, 12])
def test_a_block_equals_transformers(tmp_path: Path, window: int, context: int):
    """With contexts that end before a window does, and behind."""
    print(f"ORACLE_SEED={SEED}")
    torch.manual_seed(SEED)
    fields = transformers.MuseGlimmerAssistantConfig(
        **DRAFTER, layer_types=KINDS, sliding_window=window, rope_parameters={"rope_theta": 5e5}
    )
    fields._attn_implementation = "eager"
    model = transformers.MuseGlimmerAssistantModel(fields).eval()
    with torch.no_grad():
        for weight in model.parameters():
            norm = weight.ndim == 1
            weight.copy_(1 + torch.randn_like(weight) / 3 if norm else torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(SEED)
    taps, block = (rng.normal(size=(2, n, width)).astype(np.float32) for n, width in ((context, 144), (5, 48)))
    positions = np.broadcast_to(np.arange(context + 5), (2, context + 5)).copy()
    cache = cache_utils.DFlashCache(config=fields)
    cache.set_previous_accepted_tokens(context)
    with torch.no_grad():
        want = model(
            noise_embeds=torch.tensor(block),
            context_hidden_states=torch.tensor(taps),
            position_ids=torch.tensor(positions),
            cache=cache,
        ).last_hidden_state.numpy()
    config, params = load_dflash(tmp_path, read_config(tmp_path), decoder.config_from_hf(TARGET), "float32", None)
    assert config.windows == (window + 1, None, window + 1)

    @jax.jit
    def run(taps: jax.Array, block: jax.Array) -> jax.Array:
        features = dflash.context_features(config, PLAIN, params, jnp.split(taps, 3, axis=-1))
        pairs = dflash.context_kv(config, PLAIN, params, features, jnp.asarray(positions[:, :context], jnp.int32))
        caches = tuple(Sliding(k, v, window or 99) for (k, v), window in zip(pairs, config.windows, strict=True))
        at = jnp.asarray(positions[:, context:], jnp.int32)
        known = jnp.full(2, context, jnp.int32)
        return dflash.run_block(config, PLAIN, params, block, at, caches, dflash.attend_context, known)

    np.testing.assert_allclose(run(jnp.asarray(taps), jnp.asarray(block)), want, rtol=1e-4, atol=1e-4)
