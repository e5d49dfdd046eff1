"""Measures decoding on a GPU against the limit of its memory, then trains SmolLM2's drafter for the rest of the time.

    python benchmarks/gpu.py [--minutes 9] [--json FILE]
    python benchmarks/gpu.py --quick            # the same parts in small; also for a CPU

SmolLM2-135M-Instruct, and random weights of Qwen3-4B's shape, decode without a drafter, with n-grams and with DFlash 2, in
bfloat16 and 8 bits, in batches of 1, 8 and 64. A part is one model, format and batch, in which the decodings alternate. It is
skipped with a line if it does not fit the remaining minutes, by the last part of its model. The JSON file is written
after each part. A row of the tables and of `data`:

- `tokens_per_s`, `tau`: tokens per second of all rows; tokens per round and row. Random weights accept drafts by chance, so
  their drafters have neither.
- `round_ms`: time of a round (without a drafter: a step) in dispatches of many rounds.
- `limit_ms`, `of_limit`: least time to read a round's bytes at the measured bandwidth, and its share of `round_ms`. The bytes
  are the weights of target and drafter, once, and the target's KV cache up to the mean position of the run.
- `dispatch_ms`: time of a dispatch of one round, as the host sees it: a round and the cost of a dispatch.
- `device_ms`: time of a round's operations in a profiler's trace, summed over streams (on a CPU: threads). Far below
  `round_ms`, the device waits. XLA turns off CUDA graphs while it is profiled.
- `matmul_share`, `other_share`, `kernel_share`: shares of `device_ms` in XLA's matrix products, in everything else by XLA, and
  in this package's kernels. `longest` has the longest operations and the Python code that they stem from.

Times are medians. Training runs the first part of the recipe in `smollm2_drafter.py` with as many steps as fit, and keeps no
drafter.
"""

import datetime
import gc
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_drafter
from cyclopts import App
from rich.console import Console
from round_parts import memory_rate

from tilewright.cli.common import fetch_published, keep_programs
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.hlo import HloOp, Module, read_module
from tilewright.compiled.machine import chip_name
from tilewright.compiled.store import warm
from tilewright.compiled.timing import alternate
from tilewright.kernels.select import Weights
from tilewright.llm.language_model import LanguageModel, load
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, grouped, print_table
from tilewright.models import checkpoint, decoder, dflash2, params
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.hub import PACKAGED
from tilewright.models.published_configs import DFLASH_B16, MODELS
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.perfmodel.traced import module_name, program_in
from tilewright.perfmodel.xplane import read_trace
from tilewright.runtime.memory import held_bytes, step_bytes
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.dflash2 import DFlash2
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions
from tilewright.train.records import Records

BEGAN = time.perf_counter()
PLAIN = "plain"
BLOCK = 8
"""Tokens of a drafted block, the last committed token included."""
PROMPT_TOKENS = 64
"""Maximum number of tokens of a prompt."""
SINGLE_ROUNDS, TRACED_ROUNDS = 5, 8
"""Dispatches of one round in a run; rounds of the traced dispatch."""
LONGEST = 12
"""Number of operations in `longest`."""
TASKS = ("Explain {}.", "Write about {}.", "List facts about {}.", "What is {}?", "Draw {} in Python.", "Who needs {}?")
TOPICS = ("rain", "primes", "the heart", "trains", "chess", "bread", "volcanoes", "sorting", "tea", "maps", "glass")
"""Their combinations are the prompts of a chat model."""
FORMATS: dict[str, Weights] = {"bfloat16": "auto", "8 bits": "int8"}
MATMULS = ("__cublas", "__cudnn", "__onednn")
KERNELS = ("tilewright", "mosaic", "__gpu$xla.gpu.triton")
"""Prefixes of the targets of custom calls: products in libraries that XLA calls; kernels of this package (C++, Pallas)."""
COLUMNS = (
    Metric("batch", head="batch"),
    Metric("tokens_per_s", head="tokens/s", form=",.0f"),
    Metric("tau", head="τ", form=".2f"),
    Metric("round_ms", head="round ms", digits=3),
    Metric("limit_ms", head="limit", digits=3),
    Metric("of_limit", head="%", form=".0%"),
    Metric("dispatch_ms", head="dispatch", digits=3),
    Metric("device_ms", head="device", digits=3),
    Metric("matmul_share", head="matmuls", form=".0%"),
    Metric("other_share", head="other", form=".0%"),
    Metric("kernel_share", head="kernels", form=".0%"),
)

