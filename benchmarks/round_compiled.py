"""Estimates of the parts of a round (`round_parts.py`) on an absent TPU, from programs compiled ahead of time.

Layers are identical, so two small models are compiled and the cost per further layer is extrapolated. Embedding, head and the
extension of the context are compiled once, whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from round_parts import PARTS, RoundSetup, programs, with_ratios

from tilewright.compiled.aot import compile_for
from tilewright.hardware.ranged import ranged
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels import select
from tilewright.kernels.operations import Operations
from tilewright.models import decoder, dflash
from tilewright.perfmodel.calibration import chip_with
from tilewright.perfmodel.compiler_estimate import CompilerEstimate, estimate
from tilewright.perfmodel.timeline_ranges import ROOFLINE_TIME
from tilewright.perfmodel.uncertainty import DRAWS, Basis, Sweep, sweep_constants
from tilewright.runtime.state import DecodeState, Span, Target, block_positions, forward_tree, run_target, with_path
from tilewright.runtime.trees import DraftTree

LAYERS_COMPILED = (4, 8)
"""Layers of the compiled models. With fewer, most weights fit into VMEM, and the estimates are far too low."""

COMPILED = (*PARTS, "verify_tree")
"""Parts that are compiled."""
RATIOS = (*(f"{part}_cycles" for part in COMPILED if part != "round"), *(f"{part}_bound_cycles" for part in COMPILED))
"""Figures with ratios to those of block 16."""


def over_layers(compile_with: Callable[[int], CompilerEstimate], layers: int) -> CompilerEstimate:
    """Estimates a model of `layers` layers by extrapolation from `LAYERS_COMPILED`."""
    few, more = LAYERS_COMPILED
    if layers <= more:
        return compile_with(layers)
    first = compile_with(few)
    second = compile_with(more)
    return second.combined(second.beyond(first), (layers - more) / (more - few))


def head_estimates(topology: str, setup: RoundSetup) -> dict[str, CompilerEstimate]:
    """Estimates the heads (verification, draft, draft top-k), each with our kernel and by XLA. Independent of the context."""
    target = setup.target
    chip = chip_of(topology)
    norm_and_head = replace(with_layers(setup, 1).models().target, layers=())

    def first(ops: Operations, x: Array, params: Any) -> Array:
        return ops.head_argmax(x, decoder.output_head(params))[0]

    def best(ops: Operations, x: Array, params: Any) -> tuple[Array, Array]:
        return ops.head_top_k(x, decoder.output_head(params), setup.top_k)

    block = setup.hidden(setup.block_size)
    drafts = setup.hidden(setup.block_size - 1)
    jobs: dict[str, tuple[Callable[..., Any], jax.ShapeDtypeStruct]] = {
        "verify_head": (lambda x, params: decoder.most_likely(target, setup.ops, params, x), block),
        "verify_head_xla": (partial(first, select.PLAIN), block),
        "draft_head": (partial(first, setup.ops), drafts),
        "draft_head_xla": (partial(first, select.PLAIN), drafts),
        "draft_top_k": (partial(best, setup.ops), drafts),
        "draft_top_k_xla": (partial(best, select.PLAIN), drafts),
    }
    found = {name: compile_for(topology, run, x, norm_and_head) for name, (run, x) in jobs.items() if x.size}
    return {name: estimate(chip, compiled) for name, compiled in found.items()}


def with_layers(setup: RoundSetup, layers: int) -> RoundSetup:
    """Returns a copy of a setup with this number of layers in both models, without taps."""
    target = replace(setup.target, num_layers=layers)
    return replace(setup, target=target, drafter=replace(setup.drafter, num_layers=layers))


def verify_layers(topology: str, setup: RoundSetup, layers: int) -> CompilerEstimate:
    """Estimates verification without its head."""
    small = with_layers(setup, layers)

    def run(params: Any, state: DecodeState, block: Array) -> tuple[Array, Any]:
        span = Span(state.last_position, jnp.full_like(state.last_position, setup.block_size))
        ran = run_target(Target(small.target, small.ops), params, state, block, span, ())
        return ran.hidden, replace(state, target_cache=ran.caches)

    block = jax.ShapeDtypeStruct((1, setup.block_size), "int32")
    state = replace(jax.eval_shape(small.state), draft_cache=())
    return estimate(chip_of(topology), compile_for(topology, run, small.models().target, state, block, donate=1))


def tree_layers(topology: str, setup: RoundSetup, layers: int) -> CompilerEstimate:
    """Estimates verification of a tree with as many nodes as a block has tokens, without its head.

    The deepest path has as many tokens as a block of the drafter; its keys and values are written into the caches.
    """
    small = with_layers(setup, layers)
    nodes = setup.block_size
    deepest = min(nodes, setup.drafter.block_size)

    def run(
        params: Any, state: DecodeState, tree: DraftTree, path: Array, length: Array
    ) -> tuple[Array, tuple[Array, ...], DecodeState]:
        ran = forward_tree(Target(small.target, small.ops), params, state, tree, ())
        caches = with_path(Target(small.target, small.ops), ran.caches, path, state.last_position, length)
        return ran.hidden, ran.taps, replace(state, target_cache=caches)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "int32")

    tree = DraftTree(ints(1, nodes), ints(1, nodes), ints(1, nodes), jax.ShapeDtypeStruct((1, nodes, nodes), "bool"))
    state = replace(jax.eval_shape(small.state), draft_cache=())
    arguments = (small.models().target, state, tree, ints(1, deepest), ints(1))
    return estimate(chip_of(topology), compile_for(topology, run, *arguments, donate=1))


def draft_layers(topology: str, setup: RoundSetup, layers: int) -> CompilerEstimate:
    """Estimates drafting without its head."""
    small = with_layers(setup, layers)

    def run(table: Array, drafter: Any, context: Any, known: Array, block: Array) -> Array:
        positions = block_positions(known, setup.block_size)
        attend = dflash.attend_context
        return dflash.run_block(small.drafter, small.ops, drafter, table[block], positions, context, attend, known)

    models = small.models()
    state = jax.eval_shape(small.state)
    block = jax.ShapeDtypeStruct((1, setup.block_size), "int32")
    arguments = (models.target.embed, models.drafter, state.draft_cache, state.last_position, block)
    return estimate(chip_of(topology), compile_for(topology, run, *arguments))


def extend_estimate(topology: str, setup: RoundSetup) -> CompilerEstimate:
    """Estimates the extension of the context by all layers of the drafter."""
    program = programs(setup)["extend"]
    state = replace(jax.eval_shape(setup.state), target_cache=())
    return estimate(chip_of(topology), compile_for(topology, program.run, setup.models(), state, *program.inputs, donate=1))


def whole(layers: CompilerEstimate, head: CompilerEstimate, shared_bytes: int) -> CompilerEstimate:
    """Adds the head to the layers. `shared_bytes` are arguments of both programs and count once."""
    both = layers.combined(head, 1)
    return replace(both, peak_bytes=both.peak_bytes - shared_bytes)


def compiled_rounds(
    topology: str, setups: Sequence[RoundSetup], on_part: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Estimates rounds of several block sizes at one context. Calls `on_part` once for each and once for the plain step.

    Raises:
        ValueError: The topology is unknown or has no compiler here.
    """
    first = replace(setups[0], block_size=1)
    embed = first.models().target.embed
    shared = embed.size * embed.dtype.itemsize if first.target.tie_word_embeddings else 0

    def verified(setup: RoundSetup, head: CompilerEstimate, some_layers: Any = verify_layers) -> CompilerEstimate:
        layers = over_layers(partial(some_layers, topology, setup), setup.target.num_layers)
        return whole(layers, head, shared)

    step = verified(first, head_estimates(topology, first)["verify_head"])
    on_part()
    records = []
    for setup in setups:
        heads = head_estimates(topology, setup)
        drafting = over_layers(partial(draft_layers, topology, setup), setup.drafter.num_layers)
        draft = whole(drafting, heads["draft_head"], shared)
        verify = verified(setup, heads["verify_head"])
        parts = {"draft": draft, "verify": verify, "extend": extend_estimate(topology, setup)}
        tree = verified(setup, heads["verify_head"], tree_layers)
        records.append(record(setup, parts, {**heads, "verify_tree": tree, "step": step}))
        on_part()
    return with_ratios(records, RATIOS)


