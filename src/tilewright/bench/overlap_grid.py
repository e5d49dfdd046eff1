"""Predicted time to first token and time per output token on absent TPUs, by schedule and number of devices.

A prediction combines programs of `bench/overlap.py`: the middle layer of a prefill of all prompts, and that of a decoding step
halfway through the output, each multiplied by the number of layers, plus the head at the chip's roofline. The embedding (one
lookup and one sum of the stream) is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jax.sharding import AbstractMesh

from tilewright.bench.overlap import SYNC, OverlapRun, OverlapSetup, Phase, make_runs
from tilewright.models import decoder
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouping, shard_entries, shardings
from tilewright.perfmodel.timeline import Timeline
from tilewright.perfmodel.timeline_ranges import sweep_timelines
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep
from tilewright.runtime.placement import divided_sizes

TILE = 128
"""Positions of a decoding step are rounded up to a multiple of this, so that caches fill whole tiles."""


@dataclass(frozen=True)
class GridCase:
    """Fixed shapes without arrivals: all rows start together.

    Attributes:
        input_tokens: tokens of each prompt.
        output_tokens: tokens generated in each row.
        batch: number of rows.
    """

    input_tokens: int
    output_tokens: int
    batch: int

    @property
    def positions(self) -> int:
        """Positions of a decoding step halfway through the output."""
        return -(-(self.input_tokens + self.output_tokens // 2) // TILE) * TILE

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """The prefill and the decoding step."""
        return Phase("prefill", self.batch, self.input_tokens), Phase("decode", self.batch, self.positions)

    def figures(self, ttft_s: float, tpot_s: float) -> dict[str, Any]:
        """Returns a record of the case with TTFT, TPOT and throughput."""
        about = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "batch_rows": self.batch}
        return {**about, "ttft_ms": 1e3 * ttft_s, "tpot_ms": 1e3 * tpot_s, "output_tokens_per_s": self.batch / tpot_s}


def head_s(setup: OverlapSetup, rows: int) -> float:
    """Returns the seconds of the head at the last position of each row, on one device's part of the vocabulary, at the
    roofline."""
    hidden = setup.config.hidden_size
    vocabulary = setup.config.vocab_size / setup.devices
    return setup.spec.roofline_seconds(2 * hidden * vocabulary, 2 * rows * hidden * vocabulary)


def device_gb(setup: OverlapSetup, case: GridCase) -> float:
    """Returns the 1e9 bytes of weights and caches (bfloat16) on one device, without activations."""
    config = setup.config
    devices = setup.devices
    kv, group = grouping(devices, **divided_sizes(config))
    layers = decoder.declare(config).layers
    weight_bytes = shard_entries(layers, shardings(layers, AbstractMesh((kv, group), GROUPED_AXES), GROUPED))
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size / devices
    row = 2 * config.num_layers * config.num_kv_heads / kv * config.head_dim * (case.input_tokens + case.output_tokens)
    return 2 * (weight_bytes + tables + case.batch * row) / 1e9


def predictions(
    setups: Sequence[OverlapSetup],
    cases: Sequence[GridCase],
    schedules: Sequence[str],
    on_run: Callable[[str], None] = lambda _: None,
    draws: int = EVENT_DRAWS,
) -> tuple[list[dict[str, Any]], dict[str, Sweep]]:
    """Returns a record for each setup, case and schedule (docs/metrics.md), and the ranges of each setup and case.

    Args:
        on_run: called with the name of each program before its compilation.
        draws: number of draws of the uncertain constants.

    Raises:
        ValueError: A schedule cannot split a batch.
    """
    found = []
    drawn = {}
    for setup, case in product(setups, cases):
        prefills, decodes = (make_runs(setup, phase, schedules, on_run) for phase in case.phases)
        place = f"{setup.chip}, batch {case.batch}, {case.input_tokens:,} tokens in"
        for name, runs in (("TTFT ms", prefills), ("TPOT ms", decodes)):
            drawn[f"{place}, {name}"] = model_sweep(setup, case, runs, draws, name)
        found += [prediction(case, *runs) for runs in zip(prefills, decodes, strict=True)]
    for name in ("ttft", "tpot", "prefill_compute"):
        for record, share in zip(found, against_sync(found, f"{name}_ms"), strict=True):
            record[f"{name}_over_sync"] = share
    return found, drawn


def model_sweep(setup: OverlapSetup, case: GridCase, runs: Sequence[OverlapRun], draws: int, unit: str) -> Sweep:
    """Returns ranges of a phase under all schedules: the reported layer times the number of layers. The head has no range."""
    peers = {run.schedule: run for run in runs}
    head_ms = 1e3 * head_s(setup, case.batch)
    share = max(run.roofline_share for run in runs)

    def milliseconds(name: str, timeline: Timeline) -> float:
        return setup.config.num_layers * peers[name].total_ms(timeline) + head_ms

    timelines = {name: run.timeline for name, run in peers.items()}
    return sweep_timelines(timelines, setup.fabric, milliseconds, setup.calibration, share, draws, unit)


def prediction(case: GridCase, prefill: OverlapRun, decode: OverlapRun) -> dict[str, Any]:
    """Returns the record of one case from its two programs."""
    setup = prefill.setup
    phase_runs = {"prefill": prefill, "decode": decode}
    layers = setup.config.num_layers
    head = head_s(setup, case.batch)
    first, step = (layers * run.layer.total_s + head for run in phase_runs.values())
    required_gb = device_gb(setup, case)
    return {
        "chip": setup.chip,
        "devices": setup.devices,
        "schedule": prefill.schedule,
        **case.figures(first, step),
        **{f"{phase}_compute_ms": 1e3 * layers * run.layer.compute_s for phase, run in phase_runs.items()},
        **{f"{phase}_exposed_ms": 1e3 * layers * run.layer.exposed_s for phase, run in phase_runs.items()},
        "head_ms": 1e3 * head,
        "decode_positions": decode.phase.positions,
        "device_gb": required_gb,
        "fits": required_gb < setup.spec.hbm_gb,
        **{f"{phase}_layers_compiled": run.layers for phase, run in phase_runs.items()},
        **{f"{phase}_steady": run.steady for phase, run in phase_runs.items()},
        **{f"{phase}_without_estimate": run.without_estimate for phase, run in phase_runs.items()},
        **{f"{phase}_roofline_share": run.roofline_share for phase, run in phase_runs.items()},
        "compile_s": prefill.compile_s + decode.compile_s,
        "notes": [*dict.fromkeys([*prefill.notes, *decode.notes])],
    }


def scaled(case: GridCase, divisor: int) -> GridCase:
    """Returns the case with its tokens divided by `divisor`, for devices that are present.

    Raises:
        ValueError: No tokens would be left.
    """
    small = replace(case, input_tokens=case.input_tokens // divisor, output_tokens=case.output_tokens // divisor)
    if small.input_tokens < 2 or small.output_tokens < 2:
        raise ValueError(
            f"expected at least {2 * divisor} input and output tokens, of which one in {divisor} is left here, found "
            f"{case.input_tokens} and {case.output_tokens}"
        )
    return small


def against_sync(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Returns a figure of each record relative to `SYNC` in the same case and place; None without `SYNC`."""
    keys = ("chip", "devices", "input_tokens", "output_tokens", "batch_rows")
    sync = {tuple(one[key] for key in keys): one[name] for one in records if one["schedule"] == SYNC}
    found = [(one[name], sync.get(tuple(one[key] for key in keys))) for one in records]
    return [None if sync_value is None else value / sync_value for value, sync_value in found]
