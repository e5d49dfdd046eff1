"""Models that learn to predict tokens: language models and diffusion models, whose losses differ in what they predict.

Legend: B sequences of a batch, T positions, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Operations
from tilewright.models import decoder, diffusion
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.train.balance import Loads


class Predicted(NamedTuple):
    """Predictions of a batch of sequences.

    Attributes:
        inputs: input tokens, `[B, T]`.
        labels: token to predict at each position, `[B, T]`.
        weights: weight of each prediction, `[B, T]`.
        counts: what each row's weighted losses are divided by, summed over the rows, `[B]`; the loss's weight in other means.
        attn_metadata: metadata of each row for `Predictor.attend`, `[B, ...]`; None without.
        positions: rotary position of each input, `[B, T]`; None for 0 to T - 1.
    """

    inputs: Any
    labels: Any
    weights: Any
    counts: Any
    attn_metadata: Any = None
    positions: Any = None

    @property
    def places(self) -> Int[Array, "B T"]:
        """Rotary positions of the inputs."""
        if self.positions is not None:
            return self.positions
        return jnp.broadcast_to(jnp.arange(self.inputs.shape[1]), self.inputs.shape)


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Model that learns to predict tokens: its layers, their attention, and the predictions that it learns from.

    Attributes:
        config: its configuration.
        predict: `predict(batch, key)` returns the predictions to make, which may be drawn at random.
        attend: attention, whose metadata are those of the predictions.
        predicting: maps hidden states `[B, T, H]` to the states that predict each position; None for the identity.
        copies: number of times that the layers run over each token of a batch.
    """

    config: DiffusionConfig | DecoderConfig
    predict: Callable[[Any, Array], Predicted]
    attend: decoder.Attend
    predicting: Callable[[Array], Array] | None = None
    copies: int = 1

    @property
    def sizes(self) -> DecoderConfig:
        """Configuration of its layers."""
        return self.config.decoder if isinstance(self.config, DiffusionConfig) else self.config

    @property
    def specs(self) -> DecoderParams:
        """Declared arrays."""
        return diffusion.declare(self.config) if isinstance(self.config, DiffusionConfig) else decoder.declare(self.config)

    @property
    def fields(self) -> dict[str, Any]:
        """Its `config.json`."""
        if isinstance(self.config, DiffusionConfig):
            return diffusion.config_to_hf(self.config)
        return decoder.config_to_hf(self.config)

    @property
    def unbalanced(self) -> "Predictor":
        """The model with a loss that leaves out the balancing loss of experts."""
        sizes = replace(self.sizes, balance=0.0)
        if isinstance(self.config, DiffusionConfig):
            return replace(self, config=replace(self.config, decoder=sizes))
        return replace(self, config=sizes)

    def hidden(self, ops: Operations, params: DecoderParams, predicted: Predicted, schedule: Strategy) -> Float[Array, "B T H"]:
        """Computes the states that predict each position."""
        states = (predicted.inputs, predicted.places, self.attend, predicted.attn_metadata)
        hidden = decoder.forward(self.sizes, ops, params, *states, schedule=schedule).hidden
        return hidden if self.predicting is None else self.predicting(hidden)

    def loss(
        self, ops: Operations, params: DecoderParams, predicted: Predicted, schedule: Strategy = SINGLE_DEVICE
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Computes the weighted cross-entropy in nats over the sum of the counts, and this sum, on one device.

        For a mixture of experts the loss includes the weighted balancing loss over all positions.
        """
        loads = Loads(self.sizes, ops)
        hidden = self.hidden(loads.ops, params, predicted, schedule)
        total = jnp.sum(predicted.counts)
        loss = decoder.cross_entropy(self.sizes, ops, params, hidden, predicted.labels, predicted.weights)
        return loss / jnp.maximum(total, 1.0) + loads.loss(), total
