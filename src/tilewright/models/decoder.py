"""Decoder language models of all families in `registry.py`.

A layer is four functions (see `stack.py`), which a schedule runs. The `attend` callback decides the attention mask and stores
keys and values. The bundle of operations decides the implementation. Differences between families are in `families/`. Tensor
names are those of the checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.masks import causal_from
from tilewright.kernels.operations import (
    HEAD_MULTIPLE,
    Heads,
    Joined,
    Norm,
    Operations,
    Projection,
    Scores,
    Transposed,
    softcapped,
)
from tilewright.models.canvas import declare_canvas
from tilewright.models.config import (
    Canvas,
    ConfigReader,
    HeadSizes,
    LayerKind,
    MaskedBlocks,
    Rotation,
    Sizes,
    text_config,
    with_yarn_context,
)
from tilewright.models.delta import DeltaSizes, attend_delta, project_delta, with_delta
from tilewright.models.experts import Mixture, MlpBeside, declare_mixture, gelu_product, routed_product, routed_weights
from tilewright.models.family import Family
from tilewright.models.layers import Rope, rope_frequencies, rope_tables
from tilewright.models.lora import adapted_operations, row_ranks
from tilewright.models.params import ArraySpec, declare_interleaved, matrix, norm_weight
from tilewright.models.quantised import quantised_layout
from tilewright.models.registry import FAMILIES, family_of
from tilewright.models.stack import SINGLE_DEVICE, Rows, Stack, Strategy, Sublayer

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Sizes):
    """Sizes of a decoder language model; most fields are those of its `config.json`.

    Attributes:
        family: its name in `registry.FAMILIES`.
        unrotated_layers: layers, from 0, without rotary embedding.
        sliding_window, sliding_layers: number of positions that a query attends to in these layers, including its own.
        local_rope_theta: rotary base of the sliding-window layers; None for that of the other layers.
        global_heads: heads of layers without a sliding window; None for those of the other layers.
        attention_scale, score_softcap: see `operations.Scores`.
        logit_softcap: logits x become `logit_softcap * tanh(x / logit_softcap)`; None for no cap.
        embedding_scale: multiplier of embeddings.
        mixture: the experts of the layers; None if all layers have an MLP.
        dense_layers: layers with an MLP in a model with experts.
        balance: coefficient of `experts.balancing_loss` in training (`router_aux_loss_coef`).
        delta, delta_layers: the sizes of linear attention, and the layers that use it.
        masked_blocks: the blocks that the model was also trained to denoise; None for a model that only decodes.
        canvas: the blocks of a model that refines random tokens; None for other models.
    """

    family: str
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    global_heads: HeadSizes | None = None
    attention_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    mixture: Mixture | None = None
    dense_layers: tuple[int, ...] = ()
    balance: float = 0.001
    delta: DeltaSizes | None = None
    delta_layers: tuple[int, ...] = ()
    masked_blocks: MaskedBlocks | None = None
    canvas: Canvas | None = None

    @property
    def denoises_blocks(self) -> bool:
        """True if blocks are denoised one after the other, and the model does not decode token by token."""
        return self.canvas is not None or (self.masked_blocks is not None and not self.masked_blocks.causal)

    def kind(self, layer: int) -> LayerKind:
        """Returns the kind of a layer."""
        sliding = layer in self.sliding_layers
        local: Rotation = "local" if sliding and self.local_rope_theta is not None else "global"
        rotation = "none" if layer in self.unrotated_layers else local
        window = self.sliding_window if sliding else None
        mixture = None if layer in self.dense_layers else self.mixture
        delta = self.delta if layer in self.delta_layers else None
        heads = None if sliding else self.global_heads
        norm = FAMILIES[self.family].value_norm
        return LayerKind(rotation, window, self.attention_scale, self.score_softcap, mixture, delta, heads, norm)

    @property
    def needs_xla(self) -> bool:
        """True if XLA must compute layers on CPUs too: linear attention, capped scores, sinks or unsupported head sizes."""
        scores = self.score_softcap is not None or FAMILIES[self.family].sinks
        heads = self.global_heads is not None and self.global_heads.head_dim % HEAD_MULTIPLE != 0
        return super().needs_xla or self.delta is not None or scores or heads

    @property
    def mlp_columns(self) -> int:
        """Columns of the widest MLP that a row passes through; all experts of a row count together."""
        if self.mixture is None:
            return self.intermediate_size
        experts = self.mixture.chosen * self.mixture.size
        if self.mixture.beside_mlp:
            return experts + self.intermediate_size
        return max(experts, self.intermediate_size) if self.dense_layers else experts

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None for full attention."""
        return tuple(self.kind(n).window for n in range(self.num_layers))

    @property
    def rope_frequencies(self) -> list[float]:
        if self.global_heads is None:
            return super().rope_frequencies
        rotated = int(self.global_heads.head_dim * self.partial_rotary_factor)
        return rope_frequencies(rotated, self.rope_theta, self.rope_scaling)

    def rope_tables(self, positions: Int[Array, "B T"]) -> dict[Rotation, Rope]:
        found = super().rope_tables(positions)
        if self.unrotated_layers:
            found["none"] = rope_tables(positions, [])
        if self.local_rope_theta is not None and self.sliding_layers:
            found["local"] = rope_tables(positions, rope_frequencies(self.head_dim, self.local_rope_theta, None))
        return found


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
        ValueError: one message that lists every missing field and every unsupported value.
    """
    fields = text_config(fields)
    family = family_of(fields, where)
    read = ConfigReader(with_yarn_context({**family.defaults, **fields}), where)
    config = read_decoder(read, family.name)
    try:
        quantised_layout(fields.get("quantization_config"))
    except ValueError as error:
        read.require(False, str(error))
    read.finish()
    return config


def read_decoder(read: ConfigReader, name: str) -> DecoderConfig:
    """Reads the configuration of a decoder of the named family. Problems are collected in `read`."""
    family = FAMILIES[name]
    if family.activation == "silu":
        read.expect("hidden_act", "silu")
    else:
        read.expect("hidden_activation", "gelu_pytorch_tanh")
    # The family decides on biases of queries, keys and values; its configurations may omit them.
    read.expect("attention_bias", family.qkv_bias)
    read.expect("mlp_bias", False)
    return DecoderConfig(
        family=name,
        **read.sizes(family.head_dim, family.rope_section),
        **family.read(read),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
        max_position_embeddings=read.integer("max_position_embeddings"),
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Returns the `config.json` of a model, which other libraries read too."""
    family = FAMILIES[config.family]
    sizes = config.to_hf()
    own = family.write(config)
    if "rope_parameters" in own:  # the fields before it, which would take precedence
        del sizes["rope_theta"], sizes["rope_scaling"]
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **sizes,
        **own,
        "attention_bias": family.qkv_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """Decoder layer. `q_norm`, `k_norm` (Qwen3) and the tuple `qkv_bias` (Qwen2) are None in other families.

    Attributes:
        gate_up: `Joined` matrices; a tuple of two if the gate is not `silu`. For experts, the matrices of all of them.
        router: routes rows to experts; None if the layer has an MLP.
        o_bias, sinks: bias of the attention output, and attention sinks (see `operations.Scores`); None if the family has none.
        attention_out_norm, mlp_out_norm: norms of the sublayers' outputs; None if the family has none.
        gate: matrix of the attention output's gate; None if the family has none.
        delta: `DeltaWeights` instead of queries, keys and values, if attention is linear.
        beside: `MlpBeside` of a layer that adds its experts to an MLP; None if experts replace it, or there are none.
        scalar: factor `[1]` of the residual stream after the layer; None if the family has none.
        kind: static settings, the same in a declaration and in its parameters.
    """

    input_norm: Any
    qkv: Any
    o: Any
    q_norm: Any
    k_norm: Any
    post_attention_norm: Any
    gate_up: Any
    down: Any
    qkv_bias: Any = None
    o_bias: Any = None
    sinks: Any = None
    attention_out_norm: Any = None
    mlp_out_norm: Any = None
    router: Any = None
    gate: Any = None
    delta: Any = None
    beside: Any = None
    scalar: Any = None
    kind: LayerKind = field(default=LayerKind(), metadata={"static": True})


