"""Which tokens a step would put where, and which of these it commits, against the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.support import randomness, request_of
from opcodes import opcodes
from reference import diffusion_numpy
from reference.diffusion_cases import MASK
from reference.diffusion_numpy import Choice, Request
from tilewright.diffusion.commit import Choices, choose, commits
from tilewright.diffusion.options import BY_CHANCE, REMASKING, Denoising, RowOptions, row_options

VOCAB = 40
BLOCK = 6
LONGEST = 8
seeds = st.integers(0, 2**31 - 1)
RULES = pytest.mark.parametrize("rule", REMASKING)
run_commits = jax.jit(commits)


@partial(jax.jit, static_argnums=4)
def run_choose(logits: Any, options: RowOptions, positions: Any, steps: Any, mask: int) -> Choices:
    return choose(logits, options.rule, options.sampling, positions, steps, mask)


def asked(rule: Any, **fields: Any) -> Denoising:
    return Denoising(**{"new_tokens": 2 * BLOCK, "block_length": BLOCK, "remasking": rule, "seed": 5} | fields)


def ways(rule: Any) -> list[Denoising]:
    """Four requests for a batch: as likely as can be, filtered, drawn, and both."""
    other: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8}
    return [asked(rule), asked(rule, top_p=0.6), asked(rule, temperature=1.3, seed=2), asked(rule, **other)]


@RULES
@given(seeds)
def test_choices_are_those_of_the_reference(rule: Any, seed: int):
    rng = np.random.default_rng(seed)
    requests = ways(rule)
    logits = (rng.standard_normal((4, BLOCK, VOCAB)) * 2).astype(np.float32)
    positions = np.sort(rng.permutation(30)[:BLOCK])[None] + np.arange(4)[:, None]
    steps = rng.integers(0, 30, 4)
    found = run_choose(
        jnp.asarray(logits),
        row_options(requests, LONGEST),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(steps, jnp.int32),
        MASK,
    )
    for (row, at), position in np.ndenumerate(positions):
        noise, uniform = randomness(requests[row].seed or 0)
        want = diffusion_numpy.choose(
            logits[row, at].astype(np.float64),
            request_of(requests[row], "llada"),
            int(steps[row]),
            int(position),
            lambda step, place, _, noise=noise: noise[step, place],
            lambda step, place, uniform=uniform: float(uniform[step, place]),
        )
        if want.gap > 1e-4:
            assert int(found.token[row, at]) == want.token
            np.testing.assert_allclose(found.probability[row, at], want.probability, atol=2e-6)
        np.testing.assert_allclose(found.score[row, at], want.score, atol=2e-5, err_msg=f"{requests[row]}")


@RULES
def test_a_mask_is_never_chosen(rule: Any):
    logits = jnp.full((4, BLOCK, VOCAB), -30.0).at[:, :, MASK].set(50.0)
    positions = jnp.tile(jnp.arange(BLOCK, dtype=jnp.int32), (4, 1))
    found = run_choose(logits, row_options(ways(rule), LONGEST), positions, jnp.zeros(4, jnp.int32), MASK)
    assert not (np.asarray(found.token) == MASK).any()
    assert np.isfinite(np.asarray(found.score)).all()
    assert (np.asarray(found.token)[0] == 0).all(), "the lowest of equals"


def test_a_position_is_drawn_anew_in_each_step_and_alike_in_every_batch():
    requests = [asked("random", temperature=1.0, seed=1), asked("random", temperature=1.0, seed=9)]
    positions = jnp.tile(jnp.arange(BLOCK, dtype=jnp.int32), (2, 1))

    def drawn(requests: list[Denoising], steps: list[int]) -> tuple[np.ndarray, np.ndarray]:
        options = row_options(requests, LONGEST)
        found = run_choose(jnp.zeros((2, BLOCK, VOCAB)), options, positions, jnp.asarray(steps, jnp.int32), MASK)
        return np.asarray(found.token), np.asarray(found.score)

    first = drawn(requests, [3, 3])
    turned = drawn(requests[::-1], [3, 3])
    later = drawn(requests, [3, 4])
    for one, other, third in zip(first, turned, later, strict=True):
        np.testing.assert_array_equal(one, other[::-1])
        np.testing.assert_array_equal(one[0], third[0])
        assert (one[1] != third[1]).any()
        assert (one[0] != one[1]).any()
    assert len(set(first[1][0].tolist())) == BLOCK


@pytest.mark.parametrize("rows", [1, 4])
def test_what_only_some_rows_ask_for_is_in_loops(rows: int):
    """XLA computes before a loop what does not depend on its counter, were the loop to have no turn."""
    options = row_options(ways("entropy")[:rows], LONGEST)
    inputs = jnp.zeros((rows, BLOCK, VOCAB)), options, jnp.zeros((rows, BLOCK), jnp.int32), jnp.zeros(rows, jnp.int32)
    hlo = run_choose.lower(*inputs, MASK).compile().as_text()
    assert hlo is not None
    of_rules = {"xor", "log"}  # noise, and the entropy
    assert of_rules <= opcodes(hlo, VOCAB, 9)
    assert not of_rules & opcodes(hlo, VOCAB, 0)


SCORES = st.sampled_from([0.1, 0.25, 0.5, 0.5, 0.75, 0.9])
"""Few, so that there are equals."""


@RULES
@given(st.lists(st.tuples(SCORES, SCORES, st.booleans()), min_size=BLOCK, max_size=BLOCK), st.integers(0, 2), st.booleans())
def test_commits_are_those_of_the_reference(rule: Any, drawn: list[tuple[float, float, bool]], step: int, threshold: bool):
    """Beside a row of another rule; candidates are some of the block's positions."""
    fields: dict[str, Any] = {"threshold": 0.5} if threshold and rule not in BY_CHANCE else {"steps": 6}
    one = asked(rule, **fields)
    other = asked("low_confidence", steps=12)
    score, probability, candidate = (np.asarray(each) for each in zip(*drawn, strict=True))
    choices = Choices(
        *(
            jnp.asarray(np.stack([x, x]), dtype)
            for x, dtype in ((np.zeros(BLOCK), jnp.int32), (probability, jnp.float32), (score, jnp.float32))
        )
    )
    found = run_commits(choices, jnp.asarray(np.stack([candidate] * 2)), row_options([one, other], LONGEST), jnp.full(2, step))
    for row, request in enumerate((one, other)):
        assert np.flatnonzero(np.asarray(found)[row]).tolist() == committed(score, probability, candidate, request, step)


def committed(score: np.ndarray, probability: np.ndarray, candidate: np.ndarray, asked: Denoising, step: int) -> list[int]:
    """The positions that the reference commits; quotas are those of a block whose masks go by quota."""
    request: Request = request_of(asked, "llada")
    places = np.flatnonzero(candidate)
    choices = [Choice(0, float(probability[n]), float(score[n]), 1.0) for n in places]
    if not choices:
        return []
    if asked.threshold is None and asked.remasking != "origin":
        ranked = sorted(range(len(choices)), key=lambda i: (-choices[i].score, i))
        return sorted(int(places[i]) for i in ranked[: int(asked.quotas()[step])])
    return [int(places[i]) for i in diffusion_numpy.commits(choices, request, step)]


def test_a_threshold_commits_the_best_however_unlikely_and_nothing_where_nothing_is_masked():
    choices = Choices(jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3), 0.1), jnp.asarray([[0.1, 0.3, 0.2]] * 2))
    options = row_options([Denoising(3, threshold=0.9)] * 2, LONGEST)
    found = run_commits(choices, jnp.asarray([[True] * 3, [False] * 3]), options, jnp.zeros(2, jnp.int32))
    assert found.tolist() == [[False, True, False], [False] * 3]
