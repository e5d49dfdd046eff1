"""Times the parts of a speculative round: drafting, verifying, both heads and the extension of the context.

    python benchmarks/round_parts.py [--block-size 16,32] [--context 1024] [--chip v5e:2x2] [--json FILE]

A round drafts a block, verifies the block and extends the drafter's context. Draft and verification end with the output head,
which is also measured alone. Weights are random: times depend on shapes only, and no checkpoint is needed. With --chip the
programs are compiled for TPUs that are absent, and the figures are estimates (`round_compiled.py`).

A JSON record is one block size at one context. Each part (`draft`, `draft_head`, `draft_top_k`, `verify`, `verify_head`,
`extend`, `round`, `step`) has fields such as `draft_ms`:

- measured: `ms` and `range_ms`, the median and range of the repetitions; `ms_ratio`, over that at `base_block_size`;
- compiled, also for `verify_tree`, a tree of as many nodes: `cycles`, the sum over all operations (Pallas kernels have no
  estimate and count with the roofline of their declared bytes and flops); `memory_cycles`, the minimum for all bytes to and
  from memory; `bound_cycles`, the larger of both, and its ratio; `read_bytes`, `written_bytes`, `peak_bytes`.

`step_share_of_bandwidth` is `weight_gb` (1e9 bytes of the target's weights that a plain step reads) over `step_ms` and
`bandwidth_gb_per_s` (a read on a CPU, elsewhere a copy, read plus written). `verify_weight_gb` counts verifying the block.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bandwidth import MemoryBuffers
from cyclopts import App
from jax import Array
from rich.console import Console

from tilewright.cli.calibrate import print_ranges
from tilewright.cli.common import DEMO, keep_programs
from tilewright.cli.options import KernelChoice, Numbers, Several, check_least, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.compare import RUN_S
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate, spread
from tilewright.hardware.tpu import chip_of
from tilewright.kernels import select
from tilewright.kernels.head_top_k.cases import TOP_K
from tilewright.kernels.operations import Operations
from tilewright.metrics.metric import Metric, significant
from tilewright.metrics.tables import FigureTable, grouped, print_table
from tilewright.models import checkpoint, decoder, dflash, params
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig
from tilewright.models.hub import PACKAGED
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.published_configs import DFLASH_B16, MODELS
from tilewright.runtime import cache
from tilewright.runtime.memory import step_bytes
from tilewright.runtime.rounds import autoregressive_step, speculative_round
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.state import DecodeState, Models, Target, verify
from tilewright.speculation.drafters.dflash import DFlash

BANDWIDTH_BYTES = 2**30
"""Bytes of the buffer that measures an accelerator's memory bandwidth."""

CACHE_MULTIPLE = 128
"""Cache lengths are context plus block, rounded up to a multiple of this."""

PARTS = ("draft", "draft_head", "draft_top_k", "verify", "verify_head", "extend", "round")
"""Parts of a round: draft and verification including their heads, the heads alone, context extension, the whole round.
`draft_top_k` is the head of DFlash 2, which selects each slot's `TOP_K` best tokens."""


