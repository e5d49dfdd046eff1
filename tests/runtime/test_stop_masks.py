"""Stop tokens beside a constraint."""

from collections.abc import Sequence

import numpy as np

from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.runtime.automata import Automaton, AutomatonState
from tilewright.runtime.stop_masks import WithoutTokens, automaton_without, without_stops

WORDS = 2


def mask(*tokens: int) -> np.ndarray:
    found = np.zeros(WORDS, np.uint32)
    for token in tokens:
        found[token // 32] |= np.uint32(1 << token % 32)
    return found


class Fixed:
    """Allows the tokens 1, 2 and 40, then 40, then 2, whatever came; 1 and 40 have to come first."""

    masks = (mask(1, 2, 40), mask(40), mask(2))
    automaton: AutomatonState | None = None

    def forced(self) -> list[int]:
        return [1, 40]

    def fill(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        masks[:] = self.masks[: len(masks)]
        return len(drafts)

    def advance(self, tokens: Sequence[int]) -> None:
        self.advanced = tokens


def test_masks_leave_out_stop_tokens_where_another_may_come():
    for drafts, kept in (([1, 40], 2), ([2, 40], 2), ([40, 40], 0)):
        masks = np.zeros((3, WORDS), np.uint32)
        assert WithoutTokens(Fixed(), (40, 2**20)).fill(drafts, masks) == kept
        assert masks[0].tolist() == mask(1, 2).tolist()
        assert masks[1:].tolist() == [mask(40).tolist(), mask(2).tolist()]  # which has to come
    assert WithoutTokens(Fixed(), (40,)).forced() == [1]
    assert WithoutTokens(Fixed(), (5,)).forced() == [1, 40]


def test_automata_have_the_same_masks():
    automaton = Automaton(
        masks=np.stack(Fixed.masks),
        mask_of=np.arange(3, dtype=np.int32),
        classes=np.zeros(64, np.int32),
        after=np.asarray([[1], [2], [-1]], np.int32),
        forced=np.asarray([40, 40, -1], np.int32),
    )
    found = automaton_without(automaton, (40,))
    assert found.masks.tolist() == [mask(1, 2).tolist(), mask(40).tolist(), mask(2).tolist()]
    assert found.forced.tolist() == [-1, 40, -1]
    assert automaton_without(automaton, (40,)) is found
    state = Fixed()
    state.automaton = AutomatonState(automaton, 1)
    assert WithoutTokens(state, (40,)).automaton == AutomatonState(found, 1)


def test_tokens_of_one_character_and_those_that_end_any_text_may_come():
    tokenizer = load_tokenizer(PACKAGED["demo"])
    (character,), word = encode(tokenizer, "}"), next(n for n in range(300, 4096) if len(tokenizer.decode([n])) > 2)
    state = Fixed()
    assert without_stops(state, [character, 0], tokenizer, eos=[0]) is state
    found = without_stops(state, [word, character, 0, word], tokenizer, eos=[0])
    assert isinstance(found, WithoutTokens)
    assert found.tokens == (word,)
