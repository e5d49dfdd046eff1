"""The warped distribution against a sort in NumPy, penalties against counting, and draws against the distribution."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from reference.sampling_numpy import adjusted, boundary_gap, chi_square_excess, penalised, warped
from tilewright.runtime.sampling import (
    LEAST_TOP_P,
    REPETITION_PENALTIES,
    TEMPERATURES,
    RowSampling,
    Sampling,
    later_seed,
    penalise,
    row_sampling,
    sample,
    seed_of,
    temper,
    warp_logits,
)

VOCAB = 12
jitted_warp = jax.jit(warp_logits)
jitted_sample = jax.jit(sample)
jitted_penalise = jax.jit(penalise)


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def rows(**fields: Any) -> RowSampling:
    """One row; the rest as in a `Sampling`."""
    return row_sampling([Sampling(**fields)], [1])


def seeded(request: Sampling, many: int) -> RowSampling:
    """Rows of one request that differ by seed."""
    return row_sampling([replace(request, seed=seed) for seed in range(many)], [1] * many)


@settings(max_examples=150)
@given(
    hnp.arrays(np.int32, VOCAB, elements=st.integers(-1280, 1280) | st.sampled_from([-64, 0, 32, 192])),
    st.booleans(),
    st.sampled_from([0.25, 0.7, 1.0, 1.7]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.integers(0, VOCAB + 3),
    st.sampled_from([0.0, 0.0, 1e-6, 0.1, 0.5, 1.0]),
)
def test_warp_equals_a_sort(steps: NDArray[np.int32], minus: bool, temperature: float, top_p: float, top_k: int, min_p: float):
    """Logits in steps of 1/64, so that what is no tie is none after rounding; zeros of either sign."""
    logits = (steps / 64).astype(np.float32)
    logits[logits == 0] = np.where(minus and np.arange((logits == 0).sum()) % 2, -0.0, 0.0)
    assume(boundary_gap(logits, temperature, top_p, top_k, min_p) > 1e-5)
    row = rows(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    got = np.asarray(jitted_warp(logits[None, None], row))[0, 0]
    want = warped(logits, temperature, top_p, top_k, min_p)
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
        got = jitted_warp(logits, rows(temperature=1.0, top_k=top_k, top_p=top_p))
        assert np.flatnonzero(np.isfinite(np.asarray(got)[0, 0])).tolist() == tokens


def test_top_p_counts_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 the best two hold 0.7; of what top-k 2 leaves, the best alone holds 0.57."""
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32))[None, None]
    for top_k, kept in ((0, 2), (2, 1)):
        got = jitted_warp(logits, rows(temperature=1.0, top_k=top_k, top_p=0.55))
        assert np.isfinite(np.asarray(got)).sum() == kept


def test_temperature_comes_before_top_p():
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32))[None, None]
    kept = [int(np.isfinite(np.asarray(jitted_warp(logits, rows(temperature=t, top_p=0.6)))).sum()) for t in (0.2, 1, 5)]
    assert kept == [1, 2, 3]


def test_min_p_is_a_share_of_the_best_after_temperature():
    """Shares 1, 0.5 and 0.1 of the best; their squares at a temperature of a half."""
    logits = np.log(np.asarray([0.1, 0.01, 0.05], np.float32))[None, None]
    for temperature, min_p, kept in (
        (1.0, 0.4, [0, 2]),
        (1.0, 0.09, [0, 1, 2]),
        (1.0, 1.0, [0]),
        (0.5, 0.4, [0]),
        (0.5, 0.2, [0, 2]),
    ):
        got = jitted_warp(logits, rows(temperature=temperature, min_p=min_p))
        assert np.flatnonzero(np.isfinite(np.asarray(got)[0, 0])).tolist() == kept


def test_min_p_comes_after_top_p():
    """Of 0.4, 0.3, 0.2, 0.1 it takes three to hold 0.75; of the three that min-p leaves, two would do."""
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32))[None, None]
    got = jitted_warp(logits, rows(temperature=1.0, min_p=0.3, top_p=0.75))
    assert np.isfinite(np.asarray(got)).sum() == 3


def test_top_p_of_one_keeps_even_what_rounding_hides():
    logits = np.asarray([0, -40, -80], np.float32)[None, None]
    got = jitted_warp(logits, rows(temperature=1.0, top_p=1.0))
    np.testing.assert_array_equal(got, logits)


