"""Ranges of predictions: a seeded sweep over constants with several published values or fitted ranges.

Constants are drawn by a Latin hypercube (McKay, Beckman and Conover, Technometrics 1979, section 2): of N draws, exactly one is
in each N-th of each range. Draws are uniform in the logarithm, because rates and latencies differ by factors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.hardware.ranged import Ranged
from tilewright.metrics.metric import significant

DRAWS = 100
"""Default draws of a closed form."""

EVENT_DRAWS = 24
"""Default draws of an event simulation."""

PERCENTILES = (10.0, 90.0)
"""Percentiles of the draws at the ends of a prediction's range."""

RANGE_TEXT = "10th to 90th percentile of the draws, widened to the figure itself"

UNCALIBRATED = "nothing: constants are published or working figures"

MODEL_ERROR = "model_error"
"""Name of the constant that `sweep_constants` multiplies all predictions of a draw with: the unexplained error of a
fitted model."""


def latin_hypercube(draws: int, dimensions: int, seed: int) -> np.ndarray:
    """Draws points `[draws, dimensions]` in [0, 1), one in each of `draws` equal parts of every dimension."""
    rng = np.random.default_rng(seed)
    parts = np.array([rng.permutation(draws) for _ in range(dimensions)], float).reshape(dimensions, draws).T
    return (parts + rng.random(parts.shape)) / draws


@dataclass(frozen=True)
class Basis:
    """Calibration behind a prediction.

    Attributes:
        calibrated_against: measurements that constants were fitted to.
        residual: geometric mean of the error factors of held-out measurements, minus 1; None without a fit.
        roofline_share: share of the compute time in operations without an estimate; None if all have one.
    """

    calibrated_against: str = UNCALIBRATED
    residual: float | None = None
    roofline_share: float | None = None


@dataclass(frozen=True, eq=False)
class Sweep:
    """Predictions at the default constants and at drawn constants.

    Attributes:
        unit: unit of the predictions, which are times.
        constants: drawn constants with their ranges, by name.
        drawn: drawn values, `[draws, constants]`.
        predicted: predictions at the default constants, by name.
        outcomes: predictions at each draw, `[draws]`, by name.
        seed: seed of the draws.
        basis: calibration behind the predictions.
        compared: True if the predictions are alternatives, the smallest being the best.
    """

    unit: str
    constants: Mapping[str, Ranged]
    drawn: np.ndarray = field(repr=False)
    predicted: Mapping[str, float]
    outcomes: Mapping[str, np.ndarray] = field(repr=False)
    seed: int
    basis: Basis
    compared: bool = True

    @property
    def draws(self) -> int:
        return len(self.drawn)

    @property
    def best(self) -> str:
        """Name of the smallest prediction at the default constants."""
        return min(self.predicted, key=lambda name: self.predicted[name])

    def range(self, name: str) -> tuple[float, float]:
        """Ends of a prediction's range; see `RANGE_TEXT`."""
        low, high = np.percentile(self.outcomes[name], PERCENTILES)
        return min(float(low), self.predicted[name]), max(float(high), self.predicted[name])

    @cached_property
    def first(self) -> dict[str, int]:
        """Number of draws in which each prediction is the smallest; ties go to the first by name."""
        names = sorted(self.outcomes)
        winners = np.argmin(np.stack([self.outcomes[name] for name in names]), axis=0)
        return {name: int(np.sum(winners == at)) for at, name in enumerate(names)}

    def decides(self, name: str) -> tuple[str, float] | None:
        """Returns the constant with the largest rank correlation to a prediction, and the correlation; None if all are 0."""
        found = [
            (constant, rank_correlation(self.drawn[:, at], self.outcomes[name])) for at, constant in enumerate(self.constants)
        ]
        best = max(found, key=lambda one: abs(one[1]), default=None)
        return None if best is None or best[1] == 0 else best

    def record(self) -> dict[str, Any]:
        """Returns metrics, named as in docs/metrics.md."""
        return {
            "unit": self.unit,
            "draws": self.draws,
            "seed": self.seed,
            "range": RANGE_TEXT,
            "constants": {name: [value.low, float(value), value.high] for name, value in self.constants.items()},
            "predictions": {
                name: {
                    "value": self.predicted[name],
                    "range": list(self.range(name)),
                    "first": self.first[name],
                    "decides": self.decides(name),
                }
                for name in self.predicted
            },
            **vars(self.basis),
            "text": self.text,
        }

    @property
    def text(self) -> list[str]:
        """Text for users: predictions with ranges, stability of the ranking, deciding constant, and calibration."""
        shown = ", ".join(f"{name} {with_range(value, self.range(name))}" for name, value in self.predicted.items())
        drawn = ", ".join(f"{name} {with_range(value, (value.low, value.high))}" for name, value in self.constants.items())
        against = f"calibrated against {self.basis.calibrated_against}"
        if self.basis.residual is not None:
            against += f"; error on held-out times {self.basis.residual:.1%}"
        if self.basis.roofline_share is not None:
            against += f"; up to {self.basis.roofline_share:.0%} of the compute time is in operations without an estimate"
        return [
            f"{self.unit}, with the {RANGE_TEXT}: {shown}",
            self.ranking,
            f"drawn: {drawn or 'nothing (no constant has a range)'}; {self.draws} draws, seed {self.seed}",
            against,
        ]

    @property
    def ranking(self) -> str:
        """Text on the stability of the first place among the draws, and the constant that decides its time."""
        decides = self.decides(self.best)
        placed = []
        if self.compared and len(self.predicted) > 1:
            placed.append(f"{self.best} first in {self.first[self.best]} of {self.draws}")
            placed += [f"{name} in {count}" for name, count in self.first.items() if count and name != self.best]
        reason = "no constant changes it" if decides is None else f"{decides[0]} decides (rank correlation {decides[1]:+.2f})"
        return "; ".join([*placed, reason])


