"""Families of decoders: how their configurations are read, and how their layers differ.

Each family is an object in its own file (`families/`), listed in `registry.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.models.config import ConfigReader, is_number
from tilewright.models.experts import ExpertNames, Mixture

Reads = Callable[[ConfigReader], dict[str, Any]]
"""Reads a family's `config.json` fields beyond the sizes, by their `DecoderConfig` names, and notes problems in the reader."""


BALANCE = "router_aux_loss_coef"
FULL = "full_attention"
SLIDING = "sliding_attention"


def full_attention(read: ConfigReader) -> dict[str, Any]:
    """Checks that every layer attends to all positions; adds no fields."""
    read.expect("use_sliding_window", False)
    read.expect_all("layer_types", FULL)
    return {}


def mask_token(read: ConfigReader) -> int:
    """Reads the mask token of a model that denoises."""
    masks = read.token_ids("mask_token_id")
    vocab = read.fields.get("vocab_size")
    good = len(masks) == 1 and not (isinstance(vocab, int) and masks[0] >= vocab)
    found = read.fields.get("mask_token_id")
    read.require(good, f"mask_token_id must be a token id below vocab_size, found {found!r}")
    return masks[0] if good else 0


def windows(
    read: ConfigReader, sliding: Callable[[int], bool] = lambda layer: True, keep_long_windows: bool = False
) -> dict[str, Any]:
    """Reads the sliding window and its layers. A window as long as the context counts as none.

    Args:
        sliding: tells which layers have a window if `layer_types` is absent.
        keep_long_windows: keep a window as long as the context, because its layers differ in more than the mask.
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
    if window >= longest and not keep_long_windows:
        return {}
    return {"sliding_window": window, "sliding_layers": tuple(n for n, kind in enumerate(kinds) if kind == SLIDING)}


def write_windows(config: Any) -> dict[str, Any]:
    """Returns the fields that `windows` reads."""
    kinds = [SLIDING if n in config.sliding_layers else FULL for n in range(config.num_layers)]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def mixture(read: ConfigReader, experts: str, size: str, normalised: bool = True, balance: float = 0.001) -> dict[str, Any]:
    """Reads the experts of all layers, and the coefficient of the balancing loss.

    Args:
        experts, size: names of the fields with the number of experts and with their intermediate size.
        normalised: the weights of a token's experts sum to 1.
        balance: default coefficient.
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
    """Returns the field for the balancing loss."""
    return {BALANCE: config.balance}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of decoders.

    Attributes:
        name: the `model_type` of its configurations.
        architecture: the class name in `architectures`, which other libraries use.
        read: reads the configuration fields beyond the sizes.
        write: returns the `config.json` fields that `read` reads.
        defaults: values of fields that its configurations may omit.
        head_dim: default head size; None for the hidden size divided by the number of heads.
        qk_norm: queries and keys have an RMSNorm per head.
        value_norm: values have an RMSNorm per head, without weights.
        qkv_bias: queries, keys and values have biases.
        output_bias: the output projection of attention has a bias.
        sinks: each query head has an attention sink; see `operations.Scores`.
        windows: its configurations may have a sliding window.
        joined: projections that its checkpoints store in one tensor: "qkv" for queries, keys and values, "gate_up" for an MLP.
        gguf: llama.cpp's name of the architecture; None if its GGUF files are not supported.
        rope_section: key in a `rope_parameters` that has an entry for each kind of layer.
        norm_offset: number added to the stored norm weights.
        post_norms: outputs of attention and MLP are normed before the residual addition.
        layer_scalar: a stored number multiplies the residual stream after each layer.
        activation: activation of the gate.
        experts: tensor names of the mixture of experts; None without experts.
        experts_in_one: tensor names in checkpoints that store all experts in one tensor; None if there are no such checkpoints.
        output_gate: the attention output is gated; checkpoints store each head's gate after its queries.
        delta_in_one: see `delta.declare_delta`.
        yarn_ramp: YaRN's ramp begins and ends at whole dimensions, or between them; GGUF files do not store this.
        pairwise: GGUF files rotate neighbouring entries, where Hugging Face rotates entries i and i + d / 2.
        stored_parts: parts of tensor names, each with the part that its checkpoints have instead.
    """

    name: str
    architecture: str
    read: Reads = full_attention
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    head_dim: int | None = None
    qk_norm: bool = False
    value_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    windows: bool = False
    joined: tuple[Literal["qkv", "gate_up"], ...] = ()
    gguf: str | None = None
    pairwise: bool = False
    yarn_ramp: Literal["whole", "between"] = "whole"
    rope_section: str | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    layer_scalar: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertNames | None = None
    experts_in_one: ExpertNames | None = None
    output_gate: bool = False
    delta_in_one: bool = False
    stored_parts: tuple[tuple[str, str], ...] = ()

    def stored_name(self, name: str) -> str:
        """Returns the name that its checkpoints give a tensor."""
        for part, instead in self.stored_parts:
            if part in name:
                return name.replace(part, instead, 1)
        return name
