"""Token automata of regular grammars, from which the device makes token masks without the host.

A grammar becomes a byte automaton (`regular.py`, `schema.py`, `dfa.py`) and then a token automaton. The result is verified
against llguidance: the allowed bytes after every transition of the byte automaton, and the token mask in every state of the
token automaton. For grammars without a bound on the nesting depth, the size of the device's table bounds the depth. Deeper
text leaves the automaton: the matcher makes the masks on the host until the text re-enters (`excursion.py`). Time and size of
the construction are bounded. Without an automaton, the host makes all masks.
"""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int16, Int32

from tilewright.grammar.dfa import ByteAutomaton, Deadline, byte_automaton
from tilewright.grammar.regular import Alternation, Concatenation, Node, NotRegular, Repetition, TooLarge, literal, parse_regex
from tilewright.grammar.schema import schema_node
from tilewright.grammar.worker import make_matcher
from tilewright.runtime.automata import BEYOND, MOST_ENTRIES, MOST_MASKS, MOST_STATES, Automaton, words

MOST_STEPS = 2**27
"""Largest number of entries of the table of next states (states times tokens) before tokens are grouped: 256 MiB."""
AUTOMATON_S = 6.0
"""Limit on the CPU seconds for building an automaton."""
UNBOUNDED_CLASSES = 256
"""Token classes to expect for grammars of unbounded depth; determines the number of states, and so the depth, that fits."""
MOST_UNBOUNDED_STEPS = 2**26
"""Largest number of states times tokens for grammars of unbounded depth."""
FITTING_MASKS = MOST_MASKS - 1
"""Largest number of different masks of an automaton; a thinking block needs one more."""
STATES_PER_BATCH = 64
"""Number of states from which all tokens are walked together."""


