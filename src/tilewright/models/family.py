"""Families of decoders: how a configuration reads, and in what layers differ from those of other families.

Each family is an object in a file of its own (`families/`), which `registry.py` lists by one line.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.models.config import ConfigReader, is_number
from tilewright.models.experts import ExpertNames, Mixture

Reads = Callable[[ConfigReader], dict[str, Any]]
"""What a family's `config.json` says beyond the sizes, by the names of `DecoderConfig`; problems are noted in the reader."""


BALANCE = "router_aux_loss_coef"
FULL = "full_attention"
SLIDING = "sliding_attention"


def full_attention(read: ConfigReader) -> dict[str, Any]:
    """Nothing more: every layer sees all positions."""
    read.expect("use_sliding_window", False)
    read.expect_all("layer_types", FULL)
    return {}


def windows(
    read: ConfigReader, sliding: Callable[[int], bool] = lambda layer: True, more_than_masks: bool = False
) -> dict[str, Any]:
    """The window, and the layers that have it; no window is one that no context comes to the end of.

    Args:
        sliding: which layers do, where `layer_types` are not given.
        more_than_masks: these layers differ from others in more than what they see, so that any window is one.
    """
    count = read.integer("num_hidden_layers")
    longest = read.integer("max_position_embeddings")
    given = read.fields.get("layer_types")
    kinds = [SLIDING if sliding(n) else FULL for n in range(count)] if given is None else given
    good = isinstance(kinds, list) and len(kinds) == count and all(kind in (FULL, SLIDING) for kind in kinds)
    read.require(good, f"layer_types must be {FULL} or {SLIDING} for each of {count} layers, found {given!r}")
    if not good or SLIDING not in kinds or read.fields.get("sliding_window") is None:
        return {}
    window = read.integer("sliding_window")
    if window >= longest and not more_than_masks:
        return {}
    return {"sliding_window": window, "sliding_layers": tuple(n for n, kind in enumerate(kinds) if kind == SLIDING)}


def write_windows(config: Any) -> dict[str, Any]:
    """The fields that `windows` reads."""
    kinds = [SLIDING if n in config.sliding_layers else FULL for n in range(config.num_layers)]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def mixture(read: ConfigReader, experts: str, size: str, normalised: bool = True, balance: float = 0.001) -> dict[str, Any]:
    """The experts in all layers, and what their balancing loss is multiplied with.

    Args:
        experts, size: fields with how many there are, and with the intermediate size of each.
        balance: of a configuration that does not say.
    """
    count = read.integer(experts)
    chosen = read.integer("num_experts_per_tok")
    read.require(chosen <= count, f"num_experts_per_tok must be at most {experts} ({count}), found {chosen}")
    given = read.fields.get(BALANCE, balance)
    good = is_number(given) and given >= 0
    read.require(good, f"{BALANCE} must be a number of at least 0, found {given!r}")
    return {
        "mixture": Mixture(max(count, chosen), chosen, read.integer(size), normalised),
        "balance": float(given) if good else balance,
    }


def write_balance(config: Any) -> dict[str, Any]:
    """The field for the balancing loss."""
    return {BALANCE: config.balance}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders.

    Attributes:
        name: the `model_type` of its configurations.
        architecture: what other libraries call its models.
        read: what its configurations say beyond the sizes.
        write: the fields of a `config.json` that `read` finds again.
        defaults: of fields that its configurations may leave out.
        head_dim: where a configuration names none; None for the hidden size divided by the heads.
        qk_norm: queries and keys are normed, head by head.
        qkv_bias: queries, keys and values have biases.
        output_bias: so does what attention gives.
        sinks: each query head has a sink; see `operations.Scores`.
        windows: its configurations may name a sliding window.
        joined: its checkpoints hold queries, keys and values in one tensor, and gate and up in another.
        gguf: what llama.cpp calls its architecture; None where it has no such files.
        rope_section: of `rope_parameters`, where these speak of several kinds of layers.
        norm_offset: what is added to the stored weights of its norms.
        post_norms: what attention and MLP give is normed before it is added to the stream.
        activation: of the gate.
        experts: the names of a mixture's tensors; None where its layers have none.
        experts_in_one: those of checkpoints that hold all experts in one tensor; None where there are no such.
        output_gate: what attention gives is gated; checkpoints have each head's gate behind its queries.
        delta_in_one: see `delta.declare_delta`.
        yarn_ramp: YaRN's begins and ends at whole dimensions, or between them; GGUF files do not say.
        pairwise: GGUF files rotate neighbouring entries, where Hugging Face turns entry i with i + d / 2.
    """

    name: str
    architecture: str
    read: Reads = full_attention
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    windows: bool = False
    joined: bool = False
    gguf: str | None = None
    pairwise: bool = False
    yarn_ramp: Literal["whole", "between"] = "whole"
    rope_section: str | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertNames | None = None
    experts_in_one: ExpertNames | None = None
    output_gate: bool = False
    delta_in_one: bool = False
