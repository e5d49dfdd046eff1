"""Models and batches for the tests of sharded training, and the single device that all of it is held against."""

from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.sizes import decoder_config
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.delta import DeltaSizes
from tilewright.models.experts import ClampedGate, Mixture
from tilewright.models.layers import LinearScaling
from tilewright.models.params import ArraySpec
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.lm import language_model, next_token_loss, next_tokens
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import TrainingPlacement, accumulated, training_mesh

CONFIGS = {
    "llama": decoder_config("llama", 64, 32, 48, 3, 16, 2, 8),  # groups of queries, of which 4 and 8 devices have parts
    "looped": decoder_config("llama", 64, 32, 48, 7, 8, 8, 8),  # so many layers that some are in a loop under every shift
    "short": decoder_config("llama", 64, 32, 48, 4, 8, 8, 8),  # so many that some are in a loop under shifts of one layer
    "qwen3": decoder_config("qwen3", 64, 32, 48, 2, 8, 8, 8, tie_word_embeddings=True),
    "qwen2": decoder_config("qwen2", 64, 32, 48, 2, 8, 2, 8),
    "qwen3_moe": decoder_config("qwen3_moe", 64, 32, 48, 2, 8, 2, 8, mixture=Mixture(8, 2, 16), balance=0.5),
    "hybrid": decoder_config(
        "qwen3_next",
        64,
        32,
        48,
        2,
        8,
        2,
        8,
        partial_rotary_factor=0.5,
        delta=DeltaSizes(8, 16, 4, 6, 4),
        delta_layers=(0,),
        mixture=Mixture(8, 2, 16, shared=16),
        dense_layers=(1,),
        balance=0.5,
    ),
    "unbalanced hybrid": decoder_config(
        "qwen3_next",
        64,
        32,
        48,
        2,
        8,
        2,
        8,
        delta=DeltaSizes(8, 16, 4, 6, 4),
        delta_layers=(0,),
        mixture=Mixture(8, 2, 16, shared=16),
        balance=0.0,
    ),
    "in turns": decoder_config(  # layers of two kinds, so many that some are in a loop
        "smollm3",
        64,
        32,
        48,
        7,
        8,
        8,
        8,
        unrotated_layers=(1, 3, 5),
        sliding_window=3,
        sliding_layers=(0, 2, 4, 6),
    ),
    "gemma2": decoder_config(
        "gemma2",
        64,
        32,
        48,
        2,
        8,
        2,
        8,
        tie_word_embeddings=True,
        sliding_window=3,
        sliding_layers=(0,),
        attention_scale=0.3,
        score_softcap=5.0,
        logit_softcap=9.0,
        embedding_scale=3.0,
    ),
    "gemma3": decoder_config(
        "gemma3_text",
        64,
        32,
        48,
        3,
        8,
        2,
        8,
        tie_word_embeddings=True,
        rope_theta=5e4,
        rope_scaling=LinearScaling(4.0),
        sliding_window=3,
        sliding_layers=(0, 2),
        local_rope_theta=1e4,
        attention_scale=0.3,
        embedding_scale=3.0,
    ),
    "gpt_oss": decoder_config(
        "gpt_oss",
        64,
        32,
        24,
        2,
        8,
        2,
        8,
        mixture=Mixture(8, 2, 16, clamped=ClampedGate(1.702, 7.0)),
        balance=0.5,
        sliding_window=3,
        sliding_layers=(0,),
    ),
}
EPS = float(jnp.finfo(jnp.float32).eps)


@cache
def drawn(family: str) -> DecoderParams:
    """By NumPy, which compiles nothing; larger than models begin, so that all of a layer shows, and no norm like another."""
    rng = np.random.default_rng(0)

    def draw(spec: ArraySpec) -> Array:
        values = np.ones(spec.shape) if spec.init == "ones" else spec.scale * rng.normal(size=spec.shape).clip(-3, 3)
        larger = 4 * values if values.ndim >= 2 else values * (1 + 0.1 * np.cos(np.arange(len(values)) + rng.uniform(0, 6)))
        return jnp.asarray(larger.astype(np.float32))

    return jax.tree.map(draw, decoder.declare(CONFIGS[family]))


def counted(family: str) -> DecoderParams:
    """Numbers in the places of parameters, the same in every process; no program makes them."""
    return jax.tree.map(
        lambda spec: np.arange(prod(spec.shape), dtype=np.float32).reshape(spec.shape), decoder.declare(CONFIGS[family])
    )


@cache
def batch(rows: int = 16, length: int = 9) -> tuple[Array, Array]:
    """Tokens, and which of them are in the loss: devices have different numbers of them."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, 64, (rows, length)), jnp.int32), jnp.asarray(rng.random((rows, length)) < 0.7)


@cache
def alone(family: str) -> Any:
    """Loss and gradient on one device."""
    run = jax.value_and_grad(lambda params: next_token_loss(CONFIGS[family], PLAIN, params, *batch())[0])
    return jax.jit(run)(drawn(family))


def placed(family: str, fsdp: int, tp: int, plan: FullyShardedPlan | None) -> TrainingPlacement:
    return TrainingPlacement(training_mesh({"fsdp": fsdp, "tp": tp}, CONFIGS[family]), plan)


def gradient(placement: TrainingPlacement, family: str, parts: int = 1) -> Any:
    """Function of parameters, tokens and their mask to the loss and its gradient over the mesh."""
    loss = prediction_loss(language_model(CONFIGS[family]), PLAIN, placement)

    def run(params: Any, *batch: Array) -> Any:
        value, _, found = accumulated(lambda p, drawn: loss(p, None, drawn), params, next_tokens(*batch), parts)
        return value, found

    return run


def over_devices(placement: TrainingPlacement, family: str, parts: int = 1) -> Any:
    """Loss and gradient over the mesh."""
    params = jax.device_put(drawn(family), placement.shardings(decoder.declare(CONFIGS[family])))
    return jax.jit(gradient(placement, family, parts))(params, *batch())


def tolerance(config: DecoderConfig) -> float:
    """Of the largest entry of each array: the rounding of the longest chain of sums, those of all layers' products."""
    terms = config.num_layers * (2 * config.hidden_size + config.num_heads * config.head_dim + config.intermediate_size)
    return 16 * terms**0.5 * EPS


def equal(found: Any, family: str) -> None:
    """Loss and every gradient, to the stated tolerance; none of them is zero."""
    share = tolerance(CONFIGS[family])
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(alone(family)), strict=True):
        assert ours.dtype == jnp.float32
        largest = float(jnp.max(jnp.abs(wanted)))
        assert largest > 1e-5
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=share * largest)
