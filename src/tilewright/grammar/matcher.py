"""Grammars over a model's tokens, by llguidance (the extra `grammar`).

The matcher has limits of its own: a grammar that goes beyond them is refused when it is compiled, or ends the one request in
whose text it does. They do not bound how long some grammars take to compile, so those of strangers are tried in a process of
their own first. Compiling lets other threads run.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from tilewright.grammar.grammar import Grammar
from tilewright.grammar.trial import Trial
from tilewright.grammar.worker import CompilerSettings, compiled, made_tokenizer
from tilewright.runtime.constraints import Constraint, ConstraintError

KEPT = 32
"""Compiled grammars that are kept, for requests that bring the same again."""
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
        setting = CompilerSettings(tokenizer.to_str(), vocab, list(eos), TRIAL_BYTES)
        try:
            self.tokenizer = made_tokenizer(setting)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"llguidance does not read this tokenizer: {error}") from error
        self.eos = tuple(eos)
        self.trial = Trial(setting)
        self.kept, self.lock = OrderedDict[Grammar, Matcher](), threading.Lock()

    def compile(self, grammar: Grammar, seconds: float | None = None) -> Constraint:
        """A grammar as a constraint.

        Args:
            seconds: that compiling may take; it is tried first, in a process of its own. None for a grammar that is trusted.

        Raises:
            ValueError: it is none, nothing satisfies it, it asks for what cannot be checked here, or it takes too much.
        """
        with self.lock:
            if grammar in self.kept:
                self.kept.move_to_end(grammar)
                return self.kept[grammar]
        why = "" if seconds is None else self.trial.refusal(grammar, seconds)
        matcher, why = (None, why) if why else compiled(self.tokenizer, grammar.kind, grammar.text)
        if why:
            raise ValueError(refusal(grammar, why))
        found = Matcher(matcher, self.eos)
        with self.lock:
            self.kept[grammar] = found
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return found


def refusal(grammar: Grammar, why: str) -> str:
    """Reason why a grammar is refused, in the matcher's words, and in a schema where it is that it means."""
    named = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}[grammar.kind]
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
    """A compiled grammar."""

    def __init__(self, matcher: Any, eos: Sequence[int]):
        self.matcher, self.eos = matcher, eos

    def begin(self) -> "Matching":
        return Matching(self.matcher.deep_copy(), self.eos)


class Matching:
    """State of one text in a grammar; see `runtime.constraints.ConstraintState`."""

    def __init__(self, matcher: Any, eos: Sequence[int]):
        self.matcher, self.eos = matcher, eos

    def forced(self) -> list[int]:
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        from llguidance.numpy import fill_next_token_bitmask

        rows, matcher, allowed = masks.view(np.int32), self.matcher, 0
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
        self.matcher.consume_tokens(list(tokens))
        self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            raise ConstraintError(f"the grammar became too complex to follow: {self.matcher.stop_reason()}")