MLP_FIELDS = ("post_attention_norm", "gate_up", "down", "mlp_out_norm", "router", "beside", "scalar")
"""Fields of a layer that its MLP sublayer reads."""


def split_layer(layer: Layer) -> tuple[Layer, Layer]:
    """Splits a layer, or a tree of its form, into the fields of attention and of the MLP; the rest is None."""
    mlp = set(MLP_FIELDS)
    other = {field.name for field in fields(Layer)} - mlp - {"kind"}
    return replace(layer, **dict.fromkeys(mlp)), replace(layer, **dict.fromkeys(other))


def join_layer(attention: Layer, mlp: Layer) -> Layer:
    """Joins the fields of attention and of the MLP; the inverse of `split_layer`."""
    return replace(attention, **{name: getattr(mlp, name) for name in MLP_FIELDS})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    """All arrays of a decoder. `head` is None if the embedding is also the output head.

    `adapters` is the table of ranks of low-rank adapters (`lora.Adapters.columns`); None without adapters. `canvas` are the
    weights of passes over a canvas (`canvas.CanvasWeights`); None for a model without one.
    """

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any
    adapters: Any = None
    canvas: Any = None


def declare_layer(config: Any, prefix: str, family: Family, inputs: int | None = None, kind: LayerKind = LayerKind()) -> Layer:
    """Declares the arrays of one layer. `config` needs the sizes of `DecoderConfig`; DFlash layers have the same arrays.

    Args:
        inputs: input size of queries, keys and values; by default the hidden size.
    """
    h = config.hidden_size
    i = config.intermediate_size
    heads = config.heads(kind)
    d = heads.head_dim
    query = config.num_heads * d
    key = heads.kv_heads * d
    attn = f"{prefix}.self_attn"
    mlp = f"{prefix}.mlp"
    out_scale = 0.02 / (2 * config.num_layers) ** 0.5
    qkv = [
        (f"{attn}.{name}_proj", size, axis)
        for name, size, axis in (("q", query, "heads"), ("k", key, "kv_heads"), ("v", key, "kv_heads"))
        if not (name == "v" and heads.keys_are_values)
    ]
    matrices = [matrix(f"{name}.weight", inputs or h, size, ("hidden", axis), units=(1, d)) for name, size, axis in qkv]
    gate_up = [matrix(f"{mlp}.{name}_proj.weight", h, i, ("hidden", "mlp")) for name in ("gate", "up")]
    if "qkv" in family.joined:
        matrices = declare_stacked(f"{attn}.qkv_proj.weight", matrices)
    if "gate_up" in family.joined:
        gate_up = declare_stacked(f"{mlp}.gate_up_proj.weight", gate_up)
    q = matrices[0]
    matrices[0], gate = declare_interleaved(q.name, [[q], [q]], config.num_heads) if family.output_gate else (q, None)
    biases = [ArraySpec(f"{name}.bias", (size,), (axis,), units=(d,)) for name, size, axis in qkv]

    def norm(name: str, size: int = h, axis: str = "hidden") -> ArraySpec:
        return norm_weight(f"{prefix}.{name}.weight", size, axis, family.norm_offset)

    joined = Joined(tuple(gate_up), gated=True) if family.activation == "silu" else tuple(gate_up)
    down = matrix(f"{mlp}.down_proj.weight", i, h, ("mlp", "hidden"), out_scale)
    after, before_mlp = ("post_attention_layernorm", "pre_feedforward_layernorm")[:: 1 if family.post_norms else -1]
    router = None
    beside = None
    if kind.mixture is not None:
        assert family.experts is not None, f"{family.name} has no experts"
        if kind.mixture.beside_mlp:
            out_norms = [norm(f"post_feedforward_layernorm_{n}") for n in (1, 2)]
            router_norm = norm_weight(f"{prefix}.router.scale", h)
            beside = MlpBeside(norm(before_mlp), joined, down, out_norms[0], out_norms[1], router_norm)
            before_mlp = "pre_feedforward_layernorm_2"
        router, joined, down = declare_mixture(kind.mixture, family.experts, prefix, h, out_scale)
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=Joined(tuple(matrices)),
        o=matrix(f"{attn}.o_proj.weight", query, h, ("heads", "hidden"), out_scale, units=(d, 1)),
        q_norm=norm("self_attn.q_norm", d, "head") if family.qk_norm else None,
        k_norm=norm("self_attn.k_norm", d, "head") if family.qk_norm else None,
        post_attention_norm=norm(before_mlp),
        gate_up=joined,
        down=down,
        router=router,
        qkv_bias=tuple(biases) if family.qkv_bias else None,
        o_bias=ArraySpec(f"{attn}.o_proj.bias", (h,), ("hidden",)) if family.output_bias else None,
        sinks=ArraySpec(f"{attn}.sinks", (config.num_heads,), ("query_heads",)) if family.sinks else None,
        attention_out_norm=norm(after) if family.post_norms else None,
        mlp_out_norm=norm("post_feedforward_layernorm") if family.post_norms else None,
        gate=gate,
        beside=beside,
        scalar=ArraySpec(f"{prefix}.layer_scalar", (1,), ("single",), init="ones") if family.layer_scalar else None,
        kind=kind,
    )


