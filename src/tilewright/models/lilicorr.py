"""LiLiCorr: DFlash, and a small transformer that scores pairs of candidates in neighbouring slots (arXiv 2608.20530).

The block is drafted as in DFlash (`dflash.py`). The K most likely tokens of its slots form a lattice of L times K nodes, each
with the token's embedding, its slot's hidden state, and features of its probability. A transformer of two layers runs once over
all nodes, with full attention, and maps every node to two unit vectors: *out*, for the step to the next slot, and *in*, for the
step from the slot before. The score of two neighbours is the cosine of the earlier node's out and the later node's in: one
matmul for a whole block. The *anchor*, the feature of the position before the last token, is an input of all vectors and has an
out vector of its own, with which the walk begins. The walk of DFlash 2 (`dflash2.walk`) then takes in each slot the best
candidate after the one taken before, without the logits of the head.

Source: NVIDIA/Model-Optimizer #2342 (`modeling_lilicorr.py`), sgl-project/sglang #37462 and vLLM 0.33 (`lilicorr.py`), whose
maths this is, and the checkpoints that declare `LiLiCorrDraftModel`. Some of these also have DFlash 2's convolutions around
their layers.

Legend: B rows of a batch, L slots to be drafted, K candidates, H hidden size, h the lattice's, F size of the unit vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32

from tilewright.kernels.operations import Operations
from tilewright.models import convolution, dflash
from tilewright.models.config import ConfigReader
from tilewright.models.convolution import Convolution
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.drafter_fields import open_config
from tilewright.models.params import ArraySpec, initialise, matrix, norm_weight

ARCHITECTURE = "LiLiCorrDraftModel"
FEATURES = 5
"""Number of features of a candidate's probability; see `candidate_features`."""
LAYER_NORM_EPS = 1e-5
EXACT = jax.lax.Precision.HIGHEST
WIDEST = 16
"""The most candidates of a slot that SGLang and vLLM run. They also expect a power of two."""
OLDER_NAMES = (
    ("feature_mlp.0.", "feature_norm."),
    ("feature_mlp.1.", "feature_mlp.up_proj."),
    ("feature_mlp.3.", "feature_mlp.down_proj."),
    (".mlp.0.", ".mlp.up_proj."),
    (".mlp.2.", ".mlp.down_proj."),
)
"""Parts of tensor names in older checkpoints, which number the layers of an MLP, and those in newer checkpoints."""

INTEGERS = {
    "candidate_top_k": "lilicorr_candidate_topk",
    "lattice_layers": "lilicorr_num_layers",
    "lattice_heads": "lilicorr_num_heads",
    "vector_size": "lilicorr_factor_dim",
}
NUMBERS = {"mlp_ratio": "lilicorr_mlp_ratio", "vector_eps": "lilicorr_vector_eps", "logit_scale": "lilicorr_logit_scale"}
WIDTH = "lilicorr_hidden_size"
EXTRA_FIELDS = (
    *convolution.SIZES,
    "conv_projection_init_std",
    "projector_type",
    "lilicorr_enabled",
    WIDTH,
    *INTEGERS.values(),
    *NUMBERS.values(),
)
"""Configuration fields besides DFlash's."""


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(DFlashConfig):
    """Sizes of a LiLiCorr drafter.

    Attributes:
        candidate_top_k: K.
        lattice_size: h. If it equals H, the embeddings of the candidates are not projected.
        lattice_layers, lattice_heads: of the transformer.
        mlp_ratio: width of its MLPs divided by h.
        vector_size: F.
        vector_eps: least length that a vector is divided by.
        logit_scale: multiplier that turns a cosine into a logit.
        conv_kernel_size, conv_group_size: of DFlash 2's convolutions (see `convolution.py`); None if there are none.
    """

    candidate_top_k: int
    lattice_size: int
    lattice_layers: int
    lattice_heads: int
    mlp_ratio: float
    vector_size: int
    vector_eps: float
    logit_scale: float
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None

    @property
    def mlp_size(self) -> int:
        return int(self.lattice_size * self.mlp_ratio)


