"""Streams of text: packing, order, shards, resumption, and memory."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.train import stream
from tilewright.train.data import Document, encode_documents, encode_each, find_files, read_documents, train_tokenizer
from tilewright.train.stream import BlockOrder, Encode, PackedText, StreamBatches, StreamSources, hash_share
from tilewright.train.text import Batches, StreamOptions, Windows
from train.support import options

grain = pytest.importorskip("grain")
PACKINGS = ("concatenate", "first-fit", "best-fit")
TEXTS = [f"{n}: " + "one two three four " * (n % 9 + 1) for n in range(120)]
TOKENIZER = train_tokenizer([Document(text) for text in TEXTS], 300)
LENGTH = 17
SHUFFLE = 32
"""Rows that are shuffled; grain draws a place among fewer ones more slowly."""


def encode(documents: Sequence[Document]) -> Iterator[Any]:
    return encode_each(TOKENIZER, documents, (0,))


def write(folder: Path, texts: Sequence[str] = TEXTS, files: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for n in range(files):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[n::files])
        (folder / f"{n}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stream"))


def make(
    folder: Path,
    packing: Any = "concatenate",
    shuffle: int = SHUFFLE,
    shards: int = 1,
    rows: np.ndarray | None = None,
    held_out: Any = 0.2,
    segments: bool = True,
    tokenise: Encode = encode,
    **changes: Any,
) -> StreamBatches:
    files = find_files([folder], Counter())
    held_out = find_files([held_out], Counter()) if isinstance(held_out, Path) else held_out
    chosen = options(batch_size=4, sequence_length=LENGTH - 1, **changes)
    sources = StreamSources.divide(files, held_out, shards, chosen.seed)
    form = PackedText(tokenise, LENGTH, packing, segments)
    return StreamBatches(sources, form, chosen, StreamOptions(shuffle, shards), rows)


def taken(batches: StreamBatches, count: int, first: int = 0) -> list[tuple[np.ndarray, ...]]:
    iterator = batches.batches(first)
    found = list(islice(iterator, count))
    iterator.close()  # type: ignore[attr-defined]
    return found


def equal(one: Sequence[tuple[np.ndarray, ...]], other: Sequence[tuple[np.ndarray, ...]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def bins(lengths: Sequence[int], size: int, count: int, best: bool) -> list[list[int]]:
    """First fit or best fit by the textbook, into `count` bins, which are emptied when an item fits none: items of each bin."""
    done: list[list[int]] = []
    current: list[list[int]] = [[] for _ in range(count)]
    for n, length in enumerate(lengths):
        room = [size - sum(lengths[m] for m in bin) for bin in current]
        fitting = [b for b in range(count) if room[b] >= length]
        if not fitting:
            done += current
            current = [[] for _ in range(count)]
            current[0].append(n)
            continue
        current[min(fitting, key=lambda b: (room[b], b)) if best else fitting[0]].append(n)
    return [bin for bin in [*done, *current] if bin]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.sampled_from(PACKINGS))
def test_packed_rows_are_those_of_the_textbook(lengths: list[int], packing: Any):
    """Every token is in one row, whole sequences stay together, and segments count them."""
    size = 8
    starts = np.cumsum([0, *lengths]).tolist()

    def numbers(documents: Sequence[Document]) -> Iterator[Any]:
        for n in (int(document.text) for document in documents):
            yield [(list(range(starts[n] + 1, starts[n + 1] + 1)), [True] * lengths[n])]

    documents = grain.MapDataset.source([[Document(str(n))] for n in range(len(lengths))]).to_iter_dataset()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "PACKED_ROWS", 3)
        rows = [row for row in PackedText(numbers, size, packing).rows(documents) if row["segments"].any()]
    tokens = [row["tokens"][row["segments"] > 0] for row in rows]
    numbered = np.repeat(np.arange(len(lengths)), lengths)
    if packing == "concatenate":
        want = np.split(np.arange(1, sum(lengths) + 1), np.arange(size, sum(lengths), size))
        owners = [numbered[each - 1] for each in want]
    else:
        pieces = [min(size, length - start) for length in lengths for start in range(0, length, size)]
        ends = np.cumsum([0, *pieces])
        found = bins(pieces, size, 3, packing == "best-fit")
        want = [np.concatenate([np.arange(ends[n], ends[n + 1]) + 1 for n in bin]) for bin in found]
        owners = [np.concatenate([np.full(pieces[n], n) for n in bin]) for bin in found]
    assert [each.tolist() for each in tokens] == [each.tolist() for each in want]
    for row, number in zip(rows, owners, strict=True):
        segments = row["segments"][: len(number)]
        assert segments.tolist() == [1, *(1 + np.cumsum(number[1:] != number[:-1]))]
        assert not row["segments"][len(number) :].any()
        np.testing.assert_array_equal(row["in_loss"], row["segments"] > 0)


def test_unshuffled_concatenation_is_the_windows_of_a_list(folder: Path):
    """The first epoch, without its shuffled order, is the text that `encode_documents` makes."""
    whole = encode_documents(TOKENIZER, read_documents([folder]), 0)
    found = taken(make(folder, shuffle=1, held_out=folder), len(whole.tokens) // LENGTH // 4)
    starts = np.arange(len(found) * 4) * LENGTH
    tokens, in_loss, numbers = whole.rows(starts, LENGTH, True)
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in found]), tokens)
    np.testing.assert_array_equal(np.concatenate([batch[1] for batch in found]), in_loss)
    same = np.concatenate([np.diff(batch[2]) == 0 for batch in found])
    np.testing.assert_array_equal(same, np.diff(numbers) == 0)
    assert isinstance(make(folder), Batches)
    joined = taken(make(folder, shuffle=1, held_out=folder, segments=False), 3)
    assert equal(joined, [batch[:2] for batch in found[:3]])


def documents_in(batches: Sequence[tuple[np.ndarray, ...]]) -> Counter[str]:
    """Texts of the whole segments of batches that end with the end token."""
    found: Counter[str] = Counter()
    for tokens, _, segments in batches:
        for row, numbers in zip(tokens, segments, strict=True):
            for number in set(numbers.tolist()) - {0}:
                part = row[numbers == number].tolist()
                if part[-1] == 0 and (text := TOKENIZER.decode(part)) and text.split(":")[0].isdecimal():
                    found[text] += 1
    return found


def test_each_epoch_has_each_training_document_once_in_another_order(tmp_path: Path):
    """None of them is held out; with best fit, no document is cut."""
    texts = [f"{n}: one two" for n in range(100)]
    batches = make(write(tmp_path / "texts", texts), "best-fit")
    held_out = documents_in(batches.held_out_batches())
    assert 10 <= len(held_out) <= 30
    assert set(held_out.values()) == {1}
    found = documents_in(taken(batches, 60))
    assert found.keys() == set(texts) - held_out.keys()
    assert max(found.values()) - min(found.values()) <= 2, "packing mixes neighbouring epochs only"
    orders = [[BlockOrder(9, 0, 1, seed, True, None)(n) for n in range(18)] for seed in (0, 1)]
    assert all(sorted(map(int, epoch)) == list(range(9)) for order in orders for epoch in (order[:9], order[9:]))  # type: ignore[arg-type]
    assert orders[0][:9] != orders[0][9:]
    assert orders[0] != orders[1]


def test_the_held_out_share_is_of_all_documents():
    drawn = np.asarray([hash_share(seed, block, item) for seed in (0, 1) for block in range(20) for item in range(250)])
    assert abs(np.mean(drawn < 0.1) - 0.1) < 0.01
    assert len(set(drawn.tolist())) == len(drawn)
    np.testing.assert_allclose(np.histogram(drawn, 10, (0, 1))[0], 1000, atol=120)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [1, 2 * SHUFFLE])
def test_a_stream_goes_on_where_it_was_stopped(folder: Path, packing: str, shuffle: int):
    """From any step, by the stored place or by reading what precedes it; the place survives JSON."""
    whole = taken(make(folder, packing, shuffle, shards=2), 40)
    for stop in (0, 1, 16, 35):
        first = make(folder, packing, shuffle, shards=2)
        iterator = first.batches(0)
        list(islice(iterator, stop))
        place = json.loads(json.dumps(first.state()))
        iterator.close()  # type: ignore[attr-defined]
        again = make(folder, packing, shuffle, shards=2)
        again.restore(place)
        assert equal(taken(again, 40 - stop, stop), whole[stop:])
    assert equal(taken(make(folder, packing, shuffle, shards=2), 9, 31), whole[31:])
    assert len(json.dumps(place)) < 4000


def test_processes_with_whole_shards_take_rows_of_the_same_batches(folder: Path):
    """Two processes of two shards each give the batches of one, and each reads its own blocks."""
    whole = make(folder, "first-fit", shards=4)
    parts = [make(folder, "first-fit", shards=4, rows=np.arange(first, first + 2)) for first in (0, 2)]
    assert [part.shards for part in parts] == [[0, 1], [2, 3]]
    halves = zip(*(taken(part, 10) for part in parts), strict=True)
    joined = [tuple(np.concatenate(arrays) for arrays in zip(*both, strict=True)) for both in halves]
    assert equal(joined, taken(whole, 10))
    place = whole.state()
    parts[1].restore(place)
    assert parts[1].local_places().keys() == {"2", "3"}
    blocks = [{BlockOrder(12, shard, 4, 0, True, None)(n) for n in range(3)} for shard in range(4)]
    assert set.union(*blocks) == set(range(12))
    with pytest.raises(ValueError, match="expected the places of 2 shards of a stream, found"):
        make(folder, shards=2).restore(place)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="expected shards that divide the batch size 4, found 3"):
        make(folder, shards=3)
    with pytest.raises(ValueError, match="each process has whole ones, found 2 shards for 3 of 4 rows"):
        make(folder, shards=2, rows=np.arange(3))
    one = write(tmp_path / "one", TEXTS[:1], 1)
    with pytest.raises(ValueError, match=r"expected at least 4 files, row groups or blocks of JSON lines, .* found 1"):
        make(one, shards=4)
    with pytest.raises(ValueError, match="expected held-out documents with tokens in the loss, found none"):
        make(one, held_out=1e-6).held_out_batches()
    with pytest.raises(ValueError, match="expected text to train on, found none in"):
        taken(make(write(tmp_path / "blank", [" "] * 9, 1)), 1)
    (folder.parent / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: not JSON"):
        taken(make(folder.parent / "bad.jsonl", held_out=folder), 1)
    with pytest.raises(ValueError, match="expected shuffle of at least 1, found 0"):
        make(folder, shuffle=0)


def test_held_out_batches_are_padded_and_of_one_size(folder: Path, tmp_path: Path):
    """Also if one shard has fewer rows than another: of one file of held-out documents, the second has none."""
    (tmp_path / "held.txt").write_text("one two three four " * 9)
    batches = make(folder, "best-fit", shards=2, held_out=tmp_path / "held.txt")
    found = batches.held_out_batches()
    assert {array.shape for batch in found for array in batch} == {(4, LENGTH)}
    tokens = np.concatenate([batch[0][batch[1]] for batch in found])
    assert TOKENIZER.decode(tokens.tolist()) == "one two three four " * 9
    assert not np.any(found[0][1][2:])
    assert batches.tokens == 0
    assert equal(found, batches.held_out_batches())
    assert make(folder).run_fingerprint() != make(folder, held_out=0.3).run_fingerprint()
    assert make(folder).run_fingerprint() != make(tmp_path, held_out=0.2).run_fingerprint()


def test_padding_is_counted(folder: Path):
    batches = make(folder, "first-fit")
    found = taken(batches, 20)
    assert batches.tokens == 20 * 4 * LENGTH
    assert batches.padding == sum(int(np.sum(segments == 0)) for *_, segments in found) > 0
    best, first = (make(folder, packing, shuffle=1) for packing in ("best-fit", "first-fit"))
    assert [len(taken(each, 40)) for each in (best, first)] == [40, 40]
    assert best.padding_share <= first.padding_share < 0.3
    joined = make(folder)
    taken(joined, 20)
    assert joined.padding == 0


def test_a_file_larger_than_its_buffers_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 6 MB, training holds some blocks and the rows that are shuffled."""
    line = json.dumps({"text": "one two three four " * 60}) + "\n"
    (tmp_path / "large.jsonl").write_text(line * (6_000_000 // len(line)))
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 15)

    def short(documents: Sequence[Document]) -> Iterator[Any]:
        return ([(list(range(8)), [True] * 8)] for _ in documents)

    tracemalloc.start()
    batches = make(tmp_path, shuffle=64, held_out=0.001, tokenise=short)
    read = len(batches.held_out_batches())
    found = taken(batches, 250)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(batches.sources.trained.blocks) > 100
    assert read > 0
    assert len(found) == 250
    assert peak - sum(array.nbytes for batch in found for array in batch) < 3 << 19


def test_a_sample_is_of_training_documents(folder: Path):
    batches = make(folder)
    held_out = set(documents_in(batches.held_out_batches()))
    found = batches.sources.sample(10**6, 0)
    assert {document.text for document in found} <= set(TEXTS) - {text.removesuffix(" ") for text in held_out}
    assert len(found) == len({document.text for document in found}) > 80
    assert 1 <= len(batches.sources.sample(1, 0)) < len(found)


def test_a_list_and_a_stream_have_one_protocol(folder: Path):
    text = encode_documents(TOKENIZER, read_documents([folder]), 0)
    windows = Windows(text, text, LENGTH, options(batch_size=4, sequence_length=LENGTH - 1))
    streamed = make(folder)
    assert windows.tokens_per_step == streamed.tokens_per_step == 4 * (LENGTH - 1)
    assert streamed.run_fingerprint()["stream"].keys() == {"packing", "shuffle", "shards", "files", "held_out", "segments"}