def declare_stacked(name: str, parts: Sequence[ArraySpec]) -> list[ArraySpec]:
    """Declares matrices whose outputs one checkpoint tensor holds one below the other."""
    ends = list(accumulate(part.shape[1] for part in parts))
    rows = [(end - part.shape[1], ends[-1]) for part, end in zip(parts, ends, strict=True)]
    return [replace(part, name=name, rows=each) for part, each in zip(parts, rows, strict=True)]


def declare(config: DecoderConfig, separate_head: bool = False, family: Family | None = None) -> DecoderParams:
    """Declares the model's arrays (see `params.ArraySpec`).

    Args:
        separate_head: a tied model gets a separate output head, read from the embedding's tensor.
        family: replaces the configuration's family, for other tensor names.
    """
    v = config.vocab_size
    h = config.hidden_size
    stored = EMBEDDING if config.tie_word_embeddings else "lm_head.weight"
    tied = config.tie_word_embeddings and not separate_head
    head = None if tied else matrix(stored, h, v, ("hidden", "vocab"), kind="head")
    family = family or FAMILIES[config.family]
    layers = (declare_layer(config, f"model.layers.{n}", family, kind=config.kind(n)) for n in range(config.num_layers))
    declared = DecoderParams(
        embed=ArraySpec(EMBEDDING, (v, h), ("vocab", "hidden"), "embedding"),
        layers=tuple(with_delta(layer, f"model.layers.{n}", h, family.delta_in_one) for n, layer in enumerate(layers)),
        norm=norm_weight("model.norm.weight", h, offset=family.norm_offset),
        head=head,
    )
    if family.stored_parts:
        declared = jax.tree.map(lambda spec: replace(spec, name=family.stored_name(spec.name)), declared)
    if config.canvas is None:
        return declared
    scalars, canvas = declare_canvas(tuple(layer.scalar for layer in declared.layers), h, config.intermediate_size)
    encoder = tuple(replace(layer, scalar=scalar) for layer, scalar in zip(declared.layers, scalars, strict=True))
    return replace(declared, layers=encoder, canvas=canvas)


