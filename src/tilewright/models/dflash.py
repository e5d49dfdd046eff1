"""DFlash: a block-diffusion drafter that reads its target's hidden states (arXiv 2602.06036).

One pass drafts a whole block. Its input is the known token followed by mask tokens, embedded by the target; its context is one
*feature* for each earlier position, `hidden_norm(fc(taps))`, from which every layer makes keys and values with the projections
that it also uses for the block. Within the block attention is bidirectional. Slot k predicts the token at its own position,
through the target's output head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.linear.cpu import Format, pack
from tilewright.kernels.select import linear, prefix_attention, rms_norm
from tilewright.models import layers
from tilewright.models.config import ConfigReader
from tilewright.models.decoder import (
    Attend,
    DecoderConfig,
    Layer,
    attention_half,
    declare_layer,
    mlp_half,
    pack_layer,
    project_keys,
    single_device,
)
from tilewright.models.params import matrix, norm_weight

ContextKV = tuple[tuple[Array, Array], ...]
"""For each drafter layer the keys and values `[B, K, S, D]` of the context."""


DFLASH_FIELDS = (
    "target_layer_ids mask_token_id block_size num_target_layers is_causal layer_types sliding_window use_sliding_window "
    "input_embedding_scale output_multiplier final_logit_softcapping sample_from_anchor"
).split()
"""What `dflash_config` may hold; not all values of all of them are supported."""


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a DFlash drafter.

    Attributes:
        block_size: counts the known token.
        target_layer_ids: the tapped layers, from 0.
        input_embedding_scale: what the block's embeddings are multiplied by.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    input_embedding_scale: float = 1.0

    @property
    def rope_frequencies(self) -> list[float]:
        return layers.rope_frequencies(self.head_dim, self.rope_theta, None)


def default_target_layers(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """The tapped layers that the published drafters use: evenly from the second to the third last."""
    if taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps))


def _refuse_unsupported(read: ConfigReader, inner: Mapping[str, Any]) -> None:
    """Notes everything in a configuration that would change the maths and is not covered here."""
    unknown = sorted(inner.keys() - set(DFLASH_FIELDS))
    read.require(not unknown, f"dflash_config has unknown fields: {', '.join(unknown)}")
    # Others share the fields and differ in the layout: slot 0 predicts (DSpark), or convolutions mix the slots (DFlash2).
    read.expect_all("architectures", "DFlashDraftModel")
    read.expect("sample_from_anchor", False)
    read.expect("model_type", "qwen3")
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    read.expect("is_causal", False)
    read.expect("use_sliding_window", False)
    if not read.fields.keys() & {
        "use_sliding_window",
        "layer_types",
    }:  # with either of them, the window is one that is not used
        read.expect("sliding_window", None)
    read.expect_all("layer_types", "full_attention")
    # Positive, these two change no argmax, and drafts are argmaxes: neither is needed.
    read.number("output_multiplier", default=1.0)
    if read.fields.get("final_logit_softcapping", 0) != 0:
        read.number("final_logit_softcapping", default=1.0)


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json") -> DFlashConfig:
    """Reads a drafter's `config.json`. What is DFlash's own may stand at the top or inside `dflash_config`.

    Raises:
        ValueError: one message that lists everything missing or unsupported.
    """
    inner = fields.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, found {inner!r}")
    read = ConfigReader({name: value for name, value in {**fields, **inner}.items() if value is not None}, where)
    _refuse_unsupported(read, inner)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    theta, scaling = read.rope()
    taps = read.token_ids("target_layer_ids")
    mask = read.token_ids("mask_token_id")
    config = DFlashConfig(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", default=heads),
        head_dim=read.integer("head_dim", default=hidden // max(heads, 1)),
        block_size=read.integer("block_size"),
        mask_token_id=mask[0] if mask else 0,
        target_layer_ids=taps,
        num_target_layers=read.integer("num_target_layers"),
        rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        input_embedding_scale=read.number("input_embedding_scale", default=1.0),
    )
    read.require(scaling is None, "rope_scaling is not supported in a drafter")
    read.require(len(taps) > 0, "target_layer_ids is missing (expected in dflash_config)")
    read.require(len(mask) == 1, "mask_token_id is missing (expected in dflash_config)")
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    read.finish()
    return config


def config_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """The `config.json` of a drafter that was trained here, with the fields of the published ones."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        | ({} if config.input_embedding_scale == 1 else {"input_embedding_scale": config.input_embedding_scale}),
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * config.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }


def check_fits(drafter: DFlashConfig, target: DecoderConfig) -> None:
    """Raises a `ValueError` that lists every way in which a drafter does not fit its target."""
    problems = [
        f"{name} is {have} but the target's is {want}"
        for name, have, want in (
            ("vocab_size", drafter.vocab_size, target.vocab_size),
            ("hidden_size", drafter.hidden_size, target.hidden_size),
            ("num_target_layers", drafter.num_target_layers, target.num_layers),
        )
        if have != want
    ]
    outside = [i for i in drafter.target_layer_ids if i >= target.num_layers]
    if outside:
        problems.append(f"target_layer_ids {outside} lie outside the target's {target.num_layers} layers")
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(f"mask_token_id {drafter.mask_token_id} lies outside the target's vocabulary of {target.vocab_size}")
    if problems:
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """All arrays of a drafter; embedding and output head are the target's."""

    fc: Any
    hidden_norm: Any
    layers: tuple[Layer, ...]
    norm: Any


def declare(config: DFlashConfig) -> DFlashParams:
    """The drafter's arrays under their checkpoint names, without the `model.` prefix that some files carry."""
    h = config.hidden_size
    return DFlashParams(
        fc=matrix("fc.weight", len(config.target_layer_ids) * h, h, ("taps", "hidden")),
        hidden_norm=norm_weight("hidden_norm.weight", h),
        layers=tuple(declare_layer(config, f"layers.{n}", qk_norm=True) for n in range(config.num_layers)),
        norm=norm_weight("norm.weight", h),
    )


def pack_drafter(params: DFlashParams, kind: Format | None = None) -> DFlashParams:
    """The drafter with its matrices in the layout of the CPU kernel, in `kind` or else as they are."""
    layers = tuple(pack_layer(layer, kind, f"layers.{n}") for n, layer in enumerate(params.layers))
    return replace(params, fc=pack(params.fc, kind, "fc"), layers=layers)


def context_features(
    config: DFlashConfig, params: DFlashParams, taps: Sequence[Float[Array, "B T H"]]
) -> Float[Array, "B T H"]:
    """One feature for each position, from the target's hidden states after the tapped layers."""
    return rms_norm(linear(jnp.concatenate(taps, axis=-1), params.fc), params.hidden_norm, config.rms_norm_eps)


def context_kv(
    config: DFlashConfig, params: DFlashParams, features: Float[Array, "B T H"], positions: Int[Array, "B T"]
) -> ContextKV:
    """Keys and values of the context for every layer: a pure function of each feature and its position, so cached for good.

    The features do not pass through the layers' input norms.
    """
    rope = layers.rope_tables(positions, config.rope_frequencies)
    pairs = (project_keys(config, layer, features, rope) for layer in params.layers)
    return tuple((k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)) for k, v in pairs)


def draft_hidden(
    config: DFlashConfig,
    params: DFlashParams,
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: ContextKV,
    visible: Int[Array, " B"],
) -> Float[Array, "B T H"]:
    """Runs the block over its context; the result is normalised, ready for the target's output head.

    Args:
        embedded: the target's embeddings of the known token and the mask tokens.
        visible: how many of the context's entries, from the first, the block sees.
    """
    rope = layers.rope_tables(positions, config.rope_frequencies)
    lengths = jnp.broadcast_to(visible[:, None], positions.shape)
    x = embedded * config.input_embedding_scale
    for layer, cached in zip(params.layers, context, strict=True):

        def attend(
            q: Array, k: Array, v: Array, cached: tuple[Array, Array] = cached, beside: Any = layer.q
        ) -> tuple[Array, None]:
            block = (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
            return prefix_attention(q, *cached, lengths, block, beside=beside), None

        x = run_layer(config, layer, x, Attend(rope, attend))
    return rms_norm(x, params.norm, config.rms_norm_eps)


def run_layer(config: DFlashConfig, layer: Layer, x: Float[Array, "B T H"], around: Attend) -> Float[Array, "B T H"]:
    """One drafter layer: a Qwen3 layer whose surroundings decide what the block sees."""
    return single_device(x, lambda h: attention_half(config, layer, h, around), lambda h: mlp_half(config, layer, h))[0]