def is_lilicorr(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares a drafter of this kind."""
    return fields.get("architectures") == [ARCHITECTURE]


def config_from_hf(
    fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None
) -> LiLiCorrConfig:
    """Reads a drafter's `config.json`; see `dflash.config_from_hf`. All sizes of the lattice are required.

    Raises:
        ValueError: one message that lists everything missing or unsupported, then every mismatch with the target.
    """
    read, inner = open_config(fields, where)
    read.expect_all("architectures", ARCHITECTURE)
    read.expect("projector_type", "lilicorr")
    read.expect("lilicorr_enabled", True)
    read.expect("sample_from_anchor", False)
    read.expect("output_multiplier", 1)
    read.expect("final_logit_softcapping", 0)
    backbone = dflash.read_backbone(read, inner, EXTRA_FIELDS, target)
    is_hidden_size = read.fields.get(WIDTH) in (None, 0)
    extra: dict[str, Any] = {name: read.integer(field) for name, field in INTEGERS.items()}
    extra |= {name: _required_number(read, field) for name, field in NUMBERS.items()}
    if any(read.fields.get(name) not in (None, 0) for name in convolution.SIZES):
        extra |= {name: read.integer(name) for name in convolution.SIZES}
    config = LiLiCorrConfig(
        **vars(backbone), **extra, lattice_size=backbone.hidden_size if is_hidden_size else read.integer(WIDTH)
    )
    size = config.lattice_size
    heads = config.lattice_heads
    top_k = config.candidate_top_k
    read.require(size % heads == 0, f"lilicorr_num_heads {heads} does not divide {WIDTH} {size}")
    most = config.num_proposable
    read.require(top_k <= most, f"lilicorr_candidate_topk {top_k} exceeds the {most} tokens that can be proposed")
    read.require(config.vector_eps < 0.5, f"lilicorr_vector_eps must be below 0.5, found {config.vector_eps}")
    group = config.conv_group_size or 1
    read.require(config.hidden_size % group == 0, f"conv_group_size {group} does not divide hidden_size {config.hidden_size}")
    read.require(config.mlp_size >= 1, f"lilicorr_mlp_ratio {config.mlp_ratio} leaves nothing of {WIDTH} {size}")
    dflash.finish(read, config, target)
    return config


def _required_number(read: ConfigReader, name: str) -> float:
    """Reads a number without a default: it changes scores but no shape, so that a wrong value would be unnoticed."""
    read.require(read.fields.get(name) is not None, f"{name} is missing (expected in dflash_config)")
    return read.number(name, default=0.1)


def stored_name(name: str) -> str:
    """Returns the declared name of a stored tensor, which has another name in older checkpoints."""
    if name.startswith("lilicorr."):
        for older, newer in OLDER_NAMES:
            name = name.replace(older, newer)
    return name


def config_to_hf(config: LiLiCorrConfig) -> dict[str, Any]:
    """Returns the `config.json` of a drafter, with the fields of the published ones."""
    fields = dflash.config_to_hf(config)
    names = {**INTEGERS, **NUMBERS, "lattice_size": WIDTH}
    extra = {field: getattr(config, name) for name, field in names.items()}
    if config.conv_kernel_size is not None:
        extra |= {name: getattr(config, name) for name in convolution.SIZES}
    inner = fields["dflash_config"] | {"projector_type": "lilicorr", "lilicorr_enabled": True} | extra
    return {**fields, "architectures": [ARCHITECTURE], "dflash_config": inner}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Linear layer with a bias: `weight` `[I, O]`, `bias` `[O]`."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatticeLayer:
    """Layer of the transformer. `qkv` `[h, 3h]` holds queries, keys and values; no rotary embedding."""

    attention_norm: Any
    qkv: Dense
    out: Dense
    mlp_norm: Any
    up: Dense
    down: Dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lattice:
    """Transformer over the candidates.

    Attributes:
        token: projection of the candidates' embeddings; None if these are as wide as the lattice.
        hidden: projection of the slots' hidden states.
        feature_norm, feature_up, feature_down: the LayerNorm and the MLP of `candidate_features`.
        slots, ranks: learnt embeddings of each slot `[1, 1, L, 1, h]`, and of each rank in a slot `[1, 1, 1, K, h]`.
        slot_bias: added to the attention's logits, for each head and each distance of two slots, `[heads, 2 * block_size - 1]`;
            `[:, block_size - 1]` is distance 0.
        same_slot_bias: added as well between nodes of one slot, `[heads]`.
        anchor, anchor_norm, anchor_out: from the anchor's feature to its state, and to its out vector.
        combined: of a node's state, the anchor's, and their product, `[3h, h]`.
        out, into: from `combined` to a node's two vectors.
    """

    token: Any
    hidden: Dense
    feature_norm: Dense
    feature_up: Dense
    feature_down: Dense
    slots: Any
    ranks: Any
    slot_bias: Any
    same_slot_bias: Any
    layers: tuple[LatticeLayer, ...]
    norm: Any
    anchor: Dense
    anchor_norm: Any
    anchor_out: Dense
    combined: Dense
    out: Dense
    into: Dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LiLiCorrParams:
    """All arrays of a drafter. The convolutions are empty if there are none."""

    backbone: DFlashParams
    lattice: Lattice
    attention_convs: tuple[Convolution, ...] = ()
    mlp_convs: tuple[Convolution, ...] = ()


def _zeros(name: str, *shape: int) -> ArraySpec:
    return ArraySpec(f"lilicorr.{name}", shape, ("lattice",) * len(shape), scale=0.0)


def _dense(name: str, d_in: int, d_out: int, axis: str = "lattice") -> Dense:
    weight = matrix(f"lilicorr.{name}.weight", d_in, d_out, (axis, "lattice"))
    return Dense(weight, _zeros(f"{name}.bias", d_out))


def _norm(name: str, size: int) -> ArraySpec:
    return norm_weight(f"lilicorr.{name}.weight", size, "lattice")


def _declare_layer(config: LiLiCorrConfig, n: int) -> LatticeLayer:
    h = config.lattice_size
    name = f"layers.{n}"
    xavier = (2 / (4 * h)) ** 0.5  # initial standard deviation of this matrix alone in the published code
    qkv = matrix(f"lilicorr.{name}.attn.in_proj_weight", h, 3 * h, ("lattice", "lattice"), xavier)
    return LatticeLayer(
        _norm(f"{name}.attn_norm", h),
        Dense(qkv, _zeros(f"{name}.attn.in_proj_bias", 3 * h)),
        _dense(f"{name}.attn.out_proj", h, h),
        _norm(f"{name}.mlp_norm", h),
        _dense(f"{name}.mlp.up_proj", h, config.mlp_size),
        _dense(f"{name}.mlp.down_proj", config.mlp_size, h),
    )


def declare(config: LiLiCorrConfig) -> LiLiCorrParams:
    """Declares the drafter's arrays under their checkpoint names."""
    wide = config.hidden_size
    h = config.lattice_size
    block = config.block_size
    return LiLiCorrParams(
        dflash.declare(config),
        Lattice(
            token=None if wide == h else _dense("token_proj", wide, h, "hidden"),
            hidden=_dense("pass_hidden_proj", wide, h, "hidden"),
            feature_norm=Dense(_norm("feature_norm", FEATURES), _zeros("feature_norm.bias", FEATURES)),
            feature_up=_dense("feature_mlp.up_proj", FEATURES, h),
            feature_down=_dense("feature_mlp.down_proj", h, h),
            slots=_zeros("slot_embedding", 1, 1, block - 1, 1, h),
            ranks=_zeros("rank_embedding", 1, 1, 1, config.candidate_top_k, h),
            slot_bias=_zeros("relative_slot_bias", config.lattice_heads, 2 * block - 1),
            same_slot_bias=_zeros("same_slot_bias", config.lattice_heads),
            layers=tuple(_declare_layer(config, n) for n in range(config.lattice_layers)),
            norm=_norm("output_norm", h),
            anchor=_dense("context_proj", wide, h, "hidden"),
            anchor_norm=_norm("anchor_norm", h),
            anchor_out=_dense("anchor_out_head", h, config.vector_size),
            combined=_dense("factor_input_proj", 3 * h, h),
            out=_dense("out_head", h, config.vector_size),
            into=_dense("in_head", h, config.vector_size),
        ),
        *(() if config.conv_kernel_size is None else convolution.declare(config)),
    )


def fresh(config: LiLiCorrConfig, key: Array) -> LiLiCorrParams:
    """Draws random parameters, with zero slot and rank embeddings and identity convolutions."""
    return convolution.pass_through(initialise(declare(config), key))


def run_block(config: LiLiCorrConfig, ops: Operations, params: LiLiCorrParams, *block: Any) -> Float[Array, "B T H"]:
    """Runs blocks through all layers; see `dflash.run_block`."""
    if config.conv_kernel_size is None:
        return dflash.run_block(config, ops, params.backbone, *block)
    return convolution.run_block(config, ops, params, *block)


def apply(ops: Operations, layer: Dense, x: Float[Array, "*rows I"], add: Any = None) -> Float[Array, "*rows O"]:
    y = ops.linear(x, layer.weight, add=add)
    return y + layer.bias.astype(y.dtype)


def candidate_features(log_probs: Float[Array, "B L K"]) -> Float32[Array, "B L K 5"]:
    """Computes features of each candidate from the log-probabilities of a slot, which are in descending order.

    The features are log-probability, probability, difference to the first candidate, rank from 0 to 1, and whether it is the
    first.
    """
    log_probs = log_probs.astype(jnp.float32)
    top_k = log_probs.shape[-1]
    rank = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.float32) / max(top_k - 1, 1), log_probs.shape)
    first = jnp.broadcast_to(jnp.arange(top_k) == 0, log_probs.shape).astype(jnp.float32)
    behind = log_probs - jnp.max(log_probs, axis=-1, keepdims=True)
    return jnp.stack([log_probs, jnp.exp(log_probs), behind, rank, first], axis=-1)