app = App(help=__doc__)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        batches: numbers of rows.
        repetitions: alternating runs of each decoding, each of `dispatches` dispatches of `rounds` rounds.
        shape: name of the model with random weights.
        probe_steps: training steps that measure the time of a step; their time includes an evaluation.
        recipe: changes of the recipe of training.
        guesses: seconds of the first part of each model, and of training.
    """

    batches: tuple[int, ...] = (1, 8, 64)
    repetitions: int = 3
    dispatches: int = 2
    rounds: int = 32
    shape: str = "Qwen3-4B's shape"
    probe_steps: int = 30
    recipe: Mapping[str, Any] = field(default_factory=dict)
    guesses: Mapping[str, float] = field(default_factory=lambda: {"SmolLM2": 45, "Qwen3-4B's shape": 60, "training": 60})

    @property
    def sampling(self) -> Sampling:
        """Sampling of texts that no run finishes."""
        return Sampling((SINGLE_ROUNDS + self.dispatches * self.rounds) * BLOCK, ignore_eos=True)

    @property
    def table(self) -> ShapeTable:
        return ShapeTable(batches=self.batches, capacities=(256, 1024))

    def configs(self) -> tuple[decoder.DecoderConfig, DFlash2Config]:
        """Returns the configurations of the target and the drafter with random weights."""
        if self.shape == Sizes.shape:  # no DFlash 2 drafter of it is published: DFlash's sizes, and DFlash 2's usual ones
            more: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
            return MODELS["qwen3-4b"], DFlash2Config(**vars(DFLASH_B16), **more)
        target = checkpoint.decoder_config(PACKAGED["demo"])
        return target, dflash2.config_from_hf(checkpoint.read_config(PACKAGED["demo-dflash2"]), "demo-dflash2", target)


QUICK = Sizes(
    batches=(1, 4),
    repetitions=1,
    dispatches=1,
    rounds=8,
    shape="the demo's shape",
    probe_steps=1,
    recipe={"batch-size": 2, "sequence-length": 192, "held-out": 0.1, "loss": {"dpace": 0.5, "anchors": 4}},
    guesses={"SmolLM2": 40, "the demo's shape": 15, "training": 40},
)


class Measurement:
    """Results so far, their file, and the time budget.

    Attributes:
        end: end of the budget, by `time.perf_counter()`.
        record: figures of `--json`.
        expected: seconds of the next part of each model, and of training: those of its last part, at first a guess.
    """

    def __init__(self, quick: bool, minutes: float, json_file: str | None):
        self.sizes = QUICK if quick else Sizes()
        self.json_file = json_file
        self.console: Console = human_console(json_file)
        self.end = BEGAN + 60 * minutes
        self.expected = dict(self.sizes.guesses)
        about = {"date": datetime.date.today().isoformat(), "chip": chip_name(), "jax_version": jax.__version__}
        options = {"minutes": minutes, "quick": quick, "block_size": BLOCK, "prompt_tokens": PROMPT_TOKENS}
        self.record: dict[str, Any] = {**about, **options, "data": [], "skipped": {}, "failed": {}}

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return max(0.0, self.end - time.perf_counter())

    def skip(self, name: str, reason: str) -> None:
        self.record["skipped"][name] = reason
        self.console.print(f"skipped {name}: {reason}", markup=False)

    def run(self, model: str, name: str, part: Callable[[], None]) -> None:
        """Runs a part if it is expected to fit, stops it at the end of the budget, and writes all results.

        A failed part is recorded, and the next one runs, since access to a GPU is short.
        """
        if self.expected[model] > self.left:
            self.skip(name, f"{self.expected[model]:.0f} s expected, {self.left:.0f} s left")
        else:
            began = time.perf_counter()
            try:
                with interrupted_after(self.left):
                    part()
            except BudgetOver:
                self.skip(name, "interrupted at the end of the budget")
            except Exception as error:
                self.record["failed"][name] = traceback.format_exc()
                self.console.print(f"failed {name}: {type(error).__name__}: {str(error)[:300]}", markup=False, style="red")
            self.expected[model] = time.perf_counter() - began
        write_json(self.json_file, self.record)

    def show(self) -> None:
        """Prints a table for each model and format."""
        for (model, weights), rows in grouped(self.record["data"], lambda row: (row["model"], row["weights"])).items():
            title = f"{model}, {weights}, {chip_name()}, {self.record['bandwidth_gb_per_s']:,.0f} GB/s"
            print_table(self.console, FigureTable(title, "decoding", {"": rows}, COLUMNS))


class BudgetOver(Exception):
    """Interrupts a part at the end of the budget."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises a `BudgetOver` in the main thread after some seconds."""

    def stop(*_: Any) -> None:
        raise BudgetOver

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def smollm2(sizes: Sizes, weights: Weights) -> LanguageModel:
    return load("smollm2-135m", "smollm2-dflash2", dtype="bfloat16", weights=weights, block_size=BLOCK, table=sizes.table)


