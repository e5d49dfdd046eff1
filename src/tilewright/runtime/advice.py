"""Which shapes to declare for requests of known lengths: capacities and prefill chunks, what they pad, the programs they take.

Everything is counted in positions. A request takes as many cache positions as its prompt and its output have tokens, and
prefills one token less than its prompt has. Requests are taken one by one: what rows of a batch idle while others run is not
in here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from jaxtyping import Int

from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.programs import ProgramKey, program_keys
from tilewright.runtime.shapes import ShapeTable

Lengths = Int[np.ndarray, " N"]
Prefixes = Int[np.ndarray, " N+1"]
"""Of the first j of N entries, from j = 0 on."""


@dataclass(frozen=True)
class Buckets:
    """A choice of capacities or of chunk lengths, and what it makes of the requests.

    Attributes:
        sizes: positions of each bucket, increasing.
        needed: positions that the requests have.
        computed: positions that are held or computed for them; what is beyond those needed is padding.
        runs: how many buckets that takes: one capacity for each request, or all chunks of all plans.
        work: what the choice is judged by, in positions: those computed, and for each run what it costs besides.
    """

    sizes: tuple[int, ...]
    needed: int
    computed: int
    runs: int
    work: int

    @property
    def padding_share(self) -> float:
        """The share of computed positions that are padding."""
        return 1 - self.needed / self.computed if self.computed else 0.0


def check_requests(lengths: Lengths, least: int, what: str) -> None:
    if not len(lengths) or lengths.min() < least:
        found = "none" if not len(lengths) else f"one of {lengths.min()}"
        raise ValueError(f"expected {what} of at least {least}, found {found}")


def capacity_choices(positions: Lengths, most: int, multiple: int) -> list[Buckets]:
    """The best capacities for requests of so many positions: one choice for each number of buckets from 1 on.

    Each choice holds the fewest positions that so many buckets can. There are no more of them than distinct sizes.

    Args:
        positions: of each request, at least 1.
        most: the largest number of buckets.
        multiple: what every capacity is a multiple of.

    Raises:
        ValueError: there is no request, or a number is out of its range.
    """
    check_requests(positions, 1, "positions of requests")
    for name, value in (("buckets", most), ("a multiple", multiple)):
        if value < 1:
            raise ValueError(f"expected {name} of at least 1, found {value}")
    sizes, counts = np.unique(-(-positions // multiple) * multiple, return_counts=True)
    return [capacity_choice(boundaries, positions) for boundaries in best_boundaries(sizes, counts, most)]


def capacity_choice(capacities: Sequence[int], positions: Lengths) -> Buckets:
    """Positions that these capacities hold for requests that all fit."""
    held = np.asarray(capacities)[np.searchsorted(capacities, positions)]
    total = int(held.sum())
    return Buckets(tuple(map(int, capacities)), int(positions.sum()), total, len(positions), total)


def best_boundaries(sizes: Lengths, counts: Lengths, most: int) -> list[list[int]]:
    """For each number of buckets up to `most`, those of `sizes` that are the buckets' boundaries.

    They minimise the sum of each entry's boundary, the smallest that is not below it. This is dynamic programming over the last
    bucket. The cost of a bucket satisfies the quadrangle inequality, so the best beginning of the last one never moves back as
    its end moves on, and divide and conquer finds one bucket more in O(n log n).

    Args:
        sizes: distinct and increasing.
        counts: how many entries have each size, at least 1.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    least = np.concatenate([[0], sizes * before[1:]])  # of the first j sizes in one bucket
    begins = [np.zeros(len(sizes) + 1, np.int64)]  # of the last bucket, for each number of them
    for _ in range(1, min(most, len(sizes))):
        least, begin = one_bucket_more(sizes, before, least)
        begins.append(begin)
    found = []
    for number in range(len(begins)):
        end = len(sizes)
        boundaries = list[int]()
        for begin in reversed(begins[: number + 1]):
            boundaries.append(int(sizes[end - 1]))
            end = int(begin[end])
        found.append(boundaries[::-1])
    return found


