"""Grammar compiler and token masks, by llguidance (the extra `grammar`).

llguidance limits the size of a grammar. A grammar that exceeds the limits while it is compiled is refused; a grammar that
exceeds the limits during generation ends that request only. The limits do not bound the compile time, so untrusted grammars
are first compiled in a sandbox process. Compiling releases the GIL.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from tilewright.grammar.excursion import Excursion
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.regular import NotRegular
from tilewright.grammar.sandbox import Refusal, Sandbox
from tilewright.grammar.thinking import AfterThinking
from tilewright.grammar.token_automaton import AUTOMATON_S, TokenAutomaton, Vocabulary, build_automaton, forced_token
from tilewright.grammar.worker import CompilerSettings, compile_matcher, made_tokenizer
from tilewright.runtime.automata import AutomatonState
from tilewright.runtime.constraints import ConstraintError

K = TypeVar("K")
V = TypeVar("V")

CACHED_GRAMMARS = 32
"""Size of the LRU cache of compiled grammars."""
CACHED_REFUSALS = 64
"""Size of the LRU cache of refused grammars."""
LONGEST_ERROR = 300
"""Largest number of characters of llguidance's message, which quotes the grammar, in an error message."""
SANDBOX_BYTES = 2 << 30
"""Memory limit of the sandbox process, besides its memory after start."""


def is_installed() -> bool:
    """True if llguidance is installed."""
    return find_spec("llguidance") is not None


class Compiler:
    """Compiles grammars for one model's tokens. Thread-safe.

    Raises:
        ValueError: the extra `grammar` is not installed, the model has no end-of-sequence token, or llguidance does not support
            its tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]):
        """Args:
        vocab: size of the model's vocabulary, which may exceed the tokenizer's.
        eos: ids of the end-of-sequence tokens.
        """
        if not is_installed():
            raise ValueError("structured output needs llguidance: pip install 'tilewright[grammar]'")
        if not eos:
            raise ValueError("expected a model with an end-of-sequence token, found none")
        self.setting = CompilerSettings(tokenizer.to_str(), vocab, list(eos), SANDBOX_BYTES)
        try:
            self.tokenizer = made_tokenizer(self.setting)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"llguidance does not support this tokenizer: {error}") from error
        self.eos = tuple(eos)
        self.sandbox = Sandbox(self.setting)
        self.vocabulary: Vocabulary | None = None
        self.cache = OrderedDict[Grammar, Matcher]()
        self.lock = threading.Lock()
        self.refusals = OrderedDict[tuple[Grammar, float | None], str]()

    def is_cached(self, grammar: Grammar) -> bool:
        """True if a grammar is compiled already. Counts as a use for the LRU cache."""
        with self.lock:
            if grammar in self.cache:
                self.cache.move_to_end(grammar)
            return grammar in self.cache

    def compile(self, grammar: Grammar, seconds: float | None = None) -> "Matcher":
        """Compiles a grammar, or returns the compiled grammar from the cache.

        Args:
            seconds: limit on the CPU seconds of a first compilation in the sandbox process. None for a trusted grammar, which
                is compiled in this process only.

        Raises:
            ValueError: the grammar is invalid, no text satisfies it, it uses unsupported features, or it exceeds a limit.
        """
        with self.lock:
            if grammar in self.cache:
                self.cache.move_to_end(grammar)
                return self.cache[grammar]
            if (grammar, seconds) in self.refusals:
                self.refusals.move_to_end((grammar, seconds))
                raise ValueError(self.refusals[grammar, seconds])
        outcome = Refusal("") if seconds is None else self.sandbox.refusal(grammar, seconds)
        try:
            matcher = self.checked(grammar, outcome.reason)
        except ValueError as error:
            if outcome.is_final:
                self.store(self.refusals, (grammar, seconds), str(error), CACHED_REFUSALS)
            raise
        automaton = self.automaton(grammar) if seconds is None else self.sandbox.automaton(grammar)
        compiled = Matcher(matcher, self.eos, automaton, lambda token: self.tokenizer.decode_bytes([token]))
        self.store(self.cache, grammar, compiled, CACHED_GRAMMARS)
        return compiled

    def store(self, cache: OrderedDict[K, V], key: K, value: V, size: int) -> None:
        """Adds an entry to an LRU cache and evicts the least recently used entry above the size."""
        with self.lock:
            cache[key] = value
            cache.move_to_end(key)
            if len(cache) > size:
                cache.popitem(last=False)

    def checked(self, grammar: Grammar, reason: str = "") -> Any:
        """Compiles a grammar to an `LLMatcher`. Raises a `ValueError` with the reason for a grammar that cannot be used.

        Args:
            reason: the reason, if the sandbox has already refused the grammar.
        """
        matcher, reason = (None, reason) if reason else compile_matcher(self.tokenizer, grammar.kind, grammar.text)
        if reason:
            raise ValueError(refusal(grammar, reason))
        return matcher

    def automaton(self, grammar: Grammar) -> TokenAutomaton | None:
        """Builds a grammar's automaton; None if the grammar has none."""
        try:
            return self.token_automaton(grammar)
        except NotRegular:
            return None

    def token_automaton(self, grammar: Grammar) -> TokenAutomaton:
        """Builds a grammar's automaton. Raises `NotRegular` with the reason if the grammar has none."""
        with self.lock:
            self.vocabulary = self.vocabulary or Vocabulary.from_tokenizer(self.tokenizer, self.setting.vocab, self.eos)
        return build_automaton(self.tokenizer, self.vocabulary, grammar.kind, grammar.text, AUTOMATON_S)