def random_model(sizes: Sizes, weights: Weights) -> LanguageModel:
    """Draws a model and a drafter. Their texts are meaningless, with any tokenizer."""
    target, drafter = sizes.configs()
    keys = jax.random.split(jax.random.key(0))
    drawn = params.initialise(decoder.declare(target), keys[0], jnp.bfloat16)
    lm = LanguageModel(target, drawn, load_tokenizer(PACKAGED["demo"]), "bfloat16", weights, table=sizes.table)
    del drawn  # the model may have a copy in 8 bits
    arrays = params.initialise(dflash2.declare(drafter), keys[1], jnp.bfloat16)
    return lm.with_drafter(DFlash2(drafter, BLOCK, None, "bfloat16"), arrays)


def decodings(lm: LanguageModel) -> dict[str, LanguageModel]:
    ngrams = lm.with_drafter(*lm.load_drafter(NGRAM, DrafterOptions(BLOCK)))
    return {PLAIN: lm.with_drafter(None), NGRAM: ngrams, "dflash2": lm}


def prompts(lm: LanguageModel, count: int) -> list[list[int]]:
    """Returns conversations for a model with a folder, random tokens for a model without one."""
    if lm.folder is None:
        return np.random.default_rng(0).integers(3, lm.target.vocab_size, (count, PROMPT_TOKENS)).tolist()
    asks = [task.format(topic) for topic, task in product(TOPICS, TASKS)][:count]
    texts = [lm.chat_template.render([{"role": "user", "content": ask}]) for ask in asks]
    return [encode(lm.tokenizer, text, add_special_tokens=False)[-PROMPT_TOKENS:] for text in texts]


def decode(lm: LanguageModel, rows: Sequence[Sequence[int]], sizes: Sizes) -> dict[str, float]:
    """Decodes prompts once. Returns the seconds of a dispatch of one round and of a round, and tokens per second and round."""
    single = []
    tokens = seconds = rounds = 0.0
    with lm.start(rows, sizes.sampling) as stream:
        stream.prefill()
        for most in [1] * SINGLE_ROUNDS + [sizes.rounds] * sizes.dispatches:
            before = stream.rounds
            began = time.perf_counter()
            pieces = stream.advance(most)
            took = time.perf_counter() - began
            if most == 1:
                single.append(took)
            else:
                tokens += len(pieces)
                seconds += took
                rounds += stream.rounds - before
        lengths = [len(row) + len(result.tokens) / 2 for row, result in zip(rows, stream.results(), strict=True)]
    times = {"dispatch_s": statistics.median(single), "round_s": seconds / rounds, "positions": statistics.mean(lengths)}
    return {**times, "tokens_per_s": tokens / seconds, "tau": tokens / rounds / len(rows)}