def nodes(
    ops: Operations,
    lattice: Lattice,
    embedded: Float[Array, "B L K H"],
    log_probs: Float[Array, "B L K"],
    hidden: Float[Array, "B L H"],
) -> Float[Array, "B L K h"]:
    """Returns the state of each node before the transformer."""
    token = embedded if lattice.token is None else apply(ops, lattice.token, embedded)
    found = candidate_features(log_probs)
    centred = found - jnp.mean(found, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + LAYER_NORM_EPS)
    scale, shift = (part.astype(jnp.float32) for part in (lattice.feature_norm.weight, lattice.feature_norm.bias))
    features = (normed * scale + shift).astype(hidden.dtype)
    likely = apply(ops, lattice.feature_down, jax.nn.silu(apply(ops, lattice.feature_up, features)))
    x = token.astype(hidden.dtype) + apply(ops, lattice.hidden, hidden)[:, :, None] + likely
    return x + (lattice.slots[0, :, : hidden.shape[1]] + lattice.ranks[0]).astype(x.dtype)


def attention_bias(config: LiLiCorrConfig, lattice: Lattice, slots: int) -> Float[Array, "heads N N"]:
    """Returns the bias of attention logits between the nodes of `slots` slots, in slot order."""
    slot = jnp.repeat(jnp.arange(slots), config.candidate_top_k)
    apart = slot[:, None] - slot[None]
    # The table's middle is distance 0, for blocks of any length.
    bias = lattice.slot_bias[:, apart + config.block_size - 1]
    return bias + jnp.where(apart == 0, lattice.same_slot_bias[:, None, None], 0)


