"""Training of low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen matrices of a decoder.

The loss adds the adapter to the model as a server does (`models.lora.Adapters.apply`), with float32 matrices that the optimizer
changes. The base model may be quantised.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console

from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.lora import Adapter, Adapters, LoraSettings, LowRankPair, target_modules
from tilewright.models.params import ArraySpec, initialise
from tilewright.train.checkpoint import fingerprint
from tilewright.train.flops import token_flops
from tilewright.train.lm import language_model
from tilewright.train.loop import TrainResult, train
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import ONE_DEVICE, Objective, TrainingPlacement, make_task
from tilewright.train.text import Batches

Pairs = dict[str, LowRankPair]
"""Low-rank matrices of each module, without the adapter's scale."""


def declare_adapter(modules: Mapping[str, ArraySpec], rank: int) -> Pairs:
    """Declares the matrices of an adapter, which every device of a mesh has in full.

    A has the variance of PEFT's initial values, 1 / (3 I). B is zero, so that training begins at the base model.
    """

    def declare(module: str, spec: ArraySpec) -> LowRankPair:
        outputs, inputs = spec.stored_shape
        a = ArraySpec(f"{module}.lora_A", (rank, inputs), ("single", "single"), scale=(3 * inputs) ** -0.5)
        return LowRankPair(a, ArraySpec(f"{module}.lora_B", (outputs, rank), ("single", "single"), scale=0.0))

    return {module: declare(module, spec) for module, spec in modules.items()}


def adapted(config: DecoderConfig, ops: Operations, base: DecoderParams, pairs: Pairs, lora: LoraSettings) -> DecoderParams:
    """Adds an adapter to a base model for all rows."""
    dtype = jax.tree.leaves(pairs)[0].dtype
    scaled = {module: LowRankPair(a, b * jnp.asarray(lora.scale, dtype)) for module, (a, b) in pairs.items()}
    adapters = Adapters((Adapter("trained", lora.rank, scaled),))
    params = adapters.apply(ops, decoder.declare(config), base, dtype)
    return replace(params, adapters=jnp.ones((1, lora.rank), bool))  # also for rows that name no adapter


@dataclass(frozen=True)
class LoraResult:
    """Result of the training of an adapter.

    Attributes:
        pairs: matrices of each module, without the adapter's scale.
        training: see `loop.TrainResult`.
        base_loss: loss of the base model on the held-out text, in nats per token.
    """

    pairs: Pairs
    training: TrainResult
    base_loss: float


def train_lora(
    config: DecoderConfig,
    base: DecoderParams,
    ops: Operations,
    lora: LoraSettings,
    batches: Batches,
    out: Path,
    console: Console,
    run_fingerprint: Mapping[str, Any],
    placement: TrainingPlacement = ONE_DEVICE,
) -> LoraResult:
    """Trains an adapter on batches of a text; see `loop.train` for checkpoints and resumption.

    The loss is the cross-entropy alone: a frozen router needs no balancing loss.

    Args:
        config: configuration of the base model.
        base: its parameters, prepared for `ops`, in the compute dtype of the options or quantised; sharded over the mesh if
            there is one.
        ops: operations of the loss, for training.
        lora: rank, scale and modules of the adapter.
        batches: batches of this process.
        out: folder for checkpoints.
        console: console for progress.
        run_fingerprint: further settings that a checkpoint must match.
        placement: devices, without explicit collectives.

    Raises:
        ValueError: a target module is unknown, or the mesh does not divide the model or a batch; see also `loop.train`.
    """
    assert placement.plan is None, "explicit collectives would gather gradients of frozen weights"
    specs = declare_adapter(target_modules(decoder.declare(config), lora.targets), lora.rank)
    options = batches.options
    model = language_model(config).unbalanced
    base_loss = prediction_loss(model, ops, placement)

    def loss(pairs: Pairs, base: DecoderParams, predicted: Any) -> tuple[Array, Array]:
        return base_loss(adapted(config, ops, base, pairs, lora), None, predicted)

    def init() -> Pairs:
        return initialise(specs, jax.random.key(options.seed), shardings=placement.shardings(specs))

    objective = Objective(
        "adapter",
        specs,
        lambda pairs: jax.tree.map(lambda _: True, pairs),
        loss,
        draw=lambda frozen, batch, key: model.predict(batch, key),
        frozen=base,
        flops=token_flops(config, options.sequence_length, frozen=True),
    )
    settings = {"config": asdict(config), "base": fingerprint(base), "lora": asdict(lora), **run_fingerprint}
    task = make_task(objective, init, batches, settings, placement)
    result = train(task, console, out)
    without = jax.tree.map(lambda x: 0 * x, result.params)
    return LoraResult(result.params, result, float(task.evaluate(without, 0)["held_out_loss"]))