def round_bytes(lm: LanguageModel, rows: int, positions: float) -> int:
    """Returns the least bytes that a round reads: all weights once, and the target's KV cache up to the mean position."""
    models = lm.model.models
    config = lm.target
    drafter = held_bytes((models.target, models.drafter)) - held_bytes(models.target)
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(jnp.bfloat16).itemsize
    return step_bytes(models.target, rows * (1 if lm.drafter is None else BLOCK)) + drafter + round(rows * positions * entry)


def device_times(lm: LanguageModel, rows: Sequence[Sequence[int]], sizes: Sizes) -> dict[str, Any]:
    """Traces a dispatch. Returns milliseconds of the device per round, their shares, and the longest operations."""
    with lm.start(rows, sizes.sampling) as stream, TemporaryDirectory() as folder:
        stream.prefill()
        stream.advance(1)
        before = stream.rounds
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            stream.advance(TRACED_ROUNDS)
        rounds = stream.rounds - before
        compiled = stream.engine.decoding.programs.compiled
        text = next(program.as_text() for key, program in compiled.items() if key.name == "rounds")
        traced = program_in(read_trace(Path(folder)), module_name(text))
    module = read_module(text)
    ops = {op.name: op for computation in module.computations.values() for op in computation.ops}
    ms = {name: 1e3 * traced.self_seconds([name]) / rounds for name in traced.ops}
    shares = {"matmul": 0.0, "other": 0.0, "kernel": 0.0}
    longest = []
    for name in sorted(ms, key=lambda name: -ms[name]):
        kind = kind_of(module, ops[name]) if name in ops else "other"
        shares[kind] += ms[name] / sum(ms.values())
        place = ops[name].op_name if name in ops else ""
        longest.append({"name": name, "kind": kind, "ms": ms[name], "calls": traced.ops[name].calls / rounds, "op_name": place})
    named = {f"{kind}_share": share for kind, share in shares.items()}
    return {"device_ms": sum(ms.values()), **named, "longest": longest[:LONGEST]}


def kind_of(module: Module, op: HloOp) -> str:
    """Returns "kernel" for a kernel of this package, "matmul" for a matrix product by XLA, "other" for all else."""
    if op.custom_call_target.startswith(KERNELS):
        return "kernel"
    inner = (each for name in op.callees("calls") if name in module.computations for each in module.computations[name].ops)
    is_matmul = op.custom_call_target.startswith(MATMULS) or any(each.opcode == "dot" for each in (op, *inner))
    return "matmul" if is_matmul else "other"


def decoding_part(measurement: Measurement, about: Mapping[str, str], ways: Mapping[str, LanguageModel], batch: int) -> None:
    """Measures all decodings of a model in one batch, in alternation, and adds a row for each."""
    sizes = measurement.sizes
    rows = prompts(ways[PLAIN], batch)
    streams = [lm.start(rows, sizes.sampling) for lm in ways.values()]
    warm((stream.engine.decoding.programs, key) for stream in streams for key in stream.keys)
    results = alternate({way: partial(decode, lm, rows, sizes) for way, lm in ways.items()}, sizes.repetitions)
    for way, lm in ways.items():
        found = {name: statistics.median(one[name] for one in results[way]) for name in results[way][0]}
        nbytes = round_bytes(lm, batch, found["positions"])
        limit = nbytes / 1e9 / measurement.record["bandwidth_gb_per_s"]
        meaningful = lm.folder is not None or way == PLAIN
        row = {
            "tokens_per_s": found["tokens_per_s"] if meaningful else None,
            "tau": found["tau"] if meaningful else None,
            "round_ms": 1e3 * found["round_s"],
            "round_range_ms": [1e3 * pick(one["round_s"] for one in results[way]) for pick in (min, max)],
            "round_bytes": nbytes,
            "limit_ms": 1e3 * limit,
            "of_limit": limit / found["round_s"],
            "dispatch_ms": 1e3 * found["dispatch_s"],
        }
        traced = device_times(lm, rows, sizes)
        measurement.record["data"].append({**about, "name": way, "batch": batch, **row, **traced})


