"""Streams of training text: data that are read, tokenised, packed and shuffled while the model trains, in bounded memory.

Files are divided into blocks (`sources.py`), which are read in an order by seed and epoch. A `RowForm` makes rows of documents,
and batches of rows. grain, Google's data loader, packs, shuffles and prefetches; the state of its iterators is a place in the
data, from which a run resumes exactly.

A stream has one or more shards. A shard reads its own blocks and fills its own rows of each batch, so that each process reads
its part of the data, and the batches of a run are the same for any number of processes that divides the shards.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from grain.experimental import (
    BestFitPackIterDataset,
    ConcatThenSplitIterDataset,
    FirstFitPackIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
    ThreadPrefetchIterDataset,
    WindowShuffleIterDataset,
    index_shuffle,
)
from jaxtyping import Int

from tilewright.parallel.mesh import gather_texts
from tilewright.train.data import Document, Encoded, read_block_documents
from tilewright.train.sources import BLOCK_BYTES, Block, DataFile, file_blocks
from tilewright.train.text import HELD_OUT_BATCHES, Batch, Packing, StreamOptions, TextOptions

OPEN_BLOCKS = 8
"""Blocks of a shuffled shard that are read in turns, so that neighbouring sequences come from several places."""
GROUP_DOCUMENTS = 64
"""Documents that are tokenised at once, unless they have `BLOCK_BYTES` before."""
PACKED_ROWS = 64
"""Sequences that are filled at the same time by first fit and best fit."""
BLOCKS_PER_SHARD = 16
"""Blocks that a shard should have at least, for which blocks of JSON lines become smaller than `BLOCK_BYTES`."""
LEAST_BLOCK_BYTES = 4096

Encode = Callable[[Sequence[Document]], Iterator[list[Encoded]]]
"""Tokenises documents; yields the sequences of each."""


@dataclass(frozen=True)
class BlockOrder:
    """Order of the blocks of a shard: a permutation of all blocks for each epoch, of which shards take turns.

    Attributes:
        blocks: number of blocks of the data.
        shard: number of the shard.
        shards: number of shards.
        seed: seed of the permutations.
        shuffled: False for the order of the files.
        epochs: number of epochs; None for no end.
    """

    blocks: int
    shard: int
    shards: int
    seed: int
    shuffled: bool
    epochs: int | None

    def __call__(self, n: int) -> int | None:
        """Returns the block that the shard reads `n`-th (from 0); None behind the last epoch."""
        epoch, place = divmod(n * self.shards + self.shard, self.blocks)
        if self.epochs is not None and epoch >= self.epochs:
            return None
        if not self.shuffled:
            return place
        return index_shuffle(place, max_index=self.blocks - 1, seed=(self.seed + epoch) % 2**32, rounds=4)


def hash_share(seed: int, block: int, item: int) -> float:
    """Returns a number in [0, 1) for an item of a block, by which a share of the items is held out."""
    x = (seed << 48) ^ (block << 24) ^ item
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # SplitMix64's finaliser, with a sum in each round
        x = ((x ^ (x >> 30)) * factor + 0x9E3779B97F4A7C15) % 2**64
    return (x ^ (x >> 31)) / 2**64


@dataclass(frozen=True)
class Source:
    """Blocks of data, and which of their documents a stream reads.

    Attributes:
        blocks: the blocks.
        keep: `keep(block, item)` for the numbers of a block and of an item within it, both from 0.
    """

    blocks: Sequence[Block]
    keep: Callable[[int, int], bool] = lambda block, item: True


@dataclass(frozen=True)
class StreamSources:
    """Training data and held-out data of a stream.

    Attributes:
        trained: training data.
        held_out: held-out data.
        fingerprint: digests of the files, and the held-out share.
    """

    trained: Source
    held_out: Source
    fingerprint: Mapping[str, Any]

    @classmethod
    def divide(cls, files: Sequence[DataFile], held_out: float | Sequence[DataFile], shards: int, seed: int) -> "StreamSources":
        """Divides files into blocks, and documents into training and held-out ones.

        Args:
            files: training data.
            held_out: share of the documents that is held out, or files of held-out documents.
            shards: number of shards.
            seed: seed of the choice of held-out documents.

        Raises:
            ValueError: a file cannot be read, or there are fewer blocks than shards.
        """
        blocks = divided(files, shards)
        if not isinstance(held_out, int | float):
            fingerprint = {"files": digest(files), "held_out": digest(held_out)}
            return cls(Source(blocks), Source(divided(held_out, 1)), fingerprint)

        def is_held_out(block: int, item: int) -> bool:
            return hash_share(seed, block, item) < held_out

        trained = Source(blocks, lambda block, item: not is_held_out(block, item))
        return cls(trained, Source(blocks, is_held_out), {"files": digest(files), "held_out": held_out})

    def sample(self, characters: int, seed: int) -> list[Document]:
        """Returns training documents of about this many characters from all over the data, fewer if there are fewer."""
        order = BlockOrder(len(self.trained.blocks), 0, 1, seed, True, 1)
        documents: list[Document] = []
        for group in Documents(self.trained, order, Counter()):
            documents += group
            characters -= sum(document.size for document in group)
            if characters <= 0:
                break
        return documents


class BlockReader:
    """Documents of a block, from some place on.

    Attributes:
        number: the shard read the block as its `number`-th.
        taken: items that were read, of those that are kept.
    """

    def __init__(self, source: Source, block: int, number: int, taken: int, left_out: Counter[str]):
        self.number = number
        self.taken = taken
        before = iter(range(taken))

        def keep(item: int) -> bool:
            return source.keep(block, item) and next(before, None) is None  # items before the place are not decoded

        self.documents = read_block_documents(source.blocks[block], left_out, keep)


class DocumentIterator(grain.DatasetIterator[list[Document]]):
    """Groups of documents of a shard, from several open blocks in turns. The state is the open blocks, and places in them."""

    def __init__(self, source: Source, order: BlockOrder, left_out: Counter[str]):
        super().__init__()
        self.source = source
        self.order = order
        self.left_out = left_out
        self.opened = 0
        self.turn = 0
        most = min(OPEN_BLOCKS, max(1, order.blocks // order.shards)) if order.shuffled else 1  # so that no block is open twice
        self.readers: list[BlockReader | None] = [None] * most

    def __next__(self) -> list[Document]:
        group: list[Document] = []
        size = 0
        while size < BLOCK_BYTES and len(group) < GROUP_DOCUMENTS and (document := self.next_document()) is not None:
            group.append(document)
            size += document.size
        if not group:
            raise StopIteration
        return group

    def next_document(self) -> Document | None:
        """Returns the next document; None behind the last one.

        Raises:
            ValueError: no block has a document.
        """
        empty = 0  # blocks that ended since the last document
        idle = 0  # places without a block to open
        while idle < len(self.readers):
            slot = self.turn % len(self.readers)
            reader = self.readers[slot]
            if reader is None:
                reader = self.open(self.opened, 0)
                if reader is None:
                    idle += 1
                    self.turn += 1
                    continue
                self.readers[slot] = reader
                self.opened += 1
            for document in reader.documents:
                reader.taken += 1
                if document is not None:
                    self.turn += 1
                    return document
            self.readers[slot] = None
            empty += 1
            if self.order.epochs is None and empty > len(self.source.blocks) + len(self.readers):
                raise ValueError(f"expected text to train on, found none in {empty} parts of the data")
        return None

    def open(self, number: int, taken: int) -> BlockReader | None:
        """Opens the block that the shard reads `number`-th; None behind the last one."""
        block = self.order(number)
        return None if block is None else BlockReader(self.source, block, number, taken, self.left_out)

    def get_state(self) -> dict[str, Any]:
        readers = [None if reader is None else [reader.number, reader.taken] for reader in self.readers]
        return {"opened": self.opened, "turn": self.turn, "readers": readers}

    def set_state(self, state: dict[str, Any]) -> None:
        self.opened = state["opened"]
        self.turn = state["turn"]
        self.readers = [None if place is None else self.open(*place) for place in state["readers"]]


class Documents(grain.IterDataset[list[Document]]):
    """Groups of documents of a shard; see `DocumentIterator`."""

    def __init__(self, source: Source, order: BlockOrder, left_out: Counter[str]):
        super().__init__()
        self.parts = (source, order, left_out)

    def __iter__(self) -> DocumentIterator:
        return DocumentIterator(*self.parts)


class EachGroup(FlatMapTransform):
    """Replaces groups of documents by the elements that a function makes of each."""

    max_fan_out = 2**31

    def __init__(self, elements: Callable[[list[Document]], list[Any]]):
        self.elements = elements

    def flat_map(self, element: list[Document]) -> list[Any]:
        return self.elements(element)


def tokenised(encode: Encode, longest: int | None, documents: list[Document]) -> list[dict[str, np.ndarray]]:
    """Tokenises documents into sequences, cut into pieces of at most `longest` tokens; None cuts none."""
    found = []
    for ids, flags in (sequence for encoded in encode(documents) for sequence in encoded):
        tokens = np.asarray(ids, np.int32)
        in_loss = np.asarray(flags, bool)
        size = longest or len(ids)
        found += [
            {"tokens": tokens[start : start + size], "in_loss": in_loss[start : start + size]}
            for start in range(0, len(ids), size)
        ]
    return found


def pack(sequences: grain.IterDataset[Any], packing: Packing, length: int) -> grain.IterDataset[Any]:
    """Packs sequences into rows of `length`: arrays `tokens`, `in_loss`, and `segments`, from 1, with 0 for padding."""
    sizes = {"tokens": length, "in_loss": length}
    if packing == "concatenate":
        packed = ConcatThenSplitIterDataset(sequences, length_struct=sizes)
    else:
        packer = FirstFitPackIterDataset if packing == "first-fit" else BestFitPackIterDataset
        packed = packer(sequences, length_struct=sizes, num_packing_bins=PACKED_ROWS, shuffle_bins=False)

    def row(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": found["tokens"], "in_loss": found["in_loss"], "segments": found["tokens_segment_ids"]}

    return packed.map(row)


def restorable(state: Any) -> Any:
    """Returns a state that was stored as JSON as grain's packer needs it, with tuples as slices."""
    if isinstance(state, dict):
        return {
            name: {key: tuple(each) for key, each in value.items()} if name == "remainder_slices" else restorable(value)
            for name, value in state.items()
        }
    return state