def test_without_filters_logits_are_only_tempered():
    logits = np.asarray([3, -1, 0], np.float32)[None, None]
    np.testing.assert_array_equal(jitted_warp(logits, rows(temperature=0.5)), logits * 2)


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_p", "top_k"),
    [(8, 1.0, 1.0, 0), (64, 1.0, 1.0, 0), (8, 0.6, 0.9, 0), (64, 1.4, 0.8, 0), (32, 1.0, 1.0, 7), (64, 2.0, 0.9, 20)],
)
def test_draws_follow_the_warped_distribution(vocab: int, temperature: float, top_p: float, top_k: int):
    """Over seeds at one position; and a distribution tempered by a tenth more is told apart."""
    many = 20_000
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    assert boundary_gap(logits, temperature, top_p, top_k) > 1e-4
    request = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    batch = np.broadcast_to(logits, (many, 1, vocab))
    drawn = np.asarray(jitted_sample(batch, seeded(request, many), np.full((many, 1), 7, np.int32)))[:, 0]
    counts = np.bincount(drawn, minlength=vocab)
    assert chi_square_excess(counts, warped(logits, temperature, top_p, top_k)) < 1
    assert chi_square_excess(counts, warped(logits, temperature * 1.1, top_p, top_k)) > 1


def test_draws_of_one_seed_are_independent_between_positions():
    """The pairs of tokens at two neighbouring positions, over seeds; and at one position, over the positions of one seed."""
    p = np.asarray([0.5, 0.3, 0.2])
    logits = np.log(p).astype(np.float32)
    many = 8000
    places = np.broadcast_to(np.asarray([4, 5], np.int32), (many, 2))
    pairs = np.asarray(jitted_sample(np.broadcast_to(logits, (many, 2, 3)), seeded(Sampling(temperature=1.0), many), places))
    joint = np.bincount(pairs @ [3, 1], minlength=9)
    assert chi_square_excess(joint, np.outer(p, p).ravel()) < 1
    places = np.arange(many, dtype=np.int32)[None]
    along = jitted_sample(np.broadcast_to(logits, (1, many, 3)), rows(temperature=1.0), places)
    assert chi_square_excess(np.bincount(np.asarray(along)[0], minlength=3), p) < 1


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, VOCAB)).astype(np.float32)
    requests = [Sampling(temperature=1.0, seed=1), Sampling(temperature=0.9, top_p=0.9, seed=2), Sampling(seed=3)]
    positions = np.asarray([[5, 6, 7, 8], [0, 1, 2, 3], [9, 10, 11, 12]], np.int32)
    draw = jitted_sample
    whole = np.asarray(draw(logits, row_sampling(requests, [1] * 3), positions))
    np.testing.assert_array_equal(draw(logits, row_sampling(requests, [1] * 3), positions), whole)
    np.testing.assert_array_equal(draw(logits[:, ::-1], row_sampling(requests, [1] * 3), positions[:, ::-1]), whole[:, ::-1])
    np.testing.assert_array_equal(draw(logits[::-1], row_sampling(requests[::-1], [1] * 3), positions[::-1]), whole[::-1])
    np.testing.assert_array_equal(whole[2], logits[2].argmax(axis=-1))
    for i, request in enumerate(requests):
        one = draw(logits[i : i + 1], row_sampling([request], [1]), positions[i : i + 1])
        np.testing.assert_array_equal(one[0], whole[i])


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=3, max_size=3),
    st.dictionaries(st.integers(0, 6), st.floats(-100, 100, width=16), max_size=4),
    st.integers(0, 8),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_biases_and_ends_that_may_not_come(
    seed: int, lengths: list[tuple[int, int]], biases: dict[int, float], least: int, stops: list[int]
):
    """Slot by slot of a block that reaches beyond `min_tokens`; a token may be biased and end the row too."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 7, (3, 16)).astype(np.int32)
    block = rng.integers(0, 7, (3, 4)).astype(np.int32)
    logits = rng.normal(size=(3, 4, 7)).astype(np.float32)
    known = np.asarray([prompt + generated - 1 for prompt, generated in lengths], np.int32)
    sampling = Sampling(logit_bias=tuple(biases.items()), min_tokens=least, stop_token_ids=tuple(stops))
    requests = [sampling, Sampling(stop_token_ids=tuple(stops)), replace(sampling, repetition_penalty=1.5)]
    eos = [2]
    got = jitted_penalise(logits, row_sampling(requests, [n for n, _ in lengths], eos=eos), tokens, known, block)
    np.testing.assert_array_equal(got[1], logits[1])
    for row, repetition in ((0, 1.0), (2, 1.5)):
        prompt, text = np.split(tokens[row, : known[row] + 1].tolist(), [lengths[row][0]])
        for slot in range(4):
            history = [*text.tolist(), *block[row, 1 : slot + 1].tolist()]
            banned = [token for token in (2, *stops) if token < 7] if len(history) < least else []
            changed = adjusted(logits[row, slot], biases, banned)
            want = penalised(changed, prompt.tolist(), history, repetition, 0.0, 0.0)
            np.testing.assert_allclose(got[row, slot], want, rtol=1e-6, atol=1e-6)


def test_a_row_has_places_for_so_many_tokens():
    sampling = Sampling(logit_bias=tuple((n, 1.0) for n in range(300)), min_tokens=1, stop_token_ids=tuple(range(300, 428)))
    adjusting = row_sampling([sampling], [1], eos=range(500, 584))
    assert sorted(np.asarray(adjusting.adjusted)[0].tolist()) == [*range(428), *range(500, 584)]
    with pytest.raises(ValueError, match="at most 512 biased and ending tokens"):
        row_sampling([sampling], [1], eos=range(500, 585))
    with pytest.raises(ValueError, match="end-of-sequence tokens"):
        row_sampling([sampling], [1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logit_bias": ((1, 101.0),)}, "from -100 to 100"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "each once"),
        ({"logit_bias": tuple((n, 1.0) for n in range(301))}, "at most 300"),
        ({"logit_bias": ((-1, 1.0),)}, r"tokens from 0 on, found \[-1\]"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids from 0 on, found \(-1,\)"),
        ({"stop_token_ids": tuple(range(129))}, "at most 128 stop_token_ids"),
        ({"max_new_tokens": 4, "min_tokens": 5}, "min_tokens from 0 to the length limit, 4"),
    ],
)
def test_what_a_request_may_not_ask(fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Sampling(**fields)


def test_a_top_p_of_0_keeps_the_most_likely_token():
    logits = np.random.default_rng(0).normal(0, 0.01, (1, 1, 5000)).astype(np.float32)
    got = np.asarray(jitted_warp(logits, rows(temperature=1.0, top_p=0.0)))[0, 0]
    assert np.flatnonzero(np.isfinite(got)).tolist() == [logits[0, 0].argmax()]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=3, max_size=3),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-0.7, 0.0, 0.4]),
    st.sampled_from([-0.3, 0.0, 0.9]),
)
def test_penalties_equal_counting(
    seed: int, lengths: list[tuple[int, int]], repetition: float, presence: float, frequency: float
):
    """Three rows of different prompts and texts, few tokens so that many repeat; behind the known token the buffer is stale."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 5, (3, 16)).astype(np.int32)
    block = rng.integers(0, 5, (3, 4)).astype(np.int32)
    logits = rng.normal(size=(3, 4, 7)).astype(np.float32)
    known = np.asarray([prompt + generated - 1 for prompt, generated in lengths], np.int32)
    block[:, 0] = tokens[np.arange(3), known]
    penalties: dict[str, Any] = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    requests = [Sampling(**penalties), Sampling(), Sampling(temperature=1.0, **penalties)]
    got = jitted_penalise(logits, row_sampling(requests, [prompt for prompt, _ in lengths]), tokens, known, block)
    np.testing.assert_array_equal(got[1], logits[1])
    for row in (0, 2):
        prompt, text = np.split(tokens[row, : known[row] + 1].tolist(), [lengths[row][0]])
        for slot in range(4):
            history = [*text.tolist(), *block[row, 1 : slot + 1].tolist()]
            want = penalised(logits[row, slot], prompt.tolist(), history, repetition, presence, frequency)
            np.testing.assert_allclose(got[row, slot], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_greedy_rows_are_exact_beside_rows_that_draw(seed: int):
    logits = np.random.default_rng(seed).normal(size=(2, 3, VOCAB)).astype(np.float32)
    logits[0, 0, 5] = logits[0, 0, 2] = 9  # a tie goes to the first
    requests = row_sampling([Sampling(seed=seed), Sampling(temperature=1.0, top_p=0.5, min_p=0.1, seed=seed)], [1, 1])
    positions = np.zeros((2, 3), np.int32) + np.arange(3, dtype=np.int32)
    best = logits.argmax(axis=-1)
    np.testing.assert_array_equal(jitted_sample(logits, requests, positions)[0], best[0])
    assert best[0, 0] == 2


def test_each_int64_seed_has_a_stream_of_its_own():
    seeds = [0, 1, 5, -1, -5, 2**31, 2**32 - 5, 2**32, 2**32 + 5, 2**53, 2**63 - 1, -(2**63), -(2**63) + 5]
    keys = row_sampling([Sampling(temperature=1.0, seed=seed) for seed in seeds], [1] * len(seeds)).key
    assert len({tuple(key) for key in keys.tolist()}) == len(seeds)
    assert keys[:3].tolist() == [[0, 0], [0, 1], [0, 5]]  # seeds of 32 bits draw what they have always drawn
    assert [seed_of(words) for words in keys] == seeds
    assert [later_seed(seed, 1) for seed in (-1, 2**53, 2**63 - 1)] == [0, 2**53 + 1, -(2**63)]


@pytest.mark.parametrize("way", [temper, warp_logits])
@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": TEMPERATURES[0], "repetition_penalty": REPETITION_PENALTIES[0]},
        {"temperature": TEMPERATURES[0], "repetition_penalty": REPETITION_PENALTIES[1]},
        {"temperature": TEMPERATURES[1]},
        {"temperature": 1.0, "top_k": 2**31 - 1, "top_p": LEAST_TOP_P},
    ],
)
def test_the_extremes_that_are_accepted_keep_different_logits_apart(way: Callable[..., jax.Array], extreme: dict[str, float]):
    """Logits up to 1,000 either way, all of which came before: nothing overflows, and the most likely token stays it."""
    logits = np.linspace(-1000, 1000, VOCAB, dtype=np.float32)[None, None]
    row = rows(**extreme)
    tokens = np.arange(VOCAB, dtype=np.int32)[None]
    seen = jitted_penalise(logits, row, tokens, np.full(1, VOCAB - 1, np.int32), np.full((1, 1), VOCAB - 1, np.int32))
    got = np.asarray(jax.jit(way)(seen, row))[0, 0]
    assert np.isfinite(got).any()
    assert not np.isposinf(got).any()
    assert np.flatnonzero(got == got.max()).tolist() == [VOCAB - 1]
    if way is temper:
        assert np.isfinite(got).all()
        assert (np.diff(got) > 0).all()