def measure_model(
    measurement: Measurement, model: str, weights: str, load: Callable[[], LanguageModel], step: Callable[..., None]
) -> None:
    """Measures a model in all batches. The first part that fits loads the model."""
    ways: dict[str, LanguageModel] = {}

    def part(batch: int) -> None:
        ways.update(ways or decodings(load()))
        decoding_part(measurement, {"model": model, "weights": weights}, ways, batch)

    for batch in measurement.sizes.batches:
        name = f"{model}, {weights}, batch {batch}"
        step(name, 0)
        measurement.run(model, name, partial(part, batch))
        step()
    ways.clear()
    gc.collect()  # frees the device memory before the next model is loaded


def training_part(measurement: Measurement) -> None:
    """Trains a drafter for a few steps to measure a step's time, then another one for the remaining time."""
    sizes = measurement.sizes
    count = smollm2_drafter.FIRST_RECORDS if sizes is not QUICK else 64
    data = Records.load(smollm2_drafter.RECORDS).take(np.arange(count))
    with TemporaryDirectory() as folder:

        def trained(steps: int) -> dict[str, Any]:
            file = Path(folder) / f"{steps}.json"
            options = {**smollm2_drafter.FIRST, **sizes.recipe, "steps": steps, "save": f"every={steps}", "json": file}
            with redirect_stdout(measurement.console.file):
                smollm2_drafter.train_part(data, Path(folder) / f"{steps}", options)
            return json.loads(file.read_text(encoding="utf-8"))

        began = time.perf_counter()
        found = measurement.record["training"] = trained(sizes.probe_steps)
        step_s = (found["seconds"] - found["compile_seconds"]) / sizes.probe_steps
        once = time.perf_counter() - began - sizes.probe_steps * step_s
        fitting = int((0.9 * measurement.left - once) / step_s)
        steps = min(fitting, smollm2_drafter.FIRST["steps"] if sizes is not QUICK else 2 * sizes.probe_steps)
        if steps > sizes.probe_steps:
            found = measurement.record["training"] = trained(steps)
        else:
            measurement.skip("more training", f"{once + step_s:.0f} s expected, {measurement.left:.0f} s left")
    rates = " ".join(f"{100 * rate:.0f}" for rate in found["expected_acceptance"])
    speed = f"{found['steps']} steps, {found['tokens_per_s']:,.0f} tokens/s with compilation"
    measurement.console.print(f"training: {speed}, % accepted by position {rates}", markup=False)


@app.default
def main(*, minutes: float = 9.0, quick: bool = False, json_file: JsonFile = None) -> None:
    """Runs the parts that fit.

    Args:
        minutes: time budget.
        quick: tiny sizes, and the demo's shape in place of Qwen3-4B's.
    """
    if minutes <= 0:
        raise ValueError(f"expected --minutes above 0, found {minutes:g}")
    if jax.default_backend() == "cpu" and not quick:
        raise ValueError("expected a GPU or --quick, found a CPU: is jax[cuda13] installed?")
    measurement = Measurement(quick, minutes, json_file)
    sizes = measurement.sizes
    keep_programs()
    fetch_published("smollm2-135m", measurement.console)
    rate = memory_rate()
    measurement.record["bandwidth_gb_per_s"] = statistics.median(rate() for _ in range(5))
    del rate  # and its buffer
    models = {"SmolLM2": smollm2, sizes.shape: random_model}
    try:
        with progress(measurement.console, len(FORMATS) * len(models) * len(sizes.batches)) as step:
            for (weights, kind), (model, loader) in product(FORMATS.items(), models.items()):
                measure_model(measurement, model, weights, partial(loader, sizes, kind), step)
        if smollm2_drafter.RECORDS.is_file():
            measurement.run("training", "training", partial(training_part, measurement))
        else:
            measurement.skip("training", f"expected the records {smollm2_drafter.RECORDS}, found no file")
    finally:
        measurement.show()
        write_json(json_file, measurement.record)
    if measurement.record["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    app()
