"""Minimal deterministic automata over UTF-8 bytes, built from expressions by the subset construction.

Every state can reach an accepting state, because every part of an expression matches some text. A byte is therefore allowed
exactly where it has a transition, without lookahead. `Undescribed` parts of an expression allow every byte.
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
    CharacterClass,
    Concatenation,
    Lark,
    Node,
    NotRegular,
    Repetition,
    Separated,
    TooLarge,
    Undescribed,
)

MOST_NFA_STATES = 40_000
MOST_PARTS = 200_000
"""Largest number of parts of an expression, after repetitions are expanded (empty parts add no NFA states)."""
MOST_STATES = 4096
"""Largest number of states of a byte automaton."""


class Deadline:
    """Limit on the CPU time of the current thread.

    CPU seconds, unlike wall-clock seconds, make the outcome for a grammar independent of the machine's load.
    """

    def __init__(self, seconds: float):
        self.until = time.thread_time() + seconds

    def check(self) -> None:
        """Raises `NotRegular` after the limit."""
        if time.thread_time() > self.until:
            raise NotRegular("building the automaton takes too long")


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Deterministic automaton over bytes. State 0 is the start.

    Attributes:
        transitions: next state for each state and byte; -1 where the byte is not allowed.
        accepts: True for accepting states.
        undescribed: True for states inside an undescribed part, in which every byte leads back to the same state.
        resume: state after the undescribed part, for each undescribed state; -1 for other states, and where the next state
            depends on the undescribed text.
    """

    transitions: Int32[np.ndarray, "S 256"]
    accepts: Bool[np.ndarray, " S"]
    undescribed: Bool[np.ndarray, " S"]
    resume: Int32[np.ndarray, " S"]


ByteRanges = tuple[tuple[int, int], ...]
"""Range of each byte of an encoded character."""


