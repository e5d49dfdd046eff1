"""Grammars behind thoughts: an answer's grammar begins behind the token that ends its thought, in the middle of a block, too.

A thought is free, but for the tokens that end the text: what ends by itself has an answer that follows the grammar.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from tilewright.runtime.automata import ALL, WORD, Automaton, AutomatonState
from tilewright.runtime.constraints import Constraint, ConstraintState

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tokens that begin and end a thought, of the families that have such."""

TAIL = 4
"""Tokens at the end of a prompt among which a template's mark stands; marks before may be anybody's."""


def end_of_thought(tokenizer: Tokenizer, prompt: Sequence[int], asked: bool = False) -> int | None:
    """The token that ends the thought which an answer begins with; None if it begins with none.

    Args:
        prompt: it says so itself where its end leaves a thought open.
        asked: the model was asked to think; it does unless the prompt's end has an ended thought.
    """
    for begin, end in MARKS:
        first = tokenizer.token_to_id(begin)
        last = tokenizer.token_to_id(end)
        if first is None or last is None:
            continue
        marks = [token for token in prompt[-TAIL:] if token in (first, last)]
        if marks[-1:] == [first] or (asked and last not in marks):
            return last
    return None


class AfterThought:
    """A constraint that begins behind the token that ends a thought."""

    def __init__(self, constraint: Constraint, automaton: Automaton | None, mark: int, eos: Sequence[int]):
        """Args:
        automaton: the constraint's own, if it has one.
        mark: ends the thought.
        eos: tokens that end a text, and cannot come before.
        """
        self.constraint = constraint
        self.mark = mark
        self.eos = tuple(eos)
        self.automaton = None if automaton is None else thoughtful(automaton, mark, eos)

    def begin(self) -> "Thinking":
        return Thinking(self)


class Thinking:
    """State of one text; see `runtime.constraints.ConstraintState`."""

    def __init__(self, rule: AfterThought):
        self.rule = rule
        self.thinks = True
        self.answer: ConstraintState = rule.constraint.begin()

    @property
    def automaton(self) -> AutomatonState | None:
        automaton = self.rule.automaton
        own = self.answer.automaton
        if automaton is None or own is None:
            return None
        return AutomatonState(automaton, 0 if self.thinks else own.state + 1)

    def forced(self) -> list[int]:
        return [] if self.thinks else self.answer.forced()

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        if not self.thinks:
            return self.answer.fill(drafts, masks)
        masks[0] = thought_mask(masks.shape[1], self.rule.eos)
        for slot, draft in enumerate(drafts):
            if draft in self.rule.eos:
                return slot
            if draft == self.rule.mark:
                return slot + 1 + self.answer.fill(drafts[slot + 1 :], masks[slot + 1 :])
            masks[slot + 1] = masks[0]
        return len(drafts)

    def advance(self, tokens: Sequence[int]) -> None:
        if self.thinks and self.rule.mark in tokens:
            self.thinks = False
            tokens = tokens[list(tokens).index(self.rule.mark) + 1 :]
        if not self.thinks:
            self.answer.advance(tokens)


def thought_mask(width: int, eos: Sequence[int]) -> UInt32[np.ndarray, " W"]:
    """The mask of all tokens but those that end a text."""
    mask = np.full(width, ALL, np.uint32)
    for token in eos:
        mask[token // WORD] &= ~np.uint32(1 << token % WORD)
    return mask


def thoughtful(automaton: Automaton, mark: int, eos: Sequence[int]) -> Automaton | None:
    """An automaton behind a thought, which is a state before all of its own; None where that is too large.

    The token that ends the thought becomes a class of its own, and so do those that end a text.
    """
    states, count = automaton.after.shape
    classes = automaton.classes.copy()
    after = np.full((states + 1, count + 2), -1, np.int32)
    classes[mark] = count
    classes[list(eos)] = count + 1
    after[0, :count] = 0
    after[0, count] = 1
    after[1:, :count] = np.where(automaton.after < 0, automaton.after, automaton.after + 1)
    after[1:, count] = after[1:, automaton.classes[mark]]
    try:
        return Automaton(
            masks=np.concatenate([thought_mask(automaton.masks.shape[1], eos)[None], automaton.masks]),
            mask_of=np.concatenate([[0], automaton.mask_of + 1]).astype(np.int32),
            classes=classes,
            after=after,
            forced=np.concatenate([[-1], automaton.forced]).astype(np.int32),
        )
    except ValueError:
        return None
