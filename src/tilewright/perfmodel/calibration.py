"""Calibration: model constants fitted to measured collectives and matmuls, with uncertainty and errors on held-out times.

Two kinds of files are read: JSON of `tilewright bench overlap --micro --json` on several devices, and the output of
    `nccom-test`, AWS's tester of collectives, with its command line above each table.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, isfinite, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tilewright.hardware.collectives import COLLECTIVES
from tilewright.hardware.links import HOP_US, Fabric, Torus
from tilewright.hardware.ranged import Ranged
from tilewright.hardware.tpu import TpuChip
from tilewright.perfmodel.uncertainty import MODEL_ERROR, Basis

PERMUTE = "collective-permute"
PRODUCT = "product"
MEMORY = "memory"

LEAST_POINTS = 4
"""Minimum points of a file; half of the points are fitted, the rest held out."""

STANDARD_ERRORS = 2.0
"""Standard errors, in the logarithm, from a fitted constant to the ends of its range."""

MOST_STEPS = 60
ENOUGH = 1e-9
MOST_DAMPING = 1e9
"""Maximum steps of the fit. The fit ends when a step lowers the sum of squares by less than the share `ENOUGH`, or when the
damping exceeds `MOST_DAMPING`."""

OPERATIONS = {
    "allr": "all-reduce",
    "all_reduce": "all-reduce",
    "allg": "all-gather",
    "all_gather": "all-gather",
    "redsct": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "sendrecv": PERMUTE,
    "permute": PERMUTE,
}
"""Collectives by nccom-test's names."""

NCCOM_ROW = "size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)"


class Measurement(NamedTuple):
    """A timed collective, matmul or pass through memory.

    Attributes:
        kind: a collective, `product` (a matmul) or `memory`.
        devices: number of devices.
        whole_bytes: bytes of the whole array: a device's input of an all-reduce, a reduce-scatter, an all-to-all or a permute,
            its output of an all-gather; for `product` and `memory`, the bytes that a device reads and writes.
        us: microseconds.
        flops: flops of a matmul.
    """

    kind: str
    devices: int
    whole_bytes: float
    us: float
    flops: float = 0.0


@dataclass(frozen=True)
class MeasurementFile:
    """Measurements of one file.

    Attributes:
        name: name of the file, with the devices where the file names them.
        tester: `micro` or `nccom-test`.
        measurements: measurements of the file.
    """

    name: str
    tester: str
    measurements: tuple[Measurement, ...] = field(repr=False)


def read_measurements(path: Path) -> MeasurementFile:
    """Reads a measurement file of either kind.

    Raises:
        ValueError: the file has another content, or too few points.
    """
    text = path.read_text(encoding="utf-8")
    found = micro_measurements(path, text) if text.lstrip().startswith(("{", "[")) else nccom_measurements(path, text)
    collectives = sum(one.kind not in (PRODUCT, MEMORY) for one in found.measurements)
    if collectives < LEAST_POINTS:
        raise ValueError(f"{path}: expected at least {LEAST_POINTS} measured collectives, found {collectives}")
    return found


