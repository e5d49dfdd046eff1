"""Decoder language models: Qwen3, Qwen2 and Llama 3.

A layer is four functions (see `stack.py`), and a schedule runs the layers. What a query may see, and where keys and values are
kept, is the business of the `attend` callback; which implementation computes, that of the bundle of operations.

Sources: Qwen3 technical report (arXiv 2505.09388) §2; Qwen2 (arXiv 2407.10671) §2.2, which Qwen2.5 follows; Llama 3
(arXiv 2407.21783) §3.2; tensor names as in their checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Heads, Joined, Norm, Operations, Projection, Transposed
from tilewright.models import layers
from tilewright.models.config import ConfigReader, Sizes
from tilewright.models.params import ArraySpec, matrix, norm_weight
from tilewright.models.quantised import quantised_layout
from tilewright.models.stack import SINGLE_DEVICE, Rows, Schedule, Stack

Family = Literal["qwen3", "qwen2", "llama"]
EMBEDDING = "model.embed_tokens.weight"
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""What other libraries call the families."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Sizes):
    """Sizes of a decoder language model; the fields are those of its `config.json`."""

    family: Family
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
        ValueError: one message that lists every missing field and every value that this family does not support.
    """
    read = ConfigReader(fields, where)
    config = read_decoder(read, cast(Family, read.choice("model_type", get_args(Family))))
    try:
        quantised_layout(fields.get("quantization_config"))
    except ValueError as error:
        read.require(False, str(error))
    read.finish()
    return config


