"""Reference of DiffusionGemma in NumPy float64, which tests compare with the engine.

Layers and the loop are written from `modeling_diffusion_gemma.py` and `generation_diffusion_gemma.py` of transformers 5.24,
whose names of tensors and options they have. Every canvas starts again from the tokens. Random numbers are given. The text ends
with an end-of-sequence token, or at its length limit; the published loop pads or completes the canvas.

Legend: n tokens, T positions of a canvas, H hidden, E experts, K of them chosen for a token, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import Array, Tensors, attention, random_matrix, random_norm, rms_norm
from reference.diffusion_model_numpy import softmax
from reference.sampling_numpy import gumbel_of

DECODER = "model.decoder"
ENCODER = "model.encoder.language_model"


@partial(jax.jit, static_argnums=(1, 2, 3))
def drawn_numbers(key: jax.Array, vocab: int, positions: int, passes: int) -> tuple[jax.Array, jax.Array]:
    def of_one(step: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = jax.random.fold_in(jax.random.fold_in(key, position), step)
        token = jax.random.randint(jax.random.fold_in(own, 1), (), 0, vocab, jnp.int32)
        return jax.random.bits(own, (vocab,), jnp.uint32), token

    return jax.vmap(jax.vmap(of_one, (None, 0)), (0, None))(jnp.arange(passes), jnp.arange(positions))


@lru_cache(maxsize=512)
def randomness(seed: int, vocab: int, positions: int = 128, passes: int = 33) -> tuple[Array, NDArray[np.int32]]:
    """Gumbel noise `[passes, positions, V]` and random tokens `[passes, positions]`: functions of seed, position and pass."""
    bits, tokens = drawn_numbers(jax.random.key(seed), vocab, positions, passes)
    return gumbel_of(np.asarray(bits)), np.asarray(tokens)


def gelu(x: Array) -> Array:
    """The tanh approximation of `gelu`."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turned(x: Array, positions: Sequence[int], theta: float, fraction: float) -> Array:
    """RoPE of `x` `[n, heads, D]`, whose slower frequencies do not turn."""
    half = x.shape[-1] // 2
    frequencies = np.where(np.arange(half) < int(fraction * x.shape[-1] // 2), theta ** (-np.arange(half) / half), 0.0)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


Encoded = list[tuple[Array, Array]]
"""Keys and values `[n, heads, D]` of each layer."""


@dataclass(frozen=True)
class Model:
    """Encoder of text and decoder of canvases."""

    config: Mapping[str, Any]
    tensors: Tensors

    @cached_property
    def doubles(self) -> dict[str, Array]:
        return {name: value.astype(np.float64) for name, value in self.tensors.items()}

    def tensor(self, name: str) -> Array:
        return self.doubles[name]

    def weight(self, name: str) -> Array:
        return self.tensor(f"{DECODER}.{name}.weight")

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"])

    def plain_norm(self, x: Array) -> Array:
        return rms_norm(x, np.ones(x.shape[-1]), self.config["rms_norm_eps"])

    def is_sliding(self, n: int) -> bool:
        return self.config["layer_types"][n] == "sliding_attention"

    @cached_property
    def embedding(self) -> Array:
        return self.weight("embed_tokens") * self.config["hidden_size"] ** 0.5

    def heads(self, h: Array, n: int, positions: Sequence[int]) -> tuple[Array, Array, Array]:
        """Queries, keys and values `[n, heads, D]` of a layer. Keys are also the values of a layer without a window."""
        prefix = f"layers.{n}.self_attn"
        sliding = self.is_sliding(n)
        size = self.config["head_dim" if sliding else "global_head_dim"]
        theta, fraction = (10000.0, 1.0) if sliding else (1000000.0, 0.25)
        q, k = ((h @ self.weight(f"{prefix}.{name}_proj").T).reshape(len(h), -1, size) for name in "qk")
        v = (h @ self.weight(f"{prefix}.v_proj").T).reshape(len(h), -1, size) if sliding else k
        q, k = (turned(self.norm(x, f"{prefix}.{name}_norm"), positions, theta, fraction) for x, name in ((q, "q"), (k, "k")))
        return q * np.sqrt(size), k, self.plain_norm(v)  # scores have no scale

    def mlp(self, h: Array, prefix: str) -> Array:
        inner = gelu(h @ self.weight(f"{prefix}.gate_proj").T) * (h @ self.weight(f"{prefix}.up_proj").T)
        return inner @ self.weight(f"{prefix}.down_proj").T

    def experts(self, x: Array, layer: str) -> Array:
        """Weighted sum of each token's experts."""
        router = f"{DECODER}.{layer}.router"
        h = self.plain_norm(x) * self.tensor(f"{router}.scale") * x.shape[-1] ** -0.5
        shares = softmax(h @ self.tensor(f"{router}.proj.weight").T)
        inputs = self.norm(x, f"{layer}.pre_feedforward_layernorm_2")
        gate_up, down = (self.tensor(f"{DECODER}.{layer}.experts.{name}_proj") for name in ("gate_up", "down"))
        out = np.zeros_like(x)
        for token, row in enumerate(shares):
            chosen = np.argsort(-row, kind="stable")[: self.config["top_k_experts"]]
            for expert in chosen:
                gate, up = np.split(gate_up[expert] @ inputs[token], 2)
                weight = row[expert] / row[chosen].sum() * self.tensor(f"{router}.per_expert_scale")[expert]
                out[token] += weight * (down[expert] @ (gelu(gate) * up))
        return out

    def feed_forward(self, x: Array, layer: str) -> Array:
        dense = self.mlp(self.norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
        dense = self.norm(dense, f"{layer}.post_feedforward_layernorm_1")
        routed = self.norm(self.experts(x, layer), f"{layer}.post_feedforward_layernorm_2")
        return self.norm(dense + routed, f"{layer}.post_feedforward_layernorm")

    def layer(self, x: Array, n: int, attended: Array, scalar: str) -> Array:
        out = attended @ self.weight(f"layers.{n}.self_attn.o_proj").T
        x = x + self.norm(out, f"layers.{n}.post_attention_layernorm")
        return (x + self.feed_forward(x, f"layers.{n}")) * self.tensor(f"{scalar}.layers.{n}.layer_scalar")

    def encode(self, tokens: Sequence[int]) -> Encoded:
        """Runs the causal encoder over a whole text."""
        at = np.arange(len(tokens))
        visible: NDArray[np.bool_] = at[None] <= at[:, None]
        within = visible & (at[None] > at[:, None] - self.config["sliding_window"])
        x = self.embedding[list(tokens)]
        found = []
        for n in range(self.config["num_hidden_layers"]):
            q, k, v = self.heads(self.norm(x, f"layers.{n}.input_layernorm"), n, range(len(tokens)))
            found.append((k, v))
            x = self.layer(x, n, attention(q, k, v, within if self.is_sliding(n) else visible), ENCODER)
        return found

    def logits(self, canvas: Sequence[int], encoded: Encoded, expected: Array) -> Array:
        """Logits `[T, V]` of a canvas behind an encoded text, given the expected embeddings of the pass before."""
        before = len(encoded[0][0])
        positions = range(before, before + len(canvas))
        conditioning = self.mlp(self.norm(expected, "self_conditioning.pre_norm"), "self_conditioning")
        x = self.plain_norm(self.embedding[list(canvas)] + conditioning)
        for n, (keys, values) in enumerate(encoded):
            q, k, v = self.heads(self.norm(x, f"layers.{n}.input_layernorm"), n, positions)
            first = max(0, before - self.config["sliding_window"] + 1) if self.is_sliding(n) else 0
            k, v = np.concatenate([keys[first:], k]), np.concatenate([values[first:], v])
            x = self.layer(x, n, attention(q, k, v, np.ones((len(q), len(k)), bool)), DECODER)
        cap = self.config["final_logit_softcapping"]
        return cap * np.tanh(self.norm(x, "norm") @ self.weight("embed_tokens").T / cap)


@dataclass(frozen=True)
class Options:
    """Options of the published loop, named as there."""

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_max: float = 0.8
    t_min: float = 0.4
    stability_threshold: int = 1
    confidence_threshold: float = 0.005


def generate(model: Model, prompt: Sequence[int], new_tokens: int, options: Options, seed: int) -> tuple[list[int], list[int]]:
    """The published loop: the new tokens, and the number of passes over each canvas."""
    length = model.config["canvas_length"]
    vocab = model.config["vocab_size"]
    steps = options.max_denoising_steps
    noise, random = randomness(seed, vocab)
    text = list(prompt)
    passes = []
    while len(text) < len(prompt) + new_tokens:
        encoded = model.encode(text)
        at = slice(len(text), len(text) + length)
        canvas = random[0, at]
        expected = np.zeros((length, model.config["hidden_size"]))
        history: list[list[int]] = []
        for step in range(steps):
            temperature = options.t_min + (options.t_max - options.t_min) * (steps - step) / steps
            logits = model.logits(canvas.tolist(), encoded, expected) / temperature
            p = softmax(logits)
            entropy = -np.sum(p * np.log(p), axis=1)
            drawn = np.argmax(logits + noise[step, at], axis=1)
            order = np.argsort(entropy, kind="stable")
            kept = order[np.cumsum(entropy[order]) - entropy[order] <= options.entropy_bound]
            canvas = random[step + 1, at].copy()
            canvas[kept] = drawn[kept]
            expected = p @ model.embedding
            history.append(np.argmax(logits, axis=1).tolist())
            last = history[-options.stability_threshold - 1 :]
            stable = len(last) > options.stability_threshold and all(each == last[0] for each in last)
            if stable and entropy.mean() < options.confidence_threshold:
                break
        passes.append(len(history))
        text += history[-1]
        if model.config["eos_token_id"] in history[-1]:
            break
    new = text[len(prompt) :][:new_tokens]
    eos = model.config["eos_token_id"]
    return (new[: new.index(eos) + 1] if eos in new else new), passes


def random_model(seed: int, length: int = 8, vocab_size: int = 40, eos: int | None = None, **changes: Any) -> Model:
    """A small model with random weights: two layers with a window, and one without, of other heads.

    Scores of attention and the self-conditioning are small. Otherwise rounding grows from pass to pass until it decides.
    """
    config: dict[str, Any] = {
        "model_type": "diffusion_gemma_text",
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "canvas_length": length,
        "eos_token_id": eos,
        **changes,
    }
    rng = np.random.default_rng(seed)
    h, i, e, m = (config[name] for name in ("hidden_size", "intermediate_size", "num_experts", "moe_intermediate_size"))
    tensors: dict[str, NDArray[Any]] = {
        f"{DECODER}.embed_tokens.weight": (0.6 * rng.standard_normal((vocab_size, h))).astype(np.float32),
        f"{DECODER}.norm.weight": random_norm(rng, h),
        f"{DECODER}.self_conditioning.pre_norm.weight": random_norm(rng, h),
    }

    def mlp(prefix: str) -> None:
        for name, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
            tensors[f"{prefix}.{name}_proj.weight"] = random_matrix(rng, *shape)

    mlp(f"{DECODER}.self_conditioning")
    tensors[f"{DECODER}.self_conditioning.down_proj.weight"] *= np.float32(0.5)
    for n, kind in enumerate(config["layer_types"]):
        layer = f"{DECODER}.layers.{n}"
        sliding = kind == "sliding_attention"
        d = config["head_dim" if sliding else "global_head_dim"]
        query, key = (
            d * config["num_attention_heads"],
            d * config["num_key_value_heads" if sliding else "num_global_key_value_heads"],
        )
        for name, shape in (("q", (query, h)), ("k", (key, h)), ("v", (key, h)), ("o", (h, query))):
            if name != "v" or sliding:
                tensors[f"{layer}.self_attn.{name}_proj.weight"] = random_matrix(rng, *shape)
        for name in ("q", "k"):
            tensors[f"{layer}.self_attn.{name}_norm.weight"] = np.float32(0.3) * random_norm(rng, d)
        mlp(f"{layer}.mlp")
        after = ("", "_1", "_2")
        norms = ["input_layernorm", "post_attention_layernorm", *(f"post_feedforward_layernorm{end}" for end in after)]
        for name in (*norms, "pre_feedforward_layernorm", "pre_feedforward_layernorm_2"):
            tensors[f"{layer}.{name}.weight"] = random_norm(rng, h)
        tensors[f"{layer}.router.proj.weight"] = random_matrix(rng, e, h)
        tensors[f"{layer}.router.scale"] = random_norm(rng, h)
        tensors[f"{layer}.router.per_expert_scale"] = random_norm(rng, e)
        tensors[f"{layer}.experts.gate_up_proj"] = np.stack([random_matrix(rng, 2 * m, h) for _ in range(e)])
        tensors[f"{layer}.experts.down_proj"] = np.stack([random_matrix(rng, h, m) for _ in range(e)])
        for part in (DECODER, ENCODER):
            tensors[f"{part}.layers.{n}.layer_scalar"] = rng.uniform(0.8, 1.1, 1).astype(np.float32)
    return Model(config, tensors)
