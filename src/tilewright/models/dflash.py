"""DFlash: a block-diffusion drafter that reads its target's hidden states (arXiv 2602.06036).

One pass drafts a whole block. The input is the last token followed by mask tokens, embedded by the target. The context is one
*feature* for each earlier position, `hidden_norm(fc(taps))`, from which every layer computes keys and values with the
projections that it also uses for the block. Attention within the block is bidirectional. Slot k predicts the token at its own
position, through the target's output head.

Published checkpoints vary: sliding windows and causal order within the block in some layers, sinks, a scale of values, slots
that draft the next token, and separate embeddings, output heads and mask embeddings. `drafter_layouts.py` reads their layouts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.models import drafter_fields
from tilewright.models.config import ConfigReader, Sizes
from tilewright.models.decoder import EMBEDDING, Attend, DecoderConfig, Layer, declare_layer, head_norms, stack_of
from tilewright.models.draft_vocab import DraftVocab
from tilewright.models.families.qwen import QWEN3
from tilewright.models.params import ArraySpec, matrix, norm_weight
from tilewright.models.stack import SINGLE_DEVICE, Rows, Stack

BLOCK_SIZE = 16
"""Default block size, as in the published code."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Sizes):
    """Sizes of a DFlash drafter.

    Attributes:
        block_size: block length, including the last token.
        target_layer_ids: the tapped layers, from 0.
        input_embedding_scale: multiplier of the block's embeddings.
        last_tap_before_norm: a tap of the target's last layer is read before the target's final norm, as in the published MLX
            code; the PyTorch code reads it after the norm (`hidden_states[-1]` of transformers). Not a published field.
        draft_vocab_size: number of tokens that the drafter can propose (see `draft_vocab.py`); None for all.
        expected_acceptance: acceptance of each draft of a block given that all drafts before it were accepted, measured in
            training on held-out prompts; used to choose rounds before any acceptance was observed. Empty if
            not measured. Not a published field.
        sample_from_anchor: slot 0, which holds the last token, drafts too: every slot drafts the token after its position.
        sliding_window: number of positions that a query in `sliding_layers` attends to, including its own; and the whole block.
        causal_layers: layers in which a block's slots do not attend to later slots.
        attention_sinks: every layer has a sink for each head (see `operations.Scores`).
        value_scale: multiplier of values; loaded parameters include it, so that it is 1 (see `fold_value_scale`).
        target_hidden_size: size of the taps, if other than the hidden size; the drafter then has an embedding and a head.
        own_embedding, own_head: the checkpoint has an embedding, or an output head; otherwise the target's are used. Not fields
            of the configuration.
        mask_embedding: the checkpoint has an embedding of the mask token. Not a field of the configuration.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope_theta: float = 1e6
    input_embedding_scale: float = 1.0
    last_tap_before_norm: bool = False
    draft_vocab_size: int | None = None
    expected_acceptance: tuple[float, ...] = ()
    sample_from_anchor: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    causal_layers: tuple[int, ...] = ()
    attention_sinks: bool = False
    value_scale: float = 1.0
    target_hidden_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    mask_embedding: bool = False

    @property
    def num_proposable(self) -> int:
        """Number of tokens that the drafter can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def backbone(self) -> "DFlashConfig":
        """Configuration of a DFlash drafter of the same sizes."""
        return DFlashConfig(**{field.name: getattr(self, field.name) for field in fields(DFlashConfig)})

    @property
    def first_slot(self) -> int:
        """First slot that drafts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def slots(self) -> int:
        """Number of slots of a whole block: one for each draft, and those before the first draft."""
        return self.block_size - 1 + self.first_slot

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None for full attention."""
        return tuple(self.sliding_window if n in self.sliding_layers else None for n in range(self.num_layers))

    @property
    def tap_size(self) -> int:
        """Size of the target's hidden states."""
        return self.hidden_size if self.target_hidden_size is None else self.target_hidden_size

    @property
    def variations(self) -> tuple[str, ...]:
        """Features of the drafter that only some published drafters have, in words."""
        found = {
            "windows": self.sliding_layers,
            "causal layers": self.causal_layers,
            "attention sinks": self.attention_sinks,
            "a scale of values": self.value_scale != 1,
            "an embedding of its own": self.own_embedding,
            "a head of its own": self.own_head,
            "an embedding of masks": self.mask_embedding,
        }
        return tuple(name for name, present in found.items() if present)

    @property
    def has_head(self) -> bool:
        """True if the drafter has a head of its own, or a part of the target's."""
        return self.own_head or self.draft_vocab_size is not None