def run_layer(
    config: LiLiCorrConfig, ops: Operations, layer: LatticeLayer, x: Float[Array, "B N h"], bias: Float[Array, "heads N N"]
) -> Float[Array, "B N h"]:
    """Runs one layer, in which every node attends to every node of its block."""
    size = config.lattice_size // config.lattice_heads
    qkv = apply(ops, layer.qkv, ops.rms_norm(x, layer.attention_norm, config.rms_norm_eps))
    q, k, v = (part.reshape(*x.shape[:2], config.lattice_heads, size) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, precision=EXACT, preferred_element_type=jnp.float32) * size**-0.5
    weights = jax.nn.softmax(scores + bias.astype(jnp.float32), axis=-1).astype(v.dtype)
    attended = jnp.einsum("bnqk,bknd->bqnd", weights, v, precision=EXACT)
    x = apply(ops, layer.out, attended.reshape(x.shape), x)
    inner = jax.nn.silu(apply(ops, layer.up, ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)))
    return apply(ops, layer.down, inner, x)


def unit_vectors(
    config: LiLiCorrConfig, ops: Operations, layer: Dense, x: Float[Array, "*rows h"]
) -> Float32[Array, "*rows F"]:
    """Returns vectors of length 1; vectors shorter than `vector_eps` stay shorter than 1."""
    v = apply(ops, layer, x).astype(jnp.float32)
    squared = jnp.sum(v * v, axis=-1, keepdims=True)
    return v * jax.lax.rsqrt(jnp.maximum(squared, config.vector_eps**2))


