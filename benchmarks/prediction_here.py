"""Compares the time of a layer on two devices of this CPU with the closed form, fitted to single collectives.

    XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false" \
        python benchmarks/prediction_here.py --json prediction-here.json

The constants (start of a transfer, latency of a hop, rates of links, matmuls and memory) are fitted to single collectives of
three sizes, measured as in `tilewright bench overlap --micro`. The closed form of `hardware/layers.py` then predicts a
decoder layer at three other sizes under `sync`, `sequence` and `ring`, with ranges, and these layers run in alternation. Each
device has one thread, hence one core. The closed form has no attention, so sequences are short.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tilewright.bench.overlap import Phase, program
from tilewright.bench.overlap_micro import AXIS, cases, measured
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate, spread
from tilewright.hardware.layers import ESTIMATES, StrategyCosts
from tilewright.hardware.links import Fabric, Torus
from tilewright.hardware.tpu import TpuChip
from tilewright.kernels.select import operations
from tilewright.models.decoder import DecoderConfig
from tilewright.parallel.auto import strategy_of
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import GROUPED_AXES, grouped_mesh
from tilewright.perfmodel.calibration import (
    Calibration,
    calibrate_tpu,
    calibrated,
    constants_to_sweep,
    prediction_basis,
    read_measurements,
    with_constants,
)
from tilewright.perfmodel.uncertainty import Sweep, sweep_constants
from tilewright.runtime.placement import divided_sizes, layer_shapes

DEVICES = 2
CONFIG = DecoderConfig(
    family="llama",
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1792,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=512,
)
SCHEDULES = ("sync", "sequence", "ring")
POSITIONS = 32
BATCHES = (12, 24, 48)
"""Positions per sequence and sequences per prefill: 384, 768 and 1,536 rows."""

SIZES_KIB = (128, 512, 2048)
"""Sizes of the fitted collectives. The collectives of the layers have 384, 768 and 1,536 KiB."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
START = TpuChip("this CPU", 20.0, 0.1, 1, 1, 1, 1, 1, 5.0, 1, 1, True)
"""Initial constants of the fit. The rates are guesses; other fields have no effect."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    options = parser.parse_args()
    if jax.device_count() != DEVICES:
        raise SystemExit(f"expected {DEVICES} devices, with XLA_FLAGS as above; found {jax.device_count()}")
    mesh = make_mesh({AXIS: DEVICES})
    single = [measured(case, mesh, options.repetitions) for case in cases(COLLECTIVES, SIZES_KIB, DEVICES, 512, 256)]
    micro = {"devices": DEVICES, "measured_on": chip_name(), "measured": single}
    options.json.write_text(json.dumps(micro), encoding="utf-8")  # in the form that `--calibrate` reads
    calibration = calibrate_tpu(read_measurements(options.json), START)
    layers = layer_times(options.repetitions)
    found = {
        **micro,
        "jax_version": jax.__version__,
        "repetitions": options.repetitions,
        "calibration": calibration.record(),
        **compared(calibration, layers),
    }
    options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    show(found)


def layer_times(repetitions: int) -> list[dict[str, Any]]:
    """Measures the milliseconds per layer for each batch and schedule: a quarter of four layers, schedules in alternation."""
    mesh = grouped_mesh(make_mesh({"tp": DEVICES}), "tp", **divided_sizes(CONFIG))
    found = []
    for batch in BATCHES:
        runs = {name: runner(mesh, Phase("prefill", batch, POSITIONS), name) for name in SCHEDULES}
        for name, times in alternate(runs, repetitions, warm=True).items():
            measured_times = spread([1e3 * seconds / CONFIG.num_layers for seconds in times])
            found.append(
                {
                    "rows": batch * POSITIONS,
                    "schedule": name,
                    "measured_ms": measured_times.median,
                    "measured_range_ms": measured_times.range,
                }
            )
    return found


def runner(mesh: Mesh, phase: Phase, name: str) -> Callable[[], float]:
    """Returns a function that runs the layers once on random numbers and returns the seconds."""
    ops = operations(kernels="xla")
    function, arguments = program(CONFIG, mesh, ops, phase, strategy_of(name, GROUPED_AXES, None, None))
    compiled = jax.jit(function).lower(*arguments).compile()
    values = jax.tree.map(partial(drawn, jax.random.key(0)), arguments)

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*values))
        return time.perf_counter() - start

    return timed


def drawn(key: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """Returns an array with this shape and sharding: small random numbers, or zeros for integers."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.device_put(jnp.zeros(shape.shape, shape.dtype), shape.sharding)
    return jax.device_put(0.02 * jax.random.normal(key, shape.shape, shape.dtype), shape.sharding)


def predicted(calibration: Calibration, rows: int) -> Sweep:
    """Predicts the milliseconds per layer under each schedule by the closed form, with ranges."""
    torus = Torus((DEVICES,), (False,))
    places = tuple((n,) for n in range(DEVICES))
    fabric = calibrated(Fabric(START, torus, places), calibration)
    layer = layer_shapes(CONFIG, DEVICES)

    def predict(changes: Mapping[str, float]) -> dict[str, float]:
        costs = StrategyCosts(with_constants(fabric, changes))
        return {name: 1e3 * ESTIMATES[name](costs, rows, layer).total_s for name in SCHEDULES}

    return sweep_constants(
        predict,
        constants_to_sweep(calibration, calibration.constants),
        unit="ms per layer",
        basis=prediction_basis(calibration),
    )


def compared(calibration: Calibration, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares predictions with measured times: the error, and the share of measured times within their ranges."""
    sweeps = {rows: predicted(calibration, rows) for rows in dict.fromkeys(one["rows"] for one in layers)}
    found = []
    for one in layers:
        sweep = sweeps[one["rows"]]
        name = one["schedule"]
        low, high = sweep.range(name)
        found.append(
            {
                **one,
                "predicted_ms": sweep.predicted[name],
                "predicted_range_ms": [low, high],
                "within": low <= one["measured_ms"] <= high,
                "first_in": sweep.first[name],
                "draws": sweep.draws,
            }
        )
    log_errors = [abs(log(one["predicted_ms"] / one["measured_ms"])) for one in found]
    return {
        "layers": found,
        "error": exp(sum(log_errors) / len(log_errors)) - 1,
        "coverage": sum(one["within"] for one in found) / len(found),
    }


def show(found: Mapping[str, Any]) -> None:
    for name, (low, value, high) in found["calibration"]["constants"].items():
        print(f"{name} {value:.4g} ({low:.4g} to {high:.4g})")
    print(f"mean error for single collectives outside the fit: {found['calibration']['residual']:.0%}")
    for one in found["layers"]:
        low, high = one["predicted_range_ms"]
        least, most = one["measured_range_ms"]
        measurement = f"measured {one['measured_ms']:.2f} ({least:.2f} to {most:.2f})"
        prediction = (
            f"predicted {one['predicted_ms']:.2f} ({low:.2f} to {high:.2f}) ms, first in {one['first_in']} of {one['draws']}"
        )
        print(f"{one['rows']:5} rows {one['schedule']:8} {prediction}; {measurement}")
    print(f"mean error for layers (geometric): {found['error']:.0%}; {found['coverage']:.0%} within their ranges")


if __name__ == "__main__":
    main()