def default_target_layers(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """Returns the tapped layers of the published drafters: evenly from the second to the third last."""
    if taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps))


def read_backbone(
    read: ConfigReader,
    inner: Mapping[str, Any],
    kind_fields: Collection[str],
    target: DecoderConfig | None,
    anchored: bool = False,
) -> DFlashConfig:
    """Reads the sizes that all DFlash drafters share. Problems are collected in `read`.

    Args:
        inner: `dflash_config`.
        kind_fields: additional fields of the kind of drafter.
        target: for values that configurations may omit: the number of its layers, and its vocabulary size.
        anchored: default of `sample_from_anchor`.
    """
    drafter_fields.check_fields(read, inner, kind_fields)
    read.expect("model_type", "qwen3")
    if target is not None:
        read.fields = {"vocab_size": target.vocab_size, "num_target_layers": target.num_layers, **read.fields}
    sizes = read.sizes(head_dim=128)  # of the published code's Qwen3 layers
    read.expect("v_head_dim", sizes["head_dim"])
    read.expect("rope_dim", int(sizes["head_dim"] * sizes["partial_rotary_factor"]))
    mask = read.token_ids("mask_token_id")
    layers = read.integer("num_target_layers")
    anchored = read.flag("sample_from_anchor", default=anchored)
    slots = read.integer("block_size", default=BLOCK_SIZE)
    config = DFlashConfig(
        **sizes,
        block_size=slots + anchored,
        mask_token_id=mask[0] if mask else 0,
        target_layer_ids=read.token_ids("target_layer_ids") or default_target_layers(layers, sizes["num_layers"]),
        num_target_layers=layers,
        input_embedding_scale=read.number("input_embedding_scale", default=1.0),
        last_tap_before_norm=read.flag("last_tap_before_norm", default=False),
        draft_vocab_size=read.integer("draft_vocab_size") if "draft_vocab_size" in read.fields else None,
        expected_acceptance=read.fractions("expected_acceptance"),
        sample_from_anchor=anchored,
        attention_sinks=read.flag("attention_sink_bias", default=read.flag("add_swa_attention_sink_bias", default=False)),
        value_scale=read.number("attention_value_scale", default=1.0),
        target_hidden_size=read.integer("target_hidden_size", default=sizes["hidden_size"]),
        **drafter_fields.read_attention(read, sizes["num_layers"], slots),
    )
    if config.target_hidden_size == config.hidden_size:
        config = replace(config, target_hidden_size=None)
    too_many = f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}"
    read.require(config.num_proposable <= config.vocab_size, too_many)
    read.require(len(mask) == 1, "mask_token_id is missing (expected in dflash_config)")
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    return config


def finish(read: ConfigReader, config: DFlashConfig, target: DecoderConfig | None) -> None:
    """Raises a `ValueError` that lists wrong fields, and mismatches between drafter and target; nothing without wrong fields.

    Fields that are wrong are not compared with the target. A correct configuration is compared later, together with its
    tensors.
    """
    if read.problems and target is not None:
        wrong = {problem.partition(" ")[0] for problem in read.problems}
        read.problems += [problem for problem in misfits(config, target) if problem.partition(" ")[0] not in wrong]
    read.finish()


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None) -> DFlashConfig:
    """Reads a drafter's `config.json`. DFlash's own fields may be at the top level or in `dflash_config`.

    Args:
        target: for values that depend only on the target, which the newest published configurations omit.

    Raises:
        ValueError: one message that lists everything missing or unsupported, then every mismatch with the target.
    """
    read, inner = drafter_fields.open_config(fields, where)
    # Other kinds share the fields and differ in the layout.
    read.expect_all("architectures", "DFlashDraftModel")
    # Positive values of these two fields do not change the argmax, which is all that drafts need.
    read.number("output_multiplier", default=1.0)
    if read.fields.get("final_logit_softcapping", 0) != 0:
        read.number("final_logit_softcapping", default=1.0)
    config = read_backbone(read, inner, (), target)
    finish(read, config, target)
    return config