def prepare(config: DecoderConfig, ops: Operations, params: DecoderParams) -> DecoderParams:
    """Prepares parameters for the operations. A tied model gets a separate output head if the operations need one."""
    if params.head is None and ops.separate_head:
        params = replace(params, head=params.embed.T)
    return ops.prepare(declare(config, ops.separate_head), params)


Attend = Callable[[Operations, Projection, Heads, Any, Any], tuple[Array, Any]]
"""Attention of a layer: `attend(ops, projection, heads, attn_metadata, kv_cache) -> (out [B, T, N * D], kv_cache)`.

`attn_metadata` is that of `stack.Rows`, such as the mask. `kv_cache` is the layer's cache."""


def head_norms(config: Any, layer: Layer, rope: Rope) -> Heads:
    """Returns the settings of a layer's heads: norms, rotation, scores and window."""
    q_norm, k_norm = (None if w is None else Norm(w, config.rms_norm_eps) for w in (layer.q_norm, layer.k_norm))
    scores = Scores(layer.kind.scale, layer.kind.softcap, layer.sinks)
    sizes = config.heads(layer.kind)
    # Norms of values have no weights.
    v_norm = Norm(jnp.ones_like(layer.k_norm), config.rms_norm_eps) if layer.kind.value_norm else None
    return Heads(sizes.head_dim, q_norm, k_norm, rope, scores, layer.kind.window, v_norm, sizes.keys_are_values)


