"""DFlash: a block-diffusion drafter that reads its target's hidden states (arXiv 2602.06036).

One pass drafts a whole block. Its input is the known token followed by mask tokens, embedded by the target; its context is one
*feature* for each earlier position, `hidden_norm(fc(taps))`, from which every layer makes keys and values with the projections
that it also uses for the block. Within the block attention is bidirectional. Slot k predicts the token at its own position,
through the target's output head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.models.config import ConfigReader, Sizes
from tilewright.models.decoder import Attend, DecoderConfig, Layer, declare_layer, head_norms, stack_of
from tilewright.models.draft_vocab import DraftVocab
from tilewright.models.families.qwen import QWEN3
from tilewright.models.params import matrix, norm_weight
from tilewright.models.stack import SINGLE_DEVICE, Rows, Stack

DFLASH_FIELDS = (
    "target_layer_ids mask_token_id block_size num_target_layers is_causal layer_types sliding_window use_sliding_window "
    "input_embedding_scale output_multiplier final_logit_softcapping sample_from_anchor last_tap_before_norm draft_vocab_size "
    "expected_acceptance"
).split()
"""What `dflash_config` may hold; not all values of all of them are supported."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Sizes):
    """Sizes of a DFlash drafter.

    Attributes:
        block_size: counts the known token.
        target_layer_ids: the tapped layers, from 0.
        input_embedding_scale: what the block's embeddings are multiplied by.
        last_tap_before_norm: what follows the target's last layer is read before the target's final norm, as the published MLX
            code does; the PyTorch code reads it after (`hidden_states[-1]` of transformers). A field of our own.
        draft_vocab_size: how many tokens it can propose (see `draft_vocab.py`); None for all. Another field of our own.
        expected_acceptance: of each draft of a block, given that those before it were accepted: what training found on held-out
            prompts. Where rounds are chosen, it is what they are expected to give before any was seen. Empty where nothing was
            measured. A third field of our own.
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

    @property
    def proposed(self) -> int:
        """Number of tokens that it can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def backbone(self) -> "DFlashConfig":
        """A DFlash drafter's of the same sizes."""
        return DFlashConfig(**{field.name: getattr(self, field.name) for field in fields(DFlashConfig)})

    @property
    def first_slot(self) -> int:
        """The first slot that drafts a token. Slot 0 holds the known token and here drafts nothing."""
        return 1

    @property
    def slots(self) -> int:
        """Slots that a whole block runs: one for each draft, and those before the first one."""
        return self.block_size - 1 + self.first_slot


def default_target_layers(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """The tapped layers that the published drafters use: evenly from the second to the third last."""
    if taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps))


def open_config(fields: Mapping[str, Any], where: str) -> tuple[ConfigReader, Mapping[str, Any]]:
    """A reader of a drafter's `config.json`, where `dflash_config` goes before the top level; and `dflash_config` itself."""
    inner = fields.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, found {inner!r}")
    return ConfigReader({name: value for name, value in {**fields, **inner}.items() if value is not None}, where), inner


def _refuse_unsupported(read: ConfigReader) -> None:
    """Notes what would change the maths of this drafter and is not covered here."""
    # Others share the fields and differ in the layout: slot 0 predicts (DSpark), or convolutions mix the slots (DFlash 2).
    read.expect_all("architectures", "DFlashDraftModel")
    read.expect("sample_from_anchor", False)
    refuse_other_attention(read)
    # Positive, these two change no argmax, and drafts are argmaxes: neither is needed.
    read.number("output_multiplier", default=1.0)
    if read.fields.get("final_logit_softcapping", 0) != 0:
        read.number("final_logit_softcapping", default=1.0)


def refuse_other_attention(read: ConfigReader) -> None:
    """Notes what keeps a block from seeing all of itself and of its context."""
    read.expect("is_causal", False)
    read.expect("use_sliding_window", False)
    refuse_loose_window(read)
    read.expect_all("layer_types", "full_attention")


def refuse_loose_window(read: ConfigReader) -> None:
    """Notes a window of which nothing says whether it is used; with either of the two fields, it is one that is not."""
    if not read.fields.keys() & {"use_sliding_window", "layer_types"}:
        read.expect("sliding_window", None)


def read_backbone(
    read: ConfigReader, inner: Mapping[str, Any], known: Sequence[str], num_target_layers: int | None
) -> DFlashConfig:
    """The sizes that all drafters of this kind have. What is wrong with them is noted in `read`.

    Args:
        inner, known: `dflash_config`, and the fields that it may hold.
    """
    unknown = sorted(inner.keys() - set(known))
    read.require(not unknown, f"dflash_config has unknown fields: {', '.join(unknown)}")
    read.expect("model_type", "qwen3")
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    taps = read.token_ids("target_layer_ids")
    mask = read.token_ids("mask_token_id")
    config = DFlashConfig(
        **read.sizes(head_dim=128),  # as the published code's Qwen3 layers have
        block_size=read.integer("block_size"),
        mask_token_id=mask[0] if mask else 0,
        target_layer_ids=taps,
        num_target_layers=read.integer("num_target_layers", default=num_target_layers),
        input_embedding_scale=read.number("input_embedding_scale", default=1.0),
        last_tap_before_norm=read.flag("last_tap_before_norm", default=False),
        draft_vocab_size=read.integer("draft_vocab_size") if "draft_vocab_size" in read.fields else None,
        expected_acceptance=read.shares("expected_acceptance"),
    )
    whole = f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}"
    read.require(config.proposed <= config.vocab_size, whole)
    read.require(len(taps) > 0, "target_layer_ids is missing (expected in dflash_config)")
    read.require(len(mask) == 1, "mask_token_id is missing (expected in dflash_config)")
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    return config


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", num_target_layers: int | None = None) -> DFlashConfig:
    """Reads a drafter's `config.json`. What is DFlash's own may stand at the top or inside `dflash_config`.

    Args:
        num_target_layers: of the target, for a configuration that does not say, as the newest published ones.

    Raises:
        ValueError: one message that lists everything missing or unsupported.
    """
    read, inner = open_config(fields, where)
    _refuse_unsupported(read)
    config = read_backbone(read, inner, DFLASH_FIELDS, num_target_layers)
    read.finish()
    return config


