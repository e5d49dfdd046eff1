"""Automata of rows in a table of declared size on the device, so that constrained rows run many rounds to a dispatch.

The device makes masks by itself, cuts off drafts that may not come, drafts what has to come, and goes on from state to state
with the tokens that it commits. The host says in which state a row begins, and hears the tokens, as of any other row. A row
whose text leaves its automaton rests until the host makes its masks.

Legend: G places in the table, S states, M masks, W words of a mask, V tokens, C classes of tokens, E entries of an automaton.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, Int32, UInt32

from tilewright.runtime.automata import ALL, BEYOND, MOST_ENTRIES, MOST_MASKS, MOST_STATES, Automaton, words

MOST_PLACES = 8
"""Automata that rows can have at once, if there are as many slots."""


class AutomatonTable(NamedTuple):
    """The automata of a batch's rows, on the device; `Automaton` says what each array holds.

    Attributes:
        masks: uint32 `[G, M, W]`.
        mask_of, forced: int32 `[G, S]`.
        classes: int32 `[G, V]`.
        after: the table of each automaton row by row, int16 `[G, E]`.
        stride: how many classes of tokens each has, int32 `[G]`.
    """

    masks: Any
    mask_of: Any
    classes: Any
    after: Any
    stride: Any
    forced: Any

    def advance(self, place: Int[Array, " B"], state: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, " B"]:
        """The state behind a token; `BEYOND` where that leaves the automaton, -1 where it may not come."""
        entry = state * self.stride[place] + self.classes[place, token]
        return self.after[place, entry].astype(jnp.int32)

    def of(self, place: Int[Array, " B"], state: Int[Array, "B T"]) -> UInt32[Array, "B T W"]:
        """The masks of states."""
        at = place[:, None]
        return self.masks[at, self.mask_of[at, state]]


class AutomatonRows(NamedTuple):
    """The rows of a program in their automata.

    Attributes:
        place: of each row's automaton in the table, int32 `[n]`; 0 for rows without a constraint.
        state: that the host knows of, int32 `[n]`.
        known: bool `[n]`; of the others the device knows the state.
    """

    place: Any
    state: Any
    known: Any


class Followed(NamedTuple):
    """A block along its rows' automata.

    Attributes:
        drafts: the drafts behind the known token, `[B, T - 1]`, forced ones in their places.
        counts: how many of them may come, `[B]`.
        states: before each slot's next token, `[B, T]`; behind the last draft that may come they mean nothing.
    """

    drafts: Array
    counts: Array
    states: Array


def follow(
    table: AutomatonTable, place: Int[Array, " B"], state: Int[Array, " B"], drafts: Int[Array, "B N"], counts: Int[Array, " B"]
) -> Followed:
    """Goes along drafts, of which each row has `counts`, up to the first that may not come. Forced ones are put first."""

    def step(carry: tuple[Array, Array], given: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        (state, going), (draft, slot) = carry, given
        forced = table.forced[place, state]
        token = jnp.where(forced >= 0, forced, draft)
        after = table.advance(place, state, token)
        going = going & ((forced >= 0) | (slot < counts)) & (after >= 0)
        state = jnp.where(going, after, state)
        return (state, going), (token, going, state)

    slots = jnp.arange(drafts.shape[1])
    every = jnp.ones(state.shape, bool)
    _, (tokens, going, states) = jax.lax.scan(step, (state, every), (drafts.T, slots))
    states = jnp.concatenate([state[:, None], states.T], axis=1)
    return Followed(tokens.T, jnp.sum(going, axis=0).astype(jnp.int32), states)


def advance_committed(
    table: AutomatonTable,
    place: Int[Array, " B"],
    states: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
    committed: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The states behind the first `committed` of a block's tokens, of which all but the last were drafts that may come.

    A row that committed a token that ends it stays where it is, as does one that committed nothing. A token that leaves the
    automaton is the last that a row commits: drafts end before it.
    """
    last = jnp.maximum(committed - 1, 0)[:, None]
    before = jnp.take_along_axis(states, last, axis=1)[:, 0]
    token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    after = table.advance(place, before, jnp.maximum(token, 0))
    return jnp.where((committed > 0) & (token >= 0) & (after != -1), after, states[:, 0])


