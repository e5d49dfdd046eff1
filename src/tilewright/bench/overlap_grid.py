"""Times to the first token and for each further one, by schedule and number of devices: predicted for absent TPUs.

A prediction puts together what `bench/overlap.py` compiles: the middle layer of a prefill of all prompts and that of a decoding
step half-way through the output, each times the model's layers, and the head by the chip's roofline. The embedding is left out:
it is one look-up and one sum of the stream, where every layer has two sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jax.sharding import AbstractMesh

from tilewright.bench.overlap import SYNC, OverlapRun, OverlapSetup, Phase, runs_of
from tilewright.models import decoder
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouping, shard_entries, shardings
from tilewright.perfmodel.timeline import Timeline
from tilewright.perfmodel.timeline_ranges import swept_timelines
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep
from tilewright.runtime.placement import divided_sizes

TILE = 128
"""Positions of a decoding step are rounded up to a multiple of this, so that caches fill whole tiles."""


@dataclass(frozen=True)
class GridCase:
    """Fixed shapes, and no traffic: all rows begin together.

    Attributes:
        input_tokens: of each prompt.
        output_tokens: that each row is given.
        batch: rows.
    """

    input_tokens: int
    output_tokens: int
    batch: int

    @property
    def positions(self) -> int:
        """Of a decoding step half-way through the output."""
        return -(-(self.input_tokens + self.output_tokens // 2) // TILE) * TILE

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """The prefill and the decoding step."""
        return Phase("prefill", self.batch, self.input_tokens), Phase("decode", self.batch, self.positions)

    def figures(self, ttft_s: float, tpot_s: float) -> dict[str, Any]:
        """Record of the case with its TTFT, TPOT and throughput."""
        about = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "batch_rows": self.batch}
        return {**about, "ttft_ms": 1e3 * ttft_s, "tpot_ms": 1e3 * tpot_s, "output_tokens_per_s": self.batch / tpot_s}


def head_s(setup: OverlapSetup, rows: int) -> float:
    """The head over the last position of each row, on the device's part of the vocabulary: no less than the roofline."""
    hidden = setup.config.hidden_size
    vocabulary = setup.config.vocab_size / setup.devices
    return setup.spec.roofline_seconds(2 * hidden * vocabulary, 2 * rows * hidden * vocabulary)


def device_gb(setup: OverlapSetup, case: GridCase) -> float:
    """Memory of a device that weights and caches in bfloat16 take, in 1e9 bytes; activations are not counted."""
    config = setup.config
    devices = setup.devices
    kv, group = grouping(devices, **divided_sizes(config))
    layers = decoder.declare(config).layers
    held = shard_entries(layers, shardings(layers, AbstractMesh((kv, group), GROUPED_AXES), GROUPED))
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size / devices
    row = 2 * config.num_layers * config.num_kv_heads / kv * config.head_dim * (case.input_tokens + case.output_tokens)
    return 2 * (held + tables + case.batch * row) / 1e9


def predictions(
    setups: Sequence[OverlapSetup],
    cases: Sequence[GridCase],
    schedules: Sequence[str],
    on_run: Callable[[str], None] = lambda _: None,
    draws: int = EVENT_DRAWS,
) -> tuple[list[dict[str, Any]], dict[str, Sweep]]:
    """A record for each setup, case and schedule, as docs/metrics.md defines it, and the ranges of each setup and case.

    Args:
        on_run: is told of each program before it.
        draws: of the constants that have a range.

    Raises:
        ValueError: a schedule cannot divide a batch.
    """
    found = []
    drawn = {}
    for setup, case in product(setups, cases):
        prefills, decodes = (runs_of(setup, phase, schedules, on_run) for phase in case.phases)
        place = f"{setup.chip}, batch {case.batch}, {case.input_tokens:,} tokens in"
        for name, runs in (("TTFT ms", prefills), ("TPOT ms", decodes)):
            drawn[f"{place}, {name}"] = model_sweep(setup, case, runs, draws, name)
        found += [prediction(case, *runs) for runs in zip(prefills, decodes, strict=True)]
    for name in ("ttft", "tpot", "prefill_compute"):
        for record, share in zip(found, against_sync(found, f"{name}_ms"), strict=True):
            record[f"{name}_over_sync"] = share
    return found, drawn


def model_sweep(setup: OverlapSetup, case: GridCase, runs: Sequence[OverlapRun], draws: int, unit: str) -> Sweep:
    """Ranges of a phase under all schedules: the reported layer times the layers; the head is as it is."""
    same = {run.schedule: run for run in runs}
    head_ms = 1e3 * head_s(setup, case.batch)
    share = max(run.roofline_share for run in runs)

    def milliseconds(name: str, timeline: Timeline) -> float:
        return setup.config.num_layers * same[name].total_ms(timeline) + head_ms

    timelines = {name: run.timeline for name, run in same.items()}
    return swept_timelines(timelines, setup.fabric, milliseconds, setup.calibration, share, draws, unit)


def prediction(case: GridCase, prefill: OverlapRun, decode: OverlapRun) -> dict[str, Any]:
    """The record of one case from its two programs."""
    setup = prefill.setup
    both = {"prefill": prefill, "decode": decode}
    layers = setup.config.num_layers
    head = head_s(setup, case.batch)
    first, step = (layers * run.layer.total_s + head for run in both.values())
    needs = device_gb(setup, case)
    return {
        "chip": setup.chip,
        "devices": setup.devices,
        "schedule": prefill.schedule,
        **case.figures(first, step),
        **{f"{phase}_compute_ms": 1e3 * layers * run.layer.compute_s for phase, run in both.items()},
        **{f"{phase}_exposed_ms": 1e3 * layers * run.layer.exposed_s for phase, run in both.items()},
        "head_ms": 1e3 * head,
        "decode_positions": decode.phase.positions,
        "device_gb": needs,
        "fits": needs < setup.spec.hbm_gb,
        **{f"{phase}_layers_compiled": run.layers for phase, run in both.items()},
        **{f"{phase}_steady": run.steady for phase, run in both.items()},
        **{f"{phase}_without_estimate": run.without_estimate for phase, run in both.items()},
        **{f"{phase}_roofline_share": run.roofline_share for phase, run in both.items()},
        "compile_s": prefill.compile_s + decode.compile_s,
        "notes": [*dict.fromkeys([*prefill.notes, *decode.notes])],
    }


def scaled(case: GridCase, divisor: int) -> GridCase:
    """The case with this part of its tokens, for devices that are here.

    Raises:
        ValueError: nothing would be left to time.
    """
    small = replace(case, input_tokens=case.input_tokens // divisor, output_tokens=case.output_tokens // divisor)
    if small.input_tokens < 2 or small.output_tokens < 2:
        raise ValueError(
            f"expected at least {2 * divisor} input and output tokens, of which one in {divisor} is left here, found "
            f"{case.input_tokens} and {case.output_tokens}"
        )
    return small


def against_sync(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """A figure of each record over that of `SYNC` in the same case and place; None where that was not asked for."""
    same = ("chip", "devices", "input_tokens", "output_tokens", "batch_rows")
    sync = {tuple(one[key] for key in same): one[name] for one in records if one["schedule"] == SYNC}
    found = [(one[name], sync.get(tuple(one[key] for key in same))) for one in records]
    return [None if other is None else own / other for own, other in found]