def config_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """Returns the `config.json` of a drafter, with the fields of the published ones."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.slots,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        | ({} if config.input_embedding_scale == 1 else {"input_embedding_scale": config.input_embedding_scale})
        | ({"last_tap_before_norm": True} if config.last_tap_before_norm else {})
        | ({} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size})
        | ({"expected_acceptance": list(config.expected_acceptance)} if config.expected_acceptance else {})
        | ({"sample_from_anchor": True} if config.sample_from_anchor else {})
        | ({"attention_sink_bias": True} if config.attention_sinks else {})
        | ({} if config.value_scale == 1 else {"attention_value_scale": config.value_scale}),
        "num_target_layers": config.num_target_layers,
        **config.to_hf(),
        **({} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}),
        **drafter_fields.write_attention(config),
        "tie_word_embeddings": False,
    }


def misfits(drafter: DFlashConfig, target: DecoderConfig) -> list[str]:
    """Lists every mismatch between a drafter and its target; each begins with the name of a field."""
    tapped = "hidden_size" if drafter.target_hidden_size is None else "target_hidden_size"
    problems = [
        f"{name} is {have} but the target's is {want}"
        for name, have, want in (
            ("vocab_size", drafter.vocab_size, target.vocab_size),
            (tapped, drafter.tap_size, target.hidden_size),
            ("num_target_layers", drafter.num_target_layers, target.num_layers),
        )
        if have != want
    ]
    outside = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_layers]
    if outside:
        problems.append(f"target_layer_ids {outside} lie outside the target's {target.num_layers} layers")
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(f"mask_token_id {drafter.mask_token_id} lies outside the target's vocabulary of {target.vocab_size}")
    missing = [name for name, has in (("embedding", drafter.own_embedding), ("head", drafter.own_head)) if not has]
    if tapped == "target_hidden_size" and missing:
        problems.append(f"hidden_size is not target_hidden_size, and the drafter has no {' and no '.join(missing)} of its own")
    return problems


def check_fits(drafter: DFlashConfig, target: DecoderConfig) -> None:
    """Raises a `ValueError` that lists every mismatch between a drafter and its target."""
    if problems := misfits(drafter, target):
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """All arrays of a drafter.

    Attributes:
        vocab: the draft vocabulary with its head; None in a declaration, in training, and if the target's head is used.
        embed: None if the target's embedding is used.
        mask: the embedding of the mask token, `[hidden]`; None if it is a row of the embedding.
    """

    fc: Any
    hidden_norm: Any
    layers: tuple[Layer, ...]
    norm: Any
    vocab: Any = None
    embed: Any = None
    mask: Any = None


@runtime_checkable
class HasBackbone(Protocol):
    """Parameters of a drafter that extends DFlash."""

    @property
    def backbone(self) -> DFlashParams: ...


def backbone_of(params: DFlashParams | HasBackbone) -> DFlashParams:
    """Returns DFlash's part of a drafter's parameters."""
    return params if isinstance(params, DFlashParams) else params.backbone


def with_backbone(params: Any, **changes: Any) -> Any:
    """Replaces arrays in DFlash's part of a drafter's parameters."""
    if isinstance(params, DFlashParams):
        return replace(params, **changes)
    return replace(params, backbone=replace(params.backbone, **changes))


def with_vocab(params: Any, vocab: DraftVocab | None) -> Any:
    """Replaces the draft vocabulary of a drafter's parameters."""
    return with_backbone(params, vocab=vocab)


def fold_value_scale(config: DFlashConfig, params: Any) -> tuple[Any, Any]:
    """Folds the scale of values into the projection after attention; returns configuration and parameters."""
    scale = config.value_scale
    layers = backbone_of(params).layers
    if scale == 1:
        return config, params
    scaled = tuple(replace(layer, o=(layer.o.astype(jnp.float32) * scale).astype(layer.o.dtype)) for layer in layers)
    return replace(config, value_scale=1.0), with_backbone(params, layers=scaled)


