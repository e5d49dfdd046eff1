"""Streams of prompts with responses for diffusion models: order, resumption, problems, and held-out rows."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tilewright.train.arithmetic import problems
from tilewright.train.data import Document, end_of_text, find_files, read_documents, train_tokenizer
from tilewright.train.diffusion import Batch, Pairs, draw_bounds, response_weights
from tilewright.train.text import Batches, StreamOptions, TextOptions

pytest.importorskip("grain")

from tilewright.train.pair_rows import PairRows
from tilewright.train.stream import StreamBatches, StreamSources

OPTIONS = TextOptions(steps=4, batch_size=4, sequence_length=48, matmul_dtype="float32")
RECORDS = [{"prompt": f"say {n}\n", "response": "so " * (n % 7 + 1)} for n in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (folder / "b.txt").write_text("".join(f"line {n} of it\n" for n in range(59)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    drawn = islice(problems(np.random.default_rng(0), False), 40)
    return train_tokenizer([*read_documents([folder]), *(Document(each.response, each.prompt) for each in drawn)], 300)


def make(
    folder: Path,
    tokenizer: Tokenizer,
    shuffle: int = 1,
    shards: int = 1,
    arithmetic: float = 0.0,
    held_out: Any = 0.2,
    rows: np.ndarray | None = None,
    length: int = 48,
) -> StreamBatches:
    options = replace(OPTIONS, sequence_length=length)
    end = end_of_text(tokenizer)
    form = PairRows(tokenizer, partial(Pairs.encode, tokenizer, window=length, ends=(end,)), arithmetic, end, options)
    sources = StreamSources.divide(find_files([folder], Counter()), held_out, shards, options.seed)
    return StreamBatches(sources, form, options, StreamOptions(shuffle, shards), rows)


def taken(batches: StreamBatches, count: int, first: int = 0) -> list[Batch]:
    iterator = batches.batches(first)
    found = list(islice(iterator, count))
    iterator.close()  # type: ignore[attr-defined]
    return found


def shown(tokenizer: Tokenizer, batch: Batch, row: int) -> str:
    return tokenizer.decode(batch.tokens[row, : batch.end[row]].tolist())


def check_equal(one: list[Batch], other: list[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_unshuffled_stream_is_the_list_in_order(folder: Path, tokenizer: Tokenizer):
    """Each pair is a row, with the bounds that a list's rows have; the second epoch begins where the first ends."""
    pairs = Pairs.encode(tokenizer, read_documents([folder]), 48, (end_of_text(tokenizer),))
    every = [folder / name for name in ("a.jsonl", "b.txt")]
    batches = make(folder, tokenizer, held_out=find_files(every, Counter()))
    assert isinstance(batches, Batches)
    count = len(pairs.starts)
    found = taken(batches, count // 2)
    for step, batch in enumerate(found):
        for row in range(4):
            ids, begin = pairs[(4 * step + row) % count]
            rng = np.random.default_rng((0, 0, step, row))
            assert rng.random() >= 0
            assert (batch.first[row], batch.end[row], batch.valid[row]) == draw_bounds(rng, ids, begin, 48)
            np.testing.assert_array_equal(batch.tokens[row, : len(ids)], ids)
            assert (batch.tokens[row, len(ids) :] == end_of_text(tokenizer)).all()
    assert 4 * len(found) > count, "two epochs"
    assert batches.padding == 4 * 48 * len(found) - sum(len(pairs[n % count][0]) for n in range(4 * len(found)))


@pytest.mark.parametrize("arithmetic", [0.0, 0.5])
def test_a_stream_goes_on_where_it_was_stopped(folder: Path, tokenizer: Tokenizer, arithmetic: float):
    made = partial(make, folder, tokenizer, 8, 2, arithmetic, length=256)
    whole = taken(made(), 20)
    for stop in (0, 1, 7):
        first = made()
        iterator = first.batches(0)
        list(islice(iterator, stop))
        place = json.loads(json.dumps(first.state()))
        iterator.close()  # type: ignore[attr-defined]
        again = made()
        again.restore(place)
        check_equal(taken(again, 20 - stop, stop), whole[stop:])
    check_equal(taken(made(), 9, 11), whole[11:])
    halves = [taken(made(rows=np.arange(first, first + 2)), 5) for first in (0, 2)]
    joined = [Batch(*(np.concatenate(both) for both in zip(*parts, strict=True))) for parts in zip(*halves, strict=True)]
    check_equal(joined, whole[:5])


def test_problems_take_no_pair(folder: Path, tokenizer: Tokenizer):
    """Half of the rows are problems, of which none is held out; the pairs between them are those of the stream."""
    batches = taken(make(folder, tokenizer, arithmetic=0.5, length=256), 12)
    plain = taken(make(folder, tokenizer, length=256), 12)
    texts, pairs = ([shown(tokenizer, batch, row) for batch in each for row in range(4)] for each in (batches, plain))
    solved = [text for text in texts if text.startswith("a=")]
    assert 12 <= len(solved) <= 36
    assert all("answer:" in text for text in solved)
    rest = [text for text in texts if text not in solved]
    assert rest == pairs[: len(rest)]


def test_held_out_rows_are_padded_without_loss(folder: Path, tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "held.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
    made = make(folder, tokenizer, shards=2, held_out=find_files([tmp_path / "held.jsonl"], Counter()))
    (batch,) = made.held_out_batches()
    weights = np.asarray(response_weights(batch))
    assert weights[0].any()
    assert not weights[1:].any()
    check_equal([batch], made.held_out_batches())
    assert made.tokens == 0
    with pytest.raises(ValueError, match="expected held-out documents with tokens in the loss, found none"):
        make(folder, tokenizer, held_out=1e-9).held_out_batches()
    with pytest.raises(ValueError, match="expected a share of arithmetic below 1 for a stream, found 1"):
        make(folder, tokenizer, arithmetic=1.0, length=256)
    with pytest.raises(ValueError, match="expected sequences longer than a problem's"):
        make(folder, tokenizer, arithmetic=0.5)
    assert make(folder, tokenizer, arithmetic=0.5, length=256).run_fingerprint()["stream"]["arithmetic"] == 0.5
