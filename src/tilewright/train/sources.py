"""Files of training data, in blocks that can be read in any order and in bounded memory.

A block is a part of a file that is found without reading what stands before it: a range of bytes of a text or of JSON lines, a
Parquet row group, a range of ArrayRecord's records. A compressed file, a JSON array and an Arrow file are one block. Readers
yield texts or records; `data.py` makes documents of them.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from tilewright.models.records import RECORD_SUFFIXES, Record, parse_record, parse_records

ARRAY_RECORD_SUFFIXES = (".arrayrecord", ".array_record")
DATASET_SUFFIXES = (".parquet", ".arrow", *ARRAY_RECORD_SUFFIXES)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
BLOCK_BYTES = 1 << 20
"""Bytes of a block of a text or of JSON lines, of text read at once, and of text tokenised at once."""
CUT_BYTES = 1 << 16
"""Bytes in which a text is searched for the end of a line or a word to cut it at."""
BATCH_ROWS = 64
"""Rows of a table, and records of an ArrayRecord file, that are decoded at once."""
RECORDS_PER_BLOCK = 1024
"""Records of a block of an ArrayRecord file."""

RECORD_FIELDS = frozenset(
    (
        *("messages", "conversations", "system", "tools", "instruction", "input", "output", "prompt", "completion"),
        *("response", "question", "answer", "text"),
    )
)
"""Fields that the layouts of records use (see `data.LAYOUTS`)."""

Keep = Callable[[int], bool]
"""Choice of a block's items by number, from 0; items for which it returns False are not decoded."""
Item = tuple[str, str | Record]
"""Location for error messages, and a text or a record."""


@dataclass(frozen=True)
class DataFile:
    """File of training data.

    Attributes:
        path: the file.
        name: its name within the folder that the user named, or its own.
    """

    path: Path
    name: str

    @property
    def compression(self) -> str:
        """Suffix of the compression of JSON records; empty without one."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in COMPRESSIONS and self.path.with_suffix("").suffix.lower() in RECORD_SUFFIXES else ""

    @property
    def suffix(self) -> str:
        """Suffix of the format, in lower case."""
        return (self.path.with_suffix("") if self.compression else self.path).suffix.lower()

    @property
    def has_lines(self) -> bool:
        """True for JSON lines; a `.json` file has them if its first line is a whole object."""
        if self.suffix != ".json":
            return self.suffix in RECORD_SUFFIXES
        with readable(self.path), open_file(self) as file:
            begin = file.read(len(codecs.BOM_UTF8) + 1).removeprefix(codecs.BOM_UTF8)
            try:
                return begin.startswith(b"{") and isinstance(json.loads(begin + file.readline()), dict) and bool(file.read(1))
            except (ValueError, RecursionError):
                return False


@dataclass(frozen=True)
class Block:
    """Part of a file: all of it, or what begins in `[start, stop)`, in bytes, records or row groups.

    Attributes:
        file: the file.
        start: first place.
        stop: place behind the last one; None for the end of the file.
        last: the file ends with the block.
    """

    file: DataFile
    start: int = 0
    stop: int | None = None
    last: bool = True


def file_blocks(file: DataFile, size: int | None) -> list[Block]:
    """Divides a file into blocks.

    Args:
        file: the file.
        size: bytes of a block of JSON lines; a block of a text has `BLOCK_BYTES`. None leaves texts and JSON lines whole.

    Raises:
        ValueError: the file cannot be read.
    """
    if file.suffix == ".parquet":
        return ranges(file, open_parquet(file.path).metadata.num_row_groups, 1)
    if file.suffix in ARRAY_RECORD_SUFFIXES:
        return ranges(file, open_array_record(file.path).num_records(), RECORDS_PER_BLOCK)
    if size is None or file.compression or file.suffix == ".arrow" or (file.suffix in RECORD_SUFFIXES and not file.has_lines):
        return [Block(file)]
    return ranges(file, file.path.stat().st_size, size if file.suffix in RECORD_SUFFIXES else BLOCK_BYTES)


def ranges(file: DataFile, places: int, size: int) -> list[Block]:
    """Divides the places of a file into blocks of `size`."""
    return [Block(file, start, min(start + size, places), start + size >= places) for start in range(0, places, size)]


def read_block(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the texts or records of a block that are kept, in order.

    Raises:
        ValueError: the file cannot be read, or an item (named in the message) is malformed.
    """
    suffix = block.file.suffix
    if suffix in (".parquet", ".arrow"):
        return read_table(block, keep)
    if suffix in ARRAY_RECORD_SUFFIXES:
        return read_array_records(block, keep)
    if suffix in RECORD_SUFFIXES:
        return read_lines(block, keep) if block.file.has_lines else read_array(block, keep)
    return read_text_range(block, keep)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of reading and decompressing into a `ValueError` that names the file."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def open_file(file: DataFile) -> io.BufferedIOBase:
    """Opens a file to read its bytes, decompressed."""
    if file.compression == ".zst":
        import pyarrow

        return io.BufferedReader(cast(Any, pyarrow.input_stream(str(file.path), compression="zstd")))
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers[file.compression](file.path) if file.compression else open(file.path, "rb")