def round_sweep(topology: str, records: Sequence[Mapping[str, Any]], draws: int = DRAWS) -> Sweep:
    """Returns ranges of whole rounds over the memory bandwidth and the ratio of kernel time to roofline."""
    chip = chip_of(topology)

    def cycles(one: Mapping[str, Any], part: str, spec: TpuChip, factor: float) -> float:
        moved = one[f"{part}_read_bytes"] + one[f"{part}_written_bytes"]
        compute = one[f"{part}_cycles"] + (factor - 1) * one[f"{part}_kernel_cycles"]
        return max(compute, spec.roofline_cycles(moved, 0))

    def predict(changes: Mapping[str, float]) -> dict[str, float]:
        spec = chip_with(chip, {name: value for name, value in changes.items() if name != "roofline_time"})
        factor = changes.get("roofline_time", 1.0)
        return {
            f"block {one['block_size']} at context {one['context']}": sum(
                cycles(one, part, spec, factor) for part in ("draft", "verify", "extend")
            )
            / 1e3
            for one in records
        }

    parts = [(one[f"{part}_kernel_cycles"], one[f"{part}_cycles"]) for one in records for part in ("draft", "verify")]
    share = max(kernels / whole for kernels, whole in parts)
    memory = {name: value for name, value in ranged(chip).items() if name == "hbm_gb_per_s"}
    constants = {**memory, "roofline_time": ROOFLINE_TIME}
    unit = "kilocycles of a round"
    basis = Basis(roofline_share=share)
    return sweep_constants(predict, constants, draws, unit=unit, basis=basis, compared=False)


def record(setup: RoundSetup, parts: Mapping[str, CompilerEstimate], others: Mapping[str, CompilerEstimate]) -> dict[str, Any]:
    """Returns the figures of one round, each as `<part>_<figure>`."""
    flat = {f"{name}_{key}": value for name, one in {**parts, **others}.items() for key, value in one.record().items()}
    return {
        "context": setup.context,
        "block_size": setup.block_size,
        "capacity": setup.capacity,
        **flat,
        "round_bound_cycles": sum(flat[f"{name}_bound_cycles"] for name in parts),
        "layers_compiled": LAYERS_COMPILED,
        "extrapolated": max(setup.target.num_layers, setup.drafter.num_layers) > LAYERS_COMPILED[-1],
    }