def has_left(state: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True for rows that have left their automaton: the host goes on with them, and the device leaves them as they are."""
    return state == BEYOND


class AutomatonTables:
    """The host's side of the table: which automaton is in which place. The device gets a new one when that changes.

    Args:
        slots: how many rows there may be.
        vocab: tokens of the model.
        put: places an array on the devices, which keep it as it is.

    Attributes:
        held: the automata of all places, the first that of rows without a constraint; None where nothing is.
    """

    def __init__(self, slots: int, vocab: int, put: Callable[[np.ndarray], Array]):
        self.held: list[Automaton | None] = [anything(vocab), *[None] * places(slots)]
        self.shapes = table_shapes(slots, vocab)
        self.put = put
        self.clock = 0
        self.device: AutomatonTable | None = None
        self.used = [0] * len(self.held)
        self.host = AutomatonTable(*(np.zeros(each.shape, each.dtype) for each in self.shapes))
        self.write(0)

    def write(self, place: int) -> None:
        """Writes a place's automaton into the arrays."""
        own = self.held[place]
        host = self.host
        assert own is not None, "a place without an automaton"
        states, classes = own.after.shape
        host.masks[place, : len(own.masks)] = own.masks
        host.mask_of[place, :states] = own.mask_of
        host.forced[place, :states] = own.forced
        host.classes[place] = own.classes
        host.after[place, : states * classes] = own.after.reshape(-1)
        host.stride[place] = classes
        self.device = None

    def placed(self, wanted: Sequence[Automaton | None]) -> tuple[AutomatonTable, Int32[np.ndarray, " n"]]:
        """The table on the device with all of these, of which it has room for, and the place of each; 0 for None."""
        self.clock += 1
        found = np.zeros(len(wanted), np.int32)
        needed = {id(each): each for each in wanted if each is not None}
        for key, each in needed.items():
            held = [None if one is None else id(one) for one in self.held]
            if key not in held:
                free = [place for place in range(1, len(held)) if held[place] not in needed]
                place = min(free, key=lambda one: self.used[one])
                self.held[place] = each
                self.write(place)
        for row, each in enumerate(wanted):
            if each is not None:
                found[row] = next(place for place, one in enumerate(self.held) if one is each)
                self.used[found[row]] = self.clock
        if self.device is None:  # what was given away before may still be read: it stays as it is
            self.device = AutomatonTable(*(self.put(each.copy()) for each in self.host))
        return self.device, found


def anything(vocab: int) -> Automaton:
    """The automaton of rows without a constraint: one state, behind which any token may come."""
    zero = np.zeros(1, np.int32)
    return Automaton(np.full((1, words(vocab)), ALL), zero, np.zeros(vocab, np.int32), zero[:, None], zero - 1)


def places(slots: int) -> int:
    """Automata that rows of so many slots can have at once."""
    return min(slots, MOST_PLACES)


def table_shapes(slots: int, vocab: int) -> AutomatonTable:
    """The arrays of the table for so many slots, abstract."""
    count = 1 + places(slots)
    sizes = ((MOST_MASKS, words(vocab)), jnp.uint32), ((MOST_STATES,), jnp.int32), ((vocab,), jnp.int32)
    more = ((MOST_ENTRIES,), jnp.int16), ((), jnp.int32), ((MOST_STATES,), jnp.int32)
    return AutomatonTable(*(jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in (*sizes, *more)))


def table_bytes(slots: int, vocab: int) -> int:
    """Bytes that tables for so many slots take on each device: one that rounds read, and one that takes its place."""
    return 2 * sum(each.size * each.dtype.itemsize for each in table_shapes(slots, vocab))


def row_shapes(rows: int) -> AutomatonRows:
    """The arrays of a program's rows, abstract."""
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return AutomatonRows(numbers, numbers, jax.ShapeDtypeStruct((rows,), jnp.bool_))


def starting(rows: AutomatonRows, carried: ArrayLike) -> Int[Array, " n"]:
    """The states that rounds begin in: the host's where it knows them, else those that the rounds before left."""
    return jnp.where(rows.known, rows.state, carried)