def read_lines(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the records of the JSON lines that begin in a block."""
    path = block.file.path
    behind = f" after byte {block.start}" if block.start else ""
    with readable(path), open_file(block.file) as file:
        place = block.start
        if place:
            file.seek(place - 1)
            place += len(file.readline()) - 1  # the line that began in the block before
        found = 0
        for number in count(1):
            if (block.stop is not None and place >= block.stop) or not (line := file.readline()):
                return
            place += len(line)
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            if keep(found):
                where = f"{path}, line {number}{behind}" if behind else f"{path}:{number}"
                record = parse_record(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, where)
                yield f"{path}, record {found + 1}{behind}", record
            found += 1


def read_array(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the records of a `.json` file that is no JSON lines; the file is in memory meanwhile."""
    path = block.file.path
    with readable(path), open_file(block.file) as file:
        content = file.read()
    for n, (number, record) in enumerate(parse_records(path, content, block.file.suffix)):
        if keep(n):
            yield f"{path}, record {number}", record


def read_text_range(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the text of a block, which begins and ends behind a line if one ends nearby, else behind a word."""
    path = block.file.path
    if not keep(0):
        return
    with readable(path), open_file(block.file) as file:
        size = file.seek(0, io.SEEK_END)
        start, stop = (cut_place(file, place, size) for place in (block.start, size if block.stop is None else block.stop))
        file.seek(start)
        content = file.read(stop - start)
    try:
        yield (str(path) if block.last and not block.start else f"{path}, byte {start}"), content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected UTF-8 text, found other bytes") from None


def cut_place(file: io.BufferedIOBase, place: int, size: int) -> int:
    """Returns where a text is cut: behind the first line or word that ends after `place`, within `CUT_BYTES` if one does."""
    if place in (0, size):
        return place
    file.seek(place)
    window = file.read(CUT_BYTES)
    for separator in (b"\n", b" "):
        if (found := window.find(separator)) >= 0:
            return place + found + 1
    begin = window[:4]  # of which one byte begins a character, unless the text ends before
    return place + next((n for n, byte in enumerate(begin) if byte & 0xC0 != 0x80), len(begin))


def open_parquet(path: Path) -> Any:
    """Opens a Parquet file. Raises a `ValueError` for other files."""
    import pyarrow
    import pyarrow.parquet

    try:
        with readable(path):
            return pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a Parquet file: {error}") from None


def arrow_batches(path: Path) -> Iterator[Any]:
    """Yields the record batches of an Arrow file or stream, such as those of Hugging Face's `datasets`, mapped into memory."""
    import pyarrow
    import pyarrow.ipc

    try:
        with readable(path), pyarrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
            else:
                source.seek(0)
                yield from pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected an Arrow file: {error}") from None


def read_table(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the rows of an Arrow file or of Parquet row groups, of which only columns that a layout of `data.py` has."""
    path = block.file.path
    if block.file.suffix == ".arrow":
        batches = arrow_batches(path)
        columns = None
    else:
        file = open_parquet(path)
        names = file.schema_arrow.names
        columns = [name for name in names if name in RECORD_FIELDS]
        groups = range(block.start, file.metadata.num_row_groups if block.stop is None else block.stop)
        batches = file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns or names)
    found = 0
    behind = f"row group {block.start}, " if block.start else ""
    with readable(path):
        for batch in batches:
            for begin in range(0, batch.num_rows, BATCH_ROWS):  # Python objects of few rows at once
                rows = batch.slice(begin, BATCH_ROWS)
                kept = [n for n in range(rows.num_rows) if keep(found + n)]
                rows = rows.select([name for name in rows.schema.names if name in RECORD_FIELDS] or rows.schema.names)
                for n, record in zip(kept, rows.take(kept).to_pylist() if kept else (), strict=True):
                    yield f"{path}, {behind}row {found + n + 1}", without_nulls(record)
                found += rows.num_rows


def without_nulls(value: Any) -> Any:
    """Removes the null fields of objects, which stand for absent ones in a table."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def open_array_record(path: Path) -> Any:
    """Opens an ArrayRecord file. Raises a `ValueError` for other files."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
    if not reader.ok():
        raise ValueError(f"{path}: expected an ArrayRecord file")
    return reader


def read_array_records(block: Block, keep: Keep) -> Iterator[Item]:
    """Yields the records of a part of an ArrayRecord file, each of which is a JSON object."""
    path = block.file.path
    reader = open_array_record(path)
    stop = reader.num_records() if block.stop is None else block.stop
    for begin in range(block.start, stop, BATCH_ROWS):
        kept = [n for n in range(begin, min(begin + BATCH_ROWS, stop)) if keep(n - block.start)]
        for n, content in zip(kept, reader.read(kept) if kept else (), strict=True):
            location = f"{path}, record {n + 1}"
            yield location, parse_record(content, location)
