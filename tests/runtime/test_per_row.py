"""Batches of rows of every kind in one program: each row gets the tokens of the program that serves it alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from opcodes import opcodes
from tilewright.runtime import per_row
from tilewright.runtime.per_row import TRIES, PenaltyHistory, filters, for_each, penalises, sample_each
from tilewright.runtime.sampling import Sampling, noise, penalise, row_sampling, sample, temper

ROWS = 4
VOCAB = 40
LENGTH = 24
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 7, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "presence_penalty": -0.7},
    {"temperature": 1.6, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 0.8},
    {"logit_bias": ((3, 4.0), (17, -100.0))},
    {"temperature": 0.9, "top_p": 0.9, "logit_bias": ((5, 3.5),), "presence_penalty": 0.5},
)


def together(most: int) -> Any:
    """`sample_each` where so many rows draw together."""

    @jax.jit
    def sample_together(*given: Any) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(per_row, "drawn_together", lambda batch, slots: most)
            return sample_each(*given)

    return sample_together


each_jitted = jax.jit(sample_each)
TOGETHER = {most: together(most) for most in (2, 3, ROWS)}


@jax.jit
def alike(logits: Any, rows: Any, history: PenaltyHistory, positions: Any) -> jax.Array:
    """For all rows alike, as steps without loops do it."""
    return sample(penalise(logits, rows, *history), rows, positions)


def changes_logits(request: Sampling) -> bool:
    """True if it has penalties, biases or ends that may not come yet."""
    unchanged = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
    return any(getattr(request, name) != value for name, value in unchanged.items())


def problem(
    seed: int, slots: int, rounded: bool, vocab: int = VOCAB
) -> tuple[NDArray[np.float32], PenaltyHistory, NDArray[np.int32]]:
    """Logits of rows whose texts repeat, with the positions that follow; `rounded` as bfloat16 is, so that many are equal."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (ROWS, slots, vocab)).astype(np.float32)
    if rounded:
        logits = np.asarray(jnp.asarray(logits).astype(jnp.bfloat16).astype(jnp.float32))
    tokens, block = (rng.integers(0, 9, shape).astype(np.int32) for shape in ((ROWS, LENGTH), (ROWS, slots)))
    known = rng.integers(0, LENGTH, ROWS).astype(np.int32)
    block[:, 0] = tokens[np.arange(ROWS), known]
    return logits, PenaltyHistory(tokens, known, block), known[:, None] + 1 + np.arange(slots, dtype=np.int32)


def agreeing(
    requests: list[Sampling], logits: Any, history: PenaltyHistory, positions: Any, lengths: Any, seed: int
) -> PenaltyHistory:
    """The same texts with blocks of which a row's own tokens accept a random part."""
    rng = np.random.default_rng(seed)
    block = history.block.copy()
    rows = row_sampling(requests, lengths)
    slots = block.shape[1]
    for _ in range(3):  # a penalty changes what follows
        block[:, 1:] = np.asarray(alike(logits, rows, history._replace(block=block), positions))[:, :-1]
    for row, slot in enumerate(rng.integers(1, slots + 1, len(block))):
        if slot < slots:
            block[row, slot] = (block[row, slot] + 1) % 9
    return history._replace(block=block)


def meant(request: Sampling, tokens: NDArray[np.int32], block: NDArray[np.int32]) -> int:
    """How many of a row's tokens are given: of one that draws those up to the first that the block does not go on with."""
    differs = np.flatnonzero(tokens[:-1] != block[1:])
    return int(differs[0]) + 1 if request.temperature > 0 and len(differs) else len(tokens)


def check_each(
    requests: list[Sampling],
    logits: Any,
    history: PenaltyHistory,
    positions: Any,
    asking: NDArray[np.bool_],
    jitted: Any = each_jitted,
) -> None:
    lengths = np.maximum(history.last_position - 5, 1)
    history = agreeing(requests, logits, history, positions, lengths, int(history.last_position[0]))
    got = np.asarray(jitted(logits, row_sampling(requests, lengths), history, positions, asking))
    best = np.asarray(logits).argmax(axis=-1)
    greedy = [request.temperature == 0 and not changes_logits(request) for request in requests]
    if not np.any(asking & greedy):
        best[:] = 0  # nor was the argmax taken, where no row wants it
    together = np.asarray(alike(logits, row_sampling(requests, lengths), history, positions))
    for row, request in enumerate(requests):
        alone = PenaltyHistory(*(part[row : row + 1] for part in history))
        one = row_sampling([request], lengths[row : row + 1])
        want = alike(logits[row : row + 1], one, alone, positions[row : row + 1])
        tokens = np.asarray(want)[0]
        count = meant(request, tokens, history.block[row]) if asking[row] else 0
        np.testing.assert_array_equal(got[row, :count], tokens[:count])
        if not asking[row] or not changes_logits(request):
            np.testing.assert_array_equal(got[row, count:], best[row, count:], "what nobody asked for was not drawn")
        np.testing.assert_array_equal(together[row], tokens)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32 - 1)), min_size=ROWS, max_size=ROWS),
    st.lists(st.booleans() | st.just(True), min_size=ROWS, max_size=ROWS),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 16]),
    st.booleans(),
)
def test_rows_of_every_kind(kinds: list[tuple[dict[str, Any], int]], asking: list[bool], seed: int, slots: int, rounded: bool):
    requests = [Sampling(seed=row_seed, **kind) for kind, row_seed in kinds]
    check_each(requests, *problem(seed, slots, rounded), np.asarray(asking))