def transition_scores(
    config: LiLiCorrConfig,
    ops: Operations,
    lattice: Lattice,
    embedded: Float[Array, "B L K H"],
    log_probs: Float[Array, "B L K"],
    hidden: Float[Array, "B L H"],
    feature: Float[Array, "B H"],
    anchored: Bool[Array, " B"],
) -> Float32[Array, "B L K K"]:
    """Scores each slot's candidates after each candidate of the slot before; before the first slot is the anchor alone.

    Args:
        embedded: the candidates' embeddings, by the target.
        log_probs: of the candidates in their slot, over all tokens that the drafter can propose; in descending order.
        hidden: of the slots, normalised, as the head reads it.
        feature: of the position before the last token (`dflash.context_features`).
        anchored: whether there is such a position.
    """
    b, slots, top_k = log_probs.shape
    x = nodes(ops, lattice, embedded, log_probs, hidden).reshape(b, slots * top_k, -1)
    bias = attention_bias(config, lattice, slots)
    for layer in lattice.layers:
        x = run_layer(config, ops, layer, x, bias)
    x = ops.rms_norm(x, lattice.norm, config.rms_norm_eps).reshape(b, slots, top_k, -1)
    anchor = jnp.where(anchored[:, None], apply(ops, lattice.anchor, feature), 0)
    anchor = ops.rms_norm(anchor, lattice.anchor_norm, config.rms_norm_eps)
    beside = jnp.broadcast_to(anchor[:, None, None], x.shape).astype(x.dtype)
    combined = jax.nn.silu(apply(ops, lattice.combined, jnp.concatenate([x, beside, x * beside], axis=-1)))
    out, into = (unit_vectors(config, ops, layer, combined) for layer in (lattice.out, lattice.into))
    first = jnp.einsum("bf,bkf->bk", unit_vectors(config, ops, lattice.anchor_out, anchor), into[:, 0], precision=EXACT)
    later = jnp.einsum("blif,bljf->blij", out[:, :-1], into[:, 1:], precision=EXACT)
    first = jnp.broadcast_to(first[:, None, None], (b, 1, top_k, top_k))
    return config.logit_scale * jnp.concatenate([first, later], axis=1)
