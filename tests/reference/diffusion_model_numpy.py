"""LLaDA and Dream as small transformers in NumPy float64, and their checkpoints, for `diffusion_numpy.py`.

Legend: n positions, r rows (positions that are computed), H hidden, N query heads, K key/value heads, D head size, I inner,
V vocabulary. Weights are `[out, in]`, as checkpoints hold them.

Sources: LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487), their published configurations and modelling code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.int64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / rms(x) * weight` over the last dim."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Rows, theta: float) -> Array:
    """RoPE by half rotation: component i of `x` `[r, heads, D]` turns together with component i + D/2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first = x[..., :half]
    second = x[..., half:]
    cos = np.cos(angles)
    sin = np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: Array) -> Array:
    """Over the last dim."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(q: Array, k: Array, v: Array) -> Array:
    """`softmax(q k^T / sqrt(D)) v` of `q` `[r, N, D]` over all of `k`, `v` `[m, K, D]`; gives `[r, N * D]`."""
    group = q.shape[1] // k.shape[1]
    heads = [softmax(q[:, i] @ k[:, i // group].T / np.sqrt(q.shape[2])) @ v[:, i // group] for i in range(q.shape[1])]
    return np.concatenate(heads, axis=1)


@dataclass(frozen=True)
class Layer:
    """q `[N * D, H]`, k and v `[K * D, H]`, o `[H, N * D]`, gate and up `[I, H]`, down `[H, I]`; biases are None for LLaDA."""

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    q_bias: Array | None
    k_bias: Array | None
    v_bias: Array | None
    o: Array
    ffn_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class Model:
    """embed and head `[V, H]`, norm `[H]`. Of the family depend the shift of logits by one ("dream") and tensors' names."""

    family: Literal["llada", "dream"]
    embed: Array
    layers: list[Layer]
    norm: Array
    head: Array
    head_size: int
    theta: float
    eps: float

    @property
    def shift(self) -> int:
        return int(self.family == "dream")

    def project(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """`x` `[r, H]` to heads `[r, heads, D]`."""
        flat = x @ weight.T + (0 if bias is None else bias)
        return flat.reshape(len(x), len(weight) // self.head_size, self.head_size)

    def queries(self, layer: Layer, x: Array, positions: Rows) -> Array:
        h = rms_norm(x, layer.attention_norm, self.eps)
        return rotate(self.project(h, layer.q, layer.q_bias), positions, self.theta)

    def keys_values(self, layer: Layer, x: Array, positions: Rows) -> tuple[Array, Array]:
        h = rms_norm(x, layer.attention_norm, self.eps)
        keys = rotate(self.project(h, layer.k, layer.k_bias), positions, self.theta)
        return keys, self.project(h, layer.v, layer.v_bias)

    def ffn(self, layer: Layer, x: Array) -> Array:
        h = rms_norm(x, layer.ffn_norm, self.eps)
        gate = h @ layer.gate.T
        return gate / (1 + np.exp(-gate)) * (h @ layer.up.T) @ layer.down.T

    def logits(self, x: Array) -> Array:
        """`[r, V]` of the residual stream `[r, H]`, not shifted."""
        return rms_norm(x, self.norm, self.eps) @ self.head.T


def random_model(
    seed: int,
    family: Literal["llada", "dream"],
    vocab: int = 40,
    hidden: int = 32,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int | None = None,
    inner: int = 48,
) -> Model:
    """Float32 numbers held in float64; Dream has biases and, unless told, half as many key/value heads.

    Large enough that attention is far from uniform, so that mistakes in it show.
    """
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or (heads if family == "llada" else heads // 2)
    head_size = hidden // heads
    query = hidden
    key = kv_heads * head_size

    def single(x: NDArray[np.floating]) -> Array:
        return x.astype(np.float32).astype(np.float64)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
        return single(rng.normal(size=(rows, columns)) * gain / np.sqrt(columns))

    def norm() -> Array:
        return single(rng.uniform(0.5, 1.5, hidden))

    def bias(size: int) -> Array | None:
        return single(rng.normal(size=size) * 0.5) if family == "dream" else None

    stack = [
        Layer(
            norm(),
            matrix(query, hidden, 1.5),
            matrix(key, hidden, 1.5),
            matrix(key, hidden),
            bias(query),
            bias(key),
            bias(key),
            matrix(hidden, query, 1.5),
            norm(),
            matrix(inner, hidden, 1.5),
            matrix(inner, hidden),
            matrix(hidden, inner, 1.5),
        )
        for _ in range(layers)
    ]
    embed = single(rng.normal(size=(vocab, hidden)))
    head = matrix(vocab, hidden, 2.0)
    theta, eps = (500000.0, 1e-5) if family == "llada" else (1000000.0, 1e-6)
    return Model(family, embed, stack, norm(), head, head_size, theta, eps)


@dataclass
class Caches:
    """Caches of a layer for all n positions: keys after RoPE and values `[n, K, D]`, contexts before the output projection
    `[n, N * D]`, FFN outputs `[n, H]`; and `base`, the values that `keep_prompt_updates` compares with."""

    k: Array
    v: Array
    c: Array
    f: Array
    base: Array


def dense(model: Model, tokens: Sequence[int] | Rows, length: int | None = None) -> tuple[Array, list[Caches]]:
    """Returns unshifted logits `[n, V]` and the caches of each layer. Rows see the first `length` positions (None: all)."""
    rows = np.arange(len(tokens))
    x = model.embed[list(tokens)]
    caches = []
    for layer in model.layers:
        k, v = model.keys_values(layer, x, rows)
        c = attend(model.queries(layer, x, rows), k[:length], v[:length])
        x = x + c @ layer.o.T
        f = model.ffn(layer, x)
        x = x + f
        caches.append(Caches(k, v, c, f, v.copy()))
    return model.logits(x), caches


NAMES = {
    "llada": "attn_norm q_proj k_proj v_proj attn_out ff_norm ff_proj up_proj ff_out".split(),
    "dream": "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj post_attention_layernorm "
    "mlp.gate_proj mlp.up_proj mlp.down_proj".split(),
}
FIELDS = "attention_norm q k v o ffn_norm gate up down".split()
OUTER = {
    "llada": ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out", "model.transformer.blocks"),
    "dream": ("model.embed_tokens", "model.norm", "lm_head", "model.layers"),
}
"""Names in a checkpoint: of a layer's tensors, in the order of `FIELDS`; of embedding, final norm, head and layers."""
COUNTS = (("n_layers", "num_hidden_layers"), ("n_heads", "num_attention_heads"))
"""Names of the numbers of layers and heads in `config.json` of LLaDA and of Dream."""


def checkpoint(model: Model, mask: int, eos: int) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """The `config.json` and the tensors under their published names."""
    vocab, hidden = model.embed.shape
    heads, kv_heads = (len(weight) // model.head_size for weight in (model.layers[0].q, model.layers[0].k))
    common = {"vocab_size": vocab, "rope_theta": model.theta, "rms_norm_eps": model.eps, "mask_token_id": mask}
    common |= {"eos_token_id": eos, "pad_token_id": eos}
    if model.family == "llada":
        config = common | {
            "model_type": "llada",
            "architectures": ["LLaDAModelLM"],
            "d_model": hidden,
            "n_layers": len(model.layers),
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "mlp_hidden_size": len(model.layers[0].gate),
            "embedding_size": vocab,
            "max_sequence_length": 4096,
            "weight_tying": False,
            "include_bias": False,
            "include_qkv_bias": False,
            "activation_type": "silu",
            "block_type": "llama",
            "layer_norm_type": "rms",
            "rope": True,
        }
    else:
        config = common | {
            "model_type": "Dream",
            "architectures": ["DreamModel"],
            "hidden_size": hidden,
            "num_hidden_layers": len(model.layers),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": len(model.layers[0].gate),
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    embed, norm, head, blocks = OUTER[model.family]
    tensors = {f"{embed}.weight": model.embed, f"{norm}.weight": model.norm, f"{head}.weight": model.head}
    for i, layer in enumerate(model.layers):
        for name, own in zip(NAMES[model.family], FIELDS, strict=True):
            tensors[f"{blocks}.{i}.{name}.weight"] = getattr(layer, own)
            if (bias := getattr(layer, f"{own}_bias", None)) is not None:
                tensors[f"{blocks}.{i}.{name}.bias"] = bias
    return config, {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def read_model(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Model:
    """The model of a checkpoint, the inverse of `checkpoint`; a tied one has its embedding as its head."""
    family: Any = config["model_type"].lower()
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    embed, norm, head, blocks = OUTER[family]
    names = dict(zip(FIELDS, NAMES[family], strict=True))

    def layer(n: int) -> Layer:
        given: dict[str, Any] = {field: w[f"{blocks}.{n}.{name}.weight"] for field, name in names.items()}
        given |= {f"{field}_bias": w.get(f"{blocks}.{n}.{names[field]}.bias") for field in ("q", "k", "v")}
        return Layer(**given)

    count, heads = (config.get(name) or config[other] for name, other in COUNTS)
    layers = [layer(n) for n in range(count)]
    return Model(
        family,
        w[f"{embed}.weight"],
        layers,
        w[f"{norm}.weight"],
        w.get(f"{head}.weight", w[f"{embed}.weight"]),
        len(layers[0].q) // heads,
        config["rope_theta"],
        config["rms_norm_eps"],
    )


def predictions(model: Model, tokens: Sequence[int] | Rows) -> Array:
    """Logits `[n, V]` that predict each position: those of the row before it where they are shifted, for the first its own."""
    logits, _ = dense(model, tokens)
    return np.concatenate([logits[:1], logits[:-1]]) if model.shift else logits
