"""Reference of drafting with an assistant of Gemma 4 in NumPy float64, which tests compare with the engine.

Written from transformers' code of the method and not from the engine. The target's states, keys and values come from a pass
over the whole text without a cache. One sequence at a time, so arrays have no batch dim. Weights are kept as checkpoints store
them, `[out, in]`.

Source: `modeling_gemma4_assistant.py` and `SinglePositionMultiTokenCandidateGenerator` of transformers 5.24.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from reference.dflash_numpy import Array, rms_norm
from tilewright.kernels.select import PLAIN
from tilewright.models import assistant, decoder
from tilewright.models.checkpoint import load_decoder
from tilewright.models.params import initialise, to_tensors

WINDOW = 16
SURENESS = np.float32(0.4)
"""Scale of embeddings: the larger, the more the last token decides."""
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
TARGET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
}
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def random_tensors(seed: int, specs: Any) -> dict[str, NDArray[Any]]:
    """Random tensors of a declaration, with norms around one."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, tensor in to_tensors(specs, initialise(specs, jax.random.key(0)), jnp.float32):
        drawn = rng.normal(size=tensor.shape)
        scaled = 1 + 0.3 * drawn if tensor.ndim == 1 else drawn * (1 if "embed" in name else 1.5 * tensor.shape[1] ** -0.5)
        if name == assistant.ORDERING:
            scaled = rng.permutation(tensor.size)
        found[name] = scaled.astype(np.int64 if name == assistant.ORDERING else np.float32)
    return found


def as_folders(
    folder: Path, vocab: int, clusters: int = 0, chosen: int = 2, seed: int = 0, eos: int | None = None, **more: Any
) -> tuple[Path, Path]:
    """Writes a random target and an assistant for it. Returns the target's folder, where "t7" is token 7, and the assistant's.

    Both tend to the successor of a token, so that some drafts are accepted.

    Args:
        more: fields of the assistant's `config.json`.
    """
    sizes = {**TEXT, "vocab_size": vocab}
    target = {
        **sizes,
        **TARGET,
        "eos_token_id": eos,
        "num_hidden_layers": len(TARGET["layer_types"]),
        "architectures": ["Gemma4ForCausalLM"],
    }
    with_clusters = {"use_ordered_embeddings": True, "num_centroids": clusters, "centroid_intermediate_top_k": chosen}
    fields = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": TARGET["hidden_size"],
        "text_config": {**sizes, **LAYERS, "num_hidden_layers": len(LAYERS["layer_types"]), "num_kv_shared_layers": 3},
        **(with_clusters if clusters else {}),
        **more,
    }
    config = decoder.config_from_hf(target)
    tensors = random_tensors(seed, decoder.declare(config))
    embedding = tensors["model.embed_tokens.weight"] = SURENESS * tensors["model.embed_tokens.weight"]
    successor = np.roll(embedding, 1, axis=0)
    tensors["lm_head.weight"] = successor
    drafter = random_tensors(seed + 1, assistant.declare(assistant.config_from_hf(fields, config)))
    drafter["model.embed_tokens.weight"] = successor
    drafter["pre_projection.weight"] += np.eye(*drafter["pre_projection.weight"].shape, dtype=np.float32)
    for name, content, arrays in (("target", target, tensors), ("drafter", fields, drafter)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content))
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / name / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    return folder / "target", folder / "drafter"