def output(
    config: Any, ops: Operations, layer: Layer, out: Float[Array, "B T _"], add: Float[Array, "*rows H"] | None = None
) -> Float[Array, "*rows H"]:
    """Returns the attention sublayer's partial sum, plus `add` if given.

    Operations may return other rows than those of `out` (see `stack.py`).
    """
    if add is None or (layer.o_bias is None and layer.attention_out_norm is None):
        return ops.linear(out, layer.o, add=add)
    return add + post_reduce(config, ops, layer, "attention", ops.linear(out, layer.o))


def post_reduce(
    config: Any, ops: Operations, layer: Layer, sublayer: Sublayer, y: Float[Array, "*rows H"]
) -> Float[Array, "*rows H"]:
    """Adds the bias and applies the norm of a sublayer, if the family has them, to the sublayer's reduced sum.

    Raises:
        ValueError: the layer has a scalar, which only `mlp` applies, to the sum with the residual stream.
    """
    if layer.scalar is not None and sublayer == "mlp":
        raise ValueError("expected one device for a model whose layers scale the residual stream, found a schedule of several")
    bias, norm = (layer.o_bias, layer.attention_out_norm) if sublayer == "attention" else (None, layer.mlp_out_norm)
    y = y if bias is None else y + bias
    return y if norm is None else ops.rms_norm(y, norm, config.rms_norm_eps)


class Gated(NamedTuple):
    """Projection, and the gate `[B, T, N * D]` of the attention output."""

    projection: Projection
    gate: Array


