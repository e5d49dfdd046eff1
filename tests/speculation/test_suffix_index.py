"""The index of a corpus, against a search that tries everything; its memory; and the files that it is read from."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.dflash_numpy import as_folders, random_pair
from tilewright.models.tokenizer import load_tokenizer
from tilewright.speculation import suffix_index
from tilewright.speculation.suffix_index import (
    BYTES_PER_TOKEN,
    DEPTH,
    EIGHTHS,
    MOST_DRAFTS,
    HostIndex,
    build,
    documents_of,
    find,
    read_corpus,
)

MIN_N = 2

jitted = jax.jit(find, static_argnames=("min_n", "max_n", "min_score", "k"))


def search(documents: Sequence[Sequence[int]], row: Sequence[int], max_n: int, min_score: float) -> tuple[int, list[int]]:
    """The longest suffix of the row with a continuation, and the most frequent tokens behind it, one after the other."""
    for n in range(min(max_n, len(row)), MIN_N - 1, -1):
        places = [
            (document, end)
            for document in documents
            for end in range(n, len(document))
            if list(document[end - n : end]) == list(row[-n:])
        ]
        if places:
            break
    else:
        return 0, []
    alive, drafts, followed = places, [], 0
    while len(drafts) < MOST_DRAFTS:
        counts = Counter(document[end + len(drafts)] for document, end in alive if end + len(drafts) < len(document))
        token, count = max(counts.items(), key=lambda pair: (pair[1], -pair[0]), default=(0, 0))
        if 10 * count < len(places) or not count:
            break
        alive = [(d, end) for d, end in alive if end + len(drafts) < len(d) and d[end + len(drafts)] == token]
        drafts.append(token)
        followed += count
    expected = min(EIGHTHS * followed // len(places), EIGHTHS * n)
    return (n, drafts) if drafts and expected >= EIGHTHS * min_score else (0, [])


def look_up(
    documents: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], max_n: int, min_score: float, k: int
) -> list[tuple[int, list[int]]]:
    """`find` of rows of different lengths, which equals the search of the host."""
    index = build(documents)
    tokens = np.full((len(rows), 48), 9, np.int32)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    last = np.asarray([len(row) - 1 for row in rows], np.int32)
    found = jax.device_get(jitted(index, tokens, last, min_n=MIN_N, max_n=max_n, min_score=min_score, k=k))
    host = HostIndex(index)
    results = []
    for at, row in enumerate(rows):
        number = int(found.number[at])
        assert not found.drafts[at, number:].any()
        results.append((int(found.length[at]), found.drafts[at, :number].tolist()))
        length, drafts = host.find(list(row)[-max_n:], MIN_N, min_score)
        assert results[-1] == (length, drafts[:k])
    return results


ROWS = st.integers(1, 4).flatmap(
    lambda letters: st.tuples(
        st.lists(st.lists(st.integers(0, letters - 1), min_size=1, max_size=40), min_size=1, max_size=5),
        st.lists(st.lists(st.integers(0, letters - 1), min_size=1, max_size=40), min_size=3, max_size=3),
    )
)


@settings(max_examples=60)
@given(ROWS, st.sampled_from([(2, 0.0, 15), (5, 1.5, 3), (DEPTH, 0.0, 40), (DEPTH, 2.0, 15)]))
def test_equals_trying_everything(texts: tuple[list[list[int]], list[list[int]]], setting: tuple[int, float, int]):
    """Rows of which many stand in the texts, also across the length of the longest suffix."""
    documents, rows = texts
    max_n, min_score, k = setting
    rows = [*rows, (documents[0] * 20)[:44]]
    want = [search(documents, row, max_n, min_score) for row in rows]
    assert look_up(documents, rows, max_n, min_score, k) == [(length, drafts[:k]) for length, drafts in want]


@pytest.mark.parametrize(
    ("documents", "row", "found"),
    [
        ([[1, 2, 3, 4], [5, 2, 3, 6]], [9, 1, 2], (2, [3, 4])),  # 1 2 is longer than 2
        ([[1, 2, 3], [1, 2, 4], [7, 1, 2, 4]], [1, 2], (2, [4])),  # the most frequent
        ([[1, 2, 4], [1, 2, 3]], [1, 2], (2, [3])),  # of equals the smallest
        ([[1, 2], [3, 4]], [1, 2], (0, [])),  # no text goes on in the next one
        ([[1, 2, *range(10, 60)]], [1, 2], (2, list(range(10, 42)))),
        ([[1, 2, n] for n in range(10, 21)], [1, 2], (0, [])),  # each has less than one in ten
        ([[7]], [1, 2], (0, [])),
    ],
)
def test_examples(documents: list[list[int]], row: list[int], found: tuple[int, list[int]]):
    assert search(documents, row, DEPTH, 0.0) == found
    assert look_up(documents, [row, [8]], DEPTH, 0.0, 40) == [found, (0, [])]


def test_a_draft_must_promise_enough():
    """Five texts go on alike for a token, and four for another."""
    documents = [[1, 2, 3, 4, n] for n in range(10, 14)] + [[1, 2, 3, 5]]
    assert look_up(documents, [[1, 2]], DEPTH, 1.8, 8) == [(2, [3, 4, 10])]
    assert look_up(documents, [[1, 2]], DEPTH, 2.1, 8) == [(0, [])], "no more than the suffix is long"
    assert look_up(documents, [[0, 1, 2]], DEPTH, 2.0, 1) == [(2, [3])], "the score does not depend on the width"


@pytest.mark.parametrize("count", [1, 30, 1000])
def test_memory_is_bounded(count: int):
    rng = np.random.default_rng(count)
    index = build([rng.integers(0, 50, 20).tolist() for _ in range(count)])
    length = count * 21 + DEPTH
    capacity = len(index.tokens)
    assert capacity.bit_count() == 1
    assert length < capacity <= max(64, 2 * length)
    assert sum(each.nbytes for each in jax.tree.leaves(index)) == BYTES_PER_TOKEN * capacity + 4
    assert int(index.size) == count * 19


def test_searches_take_few_steps_and_no_loop():
    index = build([list(range(5000))])
    search_in = partial(find, min_n=2, max_n=DEPTH, min_score=2.0, k=15)
    lowered = jax.jit(search_in).lower(index, np.zeros((2, 64), np.int32), np.zeros(2, np.int32)).as_text()
    assert "stablehlo.while" not in lowered
    assert lowered.count('"stablehlo.gather"(') < 30


def test_files(tmp_path: Path):
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool"}]},
        {"text": "c", "code": "d"},
        {"question": "e", "answer": "f"},
    ]
    lines = written("a.jsonl", "\n".join(map(json.dumps, records)))
    assert documents_of(lines) == ["a", "b", "c", "f"]
    assert documents_of(written("b.txt", "one\ntwo")) == ["one\ntwo"]
    for path, message in (
        (tmp_path / "none.txt", "none.txt: no such file"),
        (written("c.txt", " \n"), "expected text in .*c.txt, found none"),
        (written("d.jsonl", '{"id": 1}'), r"d.jsonl, record 1: expected messages, or a text in text, .* found .id."),
        (written("e.jsonl", "{"), "e.jsonl:1: not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            documents_of(path)


def test_a_corpus_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = as_folders(tmp_path, random_pair(0))
    tokenizer = load_tokenizer(folder)
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "t1 t2 t3"}\n{"text": "t4 t5"}\n')
    index = read_corpus(path, tokenizer)
    assert index.tokens[DEPTH : DEPTH + 8].tolist() == [1, 2, 3, -1, 4, 5, -1, -1]
    monkeypatch.setattr(suffix_index, "MOST_TOKENS", 6)
    with pytest.raises(ValueError, match=r"corpus.jsonl: expected at most 6 tokens, one added for each text, found 7"):
        read_corpus(path, tokenizer)