def micro_measurements(path: Path, text: str) -> MeasurementFile:
    """Reads the JSON of `bench overlap --micro --json` on several devices; see `read_measurements`."""
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not data.get("measured") or not isinstance(data.get("devices"), int):
        raise ValueError(
            f"{path}: expected the JSON of `bench overlap --micro --json` on several devices, with `devices` and `measured` "
            "records; found something else"
        )
    measurements = []
    devices = data["devices"]
    for one in data["measured"]:
        try:
            kind = one["collective"]
            size = float(one["size_bytes"])
            count = one["collectives"]
            collective_us = float(one["collective_us"])
            product_us = float(one["product_us"])
            product = Measurement(PRODUCT, devices, float(one["product_bytes"]), product_us, float(one["product_flops"]))
            memory = Measurement(MEMORY, devices, float(one["memory_bytes"]), float(one["memory_us"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected a measured record of `bench overlap --micro`, found {one!r}") from error
        if count == 1:  # compilers merge two collectives or run them in parallel
            measurements.append(Measurement(kind, devices, size * (devices if kind == "all-gather" else 1), collective_us))
        measurements += [product, memory]
    checked(path, measurements)
    return MeasurementFile(f"{path.name}, {devices} devices, {data.get('measured_on')}", "micro", tuple(measurements))


def nccom_measurements(path: Path, text: str) -> MeasurementFile:
    """Reads tables of nccom-test, each below its command line; see `read_measurements`."""
    measurements: list[Measurement] = []
    kind = None
    ranks = 0
    for line in text.splitlines():
        if "nccom-test" in line:
            kind, ranks = nccom_command(path, line[line.index("nccom-test") :])
        elif re.match(r"\s*\d+\s", line):
            if kind is None:
                raise ValueError(
                    f"{path}: expected the command line, nccom-test -r N allr, above its table; found a table alone"
                )
            words = line.split()
            try:
                measurements.append(Measurement(kind, ranks, float(words[0]), float(words[3])))
            except (IndexError, ValueError) as error:
                raise ValueError(f"{path}: expected a row of {NCCOM_ROW}, found {line.strip()!r}") from error
    if not measurements:
        raise ValueError(f"{path}: expected JSON of `bench overlap --micro` or a table of nccom-test, found neither")
    checked(path, measurements)
    return MeasurementFile(f"{path.name}, nccom-test", "nccom-test", tuple(measurements))


def nccom_command(path: Path, line: str) -> tuple[str, int]:
    """Reads the collective and the number of ranks from a command line."""
    words = shlex.split(line)
    kind = next((OPERATIONS[word] for word in words if word in OPERATIONS), None)
    ranks = next((after for word, after in pairwise(words) if word in ("-r", "--nworkers")), "")
    if kind is None or not ranks.isdecimal() or int(ranks) < 2:
        raise ValueError(f"{path}: expected nccom-test -r N with one of {', '.join(OPERATIONS)}, found {line!r}")
    return kind, int(ranks)


def checked(path: Path, measurements: Sequence[Measurement]) -> None:
    """Raises ValueError for impossible measurements."""
    for one in measurements:
        if one.kind not in (*COLLECTIVES, PERMUTE, PRODUCT, MEMORY):
            raise ValueError(f"{path}: expected a collective of {', '.join((*COLLECTIVES, PERMUTE))}, found {one.kind!r}")
        if not (one.us > 0 and isfinite(one.us) and one.whole_bytes > 0 and one.devices > 1):
            raise ValueError(f"{path}: expected bytes and microseconds above 0 on at least 2 devices, found {one}")


Times = Callable[[Mapping[str, float], Sequence[Measurement]], Sequence[float]]
"""A model: microseconds of measurements, from values of constants; missing constants keep their defaults."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Constants fitted to part of a file's measurements.

    Attributes:
        source: name of the file.
        constants: fitted values with ranges, by name.
        unconstrained: constants that no fitted time depends on; they keep their defaults.
        fitted, held_out: measurements with the fitted model's times in microseconds.
    """

    source: str
    constants: Mapping[str, Ranged]
    unconstrained: tuple[str, ...]
    fitted: tuple[tuple[Measurement, float], ...] = field(repr=False)
    held_out: tuple[tuple[Measurement, float], ...] = field(repr=False)

    @property
    def error(self) -> float:
        """Geometric mean of the error factors of held-out times, minus 1."""
        return exp(sum(abs(log(found / one.us)) for one, found in self.held_out) / len(self.held_out)) - 1

    @property
    def model_error(self) -> Ranged:
        """Unexplained error factor: two root mean squares of the log ratios of held-out times."""
        spread = (sum(log(found / one.us) ** 2 for one, found in self.held_out) / len(self.held_out)) ** 0.5
        return Ranged(1.0, exp(-2 * spread), exp(2 * spread))

    def record(self) -> dict[str, Any]:
        """Returns metrics, named as in docs/metrics.md."""
        roles = (("fitted", self.fitted), ("held out", self.held_out))
        rows = [(one, found, role) for role, rows in roles for one, found in rows]
        return {
            "calibrated_against": self.source,
            "constants": {name: [value.low, float(value), value.high] for name, value in self.constants.items()},
            "unconstrained": list(self.unconstrained),
            "residual": self.error,
            "points": [
                {
                    "kind": one.kind,
                    "devices": one.devices,
                    "bytes": one.whole_bytes,
                    "role": role,
                    "measured_us": one.us,
                    "modelled_us": found,
                }
                for one, found, role in sorted(rows, key=lambda row: row[0])
            ],
        }


def prediction_basis(calibration: Calibration | None, roofline_share: float | None = None) -> Basis:
    """Returns the `Basis` of predictions, with or without fitted constants."""
    if calibration is None:
        return Basis(roofline_share=roofline_share)
    return Basis(calibration.source, calibration.error, roofline_share)


def constants_to_sweep(calibration: Calibration | None, constants: Mapping[str, Ranged]) -> dict[str, Ranged]:
    """Returns the constants that a sweep draws, with the error of the fitted model if there is a fit."""
    return dict(constants) if calibration is None else {**constants, MODEL_ERROR: calibration.model_error}


def calibrate(name: str, measurements: Sequence[Measurement], times: Times, start: Mapping[str, float]) -> Calibration:
    """Fits constants to every second measurement, ordered by kind, devices and size, and tests them on the rest.

    Repeated measurements count once, by their median.

    Args:
        name: name of the file, for messages.
        measurements: measurements to fit.
        times: model.
        start: start value of each constant to fit. Start a bandwidth below its expected value, so that it limits times.

    Raises:
        ValueError: fewer than four measurements, or measurements that do not determine the constants.
    """
    repeated: dict[Measurement, list[float]] = {}
    for one in measurements:
        repeated.setdefault(one._replace(us=0.0), []).append(one.us)
    ordered = sorted(one._replace(us=median(times_us)) for one, times_us in repeated.items())
    if len(ordered) < LEAST_POINTS:
        raise ValueError(f"{name}: expected at least {LEAST_POINTS} points, 2 of them to hold out, found {len(ordered)}")
    fitted = ordered[::2]
    held_out = ordered[1::2]
    constants, unconstrained = least_squares(name, fitted, times, start)

    def modelled(rows: Sequence[Measurement]) -> tuple[tuple[Measurement, float], ...]:
        return tuple(zip(rows, times(constants, rows), strict=True))

    return Calibration(name, constants, unconstrained, modelled(fitted), modelled(held_out))


def least_squares(
    name: str, fitted: Sequence[Measurement], times: Times, start: Mapping[str, float]
) -> tuple[dict[str, Ranged], tuple[str, ...]]:
    """Fits log constants to log times by Levenberg-Marquardt with numeric derivatives.

    Standard errors are those of linear least squares at the end of the search, with the variance of the residuals.

    Returns:
        the constants with ranges of `STANDARD_ERRORS`, and the names of constants that no time depends on.

    Raises:
        ValueError: not more measurements than constants, or a diverging fit.
    """
    names = list(start)
    measured = np.log([one.us for one in fitted])
    if len(fitted) <= len(names):
        raise ValueError(f"{name}: expected more fitted points than the {len(names)} constants, found {len(fitted)}")

    def residuals(at: np.ndarray) -> np.ndarray:
        return np.log(np.array(times(dict(zip(names, map(float, np.exp(at)), strict=True)), fitted))) - measured

    begin = np.log([start[each] for each in names])
    at, off, slope = descended(residuals, begin)
    moves = np.linalg.norm(slope, axis=0) > 1e-6
    if not moves.any() or np.max(np.abs(at - begin)[moves]) > log(1e6):
        raise ValueError(f"{name}: expected times that determine {' and '.join(names)}, found times that do not depend on them")
    variance = off @ off / (len(fitted) - int(moves.sum()))
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(slope[:, moves].T @ slope[:, moves])))
    determined = [each for each, moved in zip(names, moves, strict=True) if moved]
    found = {}
    for each, value, error in zip(determined, at[moves], errors, strict=True):
        width = STANDARD_ERRORS * float(error)
        found[each] = Ranged(exp(value), exp(value - width), exp(value + width))
    return found, tuple(each for each in names if each not in found)


def descended(residuals: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Minimises the sum of squared residuals from a start point.

    Returns:
        the minimum, and the residuals and their slopes at the minimum.
    """

    def slopes(at: np.ndarray) -> np.ndarray:
        step = 1e-4
        ahead = [(residuals(at + step * axis) - residuals(at - step * axis)) / (2 * step) for axis in np.eye(len(at))]
        return np.stack(ahead, 1)

    off = residuals(at)
    slope = slopes(at)
    damping = 1e-2
    for _ in range(MOST_STEPS):
        move = np.linalg.solve(slope.T @ slope + damping * np.eye(len(at)), -slope.T @ off)
        tried = residuals(at + move)
        if tried @ tried < off @ off:
            gained = 1 - (tried @ tried) / (off @ off)
            at = at + move
            off = tried
            damping = damping / 10
            slope = slopes(at)
            if gained < ENOUGH:
                break
        else:
            damping *= 10
            if damping > MOST_DAMPING:
                break
    return at, off, slope


FABRIC_CONSTANTS = ("hop_us", "start_us")
"""Constants of a `Fabric`; all other constants belong to its chip."""


def chip_with(chip: TpuChip, changes: Mapping[str, float]) -> TpuChip:
    """Returns the chip with changed constants, except those of the fabric."""
    return replace(chip, **{name: value for name, value in changes.items() if name not in FABRIC_CONSTANTS})


def with_constants(fabric: Fabric, changes: Mapping[str, float]) -> Fabric:
    """Returns the slice with changed constants, named as in `TpuChip` and `Fabric`."""
    latencies = {name: value for name, value in changes.items() if name in FABRIC_CONSTANTS}
    return replace(fabric, chip=chip_with(fabric.chip, changes), **latencies)


def calibrated_chip(chip: TpuChip, calibration: Calibration | None) -> TpuChip:
    """Returns the chip with fitted constants; unchanged without a calibration."""
    return chip if calibration is None else chip_with(chip, calibration.constants)


def calibrated(fabric: Fabric, calibration: Calibration | None) -> Fabric:
    """Returns the slice with fitted constants; unchanged without a calibration."""
    return fabric if calibration is None else with_constants(fabric, calibration.constants)


def tpu_times(chip: TpuChip) -> Times:
    """Returns the closed-form model of a chip and its links, as a ring of all devices."""

    def times(changes: Mapping[str, float], measurements: Sequence[Measurement]) -> list[float]:
        rings = {one.devices: ring_of(one.devices) for one in measurements}
        fabrics = {devices: with_constants(ring, changes) for devices, ring in rings.items()}
        return [1e6 * seconds(fabrics[one.devices], one) for one in measurements]

    def ring_of(devices: int) -> Fabric:
        return Fabric(chip, Torus((devices,), (True,)), tuple((place,) for place in range(devices)))

    def seconds(fabric: Fabric, one: Measurement) -> float:
        if one.kind in (PRODUCT, MEMORY):
            return fabric.chip.roofline_seconds(one.whole_bytes, one.flops)
        if one.kind == PERMUTE:
            pairs = [(place, (place + 1) % one.devices) for place in range(one.devices)]
            return fabric.permute(pairs, one.whole_bytes).seconds
        return fabric.collective(one.kind, [range(one.devices)], one.whole_bytes).seconds

    return times


def calibrate_tpu(file: MeasurementFile, chip: TpuChip) -> Calibration:
    """Fits transfer start, hop latency, and rates of links, matmuls and memory to times of `bench overlap --micro`.

    Raises:
        ValueError: the file is from another tester; see `calibrate`.
    """
    if file.tester != "micro":
        raise ValueError(f"expected --calibrate with the JSON of `bench overlap --micro` for a TPU, found {file.name}")
    rates = ("ici_gb_per_s", "bf16_tflop_per_s", "hbm_gb_per_s")
    latencies = dict.fromkeys(FABRIC_CONSTANTS, float(HOP_US))
    start = {**latencies, **{name: getattr(chip, name) / 4 for name in rates}}
    return calibrate(file.name, file.measurements, tpu_times(chip), start)
