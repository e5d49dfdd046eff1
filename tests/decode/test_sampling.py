"""The warped distribution against a sort in NumPy, draws against the distribution, and speculative decoding against both."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from decode.support import build
from reference.dflash_numpy import oracle_like_pair
from tilewright.decode.sampling import RowSampling, Sampling, Warp, batch_warp, row_sampling, sample, warp_logits
from tilewright.decode.shapes import ShapeTable

VOCAB = 12
jitted_warp = jax.jit(warp_logits, static_argnums=2)
jitted_sample = jax.jit(sample, static_argnames="warp")


def warped(logits: NDArray[Any], temperature: float, top_p: float, top_k: int) -> NDArray[np.float64]:
    """The distribution after temperature, then top-k, then top-p, by sorting; ties with the last token kept are kept."""
    scaled = logits.astype(np.float64) / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_p < 1:
        down = np.sort(p)[::-1]
        last = down[np.searchsorted(np.cumsum(down), top_p - 1e-9)]
        p = np.where(p >= last, p, 0)
    return p / p.sum()


def boundary_gap(logits: NDArray[Any], temperature: float, top_p: float, top_k: int) -> float:
    """How far the nearest set of most likely tokens is from holding just `top_p`: float32 decides no less than its rounding."""
    p = warped(logits, temperature, 1.0, top_k)
    levels = np.unique(p)[::-1]
    return float(np.min(np.abs([p[p >= level].sum() - top_p for level in levels])))


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


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


def rows(**fields: Any) -> RowSampling:
    """One row; the rest as in a `Sampling`."""
    return row_sampling([Sampling(**fields)])


@settings(max_examples=150)
@given(
    hnp.arrays(np.int32, VOCAB, elements=st.integers(-1280, 1280) | st.sampled_from([-64, 0, 32, 192])),
    st.booleans(),
    st.sampled_from([0.25, 0.7, 1.0, 1.7]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.integers(0, VOCAB + 3),
)
def test_warp_equals_a_sort(steps: NDArray[np.int32], minus: bool, temperature: float, top_p: float, top_k: int):
    """Logits in steps of 1/64, so that what is no tie is none after rounding; zeros of either sign."""
    logits = (steps / 64).astype(np.float32)
    logits[logits == 0] = np.where(minus and np.arange((logits == 0).sum()) % 2, -0.0, 0.0)
    assume(top_p == 1 or boundary_gap(logits, temperature, top_p, top_k) > 1e-5)
    got = np.asarray(jitted_warp(logits[None, None], rows(temperature=temperature, top_p=top_p, top_k=top_k), "filtered"))[0, 0]
    want = warped(logits, temperature, top_p, top_k)
    assert (np.isfinite(got) == (want > 0)).all()
    np.testing.assert_allclose(softmax(got), want, rtol=1e-4, atol=1e-7)


def test_ties_are_kept():
    logits = np.asarray([1, 2, 2, 2, 0, 1, -1, -5], np.float32)[None, None]
    kept = {
        (1, 1.0): [1, 2, 3],
        (3, 1.0): [1, 2, 3],
        (4, 1.0): [0, 1, 2, 3, 5],
        (0, 0.1): [1, 2, 3],
        (0, 0.78): [0, 1, 2, 3, 5],
        (1, 0.5): [1, 2, 3],
        (0, 1.0): list(range(8)),
    }
    for (top_k, top_p), tokens in kept.items():
        got = jitted_warp(logits, rows(temperature=1.0, top_k=top_k, top_p=top_p), "filtered")
        assert np.flatnonzero(np.isfinite(np.asarray(got)[0, 0])).tolist() == tokens


def test_top_p_counts_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 the best two hold 0.7; of what top-k 2 leaves, the best alone holds 0.57."""
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32))[None, None]
    for top_k, kept in ((0, 2), (2, 1)):
        got = jitted_warp(logits, rows(temperature=1.0, top_k=top_k, top_p=0.55), "filtered")
        assert np.isfinite(np.asarray(got)).sum() == kept


def test_temperature_comes_before_top_p():
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32))[None, None]
    kept = [
        int(np.isfinite(np.asarray(jitted_warp(logits, rows(temperature=t, top_p=0.6), "filtered"))).sum()) for t in (0.2, 1, 5)
    ]
    assert kept == [1, 2, 3]


