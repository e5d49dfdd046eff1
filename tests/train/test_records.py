"""Files of records, and batches of whole ones."""

import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.train.data import TokenStream
from tilewright.train.records import RecordRows, Records, make_batches
from tilewright.train.text import Windows
from train.support import counting_stream, options

pairs = st.lists(
    st.tuples(st.lists(st.integers(0, 70_000), max_size=5), st.lists(st.integers(0, 70_000), min_size=1, max_size=9)),
    min_size=1,
    max_size=8,
)


def numbered(count: int, prompt: int, answer: int, first: int = 100) -> list[tuple[list[int], list[int]]]:
    """Records whose tokens are all different ones."""
    size = prompt + answer
    return [
        ([first + size * n + i for i in range(prompt)], [first + size * n + prompt + i for i in range(answer)])
        for n in range(count)
    ]


@given(pairs)
@settings(max_examples=25)
def test_a_file_holds_what_was_saved(tmp_path_factory: pytest.TempPathFactory, made: list[tuple[list[int], list[int]]]):
    path = tmp_path_factory.mktemp("records") / "new" / "some.npz.xz"
    Records.from_pairs(made).save(path)
    found = Records.load(path)
    assert len(found) == len(made)
    for n, (prompt, answer) in enumerate(made):
        span = slice(found.starts[n], found.ends[n])
        assert found.tokens[span].tolist() == [*prompt, *answer]
        assert found.in_loss[span].tolist() == [False] * len(prompt) + [True] * len(answer)


def test_small_vocabularies_take_16_bits(tmp_path: Path):
    rng = np.random.default_rng(0)
    noise = Records.from_pairs([([], rng.integers(0, 2**16, 20_000).tolist())])
    noise.save(tmp_path / "noise.npz.xz")
    assert (tmp_path / "noise.npz.xz").stat().st_size < 42_000


@pytest.mark.parametrize("content", [b"", b"no file", lzma.compress(b"no arrays")], ids=["empty", "foreign", "no arrays"])
def test_another_file_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "some.npz.xz").write_bytes(content)
    with pytest.raises(ValueError, match=r"some.npz.xz: expected a file of records \(.npz.xz\)"):
        Records.load(tmp_path / "some.npz.xz")


def test_records_of_one_prompt_are_held_out_together():
    made = Records.from_pairs([([n, n], [n, i]) for n in range(20) for i in range(2)])
    trained, held = made.split(0.25, seed=3)
    prompts = [set(part.tokens[part.starts].tolist()) for part in (trained, held)]
    assert (len(trained), len(held)) == (30, 10)
    assert not prompts[0] & prompts[1]


def test_each_epoch_shows_whole_records_once_from_their_beginning():
    made = Records.from_pairs(numbered(4, 2, 5) + numbered(6, 3, 9, first=500) + numbered(2, 15, 4, first=900))
    rows = RecordRows(made, made, options(batch_size=2, sequence_length=16))
    epoch = [rows.rows(made, *each) for each in rows.chosen(made, 0)]
    assert sorted(tokens.shape for tokens, _ in epoch) == [(2, 8)] * 2 + [(2, 16)] * 3
    seen = []
    for tokens, in_loss in epoch:
        for row, flags in zip(tokens, in_loss, strict=True):
            start = row[0]
            prompt, size = (2, 7) if start < 500 else (3, 12)
            assert row[:size].tolist() == list(range(start, start + size))
            assert np.flatnonzero(flags).tolist() == list(range(prompt, size))
            seen.append(start)
    assert len(set(seen)) == len(seen) == 10
    assert rows.tokens_per_step == (4 * 7 + 6 * 12) / 5


def test_a_resumed_run_sees_the_batches_that_it_would_have_seen():
    made = Records.from_pairs(numbered(9, 1, 4) + numbered(9, 1, 11, first=700))
    rows = RecordRows(made, made, options(batch_size=2, sequence_length=16))
    whole = rows.batches(0)
    later = rows.batches(5)
    for _ in range(5):
        next(whole)
    for _ in range(9):
        np.testing.assert_array_equal(next(whole)[0], next(later)[0])


def test_a_long_record_loses_its_end():
    made = Records.from_pairs(numbered(2, 2, 40))
    tokens, in_loss = next(RecordRows(made, made, options(batch_size=2, sequence_length=16)).batches(0))
    assert tokens.shape == (2, 16)
    assert in_loss[:, 2:].all()


def test_records_of_few_prompts_are_held_out_one_by_one():
    trained, held_out = Records.from_pairs([([1], [2, n]) for n in range(30)]).split(0.02, seed=0)
    assert (len(trained), len(held_out)) == (29, 1)
    with pytest.raises(ValueError, match="expected at least 2 records, so that one can be held out, found 1"):
        held_out.split(0.5, seed=0)


def test_few_held_out_records_fill_a_batch():
    made = Records.from_pairs(numbered(9, 2, 5))
    few = Records.from_pairs(numbered(1, 2, 5, first=900))
    ((tokens, in_loss),) = RecordRows(made, few, options(batch_size=4, sequence_length=16)).held_out_batches()
    assert tokens.shape == (4, 8)
    assert in_loss.sum(1).tolist() == [5, 0, 0, 0]


def test_too_few_records_are_refused():
    made = Records.from_pairs(numbered(3, 2, 3))
    with pytest.raises(ValueError, match="expected at least 4 records to train on in rows of the same length, found 3"):
        RecordRows(made, made, options(batch_size=4, sequence_length=16))


def test_sources_get_their_batches():
    made = Records.from_pairs(numbered(4, 2, 3))
    stream = counting_stream()
    chosen = replace(options(), batch_size=2)
    assert isinstance(make_batches(made, made, chosen), RecordRows)
    assert isinstance(make_batches(stream, stream, chosen), Windows)
    assert isinstance(stream, TokenStream)
