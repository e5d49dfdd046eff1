"""Automata of rows in a fixed-size table on the device, so that constrained rows run many rounds in a dispatch.

The device makes the masks, cuts off forbidden drafts, drafts forced text, and advances the automata by the tokens that it
commits. The host sends the state in which a row begins, and reads the tokens like those of any other row. A row whose text
leaves its automaton pauses until the host makes its masks.

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
"""The most automata of running rows. Fewer slots have room for fewer."""


class AutomatonTable(NamedTuple):
    """Automata of a batch's rows, on the device; see `Automaton` for the meaning of each array.

    Attributes:
        masks: uint32 `[G, M, W]`.
        mask_of, forced: int32 `[G, S]`.
        classes: int32 `[G, V]`.
        after: transition table of each automaton row by row, int16 `[G, E]`.
        stride: number of token classes of each automaton, int32 `[G]`.
    """

    masks: Any
    mask_of: Any
    classes: Any
    after: Any
    stride: Any
    forced: Any

    def advance(self, place: Int[Array, " B"], state: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, " B"]:
        """Returns the state behind a token; `BEYOND` if the token leaves the automaton, -1 if it is forbidden."""
        entry = state * self.stride[place] + self.classes[place, token]
        return self.after[place, entry].astype(jnp.int32)

    def masks_at(self, place: Int[Array, " B"], state: Int[Array, "B T"]) -> UInt32[Array, "B T W"]:
        """Returns the masks of states."""
        at = place[:, None]
        return self.masks[at, self.mask_of[at, state]]


class AutomatonRows(NamedTuple):
    """Automata of a program's rows.

    Attributes:
        place: place of each row's automaton in the table, int32 `[n]`; 0 for rows without a constraint.
        state: state of the automaton, if the host knows the state, int32 `[n]`.
        known: whether the host knows the state, bool `[n]`; otherwise the device has it.
    """

    place: Any
    state: Any
    known: Any


class Followed(NamedTuple):
    """Block after a walk along its rows' automata.

    Attributes:
        drafts: drafts behind the last committed token, `[B, T - 1]`, with forced tokens in their places.
        counts: number of allowed drafts, `[B]`.
        states: states before each slot's next token, `[B, T]`; undefined behind the last allowed draft.
    """

    drafts: Array
    counts: Array
    states: Array


def follow(
    table: AutomatonTable, place: Int[Array, " B"], state: Int[Array, " B"], drafts: Int[Array, "B N"], counts: Int[Array, " B"]
) -> Followed:
    """Walks each row's automaton along its `counts` drafts, up to the first forbidden one. Forced tokens replace drafts."""

    def step(
        carry: tuple[Array, Array], drafted: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        (state, going), (draft, slot) = carry, drafted
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
    """Returns the states behind the first `committed` tokens of a block; all but the last were allowed drafts.

    A row that committed nothing, or a token that ends it, keeps its state. A token that leaves the automaton is the last one
    that a row commits, since drafts end before it.
    """
    last = jnp.maximum(committed - 1, 0)[:, None]
    before = jnp.take_along_axis(states, last, axis=1)[:, 0]
    token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    after = table.advance(place, before, jnp.maximum(token, 0))
    return jnp.where((committed > 0) & (token >= 0) & (after != -1), after, states[:, 0])


def has_left(state: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True for rows that have left their automaton: the host continues them, and the device does not change them."""
    return state == BEYOND


class AutomatonTables:
    """Host side of the table: the automaton in each place. A change makes a new table on the device.

    Args:
        slots: number of slots.
        vocab: size of the vocabulary.
        upload: uploads an array to the devices, which keep it unchanged.

    Attributes:
        automata: automaton of each place; the first is that of rows without a constraint, None marks an empty place.
    """

    def __init__(self, slots: int, vocab: int, upload: Callable[[np.ndarray], Array]):
        self.automata: list[Automaton | None] = [allow_all(vocab), *[None] * places(slots)]
        self.shapes = table_shapes(slots, vocab)
        self.upload = upload
        self.clock = 0
        self.device: AutomatonTable | None = None
        self.used = [0] * len(self.automata)
        self.host = AutomatonTable(*(np.zeros(each.shape, each.dtype) for each in self.shapes))
        self.write(0)

    def write(self, place: int) -> None:
        """Writes a place's automaton into the arrays."""
        automaton = self.automata[place]
        host = self.host
        assert automaton is not None, "a place without an automaton"
        states, classes = automaton.after.shape
        host.masks[place, : len(automaton.masks)] = automaton.masks
        host.mask_of[place, :states] = automaton.mask_of
        host.forced[place, :states] = automaton.forced
        host.classes[place] = automaton.classes
        host.after[place, : states * classes] = automaton.after.reshape(-1)
        host.stride[place] = classes
        self.device = None

    def placed(self, wanted: Sequence[Automaton | None]) -> tuple[AutomatonTable, Int32[np.ndarray, " n"]]:
        """Returns the device's table with all of these automata, which must fit, and the place of each; 0 for None."""
        self.clock += 1
        found = np.zeros(len(wanted), np.int32)
        needed = {id(each): each for each in wanted if each is not None}
        for key, each in needed.items():
            held = [None if one is None else id(one) for one in self.automata]
            if key not in held:
                free = [place for place in range(1, len(held)) if held[place] not in needed]
                place = min(free, key=lambda one: self.used[one])
                self.automata[place] = each
                self.write(place)
        for row, each in enumerate(wanted):
            if each is not None:
                found[row] = next(place for place, one in enumerate(self.automata) if one is each)
                self.used[found[row]] = self.clock
        if self.device is None:  # earlier tables do not change, since dispatches in flight may read them
            self.device = AutomatonTable(*(self.upload(each.copy()) for each in self.host))
        return self.device, found


def allow_all(vocab: int) -> Automaton:
    """Returns the automaton of rows without a constraint: one state that allows every token."""
    zero = np.zeros(1, np.int32)
    return Automaton(np.full((1, words(vocab)), ALL), zero, np.zeros(vocab, np.int32), zero[:, None], zero - 1)


def places(slots: int) -> int:
    """Returns the number of automata that rows of that many slots can have at once."""
    return min(slots, MOST_PLACES)


def table_shapes(slots: int, vocab: int) -> AutomatonTable:
    """Returns the abstract arrays of a table for that many slots."""
    count = 1 + places(slots)
    sizes = ((MOST_MASKS, words(vocab)), jnp.uint32), ((MOST_STATES,), jnp.int32), ((vocab,), jnp.int32)
    more = ((MOST_ENTRIES,), jnp.int16), ((), jnp.int32), ((MOST_STATES,), jnp.int32)
    return AutomatonTable(*(jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in (*sizes, *more)))


def table_bytes(slots: int, vocab: int) -> int:
    """Bytes of tables for that many slots on each device: the table that rounds read, and the one that replaces it."""
    return 2 * sum(each.size * each.dtype.itemsize for each in table_shapes(slots, vocab))


def row_shapes(rows: int) -> AutomatonRows:
    """Returns the abstract arrays of a program's rows."""
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return AutomatonRows(numbers, numbers, jax.ShapeDtypeStruct((rows,), jnp.bool_))


def starting(rows: AutomatonRows, carried: ArrayLike) -> Int[Array, " n"]:
    """Returns the states that rounds begin in: the host's if it knows them, else those behind the rounds before."""
    return jnp.where(rows.known, rows.state, carried)
