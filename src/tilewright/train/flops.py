"""Counts the floating-point operations of training as in the PaLM paper, for the model FLOPs utilisation."""

import jax

from tilewright.hardware.accelerators import accelerator_of_device
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import count


def token_flops(config: DecoderConfig, length: int, frozen: bool = False) -> float:
    """Returns the forward and backward operations per token in a sequence of `length`: 6 N + 12 A T + 18 M V D E.

    Frozen parameters, which have no gradients, count 4 N.

    N is the number of parameters that multiply a token: not an embedding that is separate from the head, and only the active
    experts of a mixture. A is the number of entries of query heads in all layers with softmax attention, and T is the length.
    M is the number of layers with linear attention, with V heads whose D × E state is read, updated and read again per
    position; further products of chunks do not count. Recomputation in the backward pass does not count, causal attention
    counts fully.
    (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.)
    """
    read_only = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    specs = decoder.declare(config)
    parameters = count(specs) - read_only
    if config.mixture is not None:
        experts = [(layer.gate_up, layer.down, layer.router.expert_bias) for layer in specs.layers if layer.router is not None]
        parameters -= count(experts) * (1 - config.mixture.chosen / config.mixture.experts)
    linear = 0.0
    if config.delta is not None:
        sizes = config.delta
        linear = 18.0 * len(config.delta_layers) * sizes.value_heads * sizes.key_dim * sizes.value_dim
    kinds = (config.kind(n) for n in range(config.num_layers))
    columns = sum(config.num_heads * config.heads(kind).head_dim for kind in kinds if kind.delta is None)
    return (4.0 if frozen else 6.0) * parameters + 12.0 * columns * length + linear


def peak_flop_per_s(devices: int) -> float | None:
    """Returns the dense bfloat16 peak of `devices` devices like the first one, in FLOP/s; None if unknown, as for CPUs."""
    chip = accelerator_of_device(jax.devices()[0].device_kind)
    return None if chip is None else devices * 1e12 * chip.bf16_tflop_per_s