def declare(config: DFlashConfig) -> DFlashParams:
    """Declares the drafter's arrays under their checkpoint names (see `drafter_layouts.plain_name`)."""
    h = config.hidden_size
    embed = ArraySpec(EMBEDDING.removeprefix("model."), (config.vocab_size, h), ("vocab", "hidden"), "embedding")

    def layer(n: int) -> Layer:
        declared = declare_layer(config, f"layers.{n}", QWEN3)
        sinks = ArraySpec(f"layers.{n}.self_attn.attention_sink_bias", (config.num_heads,), ("query_heads",))
        return replace(declared, sinks=sinks) if config.attention_sinks else declared

    return DFlashParams(
        fc=matrix("fc.weight", len(config.target_layer_ids) * config.tap_size, h, ("taps", "hidden")),
        hidden_norm=norm_weight("hidden_norm.weight", h),
        layers=tuple(map(layer, range(config.num_layers))),
        norm=norm_weight("norm.weight", h),
        embed=embed if config.own_embedding else None,
        mask=ArraySpec("mask_embedding", (h,), ("hidden",)) if config.mask_embedding else None,
    )


def normal_taps(
    config: DFlashConfig, ops: Operations, taps: Sequence[Float[Array, "B T G"]], target_norm: Norm
) -> tuple[Float[Array, "B T G"], ...]:
    """Applies the target's final norm to a tap of the target's last layer, as drafters read it.

    See `DFlashConfig.last_tap_before_norm`.
    """
    last = None if config.last_tap_before_norm else config.num_target_layers - 1
    pairs = zip(config.target_layer_ids, taps, strict=True)
    return tuple(ops.rms_norm(tap, *target_norm) if layer == last else tap for layer, tap in pairs)


def context_features(
    config: DFlashConfig, ops: Operations, params: DFlashParams, taps: Sequence[Float[Array, "B T G"]]
) -> Float[Array, "B T H"]:
    """Computes a feature for each position from the target's hidden states at the tapped layers (`normal_taps`)."""
    return ops.rms_norm(ops.linear(jnp.concatenate(taps, axis=-1), params.fc), params.hidden_norm, config.rms_norm_eps)


def context_kv(
    config: DFlashConfig,
    ops: Operations,
    params: DFlashParams,
    features: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
) -> tuple[tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]], ...]:
    """Computes keys and values of the context for every layer.

    Keys and values depend only on a feature and its position, so they can be cached. Features do not pass through the layers'
    input norms.
    """
    rope = config.rope_tables(positions)["global"]

    def layer_kv(layer: Layer) -> tuple[Array, Array]:
        _, k, v = ops.heads(ops.project(features, layer.qkv, first=1), head_norms(config, layer, rope))
        return k, v

    return tuple(layer_kv(layer) for layer in params.layers)


def run_block(
    config: DFlashConfig,
    ops: Operations,
    params: DFlashParams,
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    attend: Attend,
    attn_metadata: Any,
) -> Float[Array, "B T H"]:
    """Runs blocks through all layers. The result is normalised, ready for the output head.

    Args:
        embedded: the target's embeddings of the last token and the mask tokens.
        context: each layer's context, the `kv_cache` of `attend`.
        attend, attn_metadata: attention of a block over its context; see `decoder.Attend`.
    """
    return run_stack(
        config, stack_of(config, ops, params.layers, attend), params.norm, embedded, positions, context, attn_metadata
    )


def run_stack(
    config: DFlashConfig,
    stack: Stack,
    norm: Float[Array, " H"],
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    attn_metadata: Any,
) -> Float[Array, "B T H"]:
    """Runs blocks through a given stack, then applies the final norm; see `run_block`."""
    rows = Rows(config.rope_tables(positions), attn_metadata)
    x, _, _ = SINGLE_DEVICE.run(stack, embedded * config.input_embedding_scale, rows, context, ())
    return stack.ops.rms_norm(x, norm, config.rms_norm_eps)


def attend_context(ops: Operations, projection: Projection, heads: Heads, start: Array, kv_cache: Any) -> tuple[Array, Any]:
    """Computes attention of a block over its cached context and over the whole block.

    `start` `[B]` is the position of the last token. The block begins there, and the context is the cache before it.
    """
    q, k, v = ops.heads(projection, heads)
    context = kv_cache if heads.scores.sinks is None else replace(kv_cache, sinks=heads.scores.sinks)
    return context.attend_before(ops, q, start, (k, v)).reshape(*q.shape[:2], -1), kv_cache
