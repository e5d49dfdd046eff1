"""Contract between models and schedules: partial sums, replaceable operations, and the values of heads."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.sizes import decoder_config
from tilewright.kernels.operations import Joined, Transposed
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import Layer
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Rows, SingleDevice, Stack

CONFIG = decoder_config("qwen3", 50, 24, 40, 3, 4, 2, 8, tie_word_embeddings=True)
SHARDS = 2


def shard_of(layer: Layer, n: int) -> Layer:
    """A shard's columns of what goes in, and rows of what comes out: half the heads and half the MLP."""

    def cut(w: Array, axis: int) -> Array:
        return jnp.split(w, SHARDS, axis=axis)[n]

    def columns(joined: Joined) -> Joined:
        return replace(joined, parts=tuple(cut(w, 1) for w in joined.parts))

    return replace(layer, qkv=columns(layer.qkv), gate_up=columns(layer.gate_up), o=cut(layer.o, 0), down=cut(layer.down, 0))


@dataclass(frozen=True)
class Sharded(SingleDevice):
    """Tensor parallelism on one device: every part runs once for each shard, and the partial sums are added up."""

    def run(
        self, stack: Stack, x: Array, rows: Rows, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        ops = stack.ops
        after = []
        for whole in stack.layers:
            shards = [shard_of(whole, n) for n in range(SHARDS)]
            outs = [stack.attend(ops, shard, stack.project(ops, shard, x), rows, None)[0] for shard in shards]
            x = x + sum(stack.output(ops, shard, out) for shard, out in zip(shards, outs, strict=True))
            x = x + sum(stack.mlp(ops, shard, x) for shard in shards)
            after.append(x)
        return x, tuple(after[tap] for tap in taps), caches

    def head_argmax(self, ops: Any, x: Array, head: Any, norm: Any = None, masks: Any = None) -> Array:
        """Each shard of the vocabulary gives its best; the largest wins, the first of equals."""
        assert masks is None, "nothing here runs under a grammar"
        size = head.w.shape[0] // SHARDS
        best = [ops.head_argmax(x, Transposed(head.w[n * size : (n + 1) * size]), norm) for n in range(SHARDS)]
        winner = jnp.argmax(jnp.stack([value for _, value in best]), axis=0)
        places = jnp.stack([index + n * size for n, (index, _) in enumerate(best)])
        return jnp.take_along_axis(places, winner[None], axis=0)[0]


@dataclass(frozen=True)
class Tiled(SingleDevice):
    """Takes over the products that leave a half, as a ring would: tile by tile along the sum."""

    tiles: int = 4

    def run(
        self, stack: Stack, x: Array, rows: Rows, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        def linear(x: Array, w: Array, out_dtype: Any = None, norm: Any = None, add: Any = 0, count: Any = None) -> Array:
            pairs = zip(jnp.split(x, self.tiles, axis=-1), jnp.split(w, self.tiles), strict=True)
            return sum((stack.ops.linear(part, tile) for part, tile in pairs), start=jnp.float32(0)) + add

        return super().run(replace(stack, ops=replace(stack.ops, linear=linear)), x, rows, caches, taps)


def drawn() -> tuple[Any, Array]:
    params = jax.jit(partial(initialise, decoder.declare(CONFIG)))(jax.random.key(0))
    # Larger than they are drawn, so that every part of a layer shows.
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, params), jnp.arange(12).reshape(2, 6) * 4 % 50


def results(schedule: Any) -> tuple[Array, Array, Array]:
    """Hidden states, a tap and the most likely tokens."""
    params, tokens = drawn()

    @jax.jit
    def run(params: Any) -> tuple[Array, Array, Array]:
        ran = decoder.forward_full(CONFIG, PLAIN, params, tokens, (1,), schedule)
        return ran.hidden, ran.taps[0], decoder.most_likely(CONFIG, PLAIN, params, ran.hidden, schedule)

    return run(params)


def test_partial_sums_of_shards_add_up_to_the_whole():
    """A half that returned the stream with its sum would count the stream once for each shard."""
    whole = results(SINGLE_DEVICE)
    sharded = results(Sharded())
    for one, other in zip(whole[:2], sharded[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    np.testing.assert_array_equal(whole[2], sharded[2])
    assert len(set(np.asarray(whole[2]).ravel().tolist())) > 2, "some tokens of either shard"
    assert {int(token) >= 25 for token in np.asarray(whole[2]).ravel()} == {False, True}


def test_a_schedule_can_take_over_the_products():
    whole = results(SINGLE_DEVICE)
    tiled = results(Tiled())
    np.testing.assert_allclose(whole[0], tiled[0], atol=2e-5)
    assert (np.asarray(whole[0]) != np.asarray(tiled[0])).any(), "another order of the sums"


def test_the_stream_is_what_the_parts_add_to_the_embedding():
    """Weights that give nothing leave the embedding as it is."""
    params, tokens = drawn()
    silent = replace(params, layers=tuple(replace(one, o=0 * one.o, down=0 * one.down) for one in params.layers))
    ran = jax.jit(lambda params: decoder.forward_full(CONFIG, PLAIN, params, tokens).hidden)(silent)
    np.testing.assert_array_equal(ran, params.embed[tokens])
