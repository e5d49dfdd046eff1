"""EAGLE-3: a drafter of one layer that drafts token after token from its target's hidden states (arXiv 2503.01840).

The *feature* of a position is `fc` of the target's hidden states after a few tapped layers. The layer reads pairs: the feature
of position t and the embedding of the token at t + 1. Its output at t predicts the token at t + 2 over a small *draft
vocabulary*. A chain continues without the target: the next pair is that output, before the final norm, and the embedding of the
token just drafted.

A pair has the position t of its feature, and the pairs of a chain have t + 1, t + 2, ... Published code uses the same
positions. Attention depends only on distances, so a common shift changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.models.checkpoint import CONFIG, load_params, load_stored, read_config, save_params, weight_files
from tilewright.models.config import ConfigReader, Sizes
from tilewright.models.decoder import DecoderConfig, Layer, declare_layer, head_norms, mlp, output
from tilewright.models.draft_vocab import MAPS, maps_from_target_ids, target_ids_from_maps
from tilewright.models.drafter_layouts import as_published, is_alongside, plain_name
from tilewright.models.families.llama import LLAMA
from tilewright.models.families.qwen import QWEN3
from tilewright.models.params import ArraySpec, matrix, norm_weight
from tilewright.models.stored import read_headers

BLOCK_SIZE = 8
"""Default block size: the last token and seven drafts, as in the published training (EAGLE-3, training-time test)."""

FAMILIES = {family.name: family for family in (LLAMA, QWEN3)}
"""Supported families of a drafter's layer."""
EAGLE_FIELDS: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "has_lm_head": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Fields of published configurations, in `eagle_config` or at the top level, with their only supported value."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Sizes):
    """Sizes of an EAGLE-3 drafter.

    Attributes:
        vocab_size: vocabulary size of the target.
        draft_vocab_size: number of tokens that the drafter can propose.
        hidden_size, target_hidden_size: equal, unless the drafter has its own embedding.
        target_layer_ids: the tapped layers, from 0, whose *outputs* are read.
        block_size: tokens of a block in training, including the last token.
        norm_before_residual: the residual stream begins with the normalised feature.
        own_embedding: the checkpoint has an embedding; otherwise the target's is used.
        family: the family of the layer; Qwen3's also norms queries and keys.
    """

    num_layers: int = 1
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    block_size: int = BLOCK_SIZE
    norm_before_residual: bool = False
    own_embedding: bool = False
    family: str = "llama"

    @property
    def num_proposable(self) -> int:
        """Number of tokens that the drafter can propose."""
        return self.draft_vocab_size


