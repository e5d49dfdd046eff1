"""DSpark: DFlash in whose blocks slot 0 drafts too, and a serial head that reads the token drafted before (arXiv 2607.05147).

The backbone is DFlash's (`dflash.py`), one slot shorter for as many drafts: slot j stands at the known token's position + j and
predicts the token at the position behind it. To its logits the serial head adds `W2 W1[token before]`, of rank r. Published
drafters add that for the whole vocabulary, slot after slot. Here it is added for the K most likely tokens of each slot alone,
which is what the walk of DFlash 2 does (`dflash2.walk`): no loop over the vocabulary, and the accepted length stays
(3.1145 against 3.1120 tokens a round with K = 16, wejoncy/sfllm #42).

Only the head that its authors call "vanilla" is supported, which reads nothing but the token before. A confidence head, which
guesses how many drafts are worth verifying, may be in a checkpoint and is passed over.

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
"""The published name, and that of files that keep the fields in `dflash_config`."""

KNOWN = (
    "projector_type markov_rank markov_head_type enable_confidence_head confidence_head_with_markov candidate_top_k "
    "dspark_bonus_anchor"
).split()
"""Fields that its configurations have besides DFlash's."""

TOP_K = 16


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Sizes of a DSpark drafter.

    Attributes:
        block_size: counts the known token and the drafts: where slot 0 drafts, one more than a block's slots, which is what
            `block_size` means in a `config.json`.
        markov_rank: r.
        candidate_top_k: K. A field of our own.
    """

    markov_rank: int
    candidate_top_k: int = TOP_K
    sample_from_anchor: bool = True


def is_dspark(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares a drafter of this kind."""
    names = fields.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json", target: DecoderConfig | None = None) -> DSparkConfig:
    """Reads a drafter's `config.json`, whose fields stand at the top or inside `dflash_config`; see `dflash.config_from_hf`.

    Raises:
        ValueError: one message that lists everything missing or unsupported, and then all that does not fit the target.
    """
    read, inner = open_config(fields, where)
    names = read.fields.get("architectures")
    read.require(is_dspark(read.fields), f"architectures={names!r} is not supported (only {' or '.join(ARCHITECTURES)})")
    read.expect("output_multiplier", 1)
    read.expect("final_logit_softcapping", 0)
    read.expect("projector_type", "dspark")
    read.expect("markov_head_type", "vanilla")
    backbone = dflash.read_backbone(read, inner, KNOWN, target, anchored=read.fields.get("dspark_bonus_anchor") is not True)
    read.expect("dspark_bonus_anchor", not backbone.sample_from_anchor)
    config = DSparkConfig(
        **vars(backbone),
        markov_rank=read.integer("markov_rank"),
        candidate_top_k=read.integer("candidate_top_k", default=min(TOP_K, backbone.proposed)),
    )
    top_k = config.candidate_top_k
    most = config.proposed
    read.require(top_k <= most, f"candidate_top_k {top_k} exceeds the {most} tokens that can be proposed")
    dflash.finish(read, config, target)
    return config


def config_to_hf(config: DSparkConfig) -> dict[str, Any]:
    """The `config.json` of a drafter that was trained here, with the fields of the published ones, all at the top."""
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
    """The drafter's arrays under their checkpoint names. Fresh, the serial head adds nothing."""

    def table(name: str, tokens: int, scale: float) -> ArraySpec:
        return ArraySpec(f"{name}.weight", (tokens, config.markov_rank), ("vocab", "rank"), "embedding", scale=scale)

    serial = Selector(table(SERIAL[0], config.vocab_size, 0.02), table(SERIAL[1], config.proposed, 0.0))
    return DSparkParams(dflash.declare(config), serial)


def stored_name(name: str) -> str:
    """The declared name of a stored tensor, with the `.weight` that some files leave out."""
    return f"{name}.weight" if name in SERIAL else name


def is_passed_over(name: str) -> bool:
    """True if a stored tensor is not read: the confidence head."""
    return name.startswith("confidence_head.")


def serial_logits(ops: Operations, selector: Selector, before: Int[Array, "*rows"]) -> Float32[Array, "*rows W"]:
    """The serial head's addition to the logits of all tokens that can be proposed, after these."""
    return ops.linear(ops.gather_rows(selector.predecessor, before), Transposed(selector.successor), jnp.float32)
