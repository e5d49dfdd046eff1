"""Where a round's time goes: its parts apart, with random weights of given shapes.

A round drafts a block, verifies it and extends the drafter's context. The output head, which both of the first two end with, is
also taken alone. Times depend on shapes and not on what the weights are, so that no checkpoint is needed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tilewright.bench.bandwidth import MemoryBuffers
from tilewright.compiled.compare import RUN_S
from tilewright.compiled.timing import REPETITIONS, alternate, spread
from tilewright.kernels import select
from tilewright.kernels.head_top_k.cases import TOP_K
from tilewright.kernels.operations import Operations
from tilewright.models import decoder, dflash, params
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime import cache
from tilewright.runtime.memory import step_bytes
from tilewright.runtime.rounds import autoregressive_step, speculative_round
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.state import DecodeState, Models, Target, verify
from tilewright.speculation.drafters.dflash import DFlash

BANDWIDTH_BYTES = 2**30
"""Of the buffer by which an accelerator's memory is measured."""

CACHE_MULTIPLE = 128
"""Caches are as long as context and block together, rounded up to this."""

PARTS = ("draft", "draft_head", "draft_top_k", "verify", "verify_head", "extend", "round")
"""A round's parts: drafting and verifying with their heads, these heads alone, extending the context, and all of it; and
beside the draft's head what DFlash 2 asks of it, each slot's `TOP_K` best tokens."""


@dataclass(frozen=True)
class RoundSetup:
    """The shapes of one round, for one row.

    Attributes:
        target: of the target.
        drafter: of the drafter; its own block size does not matter here, since the weights are random.
        block_size: tokens in a block.
        context: positions before the block.
        dtype: of weights, activations and caches.
        ops: what computes.
    """

    target: DecoderConfig
    drafter: DFlashConfig
    block_size: int
    context: int
    dtype: Dtype = "bfloat16"
    ops: Operations = select.PLAIN

    @property
    def capacity(self) -> int:
        """Positions in the caches."""
        return -(-(self.context + self.block_size) // CACHE_MULTIPLE) * CACHE_MULTIPLE

    @property
    def top_k(self) -> int:
        """Candidates of a slot."""
        return min(TOP_K, self.target.vocab_size)

    @property
    def drafting(self) -> DFlash:
        size = max(2, self.block_size)
        return DFlash(replace(self.drafter, block_size=size), size, dtype=self.dtype, ops=self.ops)

    def models(self) -> Models:
        """The parameters, abstract."""
        dtype = DTYPES[self.dtype]
        target = params.abstract(decoder.declare(self.target), dtype)
        return Models(target, params.abstract(dflash.declare(self.drafter), dtype))

    def state(self) -> DecodeState:
        """The state before the round, its caches empty. Abstract inside `jax.eval_shape`."""
        rows = jnp.zeros(1, jnp.int32)
        dtype = DTYPES[self.dtype]
        target, drafter = (
            cache.allocate(one.num_layers, 1, one.num_kv_heads, self.capacity, one.head_dim, dtype)
            for one in (self.target, self.drafter)
        )
        return DecodeState(
            tokens=jnp.zeros((1, self.capacity), jnp.int32),
            known=rows + self.context,
            end=rows + self.capacity,
            done=rows > 0,
            ignore_eos=rows == 0,
            sampling=row_sampling([Sampling()], [1]),
            target_cache=target,
            draft_cache=drafter,
        )

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, rows, self.target.hidden_size), DTYPES[self.dtype])


@dataclass(frozen=True)
class RoundPart:
    """One part as a program: `run(models, state, *inputs) -> (state, result)`, which is given the state for good.

    Attributes:
        inputs: what it reads besides, abstract.
    """

    run: Callable[..., tuple[DecodeState, Any]]
    inputs: tuple[Any, ...] = ()