@pytest.mark.parametrize(
    ("vocab", "slots"),
    [(4096, 1), (5003, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4096, 16), (5003, 1)))],
)
def test_large_vocabularies(slots: int, vocab: int):
    for first in range(len(KINDS)):
        requests = [Sampling(seed=n, **KINDS[(first + n) % len(KINDS)]) for n in range(ROWS)]
        check_each(requests, *problem(first, slots, first % 2 == 0, vocab), np.ones(ROWS, bool))


@pytest.mark.parametrize("tries", [1, TRIES])
def test_a_draw_that_the_filters_left_none_of_the_best_tokens(tries: int, monkeypatch: pytest.MonkeyPatch):
    """A flat distribution, of which top-p keeps little: beyond some tries all is filtered, for the rows that need it."""
    monkeypatch.setattr(per_row, "TRIES", tries)
    requests = [Sampling(temperature=30.0, top_p=0.03, top_k=k, seed=seed) for k in (0, 35) for seed in range(20)]
    rows = row_sampling(requests, [1] * 40)
    positions = jnp.full((40, 1), 3, jnp.int32)
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (40, 1, VOCAB)), jnp.float32)
    wanted = sample(logits, rows, positions)
    tempered = temper(logits, rows)
    random = noise(rows, positions, VOCAB)
    np.testing.assert_array_equal(jax.jit(per_row.draw_kept)(tempered, tempered + random, rows), wanted)
    best = np.argsort(-np.asarray(tempered + random)[:, 0], axis=-1)
    needed = np.argmax(best == np.asarray(wanted), axis=-1) + 1
    assert needed.min() <= TRIES < needed.max()


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32 - 1)), min_size=ROWS, max_size=ROWS),
    st.lists(st.booleans() | st.just(True), min_size=ROWS, max_size=ROWS),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 3, ROWS]),
)
def test_rows_that_draw_together(kinds: list[tuple[dict[str, Any], int]], asking: list[bool], seed: int, together: int):
    """As on accelerators: any number of rows of one kind in a turn, of which the last one may be short."""
    requests = [Sampling(seed=row_seed, **kind) for kind, row_seed in kinds]
    check_each(requests, *problem(seed, 1, rounded=False), np.asarray(asking), TOGETHER[together])


def test_how_many_rows_draw_together(monkeypatch: pytest.MonkeyPatch):
    for backend, wanted in (("cpu", (1, 1)), ("tpu", (16, 1)), ("gpu", (64, 1))):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)  # noqa: B023
        assert tuple(per_row.drawn_together(64, slots) for slots in (1, 4)) == wanted


def test_what_rows_ask_is_told_as_their_requests_tell_it():
    requests = [Sampling(**kind) for kind in KINDS]
    rows = row_sampling(requests, [1] * len(KINDS))
    assert [changes_logits(request) for request in requests] == np.asarray(penalises(rows)).tolist()
    filtered = [(request.top_p, request.top_k, request.min_p) != (1.0, 0, 0.0) for request in requests]
    assert filtered == np.asarray(filters(rows)).tolist()
    assert 0 < sum(filtered) < len(filtered)


@given(st.lists(st.booleans(), min_size=9, max_size=9))
def test_a_turn_for_each_row_that_is_named_and_for_no_other(which: list[bool]):
    def take(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seen, turns = carry
        return seen.at[turns].set(n.astype(jnp.int32)), turns + 1

    seen, turns = for_each(jnp.asarray(which), take, (jnp.full(9, -1, jnp.int32), jnp.int32(0)))
    assert seen[: int(turns)].tolist() == [n for n, named in enumerate(which) if named]


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("slots", "loops"), [(1, 1), (2, 1)])
def test_no_work_of_a_row_is_done_before_it_is_known_that_it_is_asked_for(slots: int, loops: int, rows: int):
    """XLA computes before a loop what does not depend on its counter, were the loop to have no turn."""
    requests = [Sampling(**kind) for kind in KINDS[:rows]]
    whole = problem(0, slots, rounded=False)
    logits, history, positions = jax.tree.map(lambda x: x[:rows], whole)
    arguments = row_sampling(requests, history.last_position), history, positions, np.ones(rows, bool)
    hlo = jax.jit(sample_each).lower(logits, *arguments).compile().as_text()
    assert hlo is not None
    of_draws = {"xor", "log"}
    assert of_draws <= opcodes(hlo, VOCAB, 9)
    assert not of_draws & opcodes(hlo, VOCAB, loops), "a slot's draw is in a loop of its own"
