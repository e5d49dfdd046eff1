"""Automata over a model's tokens, of grammars whose texts are a regular language, for masks that are made on the device.

A grammar becomes an automaton over bytes (`regular.py`, `schema.py`, `dfa.py`), and this one over tokens. It is kept only where
it says what llguidance says: the bytes that may come next behind every transition of the one over bytes, and the mask of tokens
at every state of the one over tokens. Where a grammar sets no bound to how deep its texts go, the automaton does, by the room
that a table on the device has; of tokens that go beyond it the matcher says which may come, and the text leaves the automaton
with them (`excursion.py` says when it is back). All of it is bounded, in time and in size; where there is no automaton, masks
are made on the host.
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
from tilewright.grammar.regular import Alternation, Concatenation, Node, NotRegular, Repetition, TooLarge, literal, parsed
from tilewright.grammar.schema import schema_node
from tilewright.grammar.worker import matcher_of
from tilewright.runtime.automata import BEYOND, MOST_ENTRIES, MOST_MASKS, MOST_STATES, Automaton, words

MOST_STEPS = 2**27
"""Entries of the table of states behind tokens before these are classed: 256 MiB."""
AUTOMATON_S = 6.0
"""Seconds of a processor that making one may take."""
OPEN_CLASSES = 256
MOST_OPEN_STEPS = 2**26
"""Where a grammar sets no bound to how deep its texts go: classes of tokens that the table has room for, which gives the states
and so the depth; and states times tokens, for each state goes through all tokens."""
FITTING_MASKS = MOST_MASKS - 1
"""Of an automaton: one more is that of a thought before it."""
TOGETHER = 64
"""States that go through all tokens together."""


class Vocabulary:
    """The tokens of a model as bytes, in a trie.

    Attributes:
        size: how many `tokens` there are.
        eos: those that end a text.
        levels: for each byte of the longest token, the nodes at which it stands: the node before and the byte. Node 0 is the
            root.
        node: of each token its last node; 0 for one that stands for no text.
        nodes: how many there are.
    """

    def __init__(self, tokens: Sequence[bytes], eos: Sequence[int]):
        """Args:
        tokens: the bytes of each; empty for one that stands for no text.
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
            keys, which = np.unique(self.node[longer] * 256 + joined[starts[longer] + place], return_inverse=True)
            self.levels.append((keys // 256, keys % 256))
            self.node[longer] = self.nodes + which
            self.nodes += len(keys)

    @staticmethod
    def of(tokenizer: Any, size: int, eos: Sequence[int]) -> "Vocabulary":
        """The vocabulary of a matcher's tokenizer."""
        special = [token in eos or tokenizer.is_special_token(token) for token in range(size)]
        return Vocabulary([b"" if special[token] else tokenizer.decode_bytes([token]) for token in range(size)], eos)

    def behind(self, automaton: ByteAutomaton, states: Int32[np.ndarray, " K"]) -> Int32[np.ndarray, "K V"]:
        """The state of an automaton behind each token, from each of these; -1 where it may not come."""
        dead = len(automaton.after)
        after = np.concatenate([np.where(automaton.after < 0, dead, automaton.after), np.full((1, 256), dead)]).astype(np.int32)
        reached = np.full((self.nodes, len(states)), dead, np.int32)
        reached[0] = states
        first = 1
        for before, byte in self.levels:
            reached[first : first + len(before)] = after[reached[before], byte[:, None]]
            first += len(before)
        found = reached[self.node].T
        return np.where((found == dead) | (self.node == 0), -1, found).astype(np.int32)


def node_of(kind: str, text: str, most: int) -> Node:
    """A grammar's texts as an expression, as `schema_node`. Raises `NotRegular` where they are none."""
    match kind:
        case "choice":
            return Alternation(tuple(map(literal, json.loads(text))))
        case "regex":
            return parsed(text)
        case "json_schema":
            return schema_node(json.loads(text), most)
        case "tagged":
            return tagged_node(**json.loads(text), most=most)
        case _:
            raise NotRegular(f"a grammar of the kind {kind}")


def tagged_node(options: list[list[Any]], repeats: bool, most: int, other: Any = None) -> Node:
    """Tagged JSON texts, each as begin, schema and end, or another one without tags, as an expression; see `schema_node`."""
    parts = [Concatenation((literal(begin), schema_node(schema, most), literal(end))) for begin, schema, end in options]
    text = Alternation(tuple(parts))
    if repeats:
        text = Concatenation((text, Repetition(Concatenation((literal("\n"), text)), 0, None)))
    return text if other is None else Alternation((text, schema_node(other, most)))


class TokenAutomaton(NamedTuple):
    """A grammar's automaton over tokens, with the one over bytes that it was made of.

    Attributes:
        states: of each state that over bytes.
        brackets: within one another that it describes where the grammar sets no bound; None where the grammar sets bounds.
    """

    automaton: Automaton
    over_bytes: ByteAutomaton
    states: Int32[np.ndarray, " S"]
    brackets: int | None


PARTS: dict[str, tuple[Any, list[str]]] = {
    "automaton": (Automaton, [each.name for each in fields(Automaton)]),
    "over_bytes": (ByteAutomaton, [each.name for each in fields(ByteAutomaton)]),
}
"""Of a `TokenAutomaton`: classes and the names of their arrays."""


def automaton_of(tokenizer: Any, vocabulary: Vocabulary, kind: str, text: str, seconds: float) -> TokenAutomaton:
    """A grammar's automaton, whose masks are those of the grammar's matcher at every state.

    Args:
        tokenizer: the matcher's.
        seconds: that it may take.

    Raises:
        NotRegular: it has none here: it is of another kind, too large, takes too long, or is not what the matcher says.
    """
    deadline = Deadline(seconds)
    try:
        automaton, brackets = deepest_automaton(kind, text, most_open_states(vocabulary.size), deadline)
    except RecursionError:
        raise NotRegular("its parts are too deep within one another") from None
    check_bytes(automaton, kind, text, deadline)
    found = Exploration(vocabulary, automaton, matcher_of(tokenizer, kind, text))
    found.run(deadline)
    made = tabulated(np.stack(found.rows), np.stack(found.masks), np.asarray(found.forced, np.int32), deadline)
    return TokenAutomaton(made, automaton, np.asarray(found.states[: len(made.after)], np.int32), brackets)


def most_open_states(tokens: int) -> int:
    """States over bytes that an automaton may have which does not describe all texts, for a vocabulary of so many tokens."""
    return min(MOST_ENTRIES // OPEN_CLASSES, MOST_OPEN_STEPS // tokens)


def deepest_automaton(kind: str, text: str, states: int, deadline: Deadline) -> tuple[ByteAutomaton, int | None]:
    """The automaton over bytes of a grammar, and how many brackets within one another it describes.

    Args:
        states: that it may have if it does not describe all texts.

    Returns:
        the deepest that has no more, and its brackets where the grammar sets no bound; None where it describes all texts.
    """
    found = byte_automaton(node_of(kind, text, 0), deadline)
    if not found.beyond.any():
        return found, None
    brackets = 0
    while True:
        try:
            deeper = byte_automaton(node_of(kind, text, brackets + 1), deadline)
        except TooLarge:
            return found, brackets
        if len(deeper.after) > states:
            return found, brackets
        found = deeper
        brackets = brackets + 1


def automaton_text(tokenizer: Any, vocabulary: Vocabulary, kind: str, text: str) -> str:
    """A grammar's automaton as text, for another process; empty if it has none. Arguments as of `automaton_of`."""
    try:
        found = automaton_of(tokenizer, vocabulary, kind, text, AUTOMATON_S)
    except (NotRegular, MemoryError):
        return ""
    arrays = {f"{name} {field}": getattr(getattr(found, name), field) for name, (_, parts) in PARTS.items() for field in parts}
    file = io.BytesIO()
    brackets = [] if found.brackets is None else [found.brackets]
    np.savez_compressed(file, **arrays, states=found.states, brackets=np.asarray(brackets, np.int32))
    return base64.b64encode(file.getvalue()).decode()


def read_automaton(text: str) -> TokenAutomaton | None:
    """The automaton that `automaton_text` wrote; None for none."""
    if not text:
        return None
    with np.load(io.BytesIO(base64.b64decode(text))) as arrays:
        made = {name: kind(**{field: arrays[f"{name} {field}"] for field in parts}) for name, (kind, parts) in PARTS.items()}
        return TokenAutomaton(**made, states=arrays["states"], brackets=next(iter(arrays["brackets"].tolist()), None))


def check_bytes(automaton: ByteAutomaton, kind: str, text: str, deadline: Deadline) -> None:
    """Compares an automaton with the matcher behind each of its transitions. Raises `NotRegular` where they differ."""
    from llguidance import LLTokenizer

    live = automaton.after >= 0
    matchers = {0: matcher_of(LLTokenizer("byte"), kind, text)}
    order = [0]
    check_state(matchers[0], live[0], bool(automaton.accepts[0]))
    for state in order:  # which grows meanwhile
        deadline.check()
        row = automaton.after[state]
        edges = np.flatnonzero(live[state] & (np.diff(row, prepend=-2) != 0))
        for byte, following in zip(edges.tolist(), row[edges].tolist(), strict=True):
            if automaton.beyond[following]:
                continue
            matcher = matchers[state].deep_copy()
            matcher.consume_token(byte)
            check_state(matcher, live[following], bool(automaton.accepts[following]))
            if following not in matchers:
                matchers[following] = matcher
                order.append(following)


def check_state(matcher: Any, live: Bool[np.ndarray, "256"], accepts: bool) -> None:
    """Raises `NotRegular` where a matcher over bytes allows others than these, or ends elsewhere."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
    if matcher.is_error() or not np.array_equal(bits != 0, live) or matcher.is_accepting() != accepts:
        raise NotRegular("the matcher has other texts")


class Exploration:
    """The states that tokens lead to, from the first one on, each with the mask that the matcher has there.

    Where the text that follows is forced, the matcher allows the one token alone that it begins with, as the tokenizer would
    write it behind the token before; or any tokens, where the text is too short to say. So a state is one of the automaton over
    bytes and what is forced there, which the matcher says for each token that leads there.

    Attributes:
        states: of the automaton over bytes; `forced` has the token that is forced in each, -1 for none.
        rows: of each state the states behind all tokens, int16 `[V]`; -1 for those that may not come, `BEYOND` for those that
            leave the automaton over bytes.
        masks: of each state.
    """

    def __init__(self, vocabulary: Vocabulary, automaton: ByteAutomaton, matcher: Any):
        self.vocabulary = vocabulary
        self.automaton = automaton
        self.alone = (np.count_nonzero(automaton.after >= 0, axis=1) == 1) & ~automaton.accepts
        self.numbers: dict[tuple[int, int], int] = {}
        self.states = list[int]()
        self.forced = list[int]()
        self.matchers = dict[int, Any]()
        self.rows = list[np.ndarray]()
        self.masks = list[np.ndarray]()
        self.walked: dict[int, np.ndarray] = {}
        self.forced_behind: dict[int, np.ndarray] = {}
        self.number(0, forced_token(matcher) if self.alone[0] else -1, matcher)

    def number(self, state: int, forced: int, matcher: Any, token: int | None = None) -> int:
        """The number of a state, which is a new one if need be: behind a token that a matcher may take, or its own."""
        key = state, forced
        if key not in self.numbers:
            self.numbers[key] = number = len(self.states)
            self.states.append(state)
            self.forced.append(forced)
            self.matchers[number] = matcher if token is None else behind_token(matcher, token)
            if number >= MOST_STATES or number * self.vocabulary.size > MOST_STEPS:
                raise NotRegular("it has too many states")
        return self.numbers[key]

    def run(self, deadline: Deadline) -> None:
        """Goes through all states. Raises `NotRegular` where there are too many, or the matcher has other masks."""
        for number, _ in enumerate(self.states):  # which grow meanwhile
            deadline.check()
            matcher = self.matchers.pop(number)
            behind = self.behind(number)
            bits = self.checked_bits(number, behind, matcher)
            behind[~bits[: len(behind)]] = -1
            self.masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
            self.rows.append(self.numbered(behind, matcher))

    def behind(self, number: int) -> Int32[np.ndarray, " V"]:
        """The states of the automaton over bytes behind each token that may come in a state."""
        state = self.states[number]
        forced = self.forced[number]
        if forced >= 0:
            only = np.full(self.vocabulary.size, -1, np.int32)
            for byte in self.vocabulary.tokens[forced]:
                state = int(self.automaton.after[state, byte])
            only[forced] = state
            return only
        if state not in self.walked:
            batch = [own for own, token in zip(self.states[number:], self.forced[number:], strict=True) if token < 0][:TOGETHER]
            found = self.vocabulary.behind(self.automaton, np.asarray(batch, np.int32))
            self.walked |= dict(zip(batch, found, strict=True))
        return self.walked.pop(state)

    def checked_bits(self, number: int, behind: Int32[np.ndarray, " V"], matcher: Any) -> Bool[np.ndarray, " bits"]:
        """The tokens that may come in a state. Raises `NotRegular` where the matcher says others.

        Of those that leave the automaton the matcher alone says which may come.
        """
        from llguidance.numpy import fill_next_token_bitmask

        bits = np.zeros(32 * words(self.vocabulary.size), bool)
        bits[: self.vocabulary.size] = behind >= 0
        bits[list(self.vocabulary.eos)] = self.automaton.accepts[self.states[number]]
        mask = np.zeros((1, len(bits) // 32), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        said = np.unpackbits(mask.view(np.uint8)[0], bitorder="little").astype(bool)
        leaving = np.flatnonzero((behind >= 0) & self.automaton.beyond[behind])
        bits[leaving] = said[leaving]
        if matcher.is_error() or not np.array_equal(bits, said):
            raise NotRegular("the matcher has other tokens")
        return bits

    def numbered(self, behind: Int32[np.ndarray, " V"], matcher: Any) -> Int16[np.ndarray, " V"]:
        """The numbers of the states behind each token."""
        numbers = np.full(len(behind), -1, np.int16)
        may = np.flatnonzero(behind >= 0)
        for state in np.flatnonzero(np.bincount(behind[may])).tolist():
            tokens = may[behind[may] == state]
            if self.automaton.beyond[state]:
                numbers[tokens] = BEYOND
                continue
            if not self.alone[state]:
                numbers[tokens] = self.number(state, -1, matcher, int(tokens[0]))
                continue
            forced = self.forced_after(state, tokens, matcher)
            for each in np.unique(forced).tolist():
                own = tokens[forced == each]
                numbers[own] = self.number(state, each, matcher, int(own[0]))
        return numbers

    def forced_after(self, state: int, tokens: np.ndarray, matcher: Any) -> np.ndarray:
        """The token that is forced in a state behind each of some, which a matcher may take; -1 for none."""
        if state not in self.forced_behind:
            if len(self.forced_behind) * self.vocabulary.size > MOST_STEPS:
                raise NotRegular("too much of it is forced")
            self.forced_behind[state] = np.full(self.vocabulary.size, -2, np.int32)
        known = self.forced_behind[state]
        for token in tokens[known[tokens] == -2].tolist():
            known[token] = forced_token(behind_token(matcher, token))
        return known[tokens]


def behind_token(matcher: Any, token: int) -> Any:
    """A matcher behind a token."""
    copied = matcher.deep_copy()
    copied.consume_token(token)
    return copied


def forced_token(matcher: Any) -> int:
    """The token that a matcher forces; -1 for none."""
    return -1 if matcher.is_stopped() else next(iter(matcher.compute_ff_tokens()), -1)


def tabulated(
    behind: Int16[np.ndarray, "S V"], masks: np.ndarray, forced: Int32[np.ndarray, " S"], deadline: Deadline
) -> Automaton:
    """An automaton with each mask once, and tokens in classes of those that lead to the same states everywhere.

    Where a table has no room for all, it has the first states, and what leads to others leaves it.
    """
    kinds, firsts, mask_of = np.unique(masks, axis=0, return_index=True, return_inverse=True)
    # Two tokens with one key are of one class but for a chance of 2**-64; whether they are is looked at below.
    keys = np.zeros(behind.shape[1], np.uint64)
    rng = np.random.default_rng(0)
    for row in behind:
        keys += (row.astype(np.int64) + 1).astype(np.uint64) * rng.integers(1, 2**64, dtype=np.uint64)
    _, members, classes = np.unique(keys, return_index=True, return_inverse=True)
    after = behind[:, members]
    deadline.check()
    room = min([len(behind), MOST_ENTRIES // len(members), *np.sort(firsts)[FITTING_MASKS : FITTING_MASKS + 1]])
    if room < len(behind):
        kept = behind[:room]
        return tabulated(np.where(kept < room, kept, np.int16(BEYOND)), masks[:room], forced[:room], deadline)
    if not all(np.array_equal(own[classes], row) for own, row in zip(after, behind, strict=True)):
        raise NotRegular("its tokens have no classes")
    return Automaton(
        masks=kinds,
        mask_of=mask_of.reshape(-1).astype(np.int32),
        classes=classes.reshape(-1).astype(np.int32),
        after=after.astype(np.int32),
        forced=forced,
    )
