"""Automata of rows on the device, against going along them token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from tilewright.runtime.automata import ALL, BEYOND, MOST_MASKS, MOST_STATES, Automaton, AutomatonState, words
from tilewright.runtime.automaton_table import (
    MOST_PLACES,
    AutomatonTable,
    AutomatonTables,
    Followed,
    advance_committed,
    allow_all,
    follow,
    places,
)

VOCAB = 40
EOS = 39


def random_automaton(seed: int, states: int = 6) -> Automaton:
    """One whose tokens lead anywhere, out of it, too, with a forced token in some states; the last token, which ends texts,
    leads nowhere."""
    rng = np.random.default_rng(seed)
    after = rng.integers(BEYOND, states, (states, VOCAB)).astype(np.int32)
    after[:, 0] = 0
    after[:, EOS] = -1
    forced = np.where(rng.random(states) < 0.3, 0, -1).astype(np.int32)
    bits = np.zeros((states, 32 * words(VOCAB)), bool)
    bits[:, :VOCAB] = after != -1
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    kinds, mask_of = np.unique(masks, axis=0, return_inverse=True)
    columns, classes = np.unique(after, axis=1, return_inverse=True)
    return Automaton(kinds, mask_of.reshape(-1).astype(np.int32), classes.reshape(-1).astype(np.int32), columns, forced)


@jax.jit
def followed(
    table: AutomatonTable, place: Array, state: Array, drafts: Array, counts: Array
) -> tuple[Followed, Array]:  # once, for all examples
    found = follow(table, place, state, drafts, counts)
    return found, table.masks_at(place, found.states)


advanced = jax.jit(advance_committed)


def tables() -> AutomatonTables:
    return AutomatonTables(4, VOCAB, jnp.asarray)


@given(st.integers(0, 2**32 - 1))
def test_blocks_follow_their_automata(seed: int):
    rng = np.random.default_rng(seed)
    held = tables()
    rows = [random_automaton(seed % 7), None, random_automaton(seed % 5 + 10), random_automaton(seed % 7)]
    table, place = held.placed(rows)
    state = np.asarray([0 if each is None else rng.integers(6) for each in rows], np.int32)
    drafts = rng.integers(0, VOCAB, (4, 5)).astype(np.int32)
    counts = rng.integers(0, 6, 4).astype(np.int32)
    found, masks = followed(table, place, state, drafts, counts)
    tokens = np.zeros((4, 6), np.int32)
    committed = np.zeros(4, np.int32)
    want = np.asarray(state)
    for row, each in enumerate(rows):
        automaton = each or allow_all(VOCAB)
        at = int(state[row])
        kept = 0
        for slot in range(6):
            assert masks[row, slot].tolist() == automaton.masks[automaton.mask_of[at]].tolist()
            forced = int(automaton.forced[at])
            if slot == 5 or (forced < 0 and slot >= counts[row]):
                break
            token = forced if forced >= 0 else int(drafts[row, slot])
            if automaton.after[at, automaton.classes[token]] < 0:
                break
            assert found.drafts[row, slot] == token
            at = int(automaton.after[at, automaton.classes[token]])
            kept = kept + 1
        assert found.counts[row] == kept
        # A round accepts some of them, and draws a token that may come behind them.
        accepted = int(rng.integers(kept + 1))
        before = int(found.states[row, accepted])
        may = np.flatnonzero(np.unpackbits(automaton.masks[automaton.mask_of[before]].view(np.uint8), bitorder="little"))
        drawn = int(rng.choice(may[may < VOCAB]))
        committed[row] = rng.integers(2) * (accepted + 1)
        tokens[row, : accepted + 1] = [*np.asarray(found.drafts[row, :accepted]), drawn]
        reached = automaton.advance(int(state[row]), tokens[row, : committed[row]].tolist())
        want[row] = BEYOND if reached is None else reached
    got = advanced(table, place, found.states, tokens, committed)
    np.testing.assert_array_equal(got, want)


def test_a_token_that_ends_a_row_leaves_its_state():
    (table, place), states = tables().placed([random_automaton(1)]), jnp.full((1, 3), 2, jnp.int32)
    for token in (EOS, -1):  # and one whose logits were not finite
        tokens = jnp.full((1, 3), token, jnp.int32)
        assert advanced(table, place, states, tokens, jnp.asarray([1], jnp.int32)).tolist() == [2]


def test_places_go_to_those_that_were_used_last():
    held = tables()
    automata = [random_automaton(seed) for seed in range(6)]
    assert places(4) == 4
    assert places(100) == MOST_PLACES
    first, place = held.placed([automata[0], None, automata[1], automata[0]])
    assert place.tolist() == [1, 0, 2, 1]
    again, place = held.placed([automata[1], automata[0]])
    assert again is first, "nothing has to be sent"
    assert place.tolist() == [2, 1]
    before = np.asarray(first.mask_of)
    _, place = held.placed([automata[2], automata[3]])
    assert sorted(place.tolist()) == [3, 4]
    held.placed([automata[1]])
    table, place = held.placed([automata[4], automata[5], automata[1]])
    assert place[2] == 2
    assert sorted(place[:2].tolist()) == [1, 3], "the places of those that were not used for longest"
    np.testing.assert_array_equal(before, first.mask_of)
    for row, each in zip(place.tolist(), (automata[4], automata[5], automata[1]), strict=True):
        states, count = each.after.shape
        np.testing.assert_array_equal(np.asarray(table.after)[row, : states * count].reshape(states, count), each.after)
        np.testing.assert_array_equal(np.asarray(table.masks)[row, : len(each.masks)], each.masks)


def test_states_on_the_host():
    automaton = random_automaton(3)
    reached = automaton.advance(0, [0, 0])
    assert reached is not None
    state = AutomatonState(automaton, reached)
    assert AutomatonState(automaton, 0).advance([0, 0]) == state
    with pytest.raises(ValueError, match=rf"a token that is allowed in state 0, found {EOS}"):
        state.advance([EOS])
    leaving = int(np.flatnonzero(automaton.after[0, automaton.classes] == BEYOND)[0])
    assert state.advance([leaving, EOS]) is None, "what comes behind is not the automaton's"


def test_automata_have_limits():
    for masks, states, classes, message in (
        (1, MOST_STATES + 1, 1, f"found {MOST_STATES + 1}, 1 and"),
        (MOST_MASKS + 1, 1, 1, f"found 1, {MOST_MASKS + 1} and 1"),
        (1, 1024, 257, f"found 1024, 1 and {1024 * 257}"),
    ):
        each = np.zeros(states, np.int32)
        after = np.zeros((states, classes), np.int32)
        with pytest.raises(ValueError, match=message):
            Automaton(np.full((masks, 2), ALL), each, np.zeros(VOCAB, np.int32), after, each)
