"""Files of training data in blocks: each item is in one block, whatever the format and the size of the blocks."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilewright.train import sources
from tilewright.train.data import Document, find_files, read_block_documents, read_documents
from tilewright.train.sources import Block, DataFile, file_blocks, read_block

pa = pytest.importorskip("pyarrow")
RECORDS = [{"text": f"record {n} " * (n % 7 + 1)} for n in range(200)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def every(n: int) -> bool:
    return True


def items(path: Path, size: int | None = None, keep: Callable[[int], bool] = every) -> list[Any]:
    return [item for block in file_blocks(DataFile(path, path.name), size) for _, item in read_block(block, keep)]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def write_table(path: Path, records: list[Any], group: int = 50) -> None:
    import pyarrow.ipc
    import pyarrow.parquet

    table = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=group)
    else:
        new = pyarrow.ipc.new_file if path.stem == "file" else pyarrow.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)


def write_array_record(path: Path, records: list[Any]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(json.dumps(record).encode())
    writer.close()


@given(
    st.lists(st.text(max_size=30), max_size=12), st.integers(1, 200), st.sampled_from([b"\n", b"\r\n", b"\n\n"]), st.booleans()
)
def test_each_json_line_is_in_one_block(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, end: bytes, ended: bool
):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    records = [{"text": text} for text in texts]
    content = end.join(json.dumps(record, ensure_ascii=False).encode() for record in records) + end * ended
    path.write_bytes(content)
    assert items(path, size) == items(path) == records
    assert len(file_blocks(DataFile(path, path.name), size)) == -(-len(content) // size)


@example("é", 1)
@given(st.text("aé漢 \n", min_size=1, max_size=200), st.integers(1, 40))
def test_the_pieces_of_a_text_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int):
    """Pieces begin behind lines or words if one ends nearby, and with a character in any case."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "BLOCK_BYTES", size)
        patched.setattr(sources, "CUT_BYTES", 8)
        blocks = file_blocks(DataFile(path, path.name), size)
        pieces = [piece for block in blocks for _, piece in read_block(block, every)]
    assert "".join(map(str, pieces)) == text
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]


def test_a_piece_of_a_text_has_no_end_token_but_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("one two\nthree\nfour five")
    monkeypatch.setattr(sources, "BLOCK_BYTES", 5)
    blocks = file_blocks(DataFile(tmp_path / "a.txt", "a.txt"), 5)
    found = [document for block in blocks for document in read_block_documents(block, Counter())]
    assert [each and each.text for each in found] == ["one two\n", "three\n", "four ", "f", "ive"]
    assert [each.continues for each in found if each] == [True, True, True, True, False]
    assert read_documents([tmp_path]) == [Document("one two\nthree\nfour five")]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.gz", gzip.compress),
        ("a.ndjson.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
        ("a.json.zst", zstd),
        ("a.JSON", bytes),
    ],
)
def test_compressed_lines_are_read(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]):
    """`.json` files of data sets often are JSON lines, such as C4's."""
    (tmp_path / name).write_bytes(pack(lines(RECORDS)))
    assert items(tmp_path / name, 100) == RECORDS
    (tmp_path / name).write_bytes(
        pack(json.dumps(RECORDS[:3]).encode()) if name.startswith("a.json.") else pack(lines(RECORDS[:3]))
    )
    assert [document.text for document in read_documents([tmp_path])] == [record["text"] for record in RECORDS[:3]]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.arrayrecord"])
def test_files_of_data_sets_are_read_in_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Only the columns of a layout are read, and the items that are kept; null fields are absent ones."""
    path = tmp_path / name
    monkeypatch.setattr(sources, "RECORDS_PER_BLOCK", 50)
    monkeypatch.setattr(sources, "BATCH_ROWS", 16)
    write = write_array_record if name.endswith("record") else write_table
    write(path, RECORDS)
    blocks = file_blocks(DataFile(path, name), 100)
    assert len(blocks) == (1 if name.endswith("arrow") else 4)
    assert items(path) == RECORDS
    size = len(RECORDS) // len(blocks)
    want = [record for n, record in enumerate(RECORDS) if (n % size) % 3 == 1]
    assert items(path, keep=lambda n: n % 3 == 1) == want
    (tmp_path / "README.md").write_text("# a data set")
    chats = [
        {"id": 1, "messages": [{**CHAT[0], "name": "Ann"}, CHAT[1]], "system": None},
        {"id": 2, "messages": CHAT, "system": "S"},
    ]
    write(path, chats)
    (first, second) = read_documents([tmp_path])
    assert first.chat is not None
    assert second.chat is not None
    assert [dict(message) for message in first.chat.messages] == [{**CHAT[0], "name": "Ann"}, CHAT[1]]
    assert [dict(message) for message in second.chat.messages] == [{"role": "system", "content": "S"}, *CHAT]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.parquet", b"no table", r"a\.parquet: expected a Parquet file"),
        ("a.arrow", b"no table", r"a\.arrow"),
        ("a.arrayrecord", b"no records", r"a\.arrayrecord: expected an ArrayRecord file"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS))[:-20], r"a\.jsonl\.gz cannot be read: .*ended before"),
        ("a.jsonl.xz", b"plain", r"a\.jsonl\.xz cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, problem: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_documents([tmp_path / name])


def test_errors_name_the_place(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": "x" * 80}] * 3) + b'{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 after byte 200: not JSON"):
        items(path, 200)
    write_table(tmp_path / "a.parquet", [{"body": "x"}])
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: expected a record with .* found 'body'"):
        read_documents([tmp_path / "a.parquet"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_a_block_is_read_in_little_memory(tmp_path: Path, name: str):
    """Of a file of 10 MB, a reader holds about a block."""
    path = tmp_path / name
    record = {"text": "word " * 240}
    if name == "a.parquet":
        write_table(path, [record] * 8_000, group=8_000)
    else:
        content = (lines([record]) if name != "a.txt" else record["text"].encode() + b"\n") * 8_000
        path.write_bytes(gzip.compress(content, 1) if name.endswith("gz") else content)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    blocks = file_blocks(DataFile(path, name), sources.BLOCK_BYTES)
    read = sum(len(item if isinstance(item, str) else item["text"]) for block in blocks for _, item in read_block(block, every))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == 8_000 * (len(record["text"]) + (name == "a.txt"))
    assert peak < 4 << 20
    assert pa.total_allocated_bytes() - before < 4 << 20


def test_files_are_found_once(tmp_path: Path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS)))
    (tmp_path / "image.png.gz").write_bytes(b"")
    left_out: Counter[str] = Counter()
    assert [file.name for file in find_files([tmp_path, tmp_path / "b.txt"], left_out)] == ["a.jsonl.gz", "b.txt", "b.txt"]
    assert left_out["other files"] == 1
    assert file_blocks(DataFile(tmp_path / "a.jsonl.gz", ""), 10) == [Block(DataFile(tmp_path / "a.jsonl.gz", ""))]
