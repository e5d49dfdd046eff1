"""Constraints on the answer after a thinking block.

The constraint applies from the token after the end of the thinking block, also in the middle of a drafted block. Inside the
thinking block every token is allowed except end-of-sequence tokens, so that a text that ends by itself contains an answer.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from tilewright.runtime.automata import ALL, WORD, Automaton, AutomatonState
from tilewright.runtime.constraints import Constraint, ConstraintState

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tokens that begin and end a thinking block, by model family."""

TAIL = 4
"""Number of last prompt tokens in which the chat template's thinking tokens are searched; earlier ones may be user text."""


def thinking_end_token(tokenizer: Tokenizer, prompt: Sequence[int], enabled: bool = False) -> int | None:
    """Returns the token that ends the thinking block of a generation; None if the generation has no thinking block.

    Args:
        prompt: prompt tokens. An unclosed thinking block at the end means that the generation starts inside it.
        enabled: the request enabled thinking: the generation has a thinking block unless the prompt ends with a closed one.
    """
    for begin, end in MARKS:
        first = tokenizer.token_to_id(begin)
        last = tokenizer.token_to_id(end)
        if first is None or last is None:
            continue
        found = [token for token in prompt[-TAIL:] if token in (first, last)]
        if found[-1:] == [first] or (enabled and last not in found):
            return last
    return None


class AfterThinking:
    """Constraint that applies after the token that ends the thinking block."""

    def __init__(self, constraint: Constraint, automaton: Automaton | None, end_token: int, eos: Sequence[int]):
        """Args:
        automaton: automaton of the constraint, if it has one.
        end_token: id of the token that ends the thinking block.
        eos: ids of the end-of-sequence tokens, which are not allowed in the thinking block.
        """
        self.constraint = constraint
        self.end_token = end_token
        self.eos = tuple(eos)
        self.automaton = None if automaton is None else prepend_thinking(automaton, end_token, eos)

    def begin(self) -> "AfterThinkingState":
        return AfterThinkingState(self)


class AfterThinkingState:
    """State of one text; see `runtime.constraints.ConstraintState`."""

    def __init__(self, rule: AfterThinking):
        self.rule = rule
        self.is_thinking = True
        self.answer: ConstraintState = rule.constraint.begin()

    @property
    def automaton(self) -> AutomatonState | None:
        automaton = self.rule.automaton
        inner = self.answer.automaton
        if automaton is None or inner is None:
            return None
        return AutomatonState(automaton, 0 if self.is_thinking else inner.state + 1)

    def forced(self) -> list[int]:
        return [] if self.is_thinking else self.answer.forced()

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        if not self.is_thinking:
            return self.answer.fill(drafts, masks)
        masks[0] = thinking_mask(masks.shape[1], self.rule.eos)
        for slot, draft in enumerate(drafts):
            if draft in self.rule.eos:
                return slot
            if draft == self.rule.end_token:
                return slot + 1 + self.answer.fill(drafts[slot + 1 :], masks[slot + 1 :])
            masks[slot + 1] = masks[0]
        return len(drafts)

    def advance(self, tokens: Sequence[int]) -> None:
        if self.is_thinking and self.rule.end_token in tokens:
            self.is_thinking = False
            tokens = tokens[list(tokens).index(self.rule.end_token) + 1 :]
        if not self.is_thinking:
            self.answer.advance(tokens)


def thinking_mask(width: int, eos: Sequence[int]) -> UInt32[np.ndarray, " W"]:
    """Returns a mask of all tokens except end-of-sequence tokens."""
    mask = np.full(width, ALL, np.uint32)
    for token in eos:
        mask[token // WORD] &= ~np.uint32(1 << token % WORD)
    return mask


def prepend_thinking(automaton: Automaton, end_token: int, eos: Sequence[int]) -> Automaton | None:
    """Adds a start state for the thinking block to an automaton. Returns None if the result is too large.

    The end token of the thinking block and the end-of-sequence tokens become token classes of their own.
    """
    states, count = automaton.after.shape
    classes = automaton.classes.copy()
    after = np.full((states + 1, count + 2), -1, np.int32)
    classes[end_token] = count
    classes[list(eos)] = count + 1
    after[0, :count] = 0
    after[0, count] = 1
    after[1:, :count] = np.where(automaton.after < 0, automaton.after, automaton.after + 1)
    after[1:, count] = after[1:, automaton.classes[end_token]]
    try:
        return Automaton(
            masks=np.concatenate([thinking_mask(automaton.masks.shape[1], eos)[None], automaton.masks]),
            mask_of=np.concatenate([[0], automaton.mask_of + 1]).astype(np.int32),
            classes=classes,
            after=after,
            forced=np.concatenate([[-1], automaton.forced]).astype(np.int32),
        )
    except ValueError:
        return None