class Reference:
    """An assistant and its target.

    Attributes:
        longest: the most tokens of a text.
    """

    def __init__(self, target: Path, drafter: Path, longest: int):
        self.config, self.params = load_decoder(target, jnp.float32)
        self.embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
        self.fields = json.loads((drafter / "config.json").read_text())
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(drafter / "model.safetensors").items()}
        self.longest = longest

        @jax.jit
        def run(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
            def attend(ops: Any, projection: Any, heads: Any, metadata: Any, cache: Any) -> tuple[jax.Array, Any]:
                out, _ = decoder.causal_attend(ops, projection, heads, None, None)
                return out, ops.heads(projection, heads)[1:]

            positions = jnp.arange(tokens.shape[1])[None]
            ran = decoder.forward(self.config, PLAIN, params, tokens, positions, attend)
            states = PLAIN.rms_norm(ran.hidden, params.norm, self.config.rms_norm_eps)
            return decoder.logits(self.config, PLAIN, params, ran.hidden), states, ran.caches

        self.run = run

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"]

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), 1e-6)

    def rotated(self, x: Array, kind: str, position: int) -> Array:
        rope = TEXT["rope_parameters"][kind]
        half = x.shape[-1] // 2
        frequencies = rope["rope_theta"] ** (-np.arange(half) / half)
        frequencies[int(rope.get("partial_rotary_factor", 1.0) * half) :] = 0
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def layer(self, n: int, x: Array, k: Array, v: Array, position: int) -> Array:
        """Runs a layer over one token; keys and values `[K, positions, D]` are those of the target up to the token."""
        kind = LAYERS["layer_types"][n]
        if kind == "sliding_attention":
            k, v = k[:, -(WINDOW + 1) :], v[:, -(WINDOW + 1) :]
        prefix = f"model.layers.{n}"
        inner = self.norm(x, f"{prefix}.input_layernorm")
        q = (self.weight(f"{prefix}.self_attn.q_proj") @ inner).reshape(-1, k.shape[-1])
        q = self.rotated(self.norm(q, f"{prefix}.self_attn.q_norm"), kind, position).reshape(len(k), -1, k.shape[-1])
        scores = np.exp(q @ k.transpose(0, 2, 1))
        out = (scores / scores.sum(axis=-1, keepdims=True) @ v).reshape(-1)
        x = x + self.norm(self.weight(f"{prefix}.self_attn.o_proj") @ out, f"{prefix}.post_attention_layernorm")
        inner = self.norm(x, f"{prefix}.pre_feedforward_layernorm")
        gate = self.weight(f"{prefix}.mlp.gate_proj") @ inner
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = self.weight(f"{prefix}.mlp.down_proj") @ (gate * (self.weight(f"{prefix}.mlp.up_proj") @ inner))
        return (x + self.norm(y, f"{prefix}.post_feedforward_layernorm")) * self.tensors[f"{prefix}.layer_scalar"]

    def round(self, tokens: Sequence[int], drafts: int) -> tuple[list[int], list[int]]:
        """Returns the drafts behind at least two tokens, and the target's own token behind the last of these and each draft."""
        last = len(tokens) - 1
        proposed: list[int] = []
        padded = np.zeros((1, self.longest), np.int32)
        padded[0, : len(tokens)] = tokens
        _, states, caches = self.run(self.params, padded)
        h = np.asarray(states[0, last - 1], np.float64)
        kinds = ("sliding_attention", "full_attention")  # of the target's last two layers
        keys, values = (
            {kind: np.asarray(caches[n - 2][part][0, :, :last], np.float64) for n, kind in enumerate(kinds)} for part in (0, 1)
        )
        for _ in range(drafts):
            embedded = self.embedding[[*tokens, *proposed][-1]] * self.embedding.shape[1] ** 0.5
            x = self.weight("pre_projection") @ np.concatenate([embedded, h])
            for n, kind in enumerate(LAYERS["layer_types"]):
                x = self.layer(n, x, keys[kind], values[kind], last)
            x = self.norm(x, "model.norm")
            logits = self.weight("model.embed_tokens") @ x
            if self.fields.get("use_ordered_embeddings"):
                best = np.argsort(self.weight("masked_embedding.centroids") @ x)[: -self.fields["num_centroids"] - 1 : -1]
                members = self.tensors[assistant.ORDERING].astype(int).reshape(len(best), -1)
                allowed = members[best[: self.fields["centroid_intermediate_top_k"]]].ravel()
                logits = np.where(np.isin(np.arange(len(logits)), allowed), logits, -np.inf)
            second, first = np.sort(logits)[-2:]
            assert first - second > 1e-5, "rounding must not be able to turn a choice"
            proposed.append(int(logits.argmax()))
            h = self.weight("post_projection") @ x
        padded[0, len(tokens) : len(tokens) + drafts] = proposed
        logits, _, _ = self.run(self.params, padded)
        return proposed, np.asarray(logits[0, last : last + drafts + 1]).argmax(axis=-1).tolist()