def divided(files: Sequence[DataFile], shards: int) -> list[Block]:
    """Divides files into blocks. Raises a `ValueError` for fewer blocks than shards."""
    size = sum(file.path.stat().st_size for file in files) // (BLOCKS_PER_SHARD * shards)
    blocks = [block for file in files for block in file_blocks(file, min(BLOCK_BYTES, max(LEAST_BLOCK_BYTES, size)))]
    if len(blocks) < shards:
        raise ValueError(
            f"expected at least {shards} files, row groups or blocks of JSON lines, one for each shard, found {len(blocks)}"
        )
    return blocks


def digest(files: Sequence[DataFile]) -> str:
    """Returns a digest of the names and sizes of files."""
    listed = [[file.name, file.path.stat().st_size] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


Row = Mapping[str, Any]
"""Row of a stream, by the names of its form."""
NumberedRow = tuple[int, Row | None]
"""Number of a row within its batch, and the row; None for a row that is not of the stream, or that is padding."""


@runtime_checkable
class RowForm(Protocol):
    """Protocol of the rows of a stream: how documents become rows, and rows become batches."""

    @property
    def length(self) -> int:
        """Tokens per row."""
        ...

    @property
    def held_out_batches(self) -> int:
        """Largest number of held-out batches."""
        ...

    def rows(self, documents: grain.IterDataset[list[Document]]) -> grain.IterDataset[Row]:
        """Makes rows of groups of documents, in order."""
        ...

    def takes(self, step: int, row: int, held_out: bool) -> bool:
        """Returns True if this row of a step's batch is the next one of the stream."""
        ...

    def batch(self, step: int, rows: Sequence[NumberedRow], held_out: bool) -> Any:
        """Makes the batch of a step. A row without data is padding if it `takes` one."""
        ...

    def filled(self, row: Row) -> int:
        """Returns the number of tokens of a row without padding."""
        ...

    def learns(self, row: Row) -> bool:
        """Returns True for a row with tokens in the loss."""
        ...

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns what a checkpoint must match besides the data."""
        ...


@dataclass(frozen=True)
class PackedText:
    """Rows in which documents are packed, for models that predict tokens of texts.

    Attributes:
        encode: tokenises documents.
        length: tokens per row.
        packing: how documents fill rows. "concatenate" puts them one behind the other, cut where a row ends. "first-fit" puts
            each into the first of the rows that are being filled that has room, "best-fit" into the one whose room it fills
            best; both cut documents longer than a row only, and pad what stays empty.
        segments: batches also have the number of each token's document within its row.
    """

    encode: Encode
    length: int
    packing: Packing = "concatenate"
    segments: bool = True
    lock: Any = field(default_factory=Lock, repr=False)  # encoding switches the special tokens of the one tokenizer

    @property
    def held_out_batches(self) -> int:
        return HELD_OUT_BATCHES

    def rows(self, documents: grain.IterDataset[list[Document]]) -> grain.IterDataset[Row]:
        def sequences(group: list[Document]) -> list[Any]:
            with self.lock:
                return tokenised(self.encode, None if self.packing == "concatenate" else self.length, group)

        return pack(FlatMapIterDataset(documents, EachGroup(sequences)), self.packing, self.length)

    def takes(self, step: int, row: int, held_out: bool) -> bool:
        return True

    def batch(self, step: int, rows: Sequence[NumberedRow], held_out: bool) -> Batch:
        arrays: dict[str, Any] = {"tokens": np.int32, "in_loss": bool, "segments": np.int32}
        padding: Row = {name: np.zeros(self.length, dtype) for name, dtype in arrays.items()}
        tokens, in_loss, segments = (np.stack([(row or padding)[name] for _, row in rows]) for name in arrays)
        return (tokens, in_loss, segments) if self.segments else (tokens, in_loss)

    def filled(self, row: Row) -> int:
        return int(np.count_nonzero(row["segments"]))

    def learns(self, row: Row) -> bool:
        return bool(row["in_loss"].any())

    def run_fingerprint(self) -> dict[str, Any]:
        return {"packing": self.packing, "segments": self.segments}


class StreamBatches:
    """Batches of a stream; see `text.Batches`.

    Attributes:
        options: options of the training loop, with the seed of all orders.
        stream: options of the stream.
        form: form of the rows.
        tokens: tokens in the batches that this process took, with padding.
        padding: padding among them.
    """

    def __init__(
        self,
        sources: StreamSources,
        form: RowForm,
        options: TextOptions,
        stream: StreamOptions,
        rows: Int[np.ndarray, " R"] | None = None,
        left_out: Counter[str] | None = None,
    ):
        """Chooses the shards of this process.

        Args:
            sources: training data and held-out data, divided for the shards.
            form: form of the rows.
            options: options of the training loop.
            stream: options of the stream.
            rows: rows of each batch on the devices of this process; None for all rows.
            left_out: counts items without text to learn that were read, by reason.

        Raises:
            ValueError: the shards do not divide the batch or its rows of this process.
        """
        if options.batch_size % stream.shards:
            raise ValueError(f"expected shards that divide the batch size {options.batch_size}, found {stream.shards}")
        self.sources = sources
        self.form = form
        self.options = options
        self.stream = stream
        self.left_out: Counter[str] = Counter() if left_out is None else left_out
        self.tokens = 0
        self.padding = 0
        self._places: dict[str, Any] = {}
        self._iterators: dict[int, grain.DatasetIterator[Row]] = {}
        wanted = set(range(options.batch_size)) if rows is None else set(rows.tolist())
        self.shards = [shard for shard in range(stream.shards) if wanted.issuperset(self.span(shard))]
        if len(self.shards) * self.rows_per_shard != len(wanted):
            raise ValueError(
                f"expected shards of the stream of which each process has whole ones, found {stream.shards} shards for "
                f"{len(wanted)} of {options.batch_size} rows in this process"
            )

    @property
    def rows_per_shard(self) -> int:
        return self.options.batch_size // self.stream.shards

    def span(self, shard: int) -> range:
        """Returns the rows of a batch that a shard fills."""
        return range(shard * self.rows_per_shard, (shard + 1) * self.rows_per_shard)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, with padding."""
        return self.options.batch_size * self.options.sequence_length

    @property
    def padding_share(self) -> float:
        """Share of padding in the batches that this process took; 0 before the first one."""
        return self.padding / max(1, self.tokens)

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        stream = {**vars(self.stream), **self.sources.fingerprint, **self.form.run_fingerprint()}
        return {**self.options.run_fingerprint(), "stream": stream}

    def rows(self, source: Source, shard: int, epochs: int | None, shuffled: bool) -> grain.IterDataset[Row]:
        """Returns the rows of a shard, in the order of its documents."""
        order = BlockOrder(len(source.blocks), shard, self.stream.shards, self.options.seed, shuffled, epochs)
        return self.form.rows(Documents(source, order, self.left_out))

    def training_rows(self, shard: int) -> grain.IterDataset[Row]:
        """Returns the training rows of a shard, shuffled and without end; a thread reads ahead by as many as are shuffled."""
        window = self.stream.shuffle
        rows = self.rows(self.sources.trained, shard, None, window > 1)
        rows = ThreadPrefetchIterDataset(rows, prefetch_buffer_size=max(window, 2 * self.rows_per_shard))
        return rows if window == 1 else WindowShuffleIterDataset(rows, window_size=window, seed=self.options.seed + shard)

    def batches(self, first: int) -> Iterator[Any]:
        """Returns training batches from the place of `restore` on, or from step `first` on, which reads the data before it."""
        self._iterators = {shard: iter(self.training_rows(shard)) for shard in self.shards}
        for shard, rows in self._iterators.items():
            if self._places:
                rows.set_state(restorable(self._places[str(shard)]))
            else:
                before = sum(self.form.takes(step, row, False) for step in range(first) for row in self.span(shard))
                for _ in islice(rows, before):
                    continue
        return self._batches(first)

    def next_rows(self, step: int, rows: Mapping[int, Iterator[Row | None]], held_out: bool) -> list[NumberedRow]:
        """Returns the rows of a batch from the rows of each shard."""
        return [
            (row, next(rows[shard]) if self.form.takes(step, row, held_out) else None)
            for shard in self.shards
            for row in self.span(shard)
        ]

    def _batches(self, first: int) -> Iterator[Any]:
        """Yields batches from the current place on."""
        try:
            for step in count(first):
                rows = self.next_rows(step, self._iterators, False)
                read = [row for _, row in rows if row is not None]
                self.tokens += len(read) * self.form.length
                self.padding += sum(self.form.length - self.form.filled(row) for row in read)
                yield self.form.batch(step, rows, False)
        finally:
            self._places = self.local_places()
            for each in self._iterators.values():
                each.close()
            self._iterators = {}

    def held_out_batches(self) -> list[Any]:
        """Returns the held-out batches, the same ones at every evaluation; rows that lack are padding.

        All processes must call this function.

        Raises:
            ValueError: no held-out document has a token in the loss.
        """
        each = {shard: iter(self.rows(self.sources.held_out, shard, 1, True)) for shard in self.shards}
        rows: dict[int, Iterator[Row | None]] = {shard: chain(found, repeat(None)) for shard, found in each.items()}
        found: list[list[NumberedRow]] = []
        while len(found) < self.form.held_out_batches:
            batch = self.next_rows(len(found), rows, True)
            asked = [row for number, row in batch if self.form.takes(len(found), number, True)]
            if asked and not any(row is not None for row in asked):
                break
            found.append(batch)
        learnt = any(row is not None and self.form.learns(row) for batch in found for _, row in batch)
        everywhere = [json.loads(text) for text in gather_texts(json.dumps([len(found), learnt]))]
        if not any(learnt for _, learnt in everywhere):
            raise ValueError("expected held-out documents with tokens in the loss, found none; name a larger share, or files")
        padding: list[NumberedRow] = [(row, None) for shard in self.shards for row in self.span(shard)]
        most = max(size for size, _ in everywhere)
        padded = [*found, *[padding] * (most - len(found))]
        return [self.form.batch(step, batch, True) for step, batch in enumerate(padded)]

    def local_places(self) -> dict[str, Any]:
        """Returns the places of this process's shards in their data."""
        if not self._iterators:
            return self._places
        return {str(shard): rows.get_state() for shard, rows in self._iterators.items()}

    def state(self) -> dict[str, Any]:
        """Returns the places of all shards in their data, as plain data. All processes must call this function."""
        texts = gather_texts(json.dumps(self.local_places()))
        return {"shards": {shard: place for text in texts for shard, place in json.loads(text).items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the place from which `batches` goes on. Raises a `ValueError` for the state of other shards."""
        places = state.get("shards", {})
        if not isinstance(places, dict) or set(places) != {str(shard) for shard in range(self.stream.shards)}:
            raise ValueError(f"expected the places of {self.stream.shards} shards of a stream, found {sorted(places)}")
        self._places = {str(shard): places[str(shard)] for shard in self.shards}