def programs(setup: RoundSetup) -> dict[str, RoundPart]:
    """The parts of a round, in the order of `PARTS`, and `step`, one of plain decoding."""
    target = Target(setup.target, setup.ops)
    drafting = setup.drafting
    size = setup.block_size
    taps = (setup.hidden(size),) * len(setup.drafter.target_layer_ids)

    def draft(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        return state, drafting.propose(target, models, state).block

    def draft_head(models: Models, state: DecodeState, hidden: Array) -> tuple[DecodeState, Any]:
        return state, setup.ops.head_argmax(hidden, decoder.output_head(models.target))[0]

    def draft_top_k(models: Models, state: DecodeState, hidden: Array) -> tuple[DecodeState, Any]:
        return state, setup.ops.head_top_k(hidden, decoder.output_head(models.target), setup.top_k)

    def verify_block(models: Models, state: DecodeState, block: Array) -> tuple[DecodeState, Any]:
        verified = verify(target, models.target, state, block, drafting.tap_layers)
        return verified.state, (verified.tokens, verified.taps)

    def verify_head(models: Models, state: DecodeState, hidden: Array) -> tuple[DecodeState, Any]:
        return state, decoder.most_likely(setup.target, setup.ops, models.target, hidden)

    def extend(models: Models, state: DecodeState, taps: tuple[Array, ...]) -> tuple[DecodeState, Any]:
        return drafting.extend(target, models, state, taps, state.known, state.known + 1), ()

    def again(before: DecodeState, after: DecodeState) -> DecodeState:
        """So that every run does the same."""
        return replace(after, known=before.known, done=before.done)

    def whole_round(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        after, info = speculative_round(drafting, target, models, state)
        return again(state, after), info

    def step(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        after, info = autoregressive_step(target, models, state)
        return again(state, after), info

    block = jax.ShapeDtypeStruct((1, size), jnp.int32)
    drafts = (setup.hidden(size - 1),)
    verified = (setup.hidden(size),)
    drafting_parts = RoundPart(draft), RoundPart(draft_head, drafts), RoundPart(draft_top_k, drafts)
    parts = (
        *drafting_parts,
        RoundPart(verify_block, (block,)),
        RoundPart(verify_head, verified),
        RoundPart(extend, (taps,)),
        RoundPart(whole_round),
    )
    return {**dict(zip(PARTS, parts, strict=True)), "step": RoundPart(step)}


def load(setup: RoundSetup) -> Models:
    """Random parameters, as the operations want them."""
    dtype = DTYPES[setup.dtype]
    keys = jax.random.split(jax.random.key(0))
    target = params.initialise(decoder.declare(setup.target), keys[0], dtype)
    drafter = params.initialise(dflash.declare(setup.drafter), keys[1], dtype)
    return Models(decoder.prepare(setup.target, setup.ops, target), setup.ops.prepare(setup.drafting.declared, drafter))


def given(one: jax.ShapeDtypeStruct) -> Array:
    """Tokens that a part reads: zeros, or tokens that all differ, for those that are the same would choose the same experts."""
    if jnp.issubdtype(one.dtype, jnp.integer):
        return jnp.arange(one.size, dtype=one.dtype).reshape(one.shape)
    return jnp.zeros(one.shape, one.dtype)


def timer(models: Models, setup: RoundSetup, program: RoundPart) -> Callable[[], float]:
    """A run of one part, compiled, of about `RUN_S`; it returns seconds for a call."""
    state = jax.jit(setup.state)()
    inputs = jax.tree.map(given, program.inputs)
    compiled = jax.jit(program.run, donate_argnums=1).lower(models, state, *inputs).compile()

    def timed(calls: int) -> float:
        nonlocal state
        result: Any = ()
        began = time.perf_counter()
        for _ in range(calls):
            state, result = compiled(models, state, *inputs)
        jax.block_until_ready((state, result))
        return (time.perf_counter() - began) / calls

    timed(1)
    calls = max(1, round(RUN_S / timed(1)))
    return lambda: timed(calls)


def memory_rate() -> Callable[[], float]:
    """A run that measures the device's memory in GB/s: a CPU's by reading, another's by a copy, bytes read plus written."""
    if jax.default_backend() == "cpu":
        return MemoryBuffers().read
    buffer = jnp.zeros(BANDWIDTH_BYTES // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0).lower(buffer).compile()

    def timed() -> float:
        nonlocal buffer
        began = time.perf_counter()
        for _ in range(20):
            buffer = copy(buffer)
        buffer.block_until_ready()
        return 20 * 2 * BANDWIDTH_BYTES / (time.perf_counter() - began) / 1e9

    timed()
    return timed


def measure(
    models: Models, setups: Sequence[RoundSetup], repetitions: int = REPETITIONS, on_run: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Times the parts of the rounds of several block sizes at one context, in turns. `on_run` is called `runs` times.

    Returns:
        a record for each setup; times in milliseconds, each with its range over the repetitions.
    """
    timers: dict[tuple[int, str], Callable[[], float]] = {(0, "memory"): memory_rate()}
    for place, setup in enumerate(setups):
        wanted = programs(setup)
        for name in (*PARTS, "step") if place == 0 else PARTS:
            timers[place, name] = timer(models, setup, wanted[name])
            on_run()
    taken = alternate(timers, repetitions, on_run)
    rate = spread(taken[0, "memory"]).median
    weights = step_bytes(models.target)
    step = times(taken[0, "step"], "step")
    shared = {**step, "weight_gb": weights / 1e9, "bandwidth_gb_per_s": rate}
    shared["step_share_of_bandwidth"] = weights / 1e6 / step["step_ms"] / rate
    records = []
    for place, setup in enumerate(setups):
        about: dict[str, float] = {"context": setup.context, "block_size": setup.block_size, "capacity": setup.capacity}
        about["verify_weight_gb"] = step_bytes(models.target, setup.block_size) / 1e9
        for name in PARTS:
            about |= times(taken[place, name], name)
        records.append({**about, **shared})
    return with_ratios(records, [f"{name}_ms" for name in PARTS])


def times(seconds: Sequence[float], name: str) -> dict[str, Any]:
    """Median and range in milliseconds."""
    taken = spread([1e3 * each for each in seconds])
    return {f"{name}_ms": taken.median, f"{name}_range_ms": taken.range}


def runs(setups: int, repetitions: int) -> int:
    """Number of times that `measure` calls `on_run`."""
    return (len(PARTS) * setups + 1) * (1 + repetitions) + repetitions


def with_ratios(records: Sequence[dict[str, Any]], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Adds to the records of one context the ratio of figures to those at block 16, or without it at the smallest block."""
    base = next((one for one in records if one["block_size"] == 16), min(records, key=lambda one: one["block_size"]))
    ratios = [{f"{name}_ratio": one[name] / base[name] if base[name] else None for name in fields} for one in records]
    return [{**one, **ratio, "base_block_size": base["block_size"]} for one, ratio in zip(records, ratios, strict=True)]
