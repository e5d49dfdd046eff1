"""The operations that a model's training needs, as the PaLM paper counts them, and how much of the devices' peak that is."""

import jax

from tilewright.hardware.accelerators import accelerator_of_device
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import count


def token_flops(config: DecoderConfig, length: int) -> float:
    """Operations of a token in a sequence of `length`, forward and backward: 6 N + 12 L H Q T + 18 M V D E.

    N are the parameters that a token is multiplied with: an embedding that is not the head too is only read from, and of a
    mixture's experts a token goes to K of E. L layers have H heads of size Q, and T is the length. M layers have linear
    attention, with V heads whose state of D by E is read, corrected and read again, position by position: other products of
    chunks do not count. What is computed again in the backward pass does not count either, and nothing is taken off for causal
    attention, which needs half of its products. (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.)
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
    layers = config.num_layers - len(config.delta_layers)
    return 6.0 * parameters + 12.0 * layers * config.num_heads * config.head_dim * length + linear


def peak_flop_per_s(devices: int) -> float | None:
    """The peak of so many devices like the first, for dense bfloat16 products; None where it is not known, as of any CPU."""
    chip = accelerator_of_device(jax.devices()[0].device_kind)
    return None if chip is None else devices * 1e12 * chip.bf16_tflop_per_s
