"""Merges of a SentencePiece vocabulary: found by hashes as by a loop over all cuts."""

from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models import gguf_tokenizer
from tilewright.models.gguf_tokenizer import merges_of


def plain_merges(vocabulary: Mapping[str, int], scores: Sequence[float], control: Collection[int]) -> list[tuple[str, str]]:
    found = []
    for text, number in vocabulary.items():
        for cut in range(1, len(text)):
            a, b = text[:cut], text[cut:]
            if number not in control and a in vocabulary and b in vocabulary:
                found.append((-scores[number], number, vocabulary[a], vocabulary[b], (a, b)))
    return [pair for *_, pair in sorted(found)]


@given(
    st.dictionaries(st.text("ab▁é😀", min_size=1, max_size=6), st.integers(0, 3), min_size=1, max_size=60),
    st.sets(st.integers(0, 59)),
    st.integers(1, 3),
)
def test_merges_are_those_of_a_loop_over_all_cuts(scored: dict[str, int], control: set[int], step: int):
    # Numbers with gaps, as duplicates in a file leave them: the last of equal texts counts.
    vocabulary = {text: step * n for n, text in enumerate(scored)}
    scores = [float("nan")] * (step * len(scored))
    for text, score in scored.items():
        scores[vocabulary[text]] = float(-score)
    assert merges_of(vocabulary, scores, control) == plain_merges(vocabulary, scores, control)


def test_tokens_that_share_a_hash_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_tokenizer, "BASE", 1)  # a sum of characters, regardless of their order
    with pytest.raises(ValueError, match="two with one hash"):
        merges_of({"a": 0, "b": 1, "ab": 2, "ba": 3}, [0.0] * 4, [])
