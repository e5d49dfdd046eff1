"""Deterministic automata over bytes, of expressions over characters in UTF-8 (the subset construction), as small as may be.

Every state can still reach the end, for every part of an expression has a text. So a byte may come next where it has a
transition, and nothing has to be looked ahead for. Behind `Beyond` an expression says nothing: any byte is let through there.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from tilewright.grammar.regular import (
    LAST,
    SURROGATES,
    Alternation,
    Beyond,
    CharacterClass,
    Concatenation,
    Lark,
    Node,
    NotRegular,
    Repetition,
    Separated,
    TooLarge,
)

MOST_NFA_STATES = 40_000
MOST_PARTS = 200_000
"""Of an expression, each as often as it is repeated: some have no states."""
MOST_STATES = 4096
"""Of an automaton over bytes."""


class Deadline:
    """A bound on the processor time that this thread's work may take; `check` raises `NotRegular` behind it.

    So what a grammar gets does not depend on what else the machine does.
    """

    def __init__(self, seconds: float):
        self.until = time.thread_time() + seconds

    def check(self) -> None:
        if time.thread_time() > self.until:
            raise NotRegular("it takes too long")


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Automaton over bytes, which begins in state 0.

    Attributes:
        after: the state behind a byte; -1 where it may not come.
        accepts: whether a text may end in a state.
        beyond: whether the expression does not say what may come in a state; any byte leads back to it.
        resume: of such a state, the one behind the text that the expression does not describe; -1 where that depends on the
            text, and of any other state.
    """

    after: Int32[np.ndarray, "S 256"]
    accepts: Bool[np.ndarray, " S"]
    beyond: Bool[np.ndarray, " S"]
    resume: Int32[np.ndarray, " S"]


ByteRanges = tuple[tuple[int, int], ...]
"""For each byte of a character the range that it lies in."""


