"""MTP heads of Qwen3-Next and Qwen3.5 against layers of transformers, live, on random models of a fresh seed.

transformers has no MTP head. This one follows the published code of vLLM and SGLang (see `models/mtp.py`), around transformers'
own decoder layer, norms and rotation. Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.mtp_numpy import add_head
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, mtp
from tilewright.models.checkpoint import load_decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
IMAGE_AXES = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextConfig", "Qwen3Next", EXPERTS),
    "qwen3-next-dense": ("Qwen3NextConfig", "Qwen3Next", {"num_experts": 0}),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5", {}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5Moe", EXPERTS),
}
STEPS = 3


class TorchHead:
    """An MTP head for a model of transformers."""

    def __init__(self, name: str, model: Any):
        _, prefix, _ = CASES[name]
        module = __import__(type(model).__module__, fromlist=["models"])
        config = model.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.model = model
        self.embedding_norm, self.hidden_norm, self.norm = (
            getattr(module, f"{prefix}RMSNorm")(size, eps=eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = getattr(module, f"{prefix}DecoderLayer")(config, config.num_hidden_layers - 1)
        self.parts = {
            "pre_fc_norm_embedding": self.embedding_norm,
            "pre_fc_norm_hidden": self.hidden_norm,
            "fc": self.fc,
            "norm": self.norm,
            "layers.0": self.layer,
        }

    def tensors(self, in_one: bool) -> dict[str, np.ndarray]:
        """Tensors under their names in checkpoints, with all experts in one tensor or each in tensors of its own."""
        found = {}
        for part, module in self.parts.items():
            for name, value in module.state_dict().items():
                array = value.numpy()
                stem = f"mtp.{part}.{name}"
                if "mlp.experts." not in name or in_one:
                    found[stem] = array
                    continue
                head, _, kind = stem.rpartition(".")
                for n, matrix in enumerate(array):
                    pieces = {"down_proj": matrix}
                    if kind == "gate_up_proj":
                        pieces = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
                    found |= {f"{head}.{n}.{piece}.weight": each for piece, each in pieces.items()}
        return found

    def run(self, h: Any, tokens: Any) -> Any:
        """Outputs of the layer for pairs of states and the tokens behind them, from position 0 on, normed."""
        pair = [self.embedding_norm(self.model.model.embed_tokens(tokens)), self.hidden_norm(h)]
        x = self.fc(torch.cat(pair, dim=-1))
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.layer(
            x, position_embeddings=self.model.model.rotary_emb(x, positions), attention_mask=mask, position_ids=positions
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("name", CASES)
def test_a_chain_equals_the_published_head(tmp_path: Path, name: str):
    print(f"ORACLE_SEED={SEED}")
    torch.manual_seed(SEED)
    config_class, prefix, more = CASES[name]
    rope = {**SIZES["rope_parameters"], **(IMAGE_AXES if prefix != "Qwen3Next" else {})}
    config = getattr(transformers, config_class)(**{**SIZES, "rope_parameters": rope, **more})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    head = TorchHead(name, model)
    with torch.no_grad():
        for weight in [*model.parameters(), *(w for part in head.parts.values() for w in part.parameters())]:
            norm = weight.ndim == 1
            weight.copy_(torch.randn_like(weight) / 3 if norm else 1.5 * torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    add_head(tmp_path, head.tensors(in_one=prefix == "Qwen3_5Moe"))
    tokens = torch.randint(0, 64, (1, 11 + STEPS))
    first = 11
    with torch.no_grad():
        states = model.model(tokens).last_hidden_state
        h = states[:, :first]
        outputs = []
        for step in range(STEPS):  # the chain reads the text in the place of its own drafts
            out = head.run(h, tokens[:, 1 : first + 1 + step])[:, -1:]
            outputs.append(out)
            h = torch.cat([h, out], dim=1)
        want = torch.cat(outputs, dim=1).numpy()

    target, params = load_decoder(tmp_path, jnp.float32)
    assert mtp.is_stored(tmp_path)
    loaded, head_params = mtp.load_stored_head(tmp_path, target, jnp.float32)

    @jax.jit
    def run(params: Any, head_params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        (stream,) = decoder.forward_full(target, PLAIN, params, tokens, loaded.target_layer_ids).taps
        ours = PLAIN.rms_norm(stream, params.norm, target.rms_norm_eps)
        h = ours[:, :first]
        outputs = []
        for step in range(STEPS):
            embeds = params.embed[tokens[:, 1 : first + 1 + step]]
            positions = jnp.arange(first + step)[None]

            def attend(projection: Any, heads: Any) -> jax.Array:
                return decoder.causal_attend(PLAIN, projection, heads, None, None)[0]

            out = mtp.step(loaded, PLAIN, head_params, h, embeds, positions, attend)[:, -1:]
            outputs.append(out)
            h = jnp.concatenate([h, out], axis=1)
        return ours, jnp.concatenate(outputs, axis=1)

    ours, got = run(params, head_params, jnp.asarray(tokens.numpy(), jnp.int32))
    np.testing.assert_allclose(ours, states.numpy(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