def refusal(grammar: Grammar, reason: str) -> str:
    """Formats the error message for a refused grammar, with the paths of unsupported keywords of a schema."""
    names = {"json_schema": "JSON schema", "regex": "regular expression", "tagged": "JSON schemas", "lark": "grammar"}
    name = names.get(grammar.kind, grammar.kind)
    if "NoExtension" in reason:
        reason = "no text satisfies it"
    elif reason.startswith("panic"):
        reason = "it is too large"
    unknown = re.search(r"Unimplemented keys: \[(.*)\]", reason)
    if unknown and grammar.kind == "json_schema":
        keys = set(json.loads(f"[{unknown[1]}]"))
        paths = sorted({path for path, key in key_paths(json.loads(grammar.text)) if key in keys})
        reason = f"unsupported keywords, at {', '.join(paths) or ', '.join(sorted(keys))}"
    return f"the {name} cannot be used: {' '.join(reason.split())[:LONGEST_ERROR]}"


def key_paths(schema: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the name of each key of a schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            path = f"{prefix}.{key}" if prefix else key
            yield path, key
            yield from key_paths(value, path)
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from key_paths(value, f"{prefix}[{index}]")


class Matcher:
    """Compiled grammar, with its token automaton if the grammar has one.

    Args:
        decode: returns the bytes of a token, to track texts that have left the automaton. Without it, texts never re-enter.
    """

    def __init__(
        self,
        matcher: Any,
        eos: Sequence[int],
        token_automaton: TokenAutomaton | None = None,
        decode: Callable[[int], bytes] | None = None,
    ):
        self.matcher = matcher
        self.eos = eos
        self.token_automaton = token_automaton
        self.automaton = None if token_automaton is None else token_automaton.automaton
        self.leave = None if token_automaton is None or decode is None else partial(Excursion, token_automaton, decode)
        self.by_end_token: dict[int, AfterThinking] = {}

    def after_thinking(self, end_token: int) -> AfterThinking:
        """Returns the constraint that applies after a token. Shared, so that its automaton is on the device once."""
        if end_token not in self.by_end_token:
            self.by_end_token.setdefault(end_token, AfterThinking(self, self.automaton, end_token, self.eos))
        return self.by_end_token[end_token]

    def begin(self) -> "Matching":
        start = None if self.automaton is None else AutomatonState(self.automaton, 0)
        return Matching(self.matcher.deep_copy(), self.eos, start, self.leave)


class Matching:
    """State of one text in a grammar; see `runtime.constraints.ConstraintState`.

    Attributes:
        pending: committed tokens that the matcher has not consumed; the automaton makes the masks meanwhile.
        excursion: tracks a text that has left its automaton and may re-enter it.
    """

    def __init__(
        self,
        matcher: Any,
        eos: Sequence[int],
        automaton: AutomatonState | None = None,
        leave: Callable[[int], Excursion] | None = None,
    ):
        self.matcher = matcher
        self.eos = eos
        self.automaton = automaton
        self.leave = leave
        self.pending: list[int] = []
        self.excursion: Excursion | None = None

    def forced(self) -> list[int]:
        self.catch_up()
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        from llguidance.numpy import fill_next_token_bitmask

        self.catch_up()
        rows = masks.view(np.int32)
        matcher = self.matcher
        allowed = 0
        fill_next_token_bitmask(matcher, rows, 0)
        for draft in drafts:
            # The end-of-sequence token is never drafted: the target samples it after the drafts before it.
            if draft in self.eos or matcher.is_stopped() or not matcher.try_consume_tokens([draft]):
                break
            allowed += 1
            fill_next_token_bitmask(matcher, rows, allowed)
        if allowed and not matcher.is_error():
            matcher.rollback(allowed)
        self.check()
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        self.pending += tokens
        was_outside = self.excursion is not None
        for token in tokens:
            if self.automaton is not None:
                last = self.automaton
                self.automaton = self.automaton.advance([token])
                self.excursion = None if self.automaton is not None or self.leave is None else self.leave(last.state)
            if self.excursion is not None:
                self.excursion.advance(token)
        if self.automaton is None:
            self.catch_up()
            if was_outside:  # not in the step that left: the device waits for a round with masks of the host
                self.reenter()

    def reenter(self) -> None:
        """Continues in the automaton if the text is inside it again and the matcher's mask equals the automaton's."""
        assert self.excursion is not None, "a text that has not left"
        found = None if self.matcher.is_stopped() else self.excursion.reentry(forced_token(self.matcher))
        if found is not None:
            automaton, state = found
            mask = np.zeros((1, automaton.masks.shape[1]), np.uint32)
            self.fill([], mask)
            if np.array_equal(mask[0], automaton.masks[automaton.mask_of[state]]):
                self.automaton = found
                self.excursion = None

    def catch_up(self) -> None:
        """Has the matcher consume the pending tokens."""
        if self.pending:
            self.matcher.consume_tokens(self.pending)
            self.pending = []
            self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            raise ConstraintError(f"the grammar exceeded a limit during generation: {self.matcher.stop_reason()}")