def with_range(value: float, ends: tuple[float, float]) -> str:
    """Formats a value with the ends of its range: `8.16 (7.90 to 12.3)`."""
    return f"{significant(value)} ({significant(ends[0])} to {significant(ends[1])})"


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Computes Spearman's rank correlation; 0 if all values of a side are equal."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    ranks = [np.argsort(np.argsort(each, kind="stable")) for each in (one, other)]
    return float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])


def sweep_constants(
    predict: Callable[[Mapping[str, float]], Mapping[str, float]],
    constants: Mapping[str, Ranged],
    draws: int = DRAWS,
    seed: int = 0,
    unit: str = "ms",
    progress: Callable[[], None] = lambda: None,
    basis: Basis = Basis(),
    compared: bool = True,
) -> Sweep:
    """Predicts at the default constants and at drawn constants.

    Args:
        predict: function from values of constants, by name, to predictions, by name; missing constants keep their defaults.
        constants: ranges of the constants to draw. A prediction that depends on none has equal ends of its range.
        draws: number of draws.
        seed: seed of the draws.
        unit: unit of the predictions.
        progress: called after each draw.
        basis: calibration behind the predictions.
        compared: the predictions are alternatives, the smallest being the best.

    Raises:
        ValueError: fewer than 2 draws.
    """
    if draws < 2:
        raise ValueError(f"expected at least 2 draws, found {draws}")
    low, high = (np.log([getattr(value, end) for value in constants.values()]) for end in ("low", "high"))
    drawn = np.exp(low + (high - low) * latin_hypercube(draws, len(constants), seed))
    outcomes = []
    for row in drawn:
        values = dict(zip(constants, map(float, row), strict=True))
        factor = values.pop(MODEL_ERROR, 1.0)
        outcomes.append({name: factor * value for name, value in predict(values).items()})
        progress()
    columns = {name: np.array([one[name] for one in outcomes]) for name in outcomes[0]}
    return Sweep(unit, constants, drawn, dict(predict({})), columns, seed, basis, compared)
