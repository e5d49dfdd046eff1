"""Stop tokens of requests with a constraint: a constrained text ends only where its constraint is met.

Stop tokens are therefore masked until then, as in vLLM. Two kinds stay allowed, as text that ends nothing: tokens of a single
character, without which some texts could not be written, and tokens where the mask allows nothing else.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jaxtyping import UInt32
from tokenizers import Tokenizer

from tilewright.runtime.automata import ALL, WORD, Automaton, AutomatonState
from tilewright.runtime.constraints import ConstraintState


def without_stops(state: ConstraintState, stops: Sequence[int], tokenizer: Tokenizer, eos: Collection[int]) -> ConstraintState:
    """Returns a constraint's state whose masks forbid stop tokens, except for the model's end-of-sequence tokens."""
    tokens = tuple(sorted({token for token in stops if token not in eos and not is_character(tokenizer, token)}))
    return WithoutTokens(state, tokens) if tokens else state


def is_character(tokenizer: Tokenizer, token: int) -> bool:
    """True for a token of one character or of a part of one."""
    return len(tokenizer.decode([token], skip_special_tokens=False)) == 1


class WithoutTokens:
    """Constraint state with some tokens forbidden; see `runtime.constraints.ConstraintState`."""

    def __init__(self, state: ConstraintState, tokens: tuple[int, ...]):
        self.state = state
        self.tokens = tokens

    @property
    def automaton(self) -> AutomatonState | None:
        found = self.state.automaton
        return None if found is None else found._replace(automaton=automaton_without(found.automaton, self.tokens))

    def forced(self) -> list[int]:
        found = self.state.forced()
        return found[: next((place for place, token in enumerate(found) if token in self.tokens), len(found))]

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        allowed = self.state.fill(drafts, masks)
        masks[: allowed + 1] = masks_without(masks[: allowed + 1], self.tokens)
        for place, draft in enumerate(drafts[:allowed]):
            if not masks[place, draft // WORD] >> np.uint32(draft % WORD) & 1:
                return place
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        self.state.advance(tokens)


def masks_without(masks: UInt32[np.ndarray, "N W"], tokens: Sequence[int]) -> UInt32[np.ndarray, "N W"]:
    """Clears tokens in masks; a mask that would be empty does not change."""
    allowed = np.full(masks.shape[1], ALL, np.uint32)
    for token in tokens:
        if token // WORD < len(allowed):
            allowed[token // WORD] &= ~np.uint32(1 << token % WORD)
    found = masks & allowed
    return np.where(found.any(axis=1, keepdims=True), found, masks)


@lru_cache(maxsize=32)
def automaton_without(automaton: Automaton, tokens: tuple[int, ...]) -> Automaton:
    """Returns an automaton with such masks. The cache returns one object for all requests, which is on the device once."""
    masks = masks_without(automaton.masks, tokens)
    forced = automaton.forced.copy()
    bits = masks[automaton.mask_of, np.maximum(forced, 0) // WORD] >> (np.maximum(forced, 0) % WORD).astype(np.uint32)
    forced[(bits & 1) == 0] = -1
    return replace(automaton, masks=masks, forced=forced)