class Vocabulary:
    """Trie of the bytes of a model's tokens.

    Attributes:
        size: number of tokens.
        eos: ids of the end-of-sequence tokens.
        levels: for each byte position, the trie nodes of this depth, as arrays of parent nodes and bytes. Node 0 is the root.
        node: last trie node of each token; 0 for tokens without text.
        nodes: number of trie nodes.
    """

    def __init__(self, tokens: Sequence[bytes], eos: Sequence[int]):
        """Args:
        tokens: bytes of each token; empty for tokens without text.
        """
        self.size = len(tokens)
        self.eos = tuple(eos)
        self.tokens = tokens
        lengths = np.asarray([len(token) for token in tokens])
        joined = np.frombuffer(b"".join(tokens), np.uint8)
        starts = np.cumsum(lengths) - lengths
        self.node = np.zeros(len(tokens), np.int64)
        self.nodes = 1
        self.levels: list[tuple[np.ndarray, np.ndarray]] = []
        for place in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > place)
            keys, children = np.unique(self.node[longer] * 256 + joined[starts[longer] + place], return_inverse=True)
            self.levels.append((keys // 256, keys % 256))
            self.node[longer] = self.nodes + children
            self.nodes += len(keys)

    @staticmethod
    def from_tokenizer(tokenizer: Any, size: int, eos: Sequence[int]) -> "Vocabulary":
        """Builds the vocabulary of an `LLTokenizer`."""
        special = [token in eos or tokenizer.is_special_token(token) for token in range(size)]
        return Vocabulary([b"" if special[token] else tokenizer.decode_bytes([token]) for token in range(size)], eos)

    def next_states(self, automaton: ByteAutomaton, states: Int32[np.ndarray, " K"]) -> Int32[np.ndarray, "K V"]:
        """Returns the state of an automaton after each token, from each of the states; -1 where the token is not allowed."""
        dead = len(automaton.transitions)
        live = np.where(automaton.transitions < 0, dead, automaton.transitions)
        transitions = np.concatenate([live, np.full((1, 256), dead)]).astype(np.int32)
        reached = np.full((self.nodes, len(states)), dead, np.int32)
        reached[0] = states
        first = 1
        for parents, byte in self.levels:
            reached[first : first + len(parents)] = transitions[reached[parents], byte[:, None]]
            first += len(parents)
        found = reached[self.node].T
        return np.where((found == dead) | (self.node == 0), -1, found).astype(np.int32)


def grammar_node(kind: str, text: str, most: int) -> Node:
    """Converts a grammar to an expression; `most` as in `schema_node`. Raises `NotRegular` for other grammars."""
    match kind:
        case "choice":
            return Alternation(tuple(map(literal, json.loads(text))))
        case "regex":
            return parse_regex(text)
        case "json_schema":
            return schema_node(json.loads(text), most)
        case "tagged":
            return tagged_node(**json.loads(text), most=most)
        case _:
            raise NotRegular(f"a {kind} grammar")


def tagged_node(options: list[list[Any]], repeats: bool, most: int, other: Any = None) -> Node:
    """Converts the arguments of `Grammar.tagged` to an expression; `most` as in `schema_node`."""
    parts = [Concatenation((literal(begin), schema_node(schema, most), literal(end))) for begin, schema, end in options]
    text = Alternation(tuple(parts))
    if repeats:
        text = Concatenation((text, Repetition(Concatenation((literal("\n"), text)), 0, None)))
    return text if other is None else Alternation((text, schema_node(other, most)))


class TokenAutomaton(NamedTuple):
    """Token automaton of a grammar, with its byte automaton.

    Attributes:
        automaton: the token automaton.
        over_bytes: the byte automaton.
        byte_states: state of the byte automaton for each state of the token automaton.
        brackets: depth of nested brackets that the automaton describes; None if the grammar bounds the depth.
    """

    automaton: Automaton
    over_bytes: ByteAutomaton
    byte_states: Int32[np.ndarray, " S"]
    brackets: int | None


PARTS: dict[str, tuple[Any, list[str]]] = {
    "automaton": (Automaton, [each.name for each in fields(Automaton)]),
    "over_bytes": (ByteAutomaton, [each.name for each in fields(ByteAutomaton)]),
}
"""Fields of `TokenAutomaton` that hold arrays: their classes and the names of the arrays."""


def build_automaton(tokenizer: Any, vocabulary: Vocabulary, kind: str, text: str, seconds: float) -> TokenAutomaton:
    """Builds a grammar's token automaton, with the matcher's mask in every state.

    Args:
        tokenizer: an `LLTokenizer`.
        seconds: limit on the CPU seconds.

    Raises:
        NotRegular: the grammar is not regular, its automaton is too large, takes too long, or differs from the matcher.
    """
    deadline = Deadline(seconds)
    try:
        automaton, brackets = deepest_automaton(kind, text, most_unbounded_states(vocabulary.size), deadline)
    except RecursionError:
        raise NotRegular("the grammar is nested too deeply") from None
    check_bytes(automaton, kind, text, deadline)
    found = Exploration(vocabulary, automaton, make_matcher(tokenizer, kind, text))
    found.run(deadline)
    table = tabulate(np.stack(found.rows), np.stack(found.masks), np.asarray(found.forced, np.int32), deadline)
    return TokenAutomaton(table, automaton, np.asarray(found.states[: len(table.after)], np.int32), brackets)


def most_unbounded_states(tokens: int) -> int:
    """Returns the largest number of byte states for a grammar of unbounded depth, for a vocabulary of `tokens` tokens."""
    return min(MOST_ENTRIES // UNBOUNDED_CLASSES, MOST_UNBOUNDED_STEPS // tokens)


def deepest_automaton(kind: str, text: str, states: int, deadline: Deadline) -> tuple[ByteAutomaton, int | None]:
    """Builds the byte automaton of a grammar, as deep as the number of states permits.

    Args:
        states: largest number of states, for grammars of unbounded depth.

    Returns:
        the automaton, and the depth of nested brackets that it describes (None if the grammar bounds the depth). The automaton
        of depth 0 may exceed `states`.
    """
    found = byte_automaton(grammar_node(kind, text, 0), deadline)
    if not found.undescribed.any():
        return found, None
    brackets = 0
    while True:
        try:
            deeper = byte_automaton(grammar_node(kind, text, brackets + 1), deadline)
        except TooLarge:
            return found, brackets
        if len(deeper.transitions) > states:
            return found, brackets
        found = deeper
        brackets = brackets + 1


def automaton_text(tokenizer: Any, vocabulary: Vocabulary, kind: str, text: str) -> str:
    """Builds and serializes a grammar's automaton; empty text if the grammar has none. Arguments as in `build_automaton`."""
    try:
        found = build_automaton(tokenizer, vocabulary, kind, text, AUTOMATON_S)
    except (NotRegular, MemoryError):
        return ""
    arrays = {f"{name} {field}": getattr(getattr(found, name), field) for name, (_, parts) in PARTS.items() for field in parts}
    file = io.BytesIO()
    brackets = [] if found.brackets is None else [found.brackets]
    np.savez_compressed(file, **arrays, byte_states=found.byte_states, brackets=np.asarray(brackets, np.int32))
    return base64.b64encode(file.getvalue()).decode()


def read_automaton(text: str) -> TokenAutomaton | None:
    """Deserializes the output of `automaton_text`; None for empty text."""
    if not text:
        return None
    with np.load(io.BytesIO(base64.b64decode(text))) as arrays:
        built = {name: kind(**{field: arrays[f"{name} {field}"] for field in parts}) for name, (kind, parts) in PARTS.items()}
        brackets = next(iter(arrays["brackets"].tolist()), None)
        return TokenAutomaton(**built, byte_states=arrays["byte_states"], brackets=brackets)


def check_bytes(automaton: ByteAutomaton, kind: str, text: str, deadline: Deadline) -> None:
    """Compares a byte automaton with the matcher after each transition. Raises `NotRegular` if they differ."""
    from llguidance import LLTokenizer

    live = automaton.transitions >= 0
    matchers = {0: make_matcher(LLTokenizer("byte"), kind, text)}
    order = [0]
    check_state(matchers[0], live[0], bool(automaton.accepts[0]))
    for state in order:  # the list grows during the loop
        deadline.check()
        row = automaton.transitions[state]
        edges = np.flatnonzero(live[state] & (np.diff(row, prepend=-2) != 0))
        for byte, following in zip(edges.tolist(), row[edges].tolist(), strict=True):
            if automaton.undescribed[following]:
                continue
            matcher = matchers[state].deep_copy()
            matcher.consume_token(byte)
            check_state(matcher, live[following], bool(automaton.accepts[following]))
            if following not in matchers:
                matchers[following] = matcher
                order.append(following)


def check_state(matcher: Any, live: Bool[np.ndarray, "256"], accepts: bool) -> None:
    """Raises `NotRegular` if a byte matcher allows other bytes than `live`, or disagrees about accepting."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
    if matcher.is_error() or not np.array_equal(bits != 0, live) or matcher.is_accepting() != accepts:
        raise NotRegular("the byte automaton differs from the matcher")


class Exploration:
    """Enumerates the states of the token automaton from the start state, with the matcher's mask in each state.

    Where the following text is forced, the matcher allows only its first token, as the tokenizer would tokenize the text after
    the previous token; it allows any tokens if the forced text is too short to determine the token. A state is therefore a pair
    of a byte state and a forced token, and the forced token depends on the token that led to the state.

    Attributes:
        states: state of the byte automaton, for each state.
        forced: forced token of each state; -1 for none.
        rows: next state for each token, int16 `[V]`, for each state; -1 where the token is not allowed, `BEYOND` where the text
            leaves the byte automaton.
        masks: mask of each state.
    """

    def __init__(self, vocabulary: Vocabulary, automaton: ByteAutomaton, matcher: Any):
        self.vocabulary = vocabulary
        self.automaton = automaton
        self.has_one_byte = (np.count_nonzero(automaton.transitions >= 0, axis=1) == 1) & ~automaton.accepts
        self.numbers: dict[tuple[int, int], int] = {}
        self.states = list[int]()
        self.forced = list[int]()
        self.matchers = dict[int, Any]()
        self.rows = list[np.ndarray]()
        self.masks = list[np.ndarray]()
        self.walked: dict[int, np.ndarray] = {}
        self.forced_tokens: dict[int, np.ndarray] = {}
        self.number(0, forced_token(matcher) if self.has_one_byte[0] else -1, matcher)

    def number(self, state: int, forced: int, matcher: Any, token: int | None = None) -> int:
        """Returns the number of a state, and adds the state if it is new.

        Args:
            matcher: matcher of the state, or of the state before `token`.
        """
        key = state, forced
        if key not in self.numbers:
            self.numbers[key] = number = len(self.states)
            self.states.append(state)
            self.forced.append(forced)
            self.matchers[number] = matcher if token is None else matcher_after(matcher, token)
            if number >= MOST_STATES or number * self.vocabulary.size > MOST_STEPS:
                raise NotRegular("the token automaton has too many states")
        return self.numbers[key]

    def run(self, deadline: Deadline) -> None:
        """Enumerates all states. Raises `NotRegular` for too many states, or if the matcher's masks differ."""
        for number, _ in enumerate(self.states):  # the list grows during the loop
            deadline.check()
            matcher = self.matchers.pop(number)
            next_states = self.next_states(number)
            bits = self.checked_bits(number, next_states, matcher)
            next_states[~bits[: len(next_states)]] = -1
            self.masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
            self.rows.append(self.numbered(next_states, matcher))

    def next_states(self, number: int) -> Int32[np.ndarray, " V"]:
        """Returns the byte state after each token that is allowed in a state; -1 for other tokens."""
        state = self.states[number]
        forced = self.forced[number]
        if forced >= 0:
            only = np.full(self.vocabulary.size, -1, np.int32)
            for byte in self.vocabulary.tokens[forced]:
                state = int(self.automaton.transitions[state, byte])
            only[forced] = state
            return only
        if state not in self.walked:
            unforced = [each for each, token in zip(self.states[number:], self.forced[number:], strict=True) if token < 0]
            batch = unforced[:STATES_PER_BATCH]
            found = self.vocabulary.next_states(self.automaton, np.asarray(batch, np.int32))
            self.walked |= dict(zip(batch, found, strict=True))
        return self.walked.pop(state)

    def checked_bits(self, number: int, next_states: Int32[np.ndarray, " V"], matcher: Any) -> Bool[np.ndarray, " bits"]:
        """Returns the tokens that are allowed in a state. Raises `NotRegular` if the matcher allows other tokens.

        For tokens that leave the automaton, the matcher's answer is used.
        """
        from llguidance.numpy import fill_next_token_bitmask

        bits = np.zeros(32 * words(self.vocabulary.size), bool)
        bits[: self.vocabulary.size] = next_states >= 0
        bits[list(self.vocabulary.eos)] = self.automaton.accepts[self.states[number]]
        mask = np.zeros((1, len(bits) // 32), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        expected = np.unpackbits(mask.view(np.uint8)[0], bitorder="little").astype(bool)
        leaving = np.flatnonzero((next_states >= 0) & self.automaton.undescribed[next_states])
        bits[leaving] = expected[leaving]
        if matcher.is_error() or not np.array_equal(bits, expected):
            raise NotRegular("the token automaton differs from the matcher")
        return bits

    def numbered(self, next_states: Int32[np.ndarray, " V"], matcher: Any) -> Int16[np.ndarray, " V"]:
        """Returns the number of the state after each token, and adds new states."""
        numbers = np.full(len(next_states), -1, np.int16)
        allowed = np.flatnonzero(next_states >= 0)
        for state in np.flatnonzero(np.bincount(next_states[allowed])).tolist():
            tokens = allowed[next_states[allowed] == state]
            if self.automaton.undescribed[state]:
                numbers[tokens] = BEYOND
                continue
            if not self.has_one_byte[state]:
                numbers[tokens] = self.number(state, -1, matcher, int(tokens[0]))
                continue
            forced = self.forced_after(state, tokens, matcher)
            for each in np.unique(forced).tolist():
                group = tokens[forced == each]
                numbers[group] = self.number(state, each, matcher, int(group[0]))
        return numbers

    def forced_after(self, state: int, tokens: np.ndarray, matcher: Any) -> np.ndarray:
        """Returns the token that is forced in a state after each of `tokens`, which lead there; -1 for none."""
        if state not in self.forced_tokens:
            if len(self.forced_tokens) * self.vocabulary.size > MOST_STEPS:
                raise NotRegular("the token automaton has too many forced tokens")
            self.forced_tokens[state] = np.full(self.vocabulary.size, -2, np.int32)
        forced = self.forced_tokens[state]
        for token in tokens[forced[tokens] == -2].tolist():
            forced[token] = forced_token(matcher_after(matcher, token))
        return forced[tokens]


def matcher_after(matcher: Any, token: int) -> Any:
    """Returns a copy of a matcher that has consumed a token."""
    copied = matcher.deep_copy()
    copied.consume_token(token)
    return copied


def forced_token(matcher: Any) -> int:
    """Returns the token that a matcher forces; -1 for none."""
    return -1 if matcher.is_stopped() else next(iter(matcher.compute_ff_tokens()), -1)


def tabulate(
    next_states: Int16[np.ndarray, "S V"], masks: np.ndarray, forced: Int32[np.ndarray, " S"], deadline: Deadline
) -> Automaton:
    """Builds the automaton's tables: each mask once, and tokens grouped into classes with the same next states everywhere.

    If the tables are too large, only the first states are included. Tokens that lead to other states leave the automaton.
    """
    distinct_masks, firsts, mask_of = np.unique(masks, axis=0, return_index=True, return_inverse=True)
    # Tokens of different classes get equal keys with probability 2**-64. The classes are verified below.
    keys = np.zeros(next_states.shape[1], np.uint64)
    rng = np.random.default_rng(0)
    for row in next_states:
        keys += (row.astype(np.int64) + 1).astype(np.uint64) * rng.integers(1, 2**64, dtype=np.uint64)
    _, members, classes = np.unique(keys, return_index=True, return_inverse=True)
    after = next_states[:, members]
    deadline.check()
    room = min([len(next_states), MOST_ENTRIES // len(members), *np.sort(firsts)[FITTING_MASKS : FITTING_MASKS + 1]])
    if room < len(next_states):
        first = next_states[:room]
        return tabulate(np.where(first < room, first, np.int16(BEYOND)), masks[:room], forced[:room], deadline)
    if not all(np.array_equal(by_class[classes], row) for by_class, row in zip(after, next_states, strict=True)):
        raise NotRegular("a collision of token classes")
    return Automaton(
        masks=distinct_masks,
        mask_of=mask_of.reshape(-1).astype(np.int32),
        classes=classes.reshape(-1).astype(np.int32),
        after=after.astype(np.int32),
        forced=forced,
    )