def gated_projection(
    ops: Operations, x: Float[Array, "*rows H"], w: Any, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> Gated:
    """Projects rows to queries, keys, values and the gate.

    Args:
        w: the joined matrices, their biases or None, and the gate's matrix.
    """
    qkv, bias, gate = w
    return Gated(ops.project(x, qkv, norm, bias=bias), ops.linear(x, gate, norm=norm))


def gelu_gated(
    ops: Operations, x: Float[Array, "*rows H"], w: Any, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> Float[Array, "*rows I"]:
    """Computes `gelu(x @ gate) * (x @ up)`; see `experts.gelu_product`.

    Args:
        w: gate and up.
        count: see `Operations`.
    """
    h = x if norm is None else ops.rms_norm(x, *norm)
    return gelu_product(*(ops.linear(h, each, count=count) for each in w))


def mlp(
    config: Any,
    ops: Operations,
    layer: Layer,
    x: Float[Array, "B T H"],
    add: Float[Array, "B T H"] | None = None,
    count: Int[Array, ""] | None = None,
) -> Float[Array, "*rows H"]:
    """Returns the MLP sublayer's partial sum, plus `add` if given, for at least the first `count` rows (see `Operations`).

    Operations may return other rows than those of `x` (see `stack.py`).
    """
    norm = Norm(layer.post_attention_norm, config.rms_norm_eps)
    if layer.beside is not None:
        y = mlp_and_experts(config, ops, layer, x, count)
        if add is None:
            return y
        y = ops.rms_norm(y, layer.mlp_out_norm, config.rms_norm_eps)
        return add + y if layer.scalar is None else rounded_product(add + y, layer.scalar)
    if layer.router is not None:
        weights = routed_weights(layer.router, layer.gate_up, layer.down)
        return ops.routed(ops, routed_product(layer.router.mixture), x, weights, norm, add, count)
    if isinstance(layer.gate_up, tuple):
        inner = ops.begin(ops, gelu_gated, x, layer.gate_up, norm, count)
    else:
        inner = ops.gated_linear(x, layer.gate_up, norm, count=count)
    if add is None or layer.mlp_out_norm is None:
        return ops.linear(inner, layer.down, add=add, count=count)
    y = ops.rms_norm(ops.linear(inner, layer.down, count=count), layer.mlp_out_norm, config.rms_norm_eps)
    return add + y if layer.scalar is None else rounded_product(add + y, layer.scalar)


def mlp_and_experts(
    config: Any, ops: Operations, layer: Layer, x: Float[Array, "B T H"], count: Int[Array, ""] | None = None
) -> Float[Array, "B T H"]:
    """Returns the sum of an MLP and of the chosen experts, each behind a norm of its own; see `experts.MlpBeside`."""
    beside: MlpBeside = layer.beside

    def normed(x: Array, weight: Array) -> Array:
        return ops.rms_norm(x, weight, config.rms_norm_eps)

    inner = gelu_gated(ops, x, beside.gate_up, Norm(beside.norm, config.rms_norm_eps), count)
    dense = normed(ops.linear(inner, beside.down, count=count), beside.out_norm)
    product = routed_product(layer.router.mixture)
    weights = routed_weights(layer.router, layer.gate_up, layer.down)
    rows, routed = (
        normed(x, weight).reshape(-1, x.shape[-1])
        for weight in (layer.post_attention_norm, beside.router_norm * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
    )
    y = product.apply(ops, rows, weights, *product.choose(product.scores(ops, routed, weights), weights), count)
    return dense + normed(y.reshape(x.shape).astype(x.dtype), beside.experts_norm)


def stack_of(config: Any, ops: Operations, layers: tuple[Layer, ...], attend: Attend) -> Stack:
    """Builds the stack of layers. `config` is that of a decoder, or of a drafter with decoder layers."""

    def norms(layer: Layer) -> tuple[Norm, Norm]:
        return Norm(layer.input_norm, config.rms_norm_eps), Norm(layer.post_attention_norm, config.rms_norm_eps)

    def project(ops: Operations, layer: Layer, x: Float[Array, "B T H"]) -> Projection:
        norm, _ = norms(layer)
        if layer.delta is not None:
            return ops.begin(ops, project_delta, x, layer.delta.inputs, norm)
        if layer.gate is not None:
            return ops.begin(ops, gated_projection, x, (layer.qkv, layer.qkv_bias, layer.gate), norm)
        return ops.project(x, layer.qkv, norm, bias=layer.qkv_bias)

    def attended(ops: Operations, layer: Layer, projection: Projection, rows: Rows, kv_cache: Any) -> tuple[Array, Any]:
        if layer.kind.delta is not None:
            return attend_delta(
                layer.kind.delta, ops, layer.delta, config.rms_norm_eps, projection, rows.attn_metadata, kv_cache
            )
        heads = head_norms(config, layer, rows.rope[layer.kind.rotation])
        if not isinstance(projection, Gated):
            return attend(ops, projection, heads, rows.attn_metadata, kv_cache)
        out, kv_cache = attend(ops, projection.projection, heads, rows.attn_metadata, kv_cache)
        return out * jax.nn.sigmoid(projection.gate), kv_cache

    sublayers = partial(output, config), partial(mlp, config), partial(post_reduce, config)
    return Stack(ops, layers, project, attended, *sublayers, norms)


class Forward(NamedTuple):
    """Result of a pass through the layers.

    Attributes:
        hidden: the residual stream after the last layer, before the final norm, `[B, T, H]`.
        taps: the residual stream *after* each tapped layer, in the order of `tap_layers`.
        caches: each layer's cache or state.
    """

    hidden: Array
    taps: tuple[Array, ...]
    caches: tuple[Any, ...]


def forward(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    attn_metadata: Any = None,
    caches: tuple[Any, ...] | None = None,
    tap_layers: tuple[int, ...] = (),
    schedule: Strategy = SINGLE_DEVICE,
    adapter: Int[Array, " B"] | None = None,
    embedded: Float[Array, "B T H"] | None = None,
) -> Forward:
    """Runs the layers over `tokens` at `positions`.

    Args:
        embedded: first residual stream, in place of the tokens' scaled embeddings.
        attn_metadata, caches: passed to `attend`: metadata of all layers, such as the mask, and the cache of each layer.
        adapter: the number of each row's adapter, 0 for none; None if no row has one.
    """
    if params.adapters is not None:
        numbers = jnp.zeros(tokens.shape[0], jnp.int32) if adapter is None else adapter
        ops = adapted_operations(ops, row_ranks(params.adapters, numbers))
    rows = Rows(config.rope_tables(positions), attn_metadata)
    stack = stack_of(config, ops, params.layers, attend)
    before = (None,) * config.num_layers if caches is None else caches
    if embedded is None:
        embedded = embed(config, ops, params, tokens, schedule)
    hidden, taps, after = schedule.run(stack, embedded, rows, before, tap_layers)
    return Forward(hidden, taps, after)


def embed(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "B T"], schedule: Strategy = SINGLE_DEVICE
) -> Float[Array, "B T H"]:
    """Returns the scaled embeddings of tokens, the first residual stream."""
    return scaled(config, schedule.embed(ops, params.embed, tokens))


def scaled(config: DecoderConfig, embedded: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """Multiplies embeddings by the configured scale."""
    return embedded if config.embedding_scale == 1 else rounded_product(embedded, config.embedding_scale)


def rounded_product(x: Float[Array, "*rows H"], factor: float | Float[Array, "1"]) -> Float[Array, "*rows H"]:
    """Multiplies in the dtype of `x`, with a rounding of its own.

    XLA may contract a product and the sum that follows to one rounding, in some programs and not in others. Bounds that no
    product reaches keep them apart; an optimization barrier and `reduce_precision` do not.
    """
    limits = jnp.finfo(x.dtype)
    return jnp.clip(x * jnp.asarray(factor, x.dtype), limits.min, limits.max)


def output_head(params: DecoderParams) -> Any:
    """Returns the output head, `[hidden, vocab]`; for a tied model the embedding, marked as `Transposed`."""
    return Transposed(params.embed) if params.head is None else params.head


def logits(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    schedule: Strategy = SINGLE_DEVICE,
) -> Float[Array, "*rows V"]:
    """Applies the final norm and the output head. Sums are float32 regardless of the model's dtype."""
    found = schedule.logits(ops, hidden, output_head(params), Norm(params.norm, config.rms_norm_eps))
    return softcapped(found, config.logit_softcap)


def cross_entropy(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    labels: Int[Array, "*rows"],
    weights: Float[Array, "*rows"],
) -> Float[Array, ""]:
    """Returns the sum of `weights` times each label's loss in nats, without materialising `logits`."""
    h = ops.rms_norm(hidden, params.norm, config.rms_norm_eps)
    return ops.cross_entropy(h, output_head(params), labels, weights, config.logit_softcap)


def most_likely(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    schedule: Strategy = SINGLE_DEVICE,
    masks: Array | None = None,
) -> Int[Array, "*rows"]:
    """Returns the token with the largest of `logits`, without materialising them.

    With masks, only allowed tokens count (see `Operations.head_argmax`).
    """
    return schedule.head_argmax(ops, hidden, output_head(params), Norm(params.norm, config.rms_norm_eps), masks)


def causal_attend(
    ops: Operations, projection: Projection, heads: Heads, attn_metadata: Any, kv_cache: Any
) -> tuple[Array, None]:
    """Computes causal self-attention over a whole sequence, for training and as the reference of cached paths.

    `attn_metadata` are segment ids `[B, T]`, or None for one segment (see `AttentionMask`).
    """
    mask = causal_from(jnp.zeros(heads.rope[0].shape[0], jnp.int32), window=heads.window)
    return ops.attend_projected(ops, projection, heads, None, replace(mask, segment_ids=attn_metadata))


def forward_full(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B T"],
    tap_layers: tuple[int, ...] = (),
    schedule: Strategy = SINGLE_DEVICE,
) -> Forward:
    """Runs whole sequences from position 0, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(config, ops, params, tokens, positions, causal_attend, tap_layers=tap_layers, schedule=schedule)