def config_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """The `config.json` of a drafter that was trained here, with the fields of the published ones."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        | ({} if config.input_embedding_scale == 1 else {"input_embedding_scale": config.input_embedding_scale})
        | ({"last_tap_before_norm": True} if config.last_tap_before_norm else {})
        | ({} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size})
        | ({"expected_acceptance": list(config.expected_acceptance)} if config.expected_acceptance else {}),
        "num_target_layers": config.num_target_layers,
        **config.to_hf(),
        "layer_types": ["full_attention"] * config.num_layers,
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
    """All arrays of a drafter; embedding and output head are the target's.

    Attributes:
        vocab: the draft vocabulary; None in a declaration, while training, and where it can propose any token.
    """

    fc: Any
    hidden_norm: Any
    layers: tuple[Layer, ...]
    norm: Any
    vocab: Any = None


@runtime_checkable
class HasBackbone(Protocol):
    """Parameters of a drafter that adds something to DFlash."""

    @property
    def backbone(self) -> DFlashParams: ...


def backbone_of(params: DFlashParams | HasBackbone) -> DFlashParams:
    """The part of a drafter that is DFlash's."""
    return params if isinstance(params, DFlashParams) else params.backbone


def with_vocab(params: Any, vocab: DraftVocab | None) -> Any:
    """Parameters of a drafter of any of these kinds, with this draft vocabulary."""
    if isinstance(params, DFlashParams):
        return replace(params, vocab=vocab)
    return replace(params, backbone=replace(params.backbone, vocab=vocab))


def declare(config: DFlashConfig) -> DFlashParams:
    """The drafter's arrays under their checkpoint names, without the `model.` prefix that some files carry."""
    h = config.hidden_size
    return DFlashParams(
        fc=matrix("fc.weight", len(config.target_layer_ids) * h, h, ("taps", "hidden")),
        hidden_norm=norm_weight("hidden_norm.weight", h),
        layers=tuple(declare_layer(config, f"layers.{n}", QWEN3) for n in range(config.num_layers)),
        norm=norm_weight("norm.weight", h),
    )


def normal_taps(
    config: DFlashConfig, ops: Operations, taps: Sequence[Float[Array, "B T H"]], target_norm: Norm
) -> tuple[Float[Array, "B T H"], ...]:
    """The taps as a drafter reads them: what follows the target's last layer, after the target's final norm.

    See `DFlashConfig.last_tap_before_norm`.
    """
    last = None if config.last_tap_before_norm else config.num_target_layers - 1
    pairs = zip(config.target_layer_ids, taps, strict=True)
    return tuple(ops.rms_norm(tap, *target_norm) if layer == last else tap for layer, tap in pairs)


def context_features(
    config: DFlashConfig, ops: Operations, params: DFlashParams, taps: Sequence[Float[Array, "B T H"]]
) -> Float[Array, "B T H"]:
    """One feature for each position, from the target's hidden states after the tapped layers (see `normal_taps`)."""
    return ops.rms_norm(ops.linear(jnp.concatenate(taps, axis=-1), params.fc), params.hidden_norm, config.rms_norm_eps)


def context_kv(
    config: DFlashConfig,
    ops: Operations,
    params: DFlashParams,
    features: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
) -> tuple[tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]], ...]:
    """Keys and values of the context for every layer: a pure function of each feature and its position, so cached for good.

    The features do not pass through the layers' input norms.
    """
    rope = config.rope_tables(positions)["global"]

    def of_layer(layer: Layer) -> tuple[Array, Array]:
        _, k, v = ops.heads(ops.project(features, layer.qkv, first=1), head_norms(config, layer, rope))
        return k, v

    return tuple(of_layer(layer) for layer in params.layers)


def run_block(
    config: DFlashConfig,
    ops: Operations,
    params: DFlashParams,
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    attend: Attend,
    seen: Any,
) -> Float[Array, "B T H"]:
    """Runs blocks through all layers; the result is normalised, ready for the target's output head.

    Args:
        embedded: the target's embeddings of the known token and the mask tokens.
        context: that of each layer, the `kept` of `attend`.
        attend, seen: what a block sees of it; see `decoder.Attend`.
    """
    return run_stack(config, stack_of(config, ops, params.layers, attend), params.norm, embedded, positions, context, seen)


def run_stack(
    config: DFlashConfig,
    stack: Stack,
    norm: Float[Array, " H"],
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    seen: Any,
) -> Float[Array, "B T H"]:
    """`run_block` for layers that are given in their parts, and then a norm of this weight."""
    rows = Rows(config.rope_tables(positions), seen)
    x, _, _ = SINGLE_DEVICE.run(stack, embedded * config.input_embedding_scale, rows, context, ())
    return stack.ops.rms_norm(x, norm, config.rms_norm_eps)


def attend_context(ops: Operations, projection: Projection, heads: Heads, seen: Array, kept: Any) -> tuple[Array, Any]:
    """Attention of a block over its context, what a cache holds of the positions before `seen` `[B]`, and over all of itself.

    `seen` is the known token's position, at which the block begins.
    """
    q, k, v = ops.heads(projection, heads)
    return kept.attend_before(ops, q, seen, (k, v)).reshape(*q.shape[:2], -1), kept
