"""Answers to many prompts at once, in waves: rows that begin together, until the last of them is done.

The engine admits a request as soon as a row is free, which needs pages, and looks at the host in between. An accelerator writes
text for training faster where nothing of that is in the way: all rows of a wave stand at the same slot of the cache, so that a
step writes one slice and reads the rest as it lies. Prompts end at the same slot, the shorter ones behind empty slots. Now and
then the cache grows, so that steps read little more than what is filled.

Legend: B rows of a wave, S slots of the cache as it is, P of them for prompts, A tokens of an answer at most, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int, Int32

from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.kernels.select import attention
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.runtime.sampling import Sampling

PRNG = "unsafe_rbg"
"""Randomness by the chip's own generator: a number for each row and each token of the vocabulary takes a part of a step."""
Caches = tuple[tuple[Array, Array], ...]
"""Keys and values of each layer, `[B, K, S, D]` each."""


class Slots(NamedTuple):
    """Slots of the cache that rows see.

    Attributes:
        at: where the tokens at hand go, the same in all rows.
        first: of each row's prompt, `[B]`; nothing lies before it.
    """

    at: Array
    first: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WaveState:
    """State of a wave between two tokens.

    Attributes:
        caches: of all tokens but the last.
        token: the last one of each row, `[B]`, which stands at slot `at`.
        answers: `[B, A]`; behind a row's end more of what ended it.
        done: rows that have ended, `[B]`.
        key: of the randomness to come.
    """

    caches: Caches
    token: Array
    at: Array
    first: Array
    answers: Array
    done: Array
    key: Array


def attend_slots(
    ops: Operations, projection: Projection, heads: Heads, seen: Slots, kept: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """Attention over the slots of the cache, into which the tokens' own keys and values are written."""
    q, *new = ops.heads(projection, heads)
    k, v = (jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), seen.at, 2) for old, x in zip(kept, new, strict=True))
    slot = jnp.arange(k.shape[2])
    own = seen.at + jnp.arange(q.shape[1])
    mask = (slot >= seen.first[:, None, None]) & (slot <= own[:, None])
    return attention(q, k, v, mask, heads.scores).reshape(*q.shape[:2], -1), (k, v)


def grown(caches: Caches, slots: int) -> Caches:
    """Caches with so many slots, the further ones empty."""
    more = slots - caches[0][0].shape[2]
    width = ((0, 0), (0, 0), (0, more), (0, 0))
    return tuple((jnp.pad(k, width), jnp.pad(v, width)) for k, v in caches)