def test_top_p_of_one_keeps_even_what_rounding_hides():
    logits = np.asarray([0, -40, -80], np.float32)[None, None]
    got = jitted_warp(logits, rows(temperature=1.0, top_p=1.0), "filtered")
    np.testing.assert_array_equal(got, logits)


def test_plain_warp_only_tempers():
    logits = np.asarray([3, -1, 0], np.float32)[None, None]
    np.testing.assert_array_equal(jitted_warp(logits, rows(temperature=0.5), "plain"), logits * 2)


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_p", "top_k"),
    [(8, 1.0, 1.0, 0), (64, 1.0, 1.0, 0), (8, 0.6, 0.9, 0), (64, 1.4, 0.8, 0), (32, 1.0, 1.0, 7), (64, 2.0, 0.9, 20)],
)
def test_draws_follow_the_warped_distribution(vocab: int, temperature: float, top_p: float, top_k: int):
    """Over seeds at one position; and a distribution tempered by a tenth more is told apart."""
    many = 20_000
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    assert boundary_gap(logits, temperature, top_p, top_k) > 1e-4 or top_p == 1
    each = rows(temperature=temperature, top_p=top_p, top_k=top_k)
    seeds = np.stack([np.zeros(many), np.arange(many)], axis=1).astype(np.uint32)
    fields = (np.repeat(each.temperature, many), np.repeat(each.top_p, many), np.repeat(each.top_k, many), seeds)
    warp: Warp = Sampling(temperature=temperature, top_p=top_p, top_k=top_k).warp
    batch = np.broadcast_to(logits, (many, 1, vocab))
    drawn = np.asarray(jitted_sample(batch, RowSampling(*fields), np.full((many, 1), 7, np.int32), warp=warp))[:, 0]
    counts = np.bincount(drawn, minlength=vocab)
    assert chi_square_excess(counts, warped(logits, temperature, top_p, top_k)) < 1
    assert chi_square_excess(counts, warped(logits, temperature * 1.1, top_p, top_k)) > 1


def test_draws_of_one_seed_are_independent_between_positions():
    """The pairs of tokens at two neighbouring positions, over seeds; and at one position, over the positions of one seed."""
    p = np.asarray([0.5, 0.3, 0.2])
    logits = np.log(p).astype(np.float32)
    many = 8000
    seeds = np.stack([np.zeros(many), np.arange(many)], axis=1).astype(np.uint32)
    fields = (np.ones(many, np.float32), np.ones(many, np.float32), np.zeros(many, np.int32), seeds)
    places = np.broadcast_to(np.asarray([4, 5], np.int32), (many, 2))
    pairs = np.asarray(jitted_sample(np.broadcast_to(logits, (many, 2, 3)), RowSampling(*fields), places, warp="plain"))
    joint = np.bincount(pairs @ [3, 1], minlength=9)
    assert chi_square_excess(joint, np.outer(p, p).ravel()) < 1
    places = np.arange(many, dtype=np.int32)[None]
    along = jitted_sample(np.broadcast_to(logits, (1, many, 3)), rows(temperature=1.0), places, warp="plain")
    assert chi_square_excess(np.bincount(np.asarray(along)[0], minlength=3), p) < 1


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, VOCAB)).astype(np.float32)
    requests = [Sampling(temperature=1.0, seed=1), Sampling(temperature=0.9, top_p=0.9, seed=2), Sampling(seed=3)]
    positions = np.asarray([[5, 6, 7, 8], [0, 1, 2, 3], [9, 10, 11, 12]], np.int32)
    draw = partial(jitted_sample, warp="filtered")
    whole = np.asarray(draw(logits, row_sampling(requests), positions))
    np.testing.assert_array_equal(draw(logits, row_sampling(requests), positions), whole)
    np.testing.assert_array_equal(draw(logits[:, ::-1], row_sampling(requests), positions[:, ::-1]), whole[:, ::-1])
    np.testing.assert_array_equal(draw(logits[::-1], row_sampling(requests[::-1]), positions[::-1]), whole[::-1])
    np.testing.assert_array_equal(whole[2], logits[2].argmax(axis=-1))
    for i, request in enumerate(requests):
        one = draw(logits[i : i + 1], row_sampling([request]), positions[i : i + 1])
        np.testing.assert_array_equal(one[0], whole[i])


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_greedy_rows_are_exact_in_every_program(seed: int):
    logits = np.random.default_rng(seed).normal(size=(2, 3, VOCAB)).astype(np.float32)
    logits[0, 0, 5] = logits[0, 0, 2] = 9  # a tie goes to the first
    requests = row_sampling([Sampling(seed=seed), Sampling(temperature=1.0, top_p=0.5, seed=seed)])
    positions = np.zeros((2, 3), np.int32) + np.arange(3, dtype=np.int32)
    best = logits.argmax(axis=-1)
    programs: tuple[Warp, ...] = ("greedy", "plain", "filtered")
    for warp in programs:
        np.testing.assert_array_equal(jitted_sample(logits, requests, positions, warp=warp)[0], best[0])
    assert best[0, 0] == 2