def one_bucket_more(sizes: Lengths, before: Prefixes, least: Prefixes) -> tuple[Prefixes, Prefixes]:
    """The least costs of the first j sizes with one bucket more than `least` has, and where the last one begins."""
    costs = np.zeros_like(least)
    begins = np.zeros_like(least)
    waiting = [(1, len(sizes), 0, len(sizes) - 1)]
    while waiting:
        low, high, first, last = waiting.pop()
        if low > high:
            continue
        end = (low + high) // 2
        some = slice(first, min(last, end - 1) + 1)
        totals = least[some] + sizes[end - 1] * (before[end] - before[some])
        begin = first + int(np.argmin(totals))
        costs[end] = totals[begin - first]
        begins[end] = begin
        waiting += [(low, end - 1, first, begin), (end + 1, high, begin, last)]
    return costs, begins


def chunk_lengths(multiple: int, longest: int) -> list[int]:
    """The lengths that chunks may have: `multiple`, and its doubles up to `longest`.

    Raises:
        ValueError: they do not end with `longest`, which all capacities are multiples of.
    """
    ratio, rest = divmod(longest, max(multiple, 1))
    if multiple < 1 or ratio < 1 or rest or ratio & (ratio - 1):
        raise ValueError(f"expected a longest chunk that is {multiple} doubled any number of times, found {longest}")
    return [multiple << n for n in range(ratio.bit_length())]


def chunk_choices(tokens: Lengths, most: int, candidates: Sequence[int], overhead: int) -> list[Buckets]:
    """The best chunk lengths for prefilling so many tokens: for each number of them from 1 on, as far as more are better.

    A plan is that of `ShapeTable.prefill_plan`. The shortest chunk alone pads least and runs most often, so a run counts as
    `overhead` positions besides its own: what a dispatch takes, and reading the weights once more. All sets of candidates are
    tried.

    Args:
        tokens: to prefill, of each request; at least 0.
        most: the largest number of lengths.
        candidates: lengths to choose from, increasing.

    Raises:
        ValueError: there is no request, or a number is out of its range.
    """
    check_requests(tokens, 0, "tokens to prefill")
    for name, value, least in (("chunk lengths", most, 1), ("an overhead", overhead, 0)):
        if value < least:
            raise ValueError(f"expected {name} of at least {least}, found {value}")
    choices: list[Buckets] = []
    for number in range(1, min(most, len(candidates)) + 1):
        best = min(
            (chunk_choice(chunks, tokens, overhead) for chunks in combinations(candidates, number)), key=lambda one: one.work
        )
        if not choices or best.work < choices[-1].work:
            choices.append(best)
    return choices


def chunk_choice(chunks: Sequence[int], tokens: Lengths, overhead: int) -> Buckets:
    """Positions that prefilling so many tokens computes with these chunks."""
    table = ShapeTable(batches=(1,), capacities=(chunks[-1],), chunks=tuple(chunks))
    # A plan begins with the longest chunk as often as it fits, and goes on as the plan of the rest.
    full, rest = np.divmod(tokens, chunks[-1])
    rests, counts = np.unique(rest, return_counts=True)
    plans = [[chunk for _, chunk in table.prefill_plan(int(one))] for one in rests]
    computed = int(full.sum()) * chunks[-1] + sum(int(n) * sum(plan) for n, plan in zip(counts, plans, strict=True))
    runs = int(full.sum()) + sum(int(n) * len(plan) for n, plan in zip(counts, plans, strict=True))
    return Buckets(tuple(chunks), int(tokens.sum()), computed, runs, computed + overhead * runs)


def saved_shares(choices: Sequence[Buckets]) -> list[float | None]:
    """The share of its work that each choice saves of the one before; None of the first."""
    saved: list[float | None] = [None]
    for before, after in pairwise(choices):
        saved.append(1 - after.work / before.work if before.work else 0.0)
    return saved


def recommended(choices: Sequence[Buckets], least_saving: float) -> int:
    """The index of the first choice after which the next saves less than a share of the work; the last if none does."""
    shares = saved_shares(choices)[1:]
    return next((n for n, saved in enumerate(shares) if saved is not None and saved < least_saving), len(choices) - 1)


def programs_of(table: ShapeTable, positions: int, drafter: Drafter | None) -> list[ProgramKey]:
    """Every program that serves requests of up to `positions` positions."""
    choices = (None,) if drafter is None else drafter.choices
    return list(program_keys(replace(table, capacities=table.needed(positions)), choices))


def compile_seconds(programs: Iterable[ProgramKey], each: Mapping[str, float]) -> float:
    """An estimate: how long programs take to compile one after another, each as long as its name says."""
    return sum(count * each[name] for name, count in Counter(key.name for key in programs).items())
