"""Grammars over a model's tokens, by llguidance (the extra `grammar`).

The matcher has limits of its own: a grammar that goes beyond them is refused when it is compiled, or ends the one request in
whose text it does. They do not bound how long some grammars take to compile, so those of strangers are tried in a process of
their own first. Compiling lets other threads run.
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
from tilewright.grammar.thinking import AfterThought
from tilewright.grammar.token_automaton import AUTOMATON_S, TokenAutomaton, Vocabulary, automaton_of, forced_token
from tilewright.grammar.trial import Refusal, Trial
from tilewright.grammar.worker import CompilerSettings, compiled, made_tokenizer
from tilewright.runtime.automata import AutomatonState
from tilewright.runtime.constraints import ConstraintError

K = TypeVar("K")
V = TypeVar("V")

KEPT = 32
"""Compiled grammars that are kept, for requests that bring the same again."""
REFUSED = 64
"""Refused grammars whose reasons are kept, for requests that bring the same again."""
LONGEST_ERROR = 300
"""Characters of what a matcher says, which repeats the grammar."""
TRIAL_BYTES = 2 << 30
"""Memory that a grammar may take when it is tried."""


def is_installed() -> bool:
    """True if grammars can be compiled here."""
    return find_spec("llguidance") is not None


class Compiler:
    """Compiles grammars for one model's tokens; safe to use from several threads.

    Raises:
        ValueError: the extra `grammar` is not installed, the model names no token that ends a text, or its tokenizer is of a
            kind that llguidance does not read.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]):
        """Args:
        vocab: the size of the model's vocabulary, which may have more tokens than the tokenizer.
        eos: the tokens that end a text.
        """
        if not is_installed():
            raise ValueError("grammars are matched by llguidance: pip install 'tilewright[grammar]'")
        if not eos:
            raise ValueError("expected a model that names a token which ends a text, found one that names none")
        self.setting = CompilerSettings(tokenizer.to_str(), vocab, list(eos), TRIAL_BYTES)
        try:
            self.tokenizer = made_tokenizer(self.setting)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"llguidance does not read this tokenizer: {error}") from error
        self.eos = tuple(eos)
        self.trial = Trial(self.setting)
        self.vocabulary: Vocabulary | None = None
        self.kept = OrderedDict[Grammar, Matcher]()
        self.lock = threading.Lock()
        self.refused = OrderedDict[tuple[Grammar, float | None], str]()

    def is_kept(self, grammar: Grammar) -> bool:
        """True if a grammar is compiled already; it is kept for longer then, as if it had been asked for."""
        with self.lock:
            if grammar in self.kept:
                self.kept.move_to_end(grammar)
            return grammar in self.kept

    def compile(self, grammar: Grammar, seconds: float | None = None) -> "Matcher":
        """A grammar as a constraint.

        Args:
            seconds: of a processor that compiling may take; it is tried first, in a process of its own. None for a grammar that
                is trusted.

        Raises:
            ValueError: it is none, nothing satisfies it, it asks for what cannot be checked here, or it takes too much.
        """
        with self.lock:
            if grammar in self.kept:
                self.kept.move_to_end(grammar)
                return self.kept[grammar]
            if (grammar, seconds) in self.refused:
                self.refused.move_to_end((grammar, seconds))
                raise ValueError(self.refused[grammar, seconds])
        tried = Refusal("") if seconds is None else self.trial.refusal(grammar, seconds)
        try:
            matcher = self.checked(grammar, tried.why)
        except ValueError as error:
            if tried.lasts:
                self.keep(self.refused, (grammar, seconds), str(error), REFUSED)
            raise
        made = self.automaton(grammar) if seconds is None else self.trial.automaton(grammar)
        found = Matcher(matcher, self.eos, made, lambda token: self.tokenizer.decode_bytes([token]))
        self.keep(self.kept, grammar, found, KEPT)
        return found

    def keep(self, kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
        """Adds an entry, of which only so many of the newest stay."""
        with self.lock:
            kept[key] = value
            kept.move_to_end(key)
            if len(kept) > most:
                kept.popitem(last=False)

    def checked(self, grammar: Grammar, why: str = "") -> Any:
        """A grammar's matcher, of llguidance. Raises a `ValueError` with the reason where it cannot be used.

        Args:
            why: the reason, where it is known already.
        """
        matcher, why = (None, why) if why else compiled(self.tokenizer, grammar.kind, grammar.text)
        if why:
            raise ValueError(refusal(grammar, why))
        return matcher

    def automaton(self, grammar: Grammar) -> TokenAutomaton | None:
        """A grammar's automaton, made here; None if it has none."""
        try:
            return self.token_automaton(grammar)
        except NotRegular:
            return None

    def token_automaton(self, grammar: Grammar) -> TokenAutomaton:
        """A grammar's automaton, made here. Raises `NotRegular` where it has none, with the reason."""
        with self.lock:
            self.vocabulary = self.vocabulary or Vocabulary.of(self.tokenizer, self.setting.vocab, self.eos)
        return automaton_of(self.tokenizer, self.vocabulary, grammar.kind, grammar.text, AUTOMATON_S)


def refusal(grammar: Grammar, why: str) -> str:
    """Reason why a grammar is refused, in the matcher's words, and in a schema where it is that it means."""
    names = {"json_schema": "JSON schema", "regex": "regular expression", "tagged": "JSON schemas", "lark": "grammar"}
    named = names.get(grammar.kind, grammar.kind)
    if "NoExtension" in why:
        why = "no text satisfies it"
    elif why.startswith("panic"):
        why = "it is too large"
    unknown = re.search(r"Unimplemented keys: \[(.*)\]", why)
    if unknown and grammar.kind == "json_schema":
        keys = set(json.loads(f"[{unknown[1]}]"))
        places = sorted({place for place, key in places_of(json.loads(grammar.text)) if key in keys})
        why = f"it asks for what is not offered, at {', '.join(places) or ', '.join(sorted(keys))}"
    return f"the {named} cannot be used: {' '.join(why.split())[:LONGEST_ERROR]}"


def places_of(schema: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Each key of a schema, with the path to it."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            place = f"{where}.{key}" if where else key
            yield place, key
            yield from places_of(value, place)
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from places_of(value, f"{where}[{index}]")


class Matcher:
    """A compiled grammar, with its automaton if it has one.

    Args:
        bytes_of: those of a token, for texts that leave the automaton and come back; without it, none comes back.
    """

    def __init__(
        self,
        matcher: Any,
        eos: Sequence[int],
        made: TokenAutomaton | None = None,
        bytes_of: Callable[[int], bytes] | None = None,
    ):
        self.matcher = matcher
        self.eos = eos
        self.made = made
        self.automaton = None if made is None else made.automaton
        self.leave = None if made is None or bytes_of is None else partial(Excursion, made, bytes_of)
        self.thoughts: dict[int, AfterThought] = {}

    def after_thought(self, mark: int) -> AfterThought:
        """The constraint that begins behind a token: one for all who ask, so that its automaton is on the device once."""
        if mark not in self.thoughts:
            self.thoughts.setdefault(mark, AfterThought(self, self.automaton, mark, self.eos))
        return self.thoughts[mark]

    def begin(self) -> "Matching":
        stands = None if self.automaton is None else AutomatonState(self.automaton, 0)
        return Matching(self.matcher.deep_copy(), self.eos, stands, self.leave)


class Matching:
    """State of one text in a grammar; see `runtime.constraints.ConstraintState`.

    Attributes:
        behind: tokens that the matcher has not taken in yet: where an automaton says what may come, nobody asks it.
        excursion: of a text that has left its automaton, if it may come back.
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
        self.behind: list[int] = []
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
            # The token that ends the text is drawn by the target itself, behind the drafts before it.
            if draft in self.eos or matcher.is_stopped() or not matcher.try_consume_tokens([draft]):
                break
            allowed += 1
            fill_next_token_bitmask(matcher, rows, allowed)
        if allowed and not matcher.is_error():
            matcher.rollback(allowed)
        self.check()
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        self.behind += tokens
        away = self.excursion is not None
        for token in tokens:
            if self.automaton is not None:
                stood = self.automaton
                self.automaton = self.automaton.advance([token])
                self.excursion = None if self.automaton is not None or self.leave is None else self.leave(stood.state)
            if self.excursion is not None:
                self.excursion.advance(token)
        if self.automaton is None:
            self.catch_up()
            if away:  # not with the token that left: the device rests until a round of the host's masks tells it to go on
                self.come_back()

    def come_back(self) -> None:
        """Goes on in the automaton, where the text is back in it and the matcher has the same mask there."""
        assert self.excursion is not None, "a text that has not left"
        found = None if self.matcher.is_stopped() else self.excursion.back(forced_token(self.matcher))
        if found is not None:
            automaton, state = found
            mask = np.zeros((1, automaton.masks.shape[1]), np.uint32)
            self.fill([], mask)
            if np.array_equal(mask[0], automaton.masks[automaton.mask_of[state]]):
                self.automaton = found
                self.excursion = None

    def catch_up(self) -> None:
        """Has the matcher take in what it has not."""
        if self.behind:
            self.matcher.consume_tokens(self.behind)
            self.behind = []
            self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            raise ConstraintError(f"the grammar became too complex to follow: {self.matcher.stop_reason()}")