def default_target_layers(num_target_layers: int) -> tuple[int, ...]:
    """Returns the tapped layers of a configuration that names none: an early, a middle and a late one.

    The published choice is the input of layers 2, L // 2 and L - 3. Below seven layers these are not distinct. Then three
    layers, or all if there are fewer, are spread evenly over the target, up to its last.
    """
    if num_target_layers >= 7:
        return (1, num_target_layers // 2 - 1, num_target_layers - 4)
    first = min(1, max(0, num_target_layers - 3))
    return tuple(sorted({round(first + i * (num_target_layers - 1 - first) / 2) for i in range(3)}))


def _check_eagle_fields(read: ConfigReader) -> None:
    """Notes unsupported values in `eagle_config` or at the top level."""
    inner = read.fields.get("eagle_config") or {}
    allowed = {*EAGLE_FIELDS, "eagle_aux_hidden_state_layer_ids", "block_size"}
    unknown = sorted(inner.keys() - allowed)
    read.require(not unknown, f"eagle_config has unknown fields: {', '.join(unknown)}")
    for name, only in EAGLE_FIELDS.items():
        for fields, where in ((inner, "eagle_config."), (read.fields, "")):
            value = fields.get(name)
            read.require(value is None or value == only, f"{where}{name}={value!r} is not supported (only {only!r})")
    # At the top level, engines disagree whether these name layers by their output or by their input.
    outside = "eagle_aux_hidden_state_layer_ids" in read.fields and "eagle_aux_hidden_state_layer_ids" not in inner
    read.require(not outside, "eagle_aux_hidden_state_layer_ids must be in eagle_config (layers, from 0, whose output is read)")


def is_eagle3(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares an EAGLE-3 drafter.

    Some do not, and are recognised by their draft vocabulary. Drafters of the DFlash kinds, which name themselves, may have one
    too.
    """
    names = [str(name).lower() for name in as_published(fields, CONFIG).get("architectures") or ()]
    if any("eagle3" in name for name in names):
        return True
    named = any(kind in name for kind in ("dflash", "dspark", "lilicorr") for name in names)
    return "draft_vocab_size" in fields and "dflash_config" not in fields and not named


def config_from_hf(fields: Mapping[str, Any], num_target_layers: int, where: str = CONFIG) -> Eagle3Config:
    """Reads a drafter's `config.json`, in the form of the published `LlamaForCausalLMEagle3`.

    Args:
        num_target_layers: layers of the target, for a configuration that names no taps.

    Raises:
        ValueError: one message that lists everything missing or unsupported.
    """
    fields = as_published(fields, where)
    read = ConfigReader(fields, where)
    inner = fields.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: eagle_config must be an object, found {inner!r}")
    if fields.get("model_type") not in (None, *FAMILIES):
        read.problems.append(f"model_type={fields['model_type']!r} is not supported (only {' or '.join(FAMILIES)})")
    family = FAMILIES.get(fields.get("model_type") or "llama", LLAMA)
    for name, only in (
        ("hidden_act", "silu"),
        ("num_hidden_layers", 1),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("tie_word_embeddings", False),
        ("use_sliding_window", False),
        ("pretraining_tp", 1),
        ("quantization_config", None),
        ("is_neox_style", True),
        ("rope_is_neox_style", True),
        ("logit_scale", 1),
        ("input_embedding_scale", 1),
        ("attention_value_scale", 1),
        ("attention_sink_bias", False),
    ):
        read.expect(name, only)
    if fields.get("use_sliding_window") is None:
        read.expect("sliding_window", None)
    read.expect_all("layer_types", "full_attention")
    _check_eagle_fields(read)
    inside = ConfigReader(inner, where)
    taps = inside.token_ids("eagle_aux_hidden_state_layer_ids")
    sizes = read.sizes(head_dim=family.head_dim)
    config = Eagle3Config(
        **sizes,
        family=family.name,
        draft_vocab_size=read.integer("draft_vocab_size", default=sizes["vocab_size"]),
        target_hidden_size=read.integer("target_hidden_size", default=sizes["hidden_size"]),
        target_layer_ids=taps or default_target_layers(num_target_layers),
        block_size=inside.integer("block_size", default=BLOCK_SIZE),
        norm_before_residual=read.flag("norm_before_residual", default=False),
    )
    read.problems += inside.problems
    read.require(
        config.draft_vocab_size <= config.vocab_size,
        f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}",
    )
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    read.finish()
    return config


def config_to_hf(config: Eagle3Config) -> dict[str, Any]:
    """Returns the `config.json` of a drafter, with the fields of the published ones."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": config.family,
        **config.to_hf(),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
            "block_size": config.block_size,
        },
    }


def check_fits(drafter: Eagle3Config, target: DecoderConfig) -> None:
    """Raises a `ValueError` that lists every mismatch between a drafter and its target."""
    sizes = [
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("target_hidden_size", drafter.target_hidden_size, target.hidden_size),
    ]
    if not drafter.own_embedding:
        sizes.append(("hidden_size, without an embedding of its own,", drafter.hidden_size, target.hidden_size))
    problems = [f"{name} is {have} but the target's is {want}" for name, have, want in sizes if have != want]
    outside = [i for i in drafter.target_layer_ids if i >= target.num_layers]
    if outside:
        problems.append(f"target_layer_ids {outside} lie outside the target's {target.num_layers} layers")
    if problems:
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3Params:
    """All arrays of a drafter.

    Attributes:
        layer: its projections of queries, keys and values read `2 * hidden_size`; `input_norm` is that of the embeddings.
        embed: None if the target's embedding is used.
        target_ids: the target id of each draft id, int32 `[draft_vocab_size]`; None in a declaration and in training.
    """

    fc: Any
    hidden_norm: Any
    layer: Layer
    norm: Any
    head: Any
    embed: Any
    target_ids: Any = None


def declare(config: Eagle3Config) -> Eagle3Params:
    """Declares the drafter's arrays under their checkpoint names, without the `model.` prefix of some files."""
    h = config.hidden_size
    embed = None
    if config.own_embedding:
        embed = ArraySpec("embed_tokens.weight", (config.vocab_size, h), ("vocab", "hidden"), "embedding")
    return Eagle3Params(
        fc=matrix("fc.weight", len(config.target_layer_ids) * config.target_hidden_size, h, ("taps", "hidden")),
        hidden_norm=norm_weight("midlayer.hidden_norm.weight", h),
        layer=declare_layer(config, "midlayer", FAMILIES[config.family], inputs=2 * h),
        norm=norm_weight("norm.weight", h),
        head=matrix("lm_head.weight", h, config.draft_vocab_size, ("hidden", "vocab"), kind="head"),
        embed=embed,
    )


def _plain_name(name: str) -> str:
    """Returns the declared name of a stored tensor; speculators' files number the layer."""
    plain = plain_name(name)
    return f"midlayer.{plain.removeprefix('layers.0.')}" if plain.startswith("layers.0.") else plain


def _is_no_array(name: str) -> bool:
    return _plain_name(name) in MAPS or is_alongside(name)


