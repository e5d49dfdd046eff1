"""DFlash: a block-diffusion drafter that reads its target's hidden states (arXiv 2602.06036).

One pass drafts a whole block. Its input is the known token followed by mask tokens, embedded by the target; its context is one
*feature* for each earlier position, `hidden_norm(fc(taps))`, from which every layer makes keys and values with the projections
that it also uses for the block. Within the block attention is bidirectional. Slot k predicts the token at its own position,
through the target's output head.

Published checkpoints vary it: windows and causal order within the block in some layers, sinks, a scale of the values, slots
that draft the token behind them, an embedding, a head and an embedding of the mask of their own. `drafter_layouts.py` reads
the layouts that they come in.
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
"""Of a configuration that names none, as in the published code."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Sizes):
    """Sizes of a DFlash drafter.

    Attributes:
        block_size: counts the known token.
        target_layer_ids: the tapped layers, from 0.
        input_embedding_scale: what the block's embeddings are multiplied by.
        last_tap_before_norm: what follows the target's last layer is read before the target's final norm, as the published MLX
            code does; the PyTorch code reads it after (`hidden_states[-1]` of transformers). A field of our own.
        draft_vocab_size: how many tokens it can propose (see `draft_vocab.py`); None for all.
        expected_acceptance: of each draft of a block, given that those before it were accepted: what training found on held-out
            prompts. Where rounds are chosen, it is what they are expected to give before any was seen. Empty where nothing was
            measured. Another field of our own.
        sample_from_anchor: slot 0, which holds the known token, drafts too: every slot drafts the token behind its position.
        sliding_window: how many positions a query sees in the layers of `sliding_layers`, its own included; all of its block.
        causal_layers: where a block's slots see only those before them.
        attention_sinks: every layer has a sink for each head (see `operations.Scores`).
        value_scale: what values are multiplied by; a checkpoint's parameters are read so that it is 1 (see `scaled_values`).
        target_hidden_size: of the taps, where that is not the hidden size; the drafter then has an embedding and a head.
        own_embedding, own_head: the checkpoint holds them; otherwise the target's serve. No fields of its configuration.
        mask_embedding: the checkpoint holds what stands for the mask token's embedding. No such field either.
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
    def proposed(self) -> int:
        """Number of tokens that it can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def backbone(self) -> "DFlashConfig":
        """A DFlash drafter's of the same sizes."""
        return DFlashConfig(**{field.name: getattr(self, field.name) for field in fields(DFlashConfig)})

    @property
    def first_slot(self) -> int:
        """The first slot that drafts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def slots(self) -> int:
        """Slots that a whole block runs: one for each draft, and those before the first one."""
        return self.block_size - 1 + self.first_slot

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window; None where a query sees everything."""
        return tuple(self.sliding_window if n in self.sliding_layers else None for n in range(self.num_layers))

    @property
    def tap_size(self) -> int:
        """Size of the target's hidden states."""
        return self.hidden_size if self.target_hidden_size is None else self.target_hidden_size

    @property
    def variations(self) -> tuple[str, ...]:
        """Features that it has and only some published drafters have, in words."""
        found = {
            "windows": self.sliding_layers,
            "causal layers": self.causal_layers,
            "attention sinks": self.attention_sinks,
            "a scale of values": self.value_scale != 1,
            "an embedding of its own": self.own_embedding,
            "a head of its own": self.own_head,
            "an embedding of masks": self.mask_embedding,
        }
        return tuple(name for name, there in found.items() if there)

    @property
    def has_head(self) -> bool:
        """True if it drafts through a head of its own, or through a part of the target's."""
        return self.own_head or self.draft_vocab_size is not None


def default_target_layers(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """The tapped layers that the published drafters use: evenly from the second to the third last."""
    if taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps))


def read_backbone(
    read: ConfigReader, inner: Mapping[str, Any], own: Collection[str], target: DecoderConfig | None, anchored: bool = False
) -> DFlashConfig:
    """The sizes that all drafters of this kind have. What is wrong with them is noted in `read`.

    Args:
        inner: `dflash_config`.
        own: fields that a kind has besides.
        target: for what configurations may leave to it: the number of its layers, and its vocabulary's size.
        anchored: whether slot 0 drafts where nothing is said.
    """
    drafter_fields.check_fields(read, inner, own)
    read.expect("model_type", "qwen3")
    if target is not None:
        read.fields = {"vocab_size": target.vocab_size, "num_target_layers": target.num_layers, **read.fields}
    sizes = read.sizes(head_dim=128)  # as the published code's Qwen3 layers have
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
        expected_acceptance=read.shares("expected_acceptance"),
        sample_from_anchor=anchored,
        attention_sinks=read.flag("attention_sink_bias", default=read.flag("add_swa_attention_sink_bias", default=False)),
        value_scale=read.number("attention_value_scale", default=1.0),
        target_hidden_size=read.integer("target_hidden_size", default=sizes["hidden_size"]),
        **drafter_fields.read_attention(read, sizes["num_layers"], slots),
    )
    if config.target_hidden_size == config.hidden_size:
        config = replace(config, target_hidden_size=None)
    whole = f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}"
    read.require(config.proposed <= config.vocab_size, whole)
    read.require(len(mask) == 1, "mask_token_id is missing (expected in dflash_config)")
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    return config