def test_only_what_draws_and_has_no_seed_is_given_one():
    assert Sampling(temperature=1.0).seed is None
    fresh = [Sampling(temperature=1.0).seeded().seed for _ in range(8)]
    assert len(set(fresh)) == 8
    assert all(seed is not None and 0 <= seed < 2**32 for seed in fresh)
    for as_it_is in (Sampling(), Sampling(seed=5), Sampling(temperature=1.0, seed=0)):
        assert as_it_is.seeded() == as_it_is


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "expected max_new_tokens of at least 1, found 0"),
        ({"temperature": -0.1}, r"expected a temperature of 0, or from 1e-06 to 1e\+06, found -0.1"),
        ({"temperature": float("inf")}, r"expected a temperature of 0, or from 1e-06 to 1e\+06, found inf"),
        ({"temperature": float("nan")}, r"expected a temperature of 0, or from 1e-06 to 1e\+06, found nan"),
        ({"temperature": 1e-40}, r"expected a temperature of 0, or from 1e-06 to 1e\+06, found 1e-40"),
        ({"temperature": 1e39}, r"expected a temperature of 0, or from 1e-06 to 1e\+06, found 1e\+39"),
        ({"top_p": -1e-46}, "expected top_p from 0 to 1, found -1e-46"),
        ({"top_p": float("nan")}, "expected top_p from 0 to 1, found nan"),
        ({"top_p": 1.01}, "expected top_p from 0 to 1, found 1.01"),
        ({"top_k": -1}, r"expected top_k from 0 to 2\*\*31 - 1, found -1"),
        ({"top_k": 2**31}, r"expected top_k from 0 to 2\*\*31 - 1, found 2147483648"),
        (
            {"seed": -(2**63) - 1},
            r"expected a seed that is an integer from -2\*\*63 to 2\*\*63 - 1, found -9223372036854775809",
        ),
        ({"seed": 2**63}, r"expected a seed that is an integer from -2\*\*63 to 2\*\*63 - 1, found 9223372036854775808"),
        ({"min_p": -0.1}, "expected min_p from 0 to 1, found -0.1"),
        ({"min_p": 1.1}, "expected min_p from 0 to 1, found 1.1"),
        ({"min_p": float("nan")}, "expected min_p from 0 to 1, found nan"),
        ({"repetition_penalty": 0.0}, "expected a repetition_penalty from 0.001 to 1000, found 0.0"),
        ({"repetition_penalty": float("inf")}, "expected a repetition_penalty from 0.001 to 1000, found inf"),
        ({"presence_penalty": 2.5}, "expected a presence_penalty from -2 to 2, found 2.5"),
        ({"frequency_penalty": -3}, "expected a frequency_penalty from -2 to 2, found -3"),
        ({"stop": ("a", "")}, r"expected a tuple of stop strings, none of them empty, found \('a', ''\)"),
    ],
)
def test_errors(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


@pytest.mark.parametrize("stop", ["END", (1,)])
def test_stop_strings_stand_in_a_tuple(stop: Any):
    """Alone, "END" would stop at the first E, N or D. (These tests check annotations, which users need not: past those.)"""
    request = object.__new__(Sampling)
    vars(request).update(vars(Sampling()) | {"stop": stop})
    with pytest.raises(ValueError, match=re.escape(f"expected a tuple of stop strings, none of them empty, found {stop!r}")):
        request.__post_init__()
