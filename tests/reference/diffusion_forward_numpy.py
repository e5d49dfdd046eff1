"""A second reading of LLaDA's and Dream's forward pass, in NumPy float64, from raw tensors under their checkpoint names.

Written from the published modelling code and not from the package. One sequence without padding at a time.

Sources: `modeling_llada.py` of GSAI-ML/LLaDA-8B-Instruct (`LLaDALlamaBlock`); `modeling_dream.py` of
Dream-org/Dream-v0-Base-7B.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import attention, rms_norm, rotate

Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def bidirectional(q: Array, k: Array, v: Array, heads: int, kv_heads: int, theta: float) -> Array:
    """Attention of all positions `[n, _]` to all, after rotation by their places."""
    n, size = len(q), q.shape[1] // heads
    places = range(n)
    queries, keys = rotate(q.reshape(n, heads, size), places, theta), rotate(k.reshape(n, kv_heads, size), places, theta)
    return attention(queries, keys, v.reshape(n, kv_heads, size), np.ones((n, n), bool))


def llada_logits(config: Mapping[str, Any], tensors: Tensors, tokens: Sequence[int]) -> Array:
    """`[n, V]`: the logits of each position, which predict that position's token."""
    w = {name.removeprefix("model.transformer."): np.asarray(value, np.float64) for name, value in tensors.items()}
    eps = config["rms_norm_eps"]
    x = w["wte.weight"][np.asarray(tokens)]
    for n in range(config["n_layers"]):
        at = f"blocks.{n}."
        h = rms_norm(x, w[at + "attn_norm.weight"], eps)
        q, k, v = (h @ w[f"{at}{name}_proj.weight"].T for name in "qkv")
        out = bidirectional(q, k, v, config["n_heads"], config["n_kv_heads"], config["rope_theta"])
        x = x + out @ w[at + "attn_out.weight"].T
        h = rms_norm(x, w[at + "ff_norm.weight"], eps)
        x = x + (silu(h @ w[at + "ff_proj.weight"].T) * (h @ w[at + "up_proj.weight"].T)) @ w[at + "ff_out.weight"].T
    head = w["wte.weight"] if config["weight_tying"] else w["ff_out.weight"]
    return rms_norm(x, w["ln_f.weight"], eps) @ head.T


def dream_logits(config: Mapping[str, Any], tensors: Tensors, tokens: Sequence[int]) -> Array:
    """`[n, V]`: the logits of each position, which predict the token behind it."""
    w = {name.removeprefix("model."): np.asarray(value, np.float64) for name, value in tensors.items()}
    eps = config["rms_norm_eps"]
    x = w["embed_tokens.weight"][np.asarray(tokens)]
    for n in range(config["num_hidden_layers"]):
        attn, mlp = f"layers.{n}.self_attn.", f"layers.{n}.mlp."
        h = rms_norm(x, w[f"layers.{n}.input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{attn}{name}_proj.weight"].T + w[f"{attn}{name}_proj.bias"] for name in "qkv")
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        x = x + bidirectional(q, k, v, *heads, config["rope_theta"]) @ w[attn + "o_proj.weight"].T
        h = rms_norm(x, w[f"layers.{n}.post_attention_layernorm.weight"], eps)
        x = x + (silu(h @ w[mlp + "gate_proj.weight"].T) * (h @ w[mlp + "up_proj.weight"].T)) @ w[mlp + "down_proj.weight"].T
    head = w["embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return rms_norm(x, w["norm.weight"], eps) @ head.T


def shifted(logits: Array) -> Array:
    """Dream's logits moved to the positions that they predict, as its `generation_utils.py` does it."""
    return np.concatenate([logits[:1], logits[:-1]])