def read_decoder(read: ConfigReader, family: Family) -> DecoderConfig:
    """What `read` says of a decoder of this family; its problems are for `read.finish`."""
    read.expect("hidden_act", "silu")
    # Qwen2's queries, keys and values always have biases, of which its configurations need not speak.
    read.expect("attention_bias", family == "qwen2")
    read.expect("mlp_bias", False)
    read.expect("use_sliding_window", False)
    read.expect_all("layer_types", "full_attention")
    return DecoderConfig(
        family=family,
        # Qwen3's heads have 128 unless it says otherwise (Qwen3-4B: 2560 / 32 = 80, but heads of 128).
        **read.sizes(head_dim=128 if family == "qwen3" else None),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
        max_position_embeddings=read.integer("max_position_embeddings"),
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` of a model that was made here; other libraries read it too."""
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **config.to_hf(),
        "attention_bias": config.family == "qwen2",
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One decoder layer. `q_norm` and `k_norm` are Qwen3's, and `qkv_bias`, a tuple, Qwen2's; others have None there."""

    input_norm: Any
    qkv: Any
    o: Any
    q_norm: Any
    k_norm: Any
    post_attention_norm: Any
    gate_up: Any
    down: Any
    qkv_bias: Any = None


def split_layer(layer: Layer) -> tuple[Layer, Layer]:
    """What a layer's attention half reads, and what its MLP half does, with None for the rest; of any tree like a layer's."""
    mlp = {"post_attention_norm", "gate_up", "down"}
    other = {field.name for field in fields(Layer)} - mlp
    return replace(layer, **dict.fromkeys(mlp)), replace(layer, **dict.fromkeys(other))


def join_layer(attention: Layer, mlp: Layer) -> Layer:
    """The inverse of `split_layer`."""
    return replace(attention, post_attention_norm=mlp.post_attention_norm, gate_up=mlp.gate_up, down=mlp.down)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    """All arrays of a decoder. `head` is None where the output head is the embedding."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any


def declare_layer(config: Any, prefix: str, qk_norm: bool, inputs: int | None = None, qkv_bias: bool = False) -> Layer:
    """The arrays of one layer. `config` needs the sizes of `DecoderConfig`; a DFlash layer has the same arrays.

    Args:
        inputs: of queries, keys and values, where that is not the hidden size.
        qkv_bias: queries, keys and values have biases.
    """
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * d, config.num_kv_heads * d
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    out_scale = 0.02 / (2 * config.num_layers) ** 0.5
    qkv = [(f"{attn}.{name}_proj", size, axis) for name, size, axis in
           (("q", query, "heads"), ("k", key, "kv_heads"), ("v", key, "kv_heads"))]  # fmt: skip
    products = [matrix(f"{name}.weight", inputs or h, size, ("hidden", axis), units=(1, d)) for name, size, axis in qkv]
    biases = [ArraySpec(f"{name}.bias", (size,), (axis,), units=(d,)) for name, size, axis in qkv]
    return Layer(
        input_norm=norm_weight(f"{prefix}.input_layernorm.weight", h),
        qkv=Joined(tuple(products)),
        o=matrix(f"{attn}.o_proj.weight", query, h, ("heads", "hidden"), out_scale, units=(d, 1)),
        q_norm=norm_weight(f"{attn}.q_norm.weight", d, "head") if qk_norm else None,
        k_norm=norm_weight(f"{attn}.k_norm.weight", d, "head") if qk_norm else None,
        post_attention_norm=norm_weight(f"{prefix}.post_attention_layernorm.weight", h),
        gate_up=Joined(
            tuple(matrix(f"{mlp}.{name}_proj.weight", h, i, ("hidden", "mlp")) for name in ("gate", "up")), gated=True
        ),
        down=matrix(f"{mlp}.down_proj.weight", i, h, ("mlp", "hidden"), out_scale),
        qkv_bias=tuple(biases) if qkv_bias else None,
    )


def declare(config: DecoderConfig, own_head: bool = False) -> DecoderParams:
    """The model's arrays, each declared once (see `params.ArraySpec`).

    Args:
        own_head: a tied model has a head of its own, which is read from the embedding's tensor.
    """
    v, h = config.vocab_size, config.hidden_size
    stored = EMBEDDING if config.tie_word_embeddings else "lm_head.weight"
    tied = config.tie_word_embeddings and not own_head
    head = None if tied else matrix(stored, h, v, ("hidden", "vocab"), kind="head")
    of_family = {"qk_norm": config.family == "qwen3", "qkv_bias": config.family == "qwen2"}
    return DecoderParams(
        embed=ArraySpec(EMBEDDING, (v, h), ("vocab", "hidden"), "embedding"),
        layers=tuple(declare_layer(config, f"model.layers.{n}", **of_family) for n in range(config.num_layers)),
        norm=norm_weight("model.norm.weight", h),
        head=head,
    )


def prepare(config: DecoderConfig, ops: Operations, params: DecoderParams) -> DecoderParams:
    """Parameters as the operations want them; a tied model gets a head of its own where these say so."""
    if params.head is None and ops.own_head:
        params = replace(params, head=params.embed.T)
    return ops.prepare(declare(config, ops.own_head), params)


Attend = Callable[[Operations, Projection, Heads, Any, Any], tuple[Array, Any]]
"""`attend(ops, projection, heads, seen, kept) -> (out [B, T, N * D], kept)`: what the queries of a layer see.

`seen` is that of `stack.Rows`; `kept` is what the layer keeps, its cache for example.
"""


def head_norms(config: Any, layer: Layer, rope: layers.Rope) -> Heads:
    """How a layer's projections become heads."""
    q_norm, k_norm = (None if w is None else Norm(w, config.rms_norm_eps) for w in (layer.q_norm, layer.k_norm))
    return Heads(config.head_dim, q_norm, k_norm, rope)


def output(
    ops: Operations, layer: Layer, out: Float[Array, "B T _"], add: Float[Array, "*rows H"] | None = None
) -> Float[Array, "*rows H"]:
    """The attention half's partial sum, on top of `add` if that is given; of some rows alone where the product gives these."""
    return ops.linear(out, layer.o, add=add)


def mlp(
    config: Any,
    ops: Operations,
    layer: Layer,
    x: Float[Array, "B T H"],
    add: Float[Array, "B T H"] | None = None,
    count: Int[Array, ""] | None = None,
) -> Float[Array, "*rows H"]:
    """The MLP half's partial sum, on top of `add` if that is given; of the first `count` rows at least (see `Operations`).

    Of other rows than those of `x` where the products give these (see `stack.py`).
    """
    inner = ops.gated_linear(x, layer.gate_up, Norm(layer.post_attention_norm, config.rms_norm_eps), count=count)
    return ops.linear(inner, layer.down, add=add, count=count)


def stack_of(config: Any, ops: Operations, of: tuple[Layer, ...], attend: Attend) -> Stack:
    """Layers in their parts. `config` is that of a decoder, or of a drafter with layers like a decoder's."""

    def norms(layer: Layer) -> tuple[Norm, Norm]:
        return Norm(layer.input_norm, config.rms_norm_eps), Norm(layer.post_attention_norm, config.rms_norm_eps)

    def project(ops: Operations, layer: Layer, x: Float[Array, "B T H"]) -> Projection:
        return ops.project(x, layer.qkv, norms(layer)[0], bias=layer.qkv_bias)

    def attended(ops: Operations, layer: Layer, projection: Projection, rows: Rows, kept: Any) -> tuple[Array, Any]:
        return attend(ops, projection, head_norms(config, layer, rows.rope), rows.seen, kept)

    return Stack(ops, of, project, attended, output, partial(mlp, config), norms)


class Forward(NamedTuple):
    """What a pass through the layers gives.

    Attributes:
        hidden: the residual stream after the last layer, before the final norm, `[B, T, H]`.
        taps: the residual stream *after* each tapped layer, in the order asked for.
        kept: what each layer keeps.
    """

    hidden: Array
    taps: tuple[Array, ...]
    kept: tuple[Any, ...]


def forward(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    seen: Any = None,
    kept: tuple[Any, ...] | None = None,
    tap_layers: tuple[int, ...] = (),
    schedule: Schedule = SINGLE_DEVICE,
) -> Forward:
    """Runs the layers over `tokens` at `positions`.

    Args:
        seen, kept: what `attend` reads of each row, and what each layer keeps; by default nothing.
    """
    rows = Rows(layers.rope_tables(positions, config.rope_frequencies), seen)
    stack = stack_of(config, ops, params.layers, attend)
    before = (None,) * config.num_layers if kept is None else kept
    hidden, taps, after = schedule.run(stack, schedule.embed(ops, params.embed, tokens), rows, before, tap_layers)
    return Forward(hidden, taps, after)


def output_head(params: DecoderParams) -> Any:
    """The output head, `[hidden, vocab]`; of a tied model the embedding, to be read as its transpose."""
    return Transposed(params.embed) if params.head is None else params.head


def logits(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    schedule: Schedule = SINGLE_DEVICE,
) -> Float[Array, "*rows V"]:
    """Final norm and output head; float32 sums whatever the model's dtype."""
    return schedule.logits(ops, hidden, output_head(params), Norm(params.norm, config.rms_norm_eps))


def cross_entropy(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    labels: Int[Array, "*rows"],
    weights: Float[Array, "*rows"],
) -> Float[Array, ""]:
    """The sum of `weights` times the loss of each label under `logits`, in nats, without these."""
    return ops.cross_entropy(ops.rms_norm(hidden, params.norm, config.rms_norm_eps), output_head(params), labels, weights)


def most_likely(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    schedule: Schedule = SINGLE_DEVICE,
) -> Int[Array, "*rows"]:
    """The token with the largest of `logits`, without these."""
    return schedule.head_argmax(ops, hidden, output_head(params), Norm(params.norm, config.rms_norm_eps))


def causal_attend(ops: Operations, projection: Projection, heads: Heads, seen: Any, kept: Any) -> tuple[Array, None]:
    """Plain causal self-attention over a whole sequence: for training, and as the reference of every cached path."""
    return ops.causal_attention(projection, heads), None


def forward_full(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B T"],
    tap_layers: tuple[int, ...] = (),
    schedule: Schedule = SINGLE_DEVICE,
) -> Forward:
    """A whole sequence from position 0, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(config, ops, params, tokens, positions, causal_attend, tap_layers=tap_layers, schedule=schedule)