def test_the_least_program_is_chosen():
    greedy, plain, filtered = Sampling(top_p=0.5), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3)
    assert [s.warp for s in (greedy, plain, filtered)] == ["greedy", "plain", "filtered"]
    assert Sampling(temperature=0.1, top_p=0.99).warp == "filtered"
    assert batch_warp([greedy, greedy]) == "greedy"
    assert batch_warp([plain, greedy]) == "plain"
    assert batch_warp([plain, filtered, greedy]) == "filtered"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "expected max_new_tokens of at least 1, found 0"),
        ({"temperature": -0.1}, "expected a temperature of 0 or more, found -0.1"),
        ({"temperature": float("inf")}, "expected a temperature of 0 or more, found inf"),
        ({"temperature": float("nan")}, "expected a temperature of 0 or more, found nan"),
        ({"top_p": 0.0}, "expected top_p above 0 and at most 1, found 0.0"),
        ({"top_p": 1.01}, "expected top_p above 0 and at most 1, found 1.01"),
        ({"top_k": -1}, "expected top_k of 0 or more, found -1"),
        ({"seed": -1}, r"expected a seed from 0 to 2\*\*32 - 1, found -1"),
        ({"seed": 2**32}, r"expected a seed from 0 to 2\*\*32 - 1, found 4294967296"),
        ({"stop": ("a", "")}, r"expected stop strings that are not empty, found \('a', ''\)"),
    ],
)
def test_errors(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_speculative_decoding_draws_from_the_targets_warped_distribution(tmp_path: Path):
    """The first two tokens after one prompt, over 3,200 seeds, against what NumPy says of the target.

    The drafter has seen the most likely continuation, so that of those pairs some come out of one round and some out of two.
    """
    prompt, vocab, temperature, top_p = [3, 1, 6, 2], 8, 0.8, 0.9
    pair = oracle_like_pair(
        1, [prompt], length=8, vocab_size=vocab, target_layers=2, drafter_layers=1, taps=[0, 1], block_size=3
    )
    pair.target_tensors["lm_head.weight"] *= np.float32(0.25)  # else the target is too sure of itself to show much
    target = pair.build()[0]
    after = [target.run(prompt)[0][-1], *(target.run([*prompt, first])[0][-1] for first in range(vocab))]
    assert min(boundary_gap(logits, temperature, top_p, 0) for logits in after) > 1e-4

    def joint(temperature: float) -> NDArray[np.float64]:
        first, *second = (warped(logits, temperature, top_p, 0) for logits in after)
        return np.stack([first[i] * second[i] for i in range(vocab)])

    lm = build(tmp_path, pair, table=ShapeTable((16,), (16,), (4,)))
    counts, whole_rounds, many = np.zeros((vocab, vocab), int), 0, 3200
    for seed in range(0, many, 16):
        requests = [Sampling(2, temperature, top_p, seed=seed + row) for row in range(16)]
        for result in lm.generate([prompt] * 16, requests):
            counts[tuple(result.tokens)] += 1
            whole_rounds += result.acceptance_lengths == [2]
    assert 0.1 * many < whole_rounds < 0.9 * many
    assert (joint(temperature) > 0).sum() > 8
    assert chi_square_excess(counts.ravel(), joint(temperature).ravel()) < 1
    for wrong in (0.6, 1.05):
        assert chi_square_excess(counts.ravel(), joint(wrong).ravel()) > 1