def load(
    folder: Path, target: DecoderConfig, dtype: DTypeLike, console: Console | None = None
) -> tuple[Eagle3Config, Eagle3Params]:
    """Reads a drafter for a target: its configuration, and its parameters as `dtype`.

    Raises:
        ValueError: the configuration has missing, unknown or unsupported values; or one message with all mismatches with the
            target, all tensors that do not match, and all contradictions in the vocabulary maps.
    """
    config = config_from_hf(read_config(folder), target.num_layers, str(folder / CONFIG))
    names = {_plain_name(tensor.name) for tensor in read_headers(weight_files(folder))}
    config = replace(config, own_embedding="embed_tokens.weight" in names)
    problems = []
    ids = None
    params = None
    try:
        check_fits(config, target)
    except ValueError as error:
        problems.append(str(error))
    try:
        params = load_params(folder, declare(config), dtype, rename=_plain_name, ignore=_is_no_array, console=console)
        maps = load_stored(folder, MAPS, _plain_name)
        ids = target_ids_from_maps(config.draft_vocab_size, config.vocab_size, maps, str(folder))
    except ValueError as error:
        problems.append(str(error))
    if params is None or problems:
        raise ValueError("; ".join(problems))
    return config, replace(params, target_ids=jnp.asarray(ids))


def save(folder: Path, config: Eagle3Config, params: Eagle3Params, dtype: DTypeLike) -> None:
    """Writes a drafter in the format of `load` and of other libraries; see `checkpoint.save_params`."""
    maps = maps_from_target_ids(np.asarray(params.target_ids), config.vocab_size)
    save_params(folder, config_to_hf(config), declare(config), replace(params, target_ids=None), dtype, maps)


def prepare(config: Eagle3Config, ops: Operations, params: Eagle3Params) -> Eagle3Params:
    """Prepares parameters for the operations. `target_ids`, which no declaration names, stays unchanged."""
    return replace(ops.prepare(declare(config), replace(params, target_ids=None)), target_ids=params.target_ids)


def fuse(
    config: Eagle3Config, ops: Operations, params: Eagle3Params, taps: Sequence[Float[Array, "B T G"]]
) -> Float[Array, "B T H"]:
    """Computes a feature for each position from the target's hidden states after the tapped layers."""
    return ops.linear(jnp.concatenate(taps, axis=-1), params.fc)


def pair(
    config: Eagle3Config, ops: Operations, params: Eagle3Params, h: Float[Array, "B T H"], embeds: Float[Array, "B T H"]
) -> Float[Array, "B T H2"]:
    """Returns the input of the layer's projections: the normalised embedding, then the normalised state."""
    embedded = ops.rms_norm(embeds, params.layer.input_norm, config.rms_norm_eps)
    return jnp.concatenate([embedded, ops.rms_norm(h, params.hidden_norm, config.rms_norm_eps)], axis=-1)


def keys(
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    h: Float[Array, "B T H"],
    embeds: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
    """Computes keys and values of pairs for a cache; both depend only on a pair and its position.

    Args:
        h: features, or outputs of `step` that are fed back.
        embeds: the embedding of the token *after* each position.
        positions: those of the features.
    """
    heads = head_norms(config, params.layer, config.rope_tables(positions)["global"])
    _, k, v = ops.heads(ops.project(pair(config, ops, params, h, embeds), params.layer.qkv, first=1), heads)
    return k, v


def step(
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    h: Float[Array, "B T H"],
    embeds: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    attend: Callable[[Projection, Heads], Float[Array, "B T _"]],
) -> Float[Array, "B T H"]:
    """Runs the layer over pairs (see `keys`); `attend` computes their attention.

    Returns:
        the output before the final norm, for `draft_logits`, and as `h` of the next step of a chain.
    """
    layer = params.layer
    both = pair(config, ops, params, h, embeds)
    heads = head_norms(config, layer, config.rope_tables(positions)["global"])
    residual = both[..., config.hidden_size :] if config.norm_before_residual else h
    x = output(config, ops, layer, attend(ops.project(both, layer.qkv), heads), residual)
    return mlp(config, ops, layer, x, x)


def draft_logits(
    config: Eagle3Config, ops: Operations, params: Eagle3Params, hidden: Float[Array, "*rows H"]
) -> Float[Array, "*rows W"]:
    """Applies the final norm and the drafter's head over the draft vocabulary; float32 for any dtype of the drafter."""
    return ops.linear(hidden, params.head, jnp.float32, Norm(params.norm, config.rms_norm_eps))


def best_tokens(
    config: Eagle3Config, ops: Operations, params: Eagle3Params, h: Float[Array, "B T H"], k: int
) -> tuple[Int[Array, "B T {k}"], Float[Array, "B T {k}"]]:
    """Returns the `k` most likely tokens after a step, as target ids in descending order, and their logits."""
    index, logits = ops.head_top_k(ops.rms_norm(h, params.norm, config.rms_norm_eps), params.head, k)
    return params.target_ids[index], logits
