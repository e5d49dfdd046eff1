"""Ranges of predictions: a seeded sweep over the constants that sources give differently, or that were fitted.

Constants are drawn from their ranges by a Latin hypercube (McKay, Beckman and Conover, Technometrics 1979, section 2): of N
draws exactly one lies in each N-th of each range. Draws are even in the logarithm, since rates and latencies differ by factors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.hardware.ranged import Ranged
from tilewright.metrics.metric import significant

DRAWS = 100
"""Draws of a closed form."""

EVENT_DRAWS = 24
"""Draws where each is a run of an event simulator."""

PERCENTILES = (10.0, 90.0)
"""Ends of a prediction's range among its draws."""

RANGE_TEXT = "10th to 90th percentile of the draws, widened to the figure itself"

UNCALIBRATED = "nothing: constants are published or working figures"

MODEL_ERROR = "model_error"
"""Constant that `swept` itself applies: a factor on all predictions of a draw, for what a fitted model leaves unexplained."""


def latin_hypercube(draws: int, dimensions: int, seed: int) -> np.ndarray:
    """Points `[draws, dimensions]` in [0, 1), one in each of `draws` equal parts of every dimension."""
    rng = np.random.default_rng(seed)
    parts = np.array([rng.permutation(draws) for _ in range(dimensions)], float).reshape(dimensions, draws).T
    return (parts + rng.random(parts.shape)) / draws


@dataclass(frozen=True)
class Basis:
    """Grounds of a prediction.

    Attributes:
        calibrated_against: measurements that constants were fitted to.
        residual: geometric mean of how far held-out measurements are off, as a factor above 1, less 1; None without a fit.
        roofline_share: part of the compute time in operations without an estimate; None where the model has one for all.
    """

    calibrated_against: str = UNCALIBRATED
    residual: float | None = None
    roofline_share: float | None = None


@dataclass(frozen=True, eq=False)
class Sweep:
    """Predictions at the constants that are used, and at drawn ones.

    Attributes:
        unit: of the predictions, which are times.
        constants: those that were drawn, with their ranges.
        drawn: their values, `[draws, constants]`.
        predicted: each prediction at the values that are used, by name.
        outcomes: each prediction at each draw, `[draws]`.
        basis: what the predictions rest on.
        compared: whether the smallest of the predictions is the best of them.
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
        """Name of the smallest prediction at the values that are used."""
        return min(self.predicted, key=lambda name: self.predicted[name])

    def range(self, name: str) -> tuple[float, float]:
        """Ends of a prediction's range; see `RANGE_TEXT`."""
        low, high = np.percentile(self.outcomes[name], PERCENTILES)
        return min(float(low), self.predicted[name]), max(float(high), self.predicted[name])

    @cached_property
    def first(self) -> dict[str, int]:
        """Number of draws in which each prediction is the smallest; of equal ones the first by name counts."""
        names = sorted(self.outcomes)
        winners = np.argmin(np.stack([self.outcomes[name] for name in names]), axis=0)
        return {name: int(np.sum(winners == at)) for at, name in enumerate(names)}

    def decides(self, name: str) -> tuple[str, float] | None:
        """The constant with the largest rank correlation with a prediction, and this; None where none moves it."""
        found = [
            (constant, rank_correlation(self.drawn[:, at], self.outcomes[name])) for at, constant in enumerate(self.constants)
        ]
        best = max(found, key=lambda one: abs(one[1]), default=None)
        return None if best is None or best[1] == 0 else best

    def record(self) -> dict[str, Any]:
        """Figures, named as in docs/metrics.md."""
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
        """Sentences for people: predictions with their ranges, what is fastest how often, what decides, what that rests on."""
        shown = ", ".join(f"{name} {with_range(value, self.range(name))}" for name, value in self.predicted.items())
        drawn = ", ".join(f"{name} {with_range(value, (value.low, value.high))}" for name, value in self.constants.items())
        against = f"calibrated against {self.basis.calibrated_against}"
        if self.basis.residual is not None:
            against += f"; times held out of the fit are {self.basis.residual:.1%} off"
        if self.basis.roofline_share is not None:
            against += f"; up to {self.basis.roofline_share:.0%} of the compute time is in operations without an estimate"
        return [
            f"{self.unit}, with the {RANGE_TEXT}: {shown}",
            self.ranking,
            f"drawn: {drawn or 'nothing, for no constant has a range'}; {self.draws} draws, seed {self.seed}",
            against,
        ]

    @property
    def ranking(self) -> str:
        """Stability of the first place among the draws, and the constant that decides its time."""
        decides = self.decides(self.best)
        placed = []
        if self.compared and len(self.predicted) > 1:
            placed.append(f"{self.best} first in {self.first[self.best]} of {self.draws}")
            placed += [f"{name} in {count}" for name, count in self.first.items() if count and name != self.best]
        said = "no constant moves it" if decides is None else f"{decides[0]} decides (rank correlation {decides[1]:+.2f})"
        return "; ".join([*placed, said])


def with_range(value: float, ends: tuple[float, float]) -> str:
    """A figure with the ends of its range: `8.16 (7.90 to 12.3)`."""
    return f"{significant(value)} ({significant(ends[0])} to {significant(ends[1])})"


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's: the correlation of ranks; 0 where either side is all equal."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    ranks = [np.argsort(np.argsort(each, kind="stable")) for each in (one, other)]
    return float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])


def swept(
    predict: Callable[[Mapping[str, float]], Mapping[str, float]],
    constants: Mapping[str, Ranged],
    draws: int = DRAWS,
    seed: int = 0,
    unit: str = "ms",
    progress: Callable[[], None] = lambda: None,
    basis: Basis = Basis(),
    compared: bool = True,
) -> Sweep:
    """Predicts at the constants that are used, and at drawn ones.

    Args:
        predict: predictions by name, from values of constants by name; those that it is not given are as they are.
        constants: those to draw; a prediction that depends on none has its own value as both ends of its range.
        draws: how many.
        seed: of the draws.
        unit: of the predictions.
        progress: is called after each draw.
        basis: of the predictions.
        compared: whether the smallest of them is the best.

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