def finish(read: ConfigReader, config: DFlashConfig, target: DecoderConfig | None) -> None:
    """Raises a `ValueError` if fields are wrong. It lists them, and how the drafter does not fit its target besides.

    Whether it fits is not asked of fields that are wrong, and of a good configuration later, together with its tensors.
    """
    if read.problems and target is not None:
        wrong = {problem.partition(" ")[0] for problem in read.problems}
        read.problems += [problem for problem in misfits(config, target) if problem.partition(" ")[0] not in wrong]
    read.finish()


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None) -> DFlashConfig:
    """Reads a drafter's `config.json`. What is DFlash's own may stand at the top or inside `dflash_config`.

    Args:
        target: for configurations that do not say what depends on it alone, as the newest published ones.

    Raises:
        ValueError: one message that lists everything missing or unsupported, and then all that does not fit the target.
    """
    read, inner = drafter_fields.open_config(fields, where)
    # Others share the fields and differ in the layout.
    read.expect_all("architectures", "DFlashDraftModel")
    # Positive, these two change no argmax, and drafts are argmaxes: neither is needed.
    read.number("output_multiplier", default=1.0)
    if read.fields.get("final_logit_softcapping", 0) != 0:
        read.number("final_logit_softcapping", default=1.0)
    config = read_backbone(read, inner, (), target)
    finish(read, config, target)
    return config


def config_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """The `config.json` of a drafter that was trained here, with the fields of the published ones."""
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
    """Every way in which a drafter does not fit its target; each begins with a field's name."""
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
    lacks = [name for name, has in (("embedding", drafter.own_embedding), ("head", drafter.own_head)) if not has]
    if tapped == "target_hidden_size" and lacks:
        problems.append(f"hidden_size is not target_hidden_size, and the drafter has no {' and no '.join(lacks)} of its own")
    return problems


def check_fits(drafter: DFlashConfig, target: DecoderConfig) -> None:
    """Raises a `ValueError` that lists every way in which a drafter does not fit its target."""
    if problems := misfits(drafter, target):
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlashParams:
    """All arrays of a drafter.

    Attributes:
        vocab: the draft vocabulary, with its head; None in a declaration, while training, and where the target's head serves.
        embed: None where the target's embedding serves.
        mask: what stands for the mask token's embedding, `[hidden]`; None where that does.
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
    """Parameters of a drafter that adds something to DFlash."""

    @property
    def backbone(self) -> DFlashParams: ...


def backbone_of(params: DFlashParams | HasBackbone) -> DFlashParams:
    """The part of a drafter that is DFlash's."""
    return params if isinstance(params, DFlashParams) else params.backbone


def with_backbone(params: Any, **changes: Any) -> Any:
    """Parameters of a drafter of any of these kinds, with other arrays in the part that is DFlash's."""
    if isinstance(params, DFlashParams):
        return replace(params, **changes)
    return replace(params, backbone=replace(params.backbone, **changes))


def with_vocab(params: Any, vocab: DraftVocab | None) -> Any:
    """Parameters of a drafter of any of these kinds, with this draft vocabulary."""
    return with_backbone(params, vocab=vocab)


def scaled_values(config: DFlashConfig, params: Any) -> tuple[Any, Any]:
    """Configuration and parameters with the values' scale in the projection behind attention, where it does the same."""
    scale = config.value_scale
    layers = backbone_of(params).layers
    if scale == 1:
        return config, params
    scaled = tuple(replace(layer, o=(layer.o.astype(jnp.float32) * scale).astype(layer.o.dtype)) for layer in layers)
    return replace(config, value_scale=1.0), with_backbone(params, layers=scaled)


def declare(config: DFlashConfig) -> DFlashParams:
    """The drafter's arrays under their checkpoint names (see `drafter_layouts.plain_name`)."""
    h = config.hidden_size
    embed = ArraySpec(EMBEDDING.removeprefix("model."), (config.vocab_size, h), ("vocab", "hidden"), "embedding")

    def layer(n: int) -> Layer:
        made = declare_layer(config, f"layers.{n}", QWEN3)
        sinks = ArraySpec(f"layers.{n}.self_attn.attention_sink_bias", (config.num_heads,), ("query_heads",))
        return replace(made, sinks=sinks) if config.attention_sinks else made

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
    """The taps as a drafter reads them: what follows the target's last layer, after the target's final norm.

    See `DFlashConfig.last_tap_before_norm`.
    """
    last = None if config.last_tap_before_norm else config.num_target_layers - 1
    pairs = zip(config.target_layer_ids, taps, strict=True)
    return tuple(ops.rms_norm(tap, *target_norm) if layer == last else tap for layer, tap in pairs)


def context_features(
    config: DFlashConfig, ops: Operations, params: DFlashParams, taps: Sequence[Float[Array, "B T G"]]
) -> Float[Array, "B T H"]:
    """One feature for each position, from the target's hidden states after the tapped layers, of its size (`normal_taps`)."""
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
    context = kept if heads.scores.sinks is None else replace(kept, sinks=heads.scores.sinks)
    return context.attend_before(ops, q, seen, (k, v)).reshape(*q.shape[:2], -1), kept
