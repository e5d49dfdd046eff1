"""Decoder language models: Qwen3 and Llama 3.

A layer is two halves, attention and MLP, each of which maps the activations to its *partial sum*; a schedule adds them to the
residual stream. What a query may see, and where keys and values are kept, is the business of the `attend` callback.

Sources: Qwen3 technical report (arXiv 2505.09388) §2; Llama 3 (arXiv 2407.21783) §3.2; tensor names as in their checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.attention.xla import attention
from tilewright.kernels.linear.cpu import Format, pack, pack_gated
from tilewright.kernels.rms_norm.cpu import KernelNorm
from tilewright.kernels.select import head_argmax, linear, rms_norm
from tilewright.models import layers
from tilewright.models.config import ConfigReader
from tilewright.models.layers import Rope, RopeScaling
from tilewright.models.params import ArraySpec, matrix, norm_weight

Family = Literal["qwen3", "llama"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder language model; the fields are those of its `config.json`."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rope_frequencies(self) -> list[float]:
        return layers.rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
        ValueError: one message that lists every missing field and every value that this family does not support.
    """
    read = ConfigReader(fields, where)
    family = read.choice("model_type", ("qwen3", "llama"))
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    read.expect("mlp_bias", False)
    read.expect("use_sliding_window", False)
    read.expect("quantization_config", None)
    read.expect_all("layer_types", "full_attention")
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    theta, scaling = read.rope()
    config = DecoderConfig(
        family=cast(Family, family),
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", default=heads),
        # Qwen3's heads have 128 unless it says otherwise (Qwen3-4B: 2560 / 32 = 80, but heads of 128).
        head_dim=read.integer("head_dim", default=128 if family == "qwen3" else max(hidden // heads, 2)),
        rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
        max_position_embeddings=read.integer("max_position_embeddings"),
        eos_token_ids=read.token_ids("eos_token_id"),
    )
    read.require(config.num_heads % config.num_kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads")
    read.require(config.head_dim % 2 == 0, "head_dim must be even")
    read.finish()
    return config


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` of a model that was made here; other libraries read it too."""
    scaling = config.rope_scaling
    return {
        "architectures": ["Qwen3ForCausalLM" if config.family == "qwen3" else "LlamaForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else dict(vars(scaling)),
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One decoder layer. `q_norm` and `k_norm` are Qwen3's; a Llama layer has None there."""

    input_norm: Any
    q: Any
    k: Any
    v: Any
    o: Any
    q_norm: Any
    k_norm: Any
    post_attention_norm: Any
    gate: Any
    up: Any
    down: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    """All arrays of a decoder. `head` is None where the output head is the embedding."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any


def declare_layer(config: Any, prefix: str, qk_norm: bool) -> Layer:
    """The arrays of one layer. `config` needs the sizes of `DecoderConfig`; a DFlash layer has the same arrays."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * d, config.num_kv_heads * d
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    out_scale = 0.02 / (2 * config.num_layers) ** 0.5
    return Layer(
        input_norm=norm_weight(f"{prefix}.input_layernorm.weight", h),
        q=matrix(f"{attn}.q_proj.weight", h, query, ("hidden", "heads"), units=(1, d)),
        k=matrix(f"{attn}.k_proj.weight", h, key, ("hidden", "kv_heads"), units=(1, d)),
        v=matrix(f"{attn}.v_proj.weight", h, key, ("hidden", "kv_heads"), units=(1, d)),
        o=matrix(f"{attn}.o_proj.weight", query, h, ("heads", "hidden"), out_scale, units=(d, 1)),
        q_norm=norm_weight(f"{attn}.q_norm.weight", d, "head") if qk_norm else None,
        k_norm=norm_weight(f"{attn}.k_norm.weight", d, "head") if qk_norm else None,
        post_attention_norm=norm_weight(f"{prefix}.post_attention_layernorm.weight", h),
        gate=matrix(f"{mlp}.gate_proj.weight", h, i, ("hidden", "mlp")),
        up=matrix(f"{mlp}.up_proj.weight", h, i, ("hidden", "mlp")),
        down=matrix(f"{mlp}.down_proj.weight", i, h, ("mlp", "hidden"), out_scale),
    )


def declare(config: DecoderConfig) -> DecoderParams:
    """The model's arrays, each declared once (see `params.ArraySpec`)."""
    v, h = config.vocab_size, config.hidden_size
    head = None if config.tie_word_embeddings else matrix("lm_head.weight", h, v, ("hidden", "vocab"))
    return DecoderParams(
        embed=ArraySpec("model.embed_tokens.weight", (v, h), ("vocab", "hidden")),
        layers=tuple(declare_layer(config, f"model.layers.{n}", config.family == "qwen3") for n in range(config.num_layers)),
        norm=norm_weight("model.norm.weight", h),
        head=head,
    )


class Attend(NamedTuple):
    """What an attention half needs to know of its surroundings.

    `attend(q, k, v)` takes this layer's queries `[B, T, N, D]` and new keys and values `[B, T, K, D]`, all rotated, and
    returns the attended values `[B, T, N, D]` and what the layer leaves behind (its updated cache, say).
    """

    rope: Rope
    attend: Callable[[Array, Array, Array], tuple[Array, Any]]


def split_heads(x: Float[Array, "B T _"], head_dim: int) -> Float[Array, "B T N {head_dim}"]:
    # Without the barrier XLA lets the projection write its heads apart, for which a TPU first transposes the whole weight.
    return jax.lax.optimization_barrier(x).reshape(*x.shape[:2], -1, head_dim)


def project_keys(config: Any, layer: Layer, h: Float[Array, "B T H"], rope: Rope) -> tuple[Array, Array]:
    """Keys (normalised where the family does, rotated) and values of `h`, each `[B, T, K, D]`."""
    k = split_heads(linear(h, layer.k), config.head_dim)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return layers.rotate(k, rope), split_heads(linear(h, layer.v), config.head_dim)


def attention_half(config: Any, layer: Layer, x: Float[Array, "B T H"], around: Attend) -> tuple[Array, Any]:
    """The attention half of a layer: its partial sum `[B, T, H]`, and what `attend` leaves behind."""
    h = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    q = split_heads(linear(h, layer.q), config.head_dim)
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
    k, v = project_keys(config, layer, h, around.rope)
    out, left = around.attend(layers.rotate(q, around.rope), k, v)
    return linear(out.reshape(*x.shape[:2], -1), layer.o), left


def mlp_half(config: Any, layer: Layer, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """The MLP half of a layer: its partial sum."""
    h = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
    return layers.swiglu(h, layer.gate, layer.up, layer.down)


Schedule = Callable[[Array, Callable[[Array], tuple[Array, Any]], Callable[[Array], Array]], tuple[Array, Any]]
"""`schedule(x, attention, mlp) -> (x, left)`: how a layer's halves and their collectives interleave."""


def single_device(
    x: Float[Array, "B T H"], attention: Callable[[Array], tuple[Array, Any]], mlp: Callable[[Array], Array]
) -> tuple[Array, Any]:
    """The schedule without collectives: a shard's partial sum is the whole sum."""
    partial, left = attention(x)
    x = x + partial
    return x + mlp(x), left


class Forward(NamedTuple):
    """What a pass through the layers gives.

    Attributes:
        hidden: the residual stream after the last layer, before the final norm, `[B, T, H]`.
        taps: the residual stream *after* each tapped layer, in the order asked for.
        left: what each layer's `attend` left behind.
    """

    hidden: Array
    taps: tuple[Array, ...]
    left: tuple[Any, ...]


def forward(
    config: DecoderConfig,
    params: DecoderParams,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attends: Sequence[Callable[[Array, Array, Array], tuple[Array, Any]]],
    tap_layers: tuple[int, ...] = (),
    schedule: Schedule = single_device,
) -> Forward:
    """Runs the layers over `tokens` at `positions`; `attends` has one callback for each layer."""
    rope = layers.rope_tables(positions, config.rope_frequencies)
    x = params.embed[tokens]
    after, left = [], []
    for layer, attend in zip(params.layers, attends, strict=True):
        around = Attend(rope, attend)

        def attention(x: Array, layer: Layer = layer, around: Attend = around) -> tuple[Array, Any]:
            return attention_half(config, layer, x, around)

        def mlp(x: Array, layer: Layer = layer) -> Array:
            return mlp_half(config, layer, x)

        x, rest = schedule(x, attention, mlp)
        after.append(x)
        left.append(rest)
    return Forward(x, tuple(after[i] for i in tap_layers), tuple(left))


def pack_layer(layer: Layer, kind: Format | None = None, name: str = "layer") -> Layer:
    """The layer with its matrices as the CPU kernel wants them, in `kind` or else as they are; gate holds both gate and up."""
    packed = {each: pack(getattr(layer, each), kind, f"{name}.{each}") for each in ("q", "k", "v", "o", "down")}
    norms = ("input_norm", "q_norm", "k_norm", "post_attention_norm")
    packed |= {each: KernelNorm(getattr(layer, each)) for each in norms if getattr(layer, each) is not None}
    return replace(layer, **packed, gate=pack_gated(layer.gate, layer.up, kind, f"{name}.gate and .up"), up=None)


def pack_decoder(params: DecoderParams, kind: Format | None = None) -> DecoderParams:
    """The model with its matrices in the layout of the CPU kernel; the head apart from the embedding, which stays as it is.

    Raises:
        ValueError: a weight, which it names, is no matrix of floats.
    """
    head = pack(output_head(params), kind, "head")
    layers = tuple(pack_layer(layer, kind, f"layers.{n}") for n, layer in enumerate(params.layers))
    return replace(params, head=head, layers=layers, norm=KernelNorm(params.norm))


def untie_head(params: DecoderParams) -> DecoderParams:
    """Gives a tied model a head of its own, `[hidden, vocab]`, which XLA's CPU products read up to twice as fast.

    Costs the embedding's memory once more.
    """
    return params if params.head is not None else replace(params, head=params.embed.T)


def output_head(params: DecoderParams) -> Any:
    """The output head, `[hidden, vocab]`; of a tied model the embedding, transposed."""
    return params.embed.T if params.head is None else params.head


def project_head(params: DecoderParams, x: Float[Array, "*rows H"]) -> Float[Array, "*rows V"]:
    """The output head alone, on states that are already normalised. Logits are float32 sums, not rounded to its dtype."""
    return linear(x, output_head(params), jnp.float32)


def logits(config: DecoderConfig, params: DecoderParams, hidden: Float[Array, "*rows H"]) -> Float[Array, "*rows V"]:
    """Final norm and output head; float32 whatever the model's dtype."""
    return project_head(params, rms_norm(hidden, params.norm, config.rms_norm_eps))


def most_likely(config: DecoderConfig, params: DecoderParams, hidden: Float[Array, "*rows H"]) -> Int[Array, "*rows"]:
    """The token with the largest of `logits`, without these."""
    return choose(params, rms_norm(hidden, params.norm, config.rms_norm_eps))


def choose(params: DecoderParams, x: Float[Array, "*rows H"]) -> Int[Array, "*rows"]:
    """The most likely token of states that are already normalised."""
    if params.head is None:
        return head_argmax(x, params.embed, transposed=True)
    return head_argmax(x, params.head)


def causal_attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
    """Plain causal self-attention over a whole sequence: for training, and as the reference of every cached path."""
    t = q.shape[1]
    mask = jnp.tril(jnp.ones((1, t, t), bool))
    return attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask), None


def forward_full(
    config: DecoderConfig, params: DecoderParams, tokens: Int[Array, "B T"], tap_layers: tuple[int, ...] = ()
) -> Forward:
    """A whole sequence from position 0, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(config, params, tokens, positions, [causal_attend] * config.num_layers, tap_layers)
