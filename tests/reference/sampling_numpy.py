"""Reference of sampling distributions in NumPy float64, by sorting and counting, and a chi-square test."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def penalised(
    logits: NDArray[Any], prompt: Sequence[int], generated: Sequence[int], repetition: float, presence: float, frequency: float
) -> NDArray[np.float64]:
    """Logits `[V]` after the penalties: for repetition over all tokens (CTRL, arXiv 1909.05858, §4.1), the rest over new."""
    out = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in generated:
        out[token] -= frequency
    for token in set(generated):
        out[token] -= presence
    return out


def adjusted(logits: NDArray[Any], biases: Mapping[int, float], banned: Collection[int] = ()) -> NDArray[np.float64]:
    """Logits `[V]` with biases, and without tokens that may not come; before the penalties."""
    out = logits.astype(np.float64)
    for token, bias in biases.items():
        out[token] += bias
    for token in banned:
        out[token] = -np.inf
    return out


def warped(
    logits: NDArray[Any], temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """The distribution after temperature, then top-k, top-p and min-p; ties with the last token kept are kept."""
    scaled = logits.astype(np.float64) / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_p < 1:
        down = np.sort(p)[::-1]
        last = down[np.searchsorted(np.cumsum(down), top_p - 1e-9)]
        p = np.where(p >= last, p, 0)
    p = np.where(p >= min_p * p.max() * (1 - 1e-9), p, 0)
    return p / p.sum()


def gumbel_of(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Returns Gumbel noise of 32 random bits: that of the middle of their interval of size 2**-32. Increases with the bits."""
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**32))


def boundary_gap(logits: NDArray[Any], temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> float:
    """Returns the smallest distance of a token from the threshold of top-p or min-p, which float32 rounding must not exceed."""
    p = warped(logits, temperature, 1.0, top_k)
    levels = np.unique(p)[::-1]
    mass = np.min(np.abs([p[p >= level].sum() - top_p for level in levels])) if top_p < 1 else np.inf
    share = np.min(np.abs(levels[1:] / levels[0] - min_p), initial=np.inf) if min_p > 0 else np.inf
    return float(min(mass, share))


def chi_square_excess(counts: NDArray[Any], p: NDArray[np.float64]) -> float:
    """The chi-square statistic of `counts` under `p`, over the value that chance passes once in about 30,000 (Wilson-Hilferty).

    Outcomes expected less than five times count as one; an outcome of probability 0 that came is infinitely far.
    """
    if counts[p == 0].any():
        return np.inf
    expected = p * counts.sum()
    rare = expected < 5
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)] + [(counts[rare].sum(), expected[rare].sum())]
    groups = [(n, e) for n, e in groups if e > 0]
    statistic = sum((n - e) ** 2 / e for n, e in groups)
    freedom = len(groups) - 1
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3)