def drawn(logits: Float32[Array, "B V"], temperature: Float32[Array, " B"], key: Array) -> Int32[Array, " B"]:
    """A token of each row by the Gumbel-max rule; at temperature 0 the most likely one."""
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argmax(logits + temperature[:, None] * noise, axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class Waves:
    """Waves of one shape, of a model.

    Attributes:
        config, ops, params: the model's, in the dtype to compute in.
        rows: prompts that are answered at once.
        prompt_room, answer_room: the most tokens of a prompt and of an answer.
        stretch: tokens that are written between two looks at the host, at which the caches grow.
    """

    config: DecoderConfig
    ops: Operations
    params: DecoderParams
    rows: int
    prompt_room: int
    answer_room: int
    stretch: int = 128

    def __post_init__(self) -> None:
        if self.config.sliding_layers or self.config.delta is not None:
            raise ValueError(f"expected a model whose layers all see everything before them, found one of {self.config.family}")
        room = self.config.max_position_embeddings
        found = (self.rows, self.prompt_room, self.answer_room, self.stretch)
        if min(found) < 1 or self.prompt_room + self.answer_room > room:
            raise ValueError(f"expected rows, rooms and a stretch of at least 1, within {room} positions, found {found}")

    @property
    def ends(self) -> list[int]:
        """The lengths of the answers at which the host looks."""
        return [*range(self.stretch, self.answer_room, self.stretch), self.answer_room]

    def run(self, params: DecoderParams, tokens: Array, slots: Slots, caches: Caches) -> tuple[Array, Caches]:
        """Logits behind each row's last token, float32 `[B, V]`, and the caches with the tokens `[B, T]` in them."""
        positions = jnp.maximum(slots.at + jnp.arange(tokens.shape[1]) - slots.first[:, None], 0)
        ran = decoder.forward(self.config, self.ops, params, tokens, positions, attend_slots, slots, caches)
        return decoder.logits(self.config, self.ops, params, ran.hidden[:, -1]), ran.kept

    def is_end(self, token: Int[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.any(token[:, None] == jnp.asarray(self.config.eos_token_ids, jnp.int32), axis=-1)

    def begin(
        self, params: DecoderParams, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], temperature: Array, key: Array
    ) -> WaveState:
        """Reads the prompts, whose ends stand in the last column, and draws the first token of each answer."""
        config = self.config
        dtype = params.embed.dtype
        empty = jnp.zeros((self.rows, config.num_kv_heads, self.prompt_room, config.head_dim), dtype)
        slots = Slots(jnp.int32(0), self.prompt_room - lengths)
        logits, caches = self.run(params, tokens, slots, ((empty, empty),) * config.num_layers)
        key, own = jax.random.split(key)
        token = drawn(logits, temperature, own)
        answers = jnp.zeros((self.rows, self.answer_room), jnp.int32).at[:, 0].set(token)
        return WaveState(caches, token, jnp.int32(self.prompt_room), slots.first, answers, self.is_end(token), key)

    def advance(self, params: DecoderParams, state: WaveState, temperature: Array, end: int) -> WaveState:
        """Writes tokens until the answers have `end` of them."""

        def token(_: Array, state: WaveState) -> WaveState:
            slots = Slots(state.at, state.first)
            logits, caches = self.run(params, state.token[:, None], slots, state.caches)
            key, own = jax.random.split(state.key)
            token = jnp.where(state.done, state.token, drawn(logits, temperature, own))
            at = state.at + 1
            answers = jax.lax.dynamic_update_slice_in_dim(state.answers, token[:, None], at - self.prompt_room, 1)
            return WaveState(caches, token, at, state.first, answers, state.done | self.is_end(token), key)

        state = replace(state, caches=grown(state.caches, self.prompt_room + end))
        return jax.lax.fori_loop(state.at - self.prompt_room + 1, end, token, state)

    @cached_property
    def programs(self) -> tuple[Any, Any]:
        """`begin` and `advance`, compiled when they first run."""
        return jax.jit(self.begin), jax.jit(self.advance, static_argnums=3)

    def wave(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], key: Array, most: int | None = None
    ) -> list[list[int]]:
        """The answers to at most B prompts, each with its end if it came to one.

        Args:
            most: of tokens that are wanted; at least as many are written where there is room.

        Raises:
            ValueError: there are more prompts, or one is empty or longer than the room for it.
        """
        longest = max(map(len, prompts))
        if len(prompts) > self.rows or min(map(len, prompts)) < 1 or longest > self.prompt_room:
            wanted = f"expected up to {self.rows} prompts of 1 to {self.prompt_room} tokens"
            raise ValueError(f"{wanted}, found {len(prompts)}, the longest of {longest}")
        tokens = np.zeros((self.rows, self.prompt_room), np.int32)
        lengths = np.ones(self.rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, self.prompt_room - len(prompt) :] = prompt
            lengths[row] = len(prompt)
        temperature = np.zeros(self.rows, np.float32)
        temperature[: len(prompts)] = temperatures
        begin, advance = self.programs
        state = begin(self.params, tokens, lengths, temperature, key)
        end = 0
        for end in self.ends:
            state = advance(self.params, state, temperature, end)
            if end >= (most or self.answer_room) or np.asarray(state.done)[: len(prompts)].all():
                break
        rows = np.asarray(state.answers)[: len(prompts), :end]
        return [self.cut(row.tolist()) for row in rows]

    def cut(self, answer: list[int]) -> list[int]:
        """An answer up to what ends it."""
        stop = next((n + 1 for n, token in enumerate(answer) if token in self.config.eos_token_ids), len(answer))
        return answer[:stop]


@dataclass(frozen=True)
class WaveWriter:
    """Writes in waves. Of how tokens are drawn it knows the temperature alone, and one seed for all rows, that of the first.

    Attributes:
        target: see `regenerate.Writer`.
    """

    waves: Waves
    target: str

    @property
    def size(self) -> int:
        return self.waves.rows

    def write(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        """The answers to at most `size` prompts, each cut to the tokens that its sampling allows.

        Raises:
            ValueError: see `Waves.wave`; or a sampling asks for more than a temperature.
        """
        for one in samplings:
            plain = Sampling(one.max_new_tokens, temperature=one.temperature, seed=one.seed)
            if one != plain:
                raise ValueError(f"expected samplings with a temperature alone, found {one}")
        seed = samplings[0].seed
        if seed is None:
            raise ValueError("expected a seed, found none")
        most = max(one.max_new_tokens for one in samplings)
        temperatures = [one.temperature for one in samplings]
        answers = self.waves.wave(prompts, temperatures, jax.random.key(seed, impl=PRNG), most)
        return [answer[: one.max_new_tokens] for answer, one in zip(answers, samplings, strict=True)]