@dataclass(frozen=True)
class RoundSetup:
    """Shapes of one round for one row.

    Attributes:
        target: configuration of the target.
        drafter: configuration of the drafter; its block size is ignored.
        block_size: tokens in a block.
        context: positions before the block.
        dtype: dtype of weights, activations and caches.
        ops: implementation of the operations.
    """

    target: DecoderConfig
    drafter: DFlashConfig
    block_size: int
    context: int
    dtype: Dtype = "bfloat16"
    ops: Operations = select.PLAIN

    @property
    def capacity(self) -> int:
        """Number of positions in the caches."""
        return -(-(self.context + self.block_size) // CACHE_MULTIPLE) * CACHE_MULTIPLE

    @property
    def top_k(self) -> int:
        """Number of candidates of a slot."""
        return min(TOP_K, self.target.vocab_size)

    @property
    def drafting(self) -> DFlash:
        size = max(2, self.block_size)
        return DFlash(replace(self.drafter, block_size=size), size, dtype=self.dtype, ops=self.ops)

    def models(self) -> Models:
        """Returns abstract parameters."""
        dtype = DTYPES[self.dtype]
        target = params.abstract(decoder.declare(self.target), dtype)
        return Models(target, params.abstract(dflash.declare(self.drafter), dtype))

    def state(self) -> DecodeState:
        """Returns the state before the round, with empty caches. Abstract inside `jax.eval_shape`."""
        rows = jnp.zeros(1, jnp.int32)
        dtype = DTYPES[self.dtype]
        target, drafter = (
            cache.allocate(one.num_layers, 1, one.num_kv_heads, self.capacity, one.head_dim, dtype)
            for one in (self.target, self.drafter)
        )
        return DecodeState(
            tokens=jnp.zeros((1, self.capacity), jnp.int32),
            last_position=rows + self.context,
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
    """Program of one part: `run(models, state, *inputs) -> (state, result)`. Donates the state.

    Attributes:
        inputs: abstract further inputs.
    """

    run: Callable[..., tuple[DecodeState, Any]]
    inputs: tuple[Any, ...] = ()


def programs(setup: RoundSetup) -> dict[str, RoundPart]:
    """Returns the parts of a round in the order of `PARTS`, and `step`, a plain decoding step."""
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
        return drafting.extend(target, models, state, taps, state.last_position, state.last_position + 1), ()

    def rewound(before: DecodeState, after: DecodeState) -> DecodeState:
        """Returns to the position before the round, so that every run does the same work."""
        return replace(after, last_position=before.last_position, done=before.done)

    def whole_round(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        after, info = speculative_round(drafting, target, models, state)
        return rewound(state, after), info

    def step(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
        after, info = autoregressive_step(target, models, state)
        return rewound(state, after), info

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
    """Returns random parameters, prepared for the operations."""
    dtype = DTYPES[setup.dtype]
    keys = jax.random.split(jax.random.key(0))
    target = params.initialise(decoder.declare(setup.target), keys[0], dtype)
    drafter = params.initialise(dflash.declare(setup.drafter), keys[1], dtype)
    return Models(decoder.prepare(setup.target, setup.ops, target), setup.ops.prepare(setup.drafting.declared, drafter))


def concrete(shape: jax.ShapeDtypeStruct) -> Array:
    """Returns distinct tokens for an integer input (equal tokens would choose the same experts), else zeros."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def timer(models: Models, setup: RoundSetup, program: RoundPart) -> Callable[[], float]:
    """Compiles one part. The returned function runs for about `RUN_S` and returns seconds per call."""
    state = jax.jit(setup.state)()
    inputs = jax.tree.map(concrete, program.inputs)
    compiled = jax.jit(program.run, donate_argnums=1).lower(models, state, *inputs).compile()

    def timed(calls: int) -> float:
        nonlocal state
        result: Any = ()
        start = time.perf_counter()
        for _ in range(calls):
            state, result = compiled(models, state, *inputs)
        jax.block_until_ready((state, result))
        return (time.perf_counter() - start) / calls

    timed(1)
    calls = max(1, round(RUN_S / timed(1)))
    return lambda: timed(calls)


def memory_rate() -> Callable[[], float]:
    """Returns a function that measures memory bandwidth in GB/s: by reading on a CPU, else by a copy (read plus written)."""
    if jax.default_backend() == "cpu":
        return MemoryBuffers().read
    buffer = jnp.zeros(BANDWIDTH_BYTES // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0).lower(buffer).compile()

    def timed() -> float:
        nonlocal buffer
        start = time.perf_counter()
        for _ in range(20):
            buffer = copy(buffer)
        buffer.block_until_ready()
        return 20 * 2 * BANDWIDTH_BYTES / (time.perf_counter() - start) / 1e9

    timed()
    return timed


def measure(
    models: Models, setups: Sequence[RoundSetup], repetitions: int = REPETITIONS, on_run: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Times the parts of rounds of several block sizes at one context, in alternation. Calls `on_run` `runs` times.

    Returns:
        A record for each setup: times in milliseconds, each with its range over the repetitions.
    """
    timers: dict[tuple[int, str], Callable[[], float]] = {(0, "memory"): memory_rate()}
    for place, setup in enumerate(setups):
        parts = programs(setup)
        for name in (*PARTS, "step") if place == 0 else PARTS:
            timers[place, name] = timer(models, setup, parts[name])
            on_run()
    seconds = alternate(timers, repetitions, on_run)
    rate = spread(seconds[0, "memory"]).median
    weights = step_bytes(models.target)
    step = times(seconds[0, "step"], "step")
    shared = {**step, "weight_gb": weights / 1e9, "bandwidth_gb_per_s": rate}
    shared["step_share_of_bandwidth"] = weights / 1e6 / step["step_ms"] / rate
    records = []
    for place, setup in enumerate(setups):
        about: dict[str, float] = {"context": setup.context, "block_size": setup.block_size, "capacity": setup.capacity}
        about["verify_weight_gb"] = step_bytes(models.target, setup.block_size) / 1e9
        for name in PARTS:
            about |= times(seconds[place, name], name)
        records.append({**about, **shared})
    return with_ratios(records, [f"{name}_ms" for name in PARTS])


def times(seconds: Sequence[float], name: str) -> dict[str, Any]:
    """Returns median and range in milliseconds."""
    milliseconds = spread([1e3 * each for each in seconds])
    return {f"{name}_ms": milliseconds.median, f"{name}_range_ms": milliseconds.range}


def runs(setups: int, repetitions: int) -> int:
    """Returns the number of times that `measure` calls `on_run`."""
    return (len(PARTS) * setups + 1) * (1 + repetitions) + repetitions


def with_ratios(records: Sequence[dict[str, Any]], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Adds ratios of figures to those at block 16 (or else the smallest block) to the records of one context."""
    base = next((one for one in records if one["block_size"] == 16), min(records, key=lambda one: one["block_size"]))
    ratios = [{f"{name}_ratio": one[name] / base[name] if base[name] else None for name in fields} for one in records]
    return [{**one, **ratio, "base_block_size": base["block_size"]} for one, ratio in zip(records, ratios, strict=True)]


DEMO_DRAFTER = "demo-drafter"
BUILT_IN = "qwen3-4b, dflash-b16"

FOOTNOTE = (
    "Compiler estimates in thousands of cycles. cycles: the sum over all operations; Pallas kernels, which have no estimate, "
    "count with the roofline of their declared bytes and flops. HBM: the minimum for all bytes to and from memory; "
    "copies that overlap with compute count there only, so the larger of both is the minimum; × is its ratio to block {base}. "
    "GB: peak memory."
)


BLOCK = Metric("block_size", head="block")


@option_class
class RoundOptions:
    """Options of the measurement.

    Attributes:
        model_config: config.json of the target, or "demo"; by default Qwen3-4B's shapes.
        draft_config: config.json of the drafter, or "demo-drafter"; by default the shapes of Qwen3-4B's DFlash drafter.
        block_size: block sizes, including the last committed token; several, separated by commas or spaces.
        context: numbers of positions before the block, likewise.
        chip: TPUs to compile for instead of measuring, such as v5e:2x2, v5p:2x2x1, v6e:2x2.
        dtype: dtype of weights, activations and caches.
        repetitions: number of timed runs of each part.
    """

    model_config: str | None = None
    draft_config: str | None = None
    block_size: Numbers = (16, 32, 64, 128)
    context: Numbers = (256, 1024)
    chip: Several[str] = ()
    dtype: Dtype = "bfloat16"
    repetitions: int = 5
    kernels: KernelChoice = "auto"

    def pair(self) -> tuple[DecoderConfig, DFlashConfig]:
        """Returns the shapes of both models.

        Raises:
            ValueError: Only one model is named, a file cannot be read, or the drafter does not fit the target.
        """
        if (self.model_config is None) != (self.draft_config is None):
            raise ValueError("expected --model-config and --draft-config together, or neither; found one of them")
        if self.model_config is None or self.draft_config is None:
            return MODELS["qwen3-4b"], DFLASH_B16
        target = decoder.config_from_hf(read_config(self.model_config, DEMO), self.model_config)
        drafter = dflash.config_from_hf(read_config(self.draft_config, DEMO_DRAFTER), self.draft_config, target)
        dflash.check_fits(drafter, target)
        if drafter.variations:
            raise ValueError(f"{self.draft_config}: expected a plain drafter, found one with {', '.join(drafter.variations)}")
        return target, drafter

    def setups(self) -> list[list[RoundSetup]]:
        """Returns, for each context, a setup for every block size. Raises a `ValueError` if an option is out of range."""
        target, drafter = self.pair()
        check_least(self, block_size=2, context=1, repetitions=1)
        sizes, contexts = sorted(self.block_size), sorted(self.context)
        most = sizes[-1] + contexts[-1]
        if most > target.max_position_embeddings:
            raise ValueError(
                f"expected context and block within the model's {target.max_position_embeddings} positions, found {most}"
            )
        for topology in self.chip:
            chip_of(topology)
        ops = select.operations("tpu" if self.chip else None, kernels=self.kernels)
        return [[RoundSetup(target, drafter, size, context, self.dtype, ops) for size in sizes] for context in contexts]


def read_config(file: str, packaged: str) -> dict[str, Any]:
    """Returns the fields of a config.json, given its path or the name of a packaged model.

    Raises:
        ValueError: The file does not exist or holds no JSON object.
    """
    if file == packaged:
        return checkpoint.read_config(PACKAGED[packaged])
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"expected a config.json or {packaged!r}, found {file!r}, which is no file")
    return checkpoint.read_json(path)


def main(*, options: RoundOptions = RoundOptions(), json_file: JsonFile = None) -> None:
    console = human_console(json_file)
    setups = options.setups()
    keep_programs()
    named = options.model_config is not None
    model = {"model": f"{options.model_config}, {options.draft_config}" if named else BUILT_IN, "dtype": options.dtype}
    about = {**model, "jax_version": jax.__version__}
    if options.chip:
        from round_compiled import compiled_rounds, round_sweep

        data = []
        ranges = {}
        for topology in dict.fromkeys(options.chip):
            with progress(console, sum(len(group) + 1 for group in setups), topology) as step:
                rounds = [one for group in setups for one in compiled_rounds(topology, group, step)]
            show_estimated(console, topology, rounds)
            records = [{"chip": topology, **one} for one in rounds]
            ranges[topology] = round_sweep(topology, records).record()
            print_ranges(console, topology, [ranges[topology]])
            data += records
        write_json(json_file, {**about, "measured": False, "data": data, "ranges": ranges})
        return
    models = load(setups[0][0])
    kernels = setups[0][0].ops.name
    data = []
    with progress(console, sum(runs(len(group), options.repetitions) for group in setups)) as step:
        for group in setups:
            step(f"context {group[0].context}", 0)
            data += measure(models, group, options.repetitions, step)
    about |= {"chip": chip_name(), "kernels": kernels, "repetitions": options.repetitions}
    write_json(json_file, {**about, "measured": True, "data": data})
    show_measured(console, kernels, data)


def show_measured(console: Console, kernels: str, data: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each context and block size."""
    title = f"a round on {chip_name()}, {kernels}: ms (× block {data[0]['base_block_size']})"
    rows = [
        {**one, **{part: f"{significant(one[f'{part}_ms'])} ({one[f'{part}_ms_ratio']:.2f})" for part in MEASURED}}
        for one in data
    ]
    parts = [Metric(part, head=name) for part, name in MEASURED.items()]
    metrics = (Metric("context", head="context"), BLOCK, *parts, Metric("step_ms", head="step", digits=3))
    print_table(console, FigureTable(title, "", {"": rows}, metrics))
    firsts = [records[0] for records in grouped(data, "context").values()]
    share = ", ".join(f"{one['step_share_of_bandwidth']:.0%} at context {one['context']}" for one in firsts)
    console.print(
        f"a plain step reads its weights at this share of the memory's {data[0]['bandwidth_gb_per_s']:.0f} GB/s: {share}"
    )


MEASURED = {
    "draft": "draft",
    "draft_head": "its head",
    "draft_top_k": "top 16",
    "verify": "verify",
    "verify_head": "its head",
    "extend": "extend",
    "round": "round",
}
"""Parts of a round and their names in the table of measurements."""


def show_estimated(console: Console, topology: str, data: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each context, with lines for the parts of each block size."""
    layers = " and ".join(map(str, data[0]["layers_compiled"]))
    method = f"extrapolated from models of {layers} layers" if data[0]["extrapolated"] else "all layers compiled"
    metrics = (BLOCK, Metric("part", head="part", words=True), *ESTIMATES)
    for context, records in grouped(data, "context").items():
        rows = [{"at": 0, "block_size": "", "part": "plain step", **estimates(records[0], "step")}]
        for one in records:
            size = one["block_size"]
            for line, part in enumerate(part for part in ESTIMATED if f"{part}_cycles" in one):
                head = {"at": size, "block_size": "" if line else str(size), "part": ESTIMATED[part]}
                rows.append(head | estimates(one, part))
        title = f"a round on {topology} at context {context}, {method}"
        print_table(console, FigureTable(title, "", {"": rows}, metrics, section_by="at", unknown=""))
    console.print(FOOTNOTE.format(base=data[0]["base_block_size"]))


ESTIMATED = {
    "draft": "draft",
    "draft_head": "  its head",
    "draft_head_xla": "  … by XLA",
    "draft_top_k": "  its top 16",
    "draft_top_k_xla": "  … by XLA",
    "verify": "verify",
    "verify_tree": "verify a tree",
    "verify_head": "  its head",
    "verify_head_xla": "  … by XLA",
    "extend": "extend",
}
"""Parts of a round and their names in the table of estimates. A tree has as many nodes as the block has tokens.
The blockwise heads are compared with XLA's. A DFlash 2 drafter selects each slot's top 16 tokens, a DFlash drafter the
best one."""


ESTIMATES = (
    Metric("cycles", head="cycles", form=",.0f", factor=1e-3),
    Metric("memory_cycles", head="HBM", form=",.0f", factor=1e-3),
    Metric("bound_cycles", head="larger", form=",.0f", factor=1e-3),
    Metric("bound_cycles_ratio", head="×", form=".2f"),
    Metric("read_bytes", head="MB read", form=",.0f", factor=1e-6),
    Metric("written_bytes", head="written", form=",.1f", factor=1e-6),
    Metric("peak_bytes", head="GB", form=".1f", factor=1e-9),
)
"""Columns of the table of estimates."""


def estimates(one: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Returns the figures of a part in a record. Only draft, verification and extension have a ratio."""
    return {metric.name: one.get(f"{part}_{metric.name}") for metric in ESTIMATES}


if __name__ == "__main__":
    app = App(help=__doc__)
    app.default(main)
    app()