def byte_ranges(low: int, high: int) -> Iterator[ByteRanges]:
    """The characters from `low` to `high` in UTF-8, as disjoint products of ranges of bytes."""
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, SURROGATES[0] - 1), (SURROGATES[1] + 1, 0xFFFF), (0x10000, LAST)):
        if max(low, first) <= min(high, last):
            yield from spanned(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def spanned(low: bytes, high: bytes) -> Iterator[ByteRanges]:
    """The encodings of one length from `low` to `high`."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    first = low[0]
    last = high[0]
    rest = len(low) - 1
    least = b"\x80" * rest
    most = b"\xbf" * rest
    if first == last:
        yield from (((first, first), *tail) for tail in spanned(low[1:], high[1:]))
        return
    if low[1:] != least:
        yield from (((first, first), *tail) for tail in spanned(low[1:], most))
        first += 1
    if high[1:] != most:
        yield from (((last, last), *tail) for tail in spanned(least, high[1:]))
        last -= 1
    if first <= last:
        yield ((first, last), *[(0x80, 0xBF)] * rest)


class Nfa:
    """Nondeterministic automaton, made of an expression (Thompson's construction); it begins in state 0.

    Attributes:
        moves: of each state, ranges of bytes and the state behind one of them.
        free: of each state, those that it becomes without a byte.
        beyond: of each state behind which the expression says nothing, the state behind the text that it does not describe.
    """

    def __init__(self, node: Node, deadline: Deadline):
        self.moves: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self.deadline = deadline
        self.parts = 0
        self.beyond = dict[int, int]()
        self.end = self.add(node, self.new())

    def new(self) -> int:
        if len(self.moves) >= MOST_NFA_STATES:
            raise TooLarge("it is too large")
        if len(self.moves) % 256 == 0:
            self.deadline.check()
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def add(self, node: Node, start: int) -> int:
        """Adds an expression behind a state. Returns the state behind it."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise TooLarge("it is too large")
        match node:
            case CharacterClass():
                return self.add_characters(node, start)
            case Concatenation():
                for part in node.parts:
                    start = self.add(part, start)
                return start
            case Alternation():
                ends = [self.add(part, self.begin(start)) for part in node.parts]
                end = self.new()
                for each in ends:
                    self.free[each].append(end)
                return end
            case Repetition():
                return self.add_repeated(node, start)
            case Separated():
                loop = self.begin(start)
                end = self.add(node.part, loop)
                self.free[self.add(node.separator, end)].append(loop)
                return end
            case Beyond():
                state = self.begin(start)
                self.moves[state].append((0, 255, state))
                self.beyond[state] = self.new()
                return self.beyond[state]
            case Lark():
                raise NotRegular("text that the matcher alone describes")

    def begin(self, start: int) -> int:
        """A new state behind another, so that what loops back to it stays inside."""
        state = self.new()
        self.free[start].append(state)
        return state

    def add_characters(self, node: CharacterClass, start: int) -> int:
        end = self.new()
        for low, high in node.ranges:
            for ranges in byte_ranges(low, high):
                state = start
                for first, last in ranges[:-1]:
                    following = self.new()
                    self.moves[state].append((first, last, following))
                    state = following
                self.moves[state].append((*ranges[-1], end))
        return end

    def add_repeated(self, node: Repetition, start: int) -> int:
        for _ in range(node.least):
            start = self.add(node.part, start)
        if node.most is None:
            loop = self.begin(start)
            self.free[self.add(node.part, loop)].append(loop)
            return loop
        leaving = [start]
        for _ in range(node.most - node.least):
            start = self.add(node.part, self.begin(start))
            leaving.append(start)
        end = self.new()
        for each in leaving:
            self.free[each].append(end)
        return end

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """What some states become without a byte, as far as something follows or the text may end."""
        seen = set(states)
        left = list(states)
        while left:
            for following in self.free[left.pop()]:
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        return frozenset(each for each in seen if self.moves[each] or each == self.end)


class Subsets:
    """Sets of an automaton's states, each with what its states become without a byte, numbered as they are met.

    Attributes:
        order: the sets by their numbers.
    """

    def __init__(self, nfa: Nfa):
        self.nfa = nfa
        self.order = list[frozenset[int]]()
        self.numbers = dict[frozenset[int], int]()
        self.closures = dict[frozenset[int], frozenset[int]]()

    def number(self, states: frozenset[int]) -> int:
        """The number of the set that some states become."""
        if states not in self.closures:
            self.closures[states] = self.nfa.closure(states)
        held = self.closures[states]
        if held not in self.numbers:
            self.numbers[held] = len(self.order)
            self.order.append(held)
        return self.numbers[held]

    def resumed(self, held: frozenset[int]) -> int:
        """The number of the set behind a text that is not described, which begins in this one; -1 if that depends on it."""
        ends = {self.nfa.closure(frozenset([self.nfa.beyond[each]])) for each in held if each in self.nfa.beyond}
        return self.number(ends.pop()) if len(ends) == 1 and held <= self.nfa.beyond.keys() else -1


def byte_automaton(node: Node, deadline: Deadline) -> ByteAutomaton:
    """The automaton of an expression.

    Raises:
        NotRegular: it has too many states, or takes too long.
    """
    nfa = Nfa(node, deadline)
    bounds = sorted({0, 256, *(edge for moves in nfa.moves for low, high, _ in moves for edge in (low, high + 1))})
    place = {bound: n for n, bound in enumerate(bounds)}
    moves = [[(range(place[low], place[high + 1]), target) for low, high, target in each] for each in nfa.moves]
    subsets = Subsets(nfa)
    rows = list[np.ndarray]()
    resume = list[int]()
    subsets.number(frozenset([0]))
    for number, held in enumerate(subsets.order):  # which grows meanwhile
        deadline.check()
        unsaid = not held.isdisjoint(nfa.beyond)
        row = np.full(len(bounds) - 1, number if unsaid else -1, np.int32)
        resume.append(subsets.resumed(held) if unsaid else -1)
        behind: list[set[int]] = [set() for _ in row]
        for pieces, target in () if unsaid else (move for state in held for move in moves[state]):
            for piece in pieces:
                behind[piece].add(target)
        for piece, targets in enumerate(map(frozenset, behind)):
            if targets:
                row[piece] = subsets.number(targets)
        rows.append(row)
        if len(subsets.order) > MOST_STATES:
            raise TooLarge("its automaton is too large")
    beyond = np.asarray([not held.isdisjoint(nfa.beyond) for held in subsets.order])
    accepts = np.asarray([nfa.end in held for held in subsets.order]) & ~beyond
    return minimal(np.stack(rows), np.diff(bounds), accepts, beyond, np.asarray(resume, np.int32), deadline)


def minimal(
    after: Int32[np.ndarray, "S P"],
    widths: Int64[np.ndarray, " P"],
    accepts: Bool[np.ndarray, " S"],
    beyond: Bool[np.ndarray, " S"],
    resume: Int32[np.ndarray, " S"],
    deadline: Deadline,
) -> ByteAutomaton:
    """The automaton with each of its states once: those that nothing tells apart are one (Moore's algorithm).

    States behind which the expression says nothing stay apart, each of which has a text of its own behind it.

    Args:
        after: by pieces of the bytes.
        widths: bytes of each piece.
    """
    states = len(after)
    rng = np.random.default_rng(0)
    columns = np.concatenate([np.arange(states, dtype=np.int32)[:, None], after], axis=1)
    firsts, kinds = distinct(np.where(beyond, np.arange(2, states + 2), accepts))
    while True:
        deadline.check()
        # Two states with one key are of one kind but for a chance of 2**-64; the matcher is asked about all that is left.
        codes = rng.integers(1, 2**64, size=len(firsts) + 1, dtype=np.uint64)[np.append(kinds, len(firsts))]
        weights = rng.integers(1, 2**64, size=columns.shape[1], dtype=np.uint64)
        found, kinds = distinct((codes[columns] * weights).sum(axis=1))
        if len(found) == len(firsts):
            break
        firsts = found
    kept = np.append(kinds, -1).astype(np.int32)
    return ByteAutomaton(np.repeat(kept[after[found]], widths, axis=1), accepts[found], beyond[found], kept[resume[found]])


def distinct(keys: Shaped[np.ndarray, " S"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " S"]]:
    """The first state of each key, in their order, and for each state which of these it is like."""
    _, firsts, kinds = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[kinds]
