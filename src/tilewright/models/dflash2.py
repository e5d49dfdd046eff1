"""DFlash 2: DFlash with convolutions along the block, and a selector that walks through the target's best candidates.

The block is drafted as in DFlash (`dflash.py`), with two additions. Around each sublayer, a short causal convolution mixes
every slot with earlier slots (`convolution.py`). And the drafts are not the argmax of each slot alone: of each slot's K most
likely tokens, the selector takes the best one after the token taken in the slot before, by the logit of the target's head and a
score of the pair under the slot's hidden state.

Source: z-lab/dflash, `dflash/model.py`, and the checkpoints that declare `DFlash2DraftModel`.

Legend: B rows of a batch, T slots of a block, L slots to be drafted, H hidden size, K candidates, r rank, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int, Int32

from tilewright.kernels.operations import Operations, softcapped
from tilewright.kernels.select import argmax
from tilewright.models import convolution, dflash
from tilewright.models.convolution import Convolution
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.drafter_fields import open_config
from tilewright.models.params import ArraySpec, initialise, matrix

ARCHITECTURE = "DFlash2DraftModel"
SELECTOR_FIELDS = (*convolution.SIZES, "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Sizes of a DFlash 2 drafter.

    Attributes:
        conv_kernel_size: k, including the slot itself.
        conv_group_size: channels that share a kernel's dynamic part.
        selector_rank: r.
        selector_top_k: K.
        output_multiplier: multiplier of the logits, before the softcap.
        final_logit_softcapping: caps the logits, `cap * tanh(logit / cap)`; None for no cap.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None


def is_dflash2(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares a drafter of this kind."""
    names = fields.get("architectures")
    return isinstance(names, list) and ARCHITECTURE in names


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None) -> DFlash2Config:
    """Reads a drafter's `config.json`; see `dflash.config_from_hf`.

    Raises:
        ValueError: one message that lists everything missing or unsupported, then every mismatch with the target.
    """
    read, inner = open_config(fields, where)
    read.expect_all("architectures", ARCHITECTURE)
    backbone = dflash.read_backbone(read, inner, SELECTOR_FIELDS, target)
    cap = read.fields.get("final_logit_softcapping", 0)
    extra: dict[str, Any] = {name: read.integer(name) for name in SELECTOR_FIELDS}
    config = DFlash2Config(
        **vars(backbone),
        **extra,
        output_multiplier=read.number("output_multiplier", default=1.0),
        final_logit_softcapping=read.number("final_logit_softcapping", default=1.0) if cap != 0 else None,
    )
    hidden = config.hidden_size
    group = config.conv_group_size
    top_k = config.selector_top_k
    read.require(hidden % group == 0, f"conv_group_size {group} does not divide hidden_size {hidden}")
    read.require(
        top_k <= config.num_proposable,
        f"selector_top_k {top_k} exceeds the {config.num_proposable} tokens that can be proposed",
    )
    dflash.finish(read, config, target)
    return config