def byte_ranges(low: int, high: int) -> Iterator[ByteRanges]:
    """Yields the UTF-8 encodings of the code points `low` to `high`, as disjoint products of byte ranges."""
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, SURROGATES[0] - 1), (SURROGATES[1] + 1, 0xFFFF), (0x10000, LAST)):
        if max(low, first) <= min(high, last):
            yield from encoded_ranges(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def encoded_ranges(low: bytes, high: bytes) -> Iterator[ByteRanges]:
    """Yields the encodings from `low` to `high`, which have the same length."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    first = low[0]
    last = high[0]
    rest = len(low) - 1
    least = b"\x80" * rest
    most = b"\xbf" * rest
    if first == last:
        yield from (((first, first), *tail) for tail in encoded_ranges(low[1:], high[1:]))
        return
    if low[1:] != least:
        yield from (((first, first), *tail) for tail in encoded_ranges(low[1:], most))
        first += 1
    if high[1:] != most:
        yield from (((last, last), *tail) for tail in encoded_ranges(least, high[1:]))
        last -= 1
    if first <= last:
        yield ((first, last), *[(0x80, 0xBF)] * rest)


class Nfa:
    """Nondeterministic automaton of an expression (Thompson's construction). State 0 is the start.

    Attributes:
        moves: transitions of each state, as (first byte, last byte, next state).
        epsilons: epsilon transitions of each state.
        undescribed: maps each state inside an undescribed part to the state after the part.
        end: the accepting state.
    """

    def __init__(self, node: Node, deadline: Deadline):
        self.moves: list[list[tuple[int, int, int]]] = []
        self.epsilons: list[list[int]] = []
        self.deadline = deadline
        self.parts = 0
        self.undescribed = dict[int, int]()
        self.end = self.add(node, self.new())

    def new(self) -> int:
        if len(self.moves) >= MOST_NFA_STATES:
            raise TooLarge("the expression is too large")
        if len(self.moves) % 256 == 0:
            self.deadline.check()
        self.moves.append([])
        self.epsilons.append([])
        return len(self.moves) - 1

    def add(self, node: Node, start: int) -> int:
        """Appends an expression to the state `start`. Returns the state after the expression."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise TooLarge("the expression is too large")
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
                    self.epsilons[each].append(end)
                return end
            case Repetition():
                return self.add_repeated(node, start)
            case Separated():
                loop = self.begin(start)
                end = self.add(node.part, loop)
                self.epsilons[self.add(node.separator, end)].append(loop)
                return end
            case Undescribed():
                state = self.begin(start)
                self.moves[state].append((0, 255, state))
                self.undescribed[state] = self.new()
                return self.undescribed[state]
            case Lark():
                raise NotRegular("rules of a Lark grammar")

    def begin(self, start: int) -> int:
        """Adds a state with an epsilon transition from `start`, so that loops to the new state do not reach `start`."""
        state = self.new()
        self.epsilons[start].append(state)
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
            self.epsilons[self.add(node.part, loop)].append(loop)
            return loop
        leaving = [start]
        for _ in range(node.most - node.least):
            start = self.add(node.part, self.begin(start))
            leaving.append(start)
        end = self.new()
        for each in leaving:
            self.epsilons[each].append(end)
        return end

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """Computes the epsilon closure of states, without states that neither have byte transitions nor accept."""
        reached = set(states)
        stack = list(states)
        while stack:
            for following in self.epsilons[stack.pop()]:
                if following not in reached:
                    reached.add(following)
                    stack.append(following)
        return frozenset(each for each in reached if self.moves[each] or each == self.end)


class Subsets:
    """Epsilon-closed sets of NFA states, numbered in order of discovery.

    Attributes:
        order: the sets by number.
    """

    def __init__(self, nfa: Nfa):
        self.nfa = nfa
        self.order = list[frozenset[int]]()
        self.numbers = dict[frozenset[int], int]()
        self.closures = dict[frozenset[int], frozenset[int]]()

    def number(self, states: frozenset[int]) -> int:
        """Returns the number of the epsilon closure of states, and adds the closure if it is new."""
        if states not in self.closures:
            self.closures[states] = self.nfa.closure(states)
        subset = self.closures[states]
        if subset not in self.numbers:
            self.numbers[subset] = len(self.order)
            self.order.append(subset)
        return self.numbers[subset]

    def resume(self, subset: frozenset[int]) -> int:
        """Returns the number of the set after the undescribed part; -1 if the next set depends on the undescribed text."""
        undescribed = self.nfa.undescribed
        ends = {self.nfa.closure(frozenset([undescribed[each]])) for each in subset if each in undescribed}
        return self.number(ends.pop()) if len(ends) == 1 and subset <= undescribed.keys() else -1


def byte_automaton(node: Node, deadline: Deadline) -> ByteAutomaton:
    """Builds the minimal automaton of an expression.

    Raises:
        NotRegular: the automaton has too many states, or building it takes too long.
    """
    nfa = Nfa(node, deadline)
    bounds = sorted({0, 256, *(edge for moves in nfa.moves for low, high, _ in moves for edge in (low, high + 1))})
    piece_index = {bound: n for n, bound in enumerate(bounds)}
    moves = [[(range(piece_index[low], piece_index[high + 1]), target) for low, high, target in each] for each in nfa.moves]
    subsets = Subsets(nfa)
    rows = list[np.ndarray]()
    resume = list[int]()
    subsets.number(frozenset([0]))
    for number, subset in enumerate(subsets.order):  # the list grows during the loop
        deadline.check()
        is_undescribed = not subset.isdisjoint(nfa.undescribed)
        row = np.full(len(bounds) - 1, number if is_undescribed else -1, np.int32)
        resume.append(subsets.resume(subset) if is_undescribed else -1)
        targets_of_piece: list[set[int]] = [set() for _ in row]
        for pieces, target in () if is_undescribed else (move for state in subset for move in moves[state]):
            for piece in pieces:
                targets_of_piece[piece].add(target)
        for piece, targets in enumerate(map(frozenset, targets_of_piece)):
            if targets:
                row[piece] = subsets.number(targets)
        rows.append(row)
        if len(subsets.order) > MOST_STATES:
            raise TooLarge("the automaton is too large")
    undescribed = np.asarray([not subset.isdisjoint(nfa.undescribed) for subset in subsets.order])
    accepts = np.asarray([nfa.end in subset for subset in subsets.order]) & ~undescribed
    return minimize(np.stack(rows), np.diff(bounds), accepts, undescribed, np.asarray(resume, np.int32), deadline)


def minimize(
    transitions: Int32[np.ndarray, "S P"],
    widths: Int64[np.ndarray, " P"],
    accepts: Bool[np.ndarray, " S"],
    undescribed: Bool[np.ndarray, " S"],
    resume: Int32[np.ndarray, " S"],
    deadline: Deadline,
) -> ByteAutomaton:
    """Merges equivalent states of an automaton (Moore's algorithm).

    Undescribed states are never merged, because different text follows each of them.

    Args:
        transitions: next state for each state and piece; a piece is a run of bytes with equal transitions.
        widths: bytes in each piece.
    """
    states = len(transitions)
    rng = np.random.default_rng(0)
    columns = np.concatenate([np.arange(states, dtype=np.int32)[:, None], transitions], axis=1)
    firsts, classes = distinct(np.where(undescribed, np.arange(2, states + 2), accepts))
    while True:
        deadline.check()
        # Different states get equal keys with probability 2**-64. `check_bytes` compares the result with the matcher anyway.
        codes = rng.integers(1, 2**64, size=len(firsts) + 1, dtype=np.uint64)[np.append(classes, len(firsts))]
        weights = rng.integers(1, 2**64, size=columns.shape[1], dtype=np.uint64)
        found, classes = distinct((codes[columns] * weights).sum(axis=1))
        if len(found) == len(firsts):
            break
        firsts = found
    merged = np.append(classes, -1).astype(np.int32)
    return ByteAutomaton(
        transitions=np.repeat(merged[transitions[found]], widths, axis=1),
        accepts=accepts[found],
        undescribed=undescribed[found],
        resume=merged[resume[found]],
    )


def distinct(keys: Shaped[np.ndarray, " S"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " S"]]:
    """Returns the first state of each distinct key, in ascending order, and for each state the index of its key."""
    _, firsts, classes = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[classes]
