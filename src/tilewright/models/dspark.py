"""DSpark: DFlash whose slot 0 drafts too, with a serial head that reads the token drafted before (arXiv 2607.05147).

The backbone is DFlash's (`dflash.py`), one slot shorter for the same number of drafts: slot j has the last token's position + j
and predicts the token at the next position. The serial head adds `W2 W1[token before]`, of rank r, to the slot's logits.
Published drafters add it over the whole vocabulary, slot after slot. Here it is added for the K most likely tokens of each
slot, in the walk of DFlash 2 (`dflash2.walk`): there is no loop over the vocabulary, and the accepted length stays (3.1145
against 3.1120 tokens a round with K = 16, wejoncy/sfllm #42).

Only the "vanilla" head is supported, which reads only the token before. A confidence head, which estimates how many drafts are
worth verifying, is ignored.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark`, and the checkpoints that declare `Qwen3DSparkModel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int

from tilewright.kernels.operations import Operations, Transposed
from tilewright.models import dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.dflash2 import Selector
from tilewright.models.drafter_fields import open_config
from tilewright.models.params import ArraySpec

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
"""Published architecture, and that of files with the fields in `dflash_config`."""

EXTRA_FIELDS = (
    "projector_type markov_rank markov_head_type enable_confidence_head confidence_head_with_markov candidate_top_k "
    "dspark_bonus_anchor"
).split()
"""Configuration fields besides DFlash's."""

TOP_K = 16


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Sizes of a DSpark drafter.

    Attributes:
        block_size: number of drafts and the last token. If slot 0 drafts, this is one more than the number of slots, which is
            the `block_size` of a `config.json`.
        markov_rank: r.
        candidate_top_k: K. Not a published field.
    """

    markov_rank: int
    candidate_top_k: int = TOP_K
    sample_from_anchor: bool = True


def is_dspark(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares a drafter of this kind."""
    names = fields.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None) -> DSparkConfig:
    """Reads a drafter's `config.json`, with fields at the top level or in `dflash_config`; see `dflash.config_from_hf`.

    Raises:
        ValueError: one message that lists everything missing or unsupported, then every mismatch with the target.
    """
    read, inner = open_config(fields, where)
    names = read.fields.get("architectures")
    read.require(is_dspark(read.fields), f"architectures={names!r} is not supported (only {' or '.join(ARCHITECTURES)})")
    read.expect("output_multiplier", 1)
    read.expect("final_logit_softcapping", 0)
    read.expect("projector_type", "dspark")
    read.expect("markov_head_type", "vanilla")
    backbone = dflash.read_backbone(
        read, inner, EXTRA_FIELDS, target, anchored=read.fields.get("dspark_bonus_anchor") is not True
    )
    read.expect("dspark_bonus_anchor", not backbone.sample_from_anchor)
    config = DSparkConfig(
        **vars(backbone),
        markov_rank=read.integer("markov_rank"),
        candidate_top_k=read.integer("candidate_top_k", default=min(TOP_K, backbone.num_proposable)),
    )
    top_k = config.candidate_top_k
    most = config.num_proposable
    read.require(top_k <= most, f"candidate_top_k {top_k} exceeds the {most} tokens that can be proposed")
    dflash.finish(read, config, target)
    return config


def config_to_hf(config: DSparkConfig) -> dict[str, Any]:
    """Returns the `config.json` of a drafter, with the fields of the published ones, all at the top level."""
    fields = dflash.config_to_hf(config)
    inner = fields.pop("dflash_config")
    return {
        **fields,
        **inner,
        "architectures": [ARCHITECTURES[0]],
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "candidate_top_k": config.candidate_top_k,
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DSparkParams:
    """All arrays of a drafter.

    Attributes:
        selector: the serial head: W1 `[V, r]` for the token before, W2 `[W, r]` for the tokens that can be proposed, and no
            projection.
    """

    backbone: DFlashParams
    selector: Selector


SERIAL = ("markov_head.markov_w1", "markov_head.markov_w2")


def declare(config: DSparkConfig) -> DSparkParams:
    """Declares the drafter's arrays under their checkpoint names. The serial head initially adds zero."""

    def table(name: str, tokens: int, scale: float) -> ArraySpec:
        return ArraySpec(f"{name}.weight", (tokens, config.markov_rank), ("vocab", "rank"), "embedding", scale=scale)

    serial = Selector(table(SERIAL[0], config.vocab_size, 0.02), table(SERIAL[1], config.num_proposable, 0.0))
    return DSparkParams(dflash.declare(config), serial)


def stored_name(name: str) -> str:
    """Returns the declared name of a stored tensor, with the `.weight` that some files leave out."""
    return f"{name}.weight" if name in SERIAL else name


def is_passed_over(name: str) -> bool:
    """True if a stored tensor is ignored, because it belongs to the confidence head."""
    return name.startswith("confidence_head.")


def serial_logits(ops: Operations, selector: Selector, before: Int[Array, "*rows"]) -> Float32[Array, "*rows W"]:
    """Returns the serial head's addition to the logits of all tokens that can be proposed."""
    return ops.linear(ops.gather_rows(selector.predecessor, before), Transposed(selector.successor), jnp.float32)
