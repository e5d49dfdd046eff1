"""A tiny language model, a drafter and texts for tests of training."""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tilewright.models import decoder, dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.delta import DeltaSizes
from tilewright.models.dflash import DFlashConfig
from tilewright.models.experts import Mixture
from tilewright.models.params import initialise
from tilewright.train.data import TokenStream
from tilewright.train.drafter import draw_blocks
from tilewright.train.text import TextOptions

END = 0
TARGET = DecoderConfig(
    family="qwen3",
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    eos_token_ids=(END,),
)
DRAFTER = DFlashConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    mask_token_id=23,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    rope_theta=10000.0,
)
HYBRID = DecoderConfig(
    family="qwen3_next",
    vocab_size=24,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    partial_rotary_factor=0.5,
    delta=DeltaSizes(2, 4, 8, 8, 4),
    delta_layers=(0,),
    mixture=Mixture(4, 2, 16, shared=16),
    dense_layers=(1,),
)
OPTIONS = TextOptions(
    steps=12, batch_size=2, sequence_length=16, learning_rate=3e-3, warmup=0.1, evaluate_every=6, save_every=5
)


def target_params(config: DecoderConfig = TARGET, seed: int = 0) -> Any:
    """Returns random parameters that are larger than initial ones, so that logits differ visibly."""
    params = initialise(decoder.declare(config), jax.random.key(seed))
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)


@cache
def kept_target() -> Any:
    """Returns cached `target_params()` for tests that only read it. Collecting tests must not compile."""
    with jax.ensure_compile_time_eval():  # the first caller may be inside a trace
        return target_params()


def drafter_params(config: DFlashConfig = DRAFTER, seed: int = 1) -> Any:
    params = initialise(dflash.declare(config), jax.random.key(seed))
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)


def random_stream(n: int = 200, seed: int = 0, vocab: int = 24) -> TokenStream:
    rng = np.random.default_rng(seed)
    return TokenStream(rng.integers(1, vocab, n).astype(np.int32), np.ones(n, bool))


def counting_stream(n: int = 400, period: int = 7) -> TokenStream:
    """Returns 1, 2, ... `period`, 1, 2, ..., in which every token follows from the one before."""
    return TokenStream((1 + np.arange(n) % period).astype(np.int32), np.ones(n, bool))


def silent() -> Console:
    return Console(file=io.StringIO())


def options(**changes: Any) -> TextOptions:
    return replace(OPTIONS, **changes)


def drawing(losses: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a drafter's losses as a function of a key, with which they draw their blocks, instead of drawn blocks."""

    def at_key(target: Any, config: Any, options: Any, ops: Any, params: Any, frozen: Any, batch: Any, key: Any) -> Any:
        blocks = draw_blocks(target, config, options, batch, key, frozen.vocab)
        return losses(target, config, options, ops, params, frozen, batch, blocks)

    return at_key