def config_to_hf(config: DFlash2Config) -> dict[str, Any]:
    """Returns the `config.json` of a drafter, with the fields of the published ones."""
    fields = dflash.config_to_hf(config)
    extra = {name: getattr(config, name) for name in SELECTOR_FIELDS}
    if config.output_multiplier != 1:
        extra["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        extra["final_logit_softcapping"] = config.final_logit_softcapping
    full = {"sliding_window": None, "use_sliding_window": False, "is_causal": False}
    return {**full, **fields, "architectures": [ARCHITECTURE], "dflash_config": fields["dflash_config"] | extra}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selector:
    """Scores of pairs of neighbouring tokens.

    Attributes:
        predecessor: `[V, r]`.
        successor: `[W, r]`, for the tokens that the drafter can propose.
        projection: `[H, r]`; None if a pair's score is the same in every slot.
    """

    predecessor: Any
    successor: Any
    projection: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DFlash2Params:
    """All arrays of a drafter, with one convolution of each kind for each layer."""

    backbone: DFlashParams
    attention_convs: tuple[Convolution, ...]
    mlp_convs: tuple[Convolution, ...]
    selector: Selector


def declare(config: DFlash2Config) -> DFlash2Params:
    """Declares the drafter's arrays under their checkpoint names.

    The dynamic part of all kernels and the scores of all pairs are initialised to zero. See `fresh` for the rest.
    """
    h = config.hidden_size
    r = config.selector_rank

    def codebook(name: str, tokens: int, scale: float) -> ArraySpec:
        return ArraySpec(f"candidate_selector.{name}_codebook", (tokens, r), ("vocab", "rank"), "embedding", scale=scale)

    return DFlash2Params(
        dflash.declare(config),
        *convolution.declare(config),
        Selector(
            codebook("predecessor", config.vocab_size, 0.02),
            codebook("successor", config.num_proposable, 0.0),
            matrix("candidate_selector.hidden_projection.weight", h, r, ("hidden", "rank")),
        ),
    )


def fresh(config: DFlash2Config, key: Array) -> DFlash2Params:
    """Draws random parameters that compute what DFlash would: identity convolutions, and pair scores of zero."""
    return convolution.pass_through(initialise(declare(config), key))


def scaled_logits(config: DFlash2Config, logits: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scales and caps the target head's logits as in this drafter's training; their order stays."""
    return softcapped(logits * config.output_multiplier, config.final_logit_softcapping)


def pair_scores(
    ops: Operations,
    selector: Selector,
    hidden: Float[Array, "B L H"],
    previous: Int[Array, "B L P"],
    candidates: Int[Array, "B L K"],
) -> Float32[Array, "B L P K"]:
    """Scores pairs of a token in the slot before and a candidate in a slot, given the slot's hidden state.

    Args:
        previous: as target ids.
        candidates: as draft ids.
    """
    before, after = (
        ops.gather_rows(codebook, tokens).astype(jnp.float32)
        for codebook, tokens in ((selector.predecessor, previous), (selector.successor, candidates))
    )
    if selector.projection is not None:
        before = before * ops.linear(hidden, selector.projection, jnp.float32)[:, :, None]
    return jnp.einsum("blpr,blkr->blpk", before, after, precision=jax.lax.Precision.HIGHEST)


def transition_scores(
    ops: Operations,
    selector: Selector,
    hidden: Float[Array, "B L H"],
    last_token: Int[Array, " B"],
    candidates: Int[Array, "B L K"],
    logits: Float32[Array, "B L K"],
    ids: Int[Array, "B L K"] | None = None,
) -> Float32[Array, "B L K K"]:
    """Scores each slot's candidates after each candidate of the slot before; before the first slot is the last token alone.

    Args:
        hidden: of the slots to be drafted, normalised, as the head reads it.
        last_token: the last committed token, `[B]`.
        candidates: as draft ids.
        logits: of the candidates, by the target's head; see `scaled_logits`.
        ids: the candidates as target ids, if the drafter has its own ids.
    """
    anchor = jnp.broadcast_to(last_token[:, None, None], (*candidates.shape[:1], 1, candidates.shape[2]))
    previous = jnp.concatenate([anchor, (candidates if ids is None else ids)[:, :-1]], axis=1)
    return logits[:, :, None] + pair_scores(ops, selector, hidden, previous, candidates)


def walk(
    scores: Float32[Array, "B L K K"],
    candidates: Int[Array, "B L K"],
    temperature: Float32[Array, " B"] | None = None,
    gumbel: Float32[Array, "B L K"] | None = None,
) -> Int32[Array, "B L"]:
    """Returns the drafts: in each slot the best candidate after the one taken in the slot before, the first among equals.

    With a temperature, rows above 0 draw a candidate from `softmax(scores / temperature)` by the Gumbel-max rule instead.
    """
    if temperature is not None and gumbel is not None:
        warm = temperature[:, None, None, None]
        scores = jnp.where(warm > 0, scores / jnp.where(warm > 0, warm, 1.0) + gumbel[:, :, None], scores)
    follower = argmax(scores)  # for every candidate at once, so that the loop only looks up
    place = follower[:, 0, :1]
    places = []
    for slot in range(scores.shape[1]):
        if slot:
            place = jnp.take_along_axis(follower[:, slot], place, axis=1)
        places.append(place)
    drafts = jnp.take_along_axis(candidates, jnp.stack(places, axis=1), axis=2)
    return drafts[..., 0].astype(jnp.int32)
