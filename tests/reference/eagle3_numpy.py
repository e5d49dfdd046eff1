"""Reference of EAGLE-3 chain drafting in NumPy float64, which tests compare with the engine.

Written from the description of the method and not from the engine. There are no caches: every draft step runs the drafter's
layer again over the whole sequence of pairs. One sequence at a time, so arrays have no batch dim.

Legend: n positions, H hidden of the drafter, G hidden of the target, W draft vocabulary. Weights are kept as a checkpoint
stores them, `[out, in]`.

Sources: EAGLE-3 (arXiv 2503.01840) §3 and its published `eagle/model/cnets.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from reference.dflash_numpy import Array, Target, Tensors, attention, random_matrix, random_norm, rms_norm, rotate


@dataclass(frozen=True)
class Draft:
    """Result of a chain, one entry per step.

    Attributes:
        tokens: drafts, as ids of the target.
        logits: over the draft vocabulary, `[steps, W]`.
        outputs: the layer's output before the final norm, which the next step reads, `[steps, H]`.
    """

    tokens: list[int]
    logits: Array
    outputs: Array


class Chain:
    """An EAGLE-3 drafter: one layer that reads, at position t, the features of position t and the token at t + 1."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, target: Target):
        """`tensors` are named without a `model.` prefix; where they hold no embedding, the target's is read."""
        self.config = config
        self.tensors = tensors
        self.target = target
        self.taps: list[int] = list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.map = [draft + int(shift) for draft, shift in enumerate(tensors["d2t"])]

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"])

    def embed(self, tokens: Sequence[int]) -> Array:
        return self.weight("embed_tokens")[list(tokens)] if "embed_tokens.weight" in self.tensors else self.target.embed(tokens)

    def fuse(self, hidden_after_layer: Sequence[Array]) -> Array:
        """The features `[n, H]`: the target's states `[n, G]` after the tapped layers, side by side, through `fc`."""
        return np.concatenate([hidden_after_layer[i] for i in self.taps], axis=1) @ self.weight("fc").T

    def features(self, tokens: Sequence[int]) -> Array:
        """The features of a text's positions, `[n, H]`."""
        return self.fuse(self.target.run(tokens)[1])

    def layer(self, h: Array, tokens: Sequence[int], first: int = 0) -> Array:
        """Runs the layer over pairs of `h[i]` and `tokens[i]` at positions `first`, `first` + 1, ...; causal; `[n, H]`."""
        positions = range(first, first + len(h))
        x = np.concatenate(
            [self.norm(self.embed(tokens), "midlayer.input_layernorm"), self.norm(h, "midlayer.hidden_norm")], axis=1
        )
        size = self.config["head_dim"]
        theta = self.config["rope_theta"]
        q, k, v = ((x @ self.weight(f"midlayer.self_attn.{name}_proj").T).reshape(len(h), -1, size) for name in "qkv")
        causal = np.tril(np.ones((len(h), len(h)), bool))
        seen = attention(rotate(q, positions, theta), rotate(k, positions, theta), v, causal)
        residual = self.norm(h, "midlayer.hidden_norm") if self.config.get("norm_before_residual") else h
        x = residual + seen @ self.weight("midlayer.self_attn.o_proj").T
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate = inner @ self.weight("midlayer.mlp.gate_proj").T
        up = inner @ self.weight("midlayer.mlp.up_proj").T
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.weight("midlayer.mlp.down_proj").T

    def logits(self, outputs: Array) -> Array:
        """Over the draft vocabulary, `[n, W]`."""
        return self.norm(outputs, "norm") @ self.weight("lm_head").T

    def draft(self, tokens: Sequence[int], features: Array, steps: int, forced: Sequence[int] = ()) -> Draft:
        """Drafts the tokens that follow `tokens`, whose last one is the known token.

        Args:
            tokens: all tokens up to and with the known one.
            features: one row a position, from position 0; that of the known token and later ones are not read.
            steps: how many tokens to draft.
            forced: what the chain reads in the place of its own first proposals.
        """
        known = len(tokens) - 1
        if known < 1 or len(features) < known:
            raise ValueError(f"expected features of at least one and all {known} earlier positions, got {len(features)}")
        h = features[:known]
        beside = list(tokens[1:])
        proposed = []
        logits = []
        for step in range(steps):
            output = self.layer(h, beside)[-1:]
            logits.append(self.logits(output)[0])
            proposed.append(self.map[int(logits[-1].argmax())])
            h = np.concatenate([h, output])
            beside.append(forced[step] if step < len(forced) else proposed[-1])
        return Draft(proposed, np.stack(logits), h[known:])


def random_eagle3(
    seed: int,
    target: Mapping[str, Any],
    *,
    taps: Sequence[int] = (0, 2, 3),
    draft_vocab_size: int = 24,
    hidden_size: int | None = None,
    intermediate_size: int = 48,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    norm_before_residual: bool = False,
    rope_theta: float = 10000.0,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Configuration and tensors of a random drafter for a target of configuration `target`.

    A `hidden_size` of its own brings an embedding of its own.
    """
    rng = np.random.default_rng(seed)
    wide = target["hidden_size"]
    vocab = target["vocab_size"]
    h = hidden_size or wide
    query = num_heads * head_dim
    key = num_kv_heads * head_dim
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": h,
        "target_hidden_size": wide,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab_size,
        "norm_before_residual": norm_before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    }
    ids = np.sort(rng.permutation(vocab)[:draft_vocab_size])
    tensors: dict[str, NDArray[Any]] = {
        "fc": random_matrix(rng, h, wide * len(taps)),
        "midlayer.input_layernorm": random_norm(rng, h),
        "midlayer.hidden_norm": random_norm(rng, h),
        "midlayer.post_attention_layernorm": random_norm(rng, h),
        "midlayer.self_attn.q_proj": random_matrix(rng, query, 2 * h, 1.5),
        "midlayer.self_attn.k_proj": random_matrix(rng, key, 2 * h, 1.5),
        "midlayer.self_attn.v_proj": random_matrix(rng, key, 2 * h),
        "midlayer.self_attn.o_proj": random_matrix(rng, h, query, 1.5),
        "midlayer.mlp.gate_proj": random_matrix(rng, intermediate_size, h, 1.5),
        "midlayer.mlp.up_proj": random_matrix(rng, intermediate_size, h),
        "midlayer.mlp.down_proj": random_matrix(rng, h, intermediate_size, 1.5),
        "norm": random_norm(rng, h),
        "lm_head": random_matrix(rng, draft_vocab_size, h, 3.0),
    }
    if hidden_size is not None:
        tensors["embed_tokens"] = random_matrix(rng, vocab, h, 3.0)
    tensors = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(vocab), ids)
    return config, tensors


def as_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, model_prefix: bool = False) -> Path:
    """Writes a drafter as a Hugging Face style folder; with `model_prefix` as later exports name their tensors.

    These put `model.` before everything but the head and the two vocabulary maps.
    """
    outside = ("lm_head.weight", "d2t", "t2d")
    named = {f"model.{name}" if model_prefix and name not in outside else name: tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in named.items()}, folder / "model.safetensors")
    return folder
