"""Reading text, its tokenizer, the stream of tokens and the order of its windows."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

from tilewright.train.data import (
    END_OF_TEXT,
    MASK,
    Document,
    TokenStream,
    encode_documents,
    end_of_text,
    read_documents,
    read_jsonl,
    require_windows,
    split_documents,
    train_tokenizer,
)

TEXTS = ["def add(a, b):\n    return a + b\n", "The sum of 12 and 345 is 357.\n", "It's naïve; 漢字 too.\n"]
CORPUS = [Document(text) for text in TEXTS]
TOKENIZER = train_tokenizer(CORPUS, 300)
END = end_of_text(TOKENIZER)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def numbered(n: int) -> TokenStream:
    """A stream whose tokens are their own positions; even ones are in the loss."""
    return TokenStream(np.arange(n, dtype=np.int32), np.arange(n) % 2 == 0)


def test_a_folder_is_searched_for_text_and_records(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "code.py").write_text("x = 1\n")
    (tmp_path / "a.md").write_text("# Title\n")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "table.csv").write_text("1,2\n")
    write(tmp_path / "c.jsonl", {"text": "plain"}, {"prompt": "p: ", "response": "r"})
    assert read_documents([tmp_path]) == [*map(Document, ("# Title\n", "x = 1\n", "plain")), Document("r", "p: ")]
    assert read_documents([tmp_path / "table.csv", tmp_path / "a.md"]) == [Document("1,2\n"), Document("# Title\n")]


def test_question_and_answer_lose_their_annotations(tmp_path: Path):
    path = write(tmp_path / "q.jsonl", {"question": " How many? ", "answer": "48/2 = <<48/2=24>>24.\n#### 24"})
    assert read_documents([path]) == [Document("Question: How many?\nAnswer: 48/2 = 24.\n#### 24")]


@pytest.mark.parametrize("with_start", [False, True])
def test_a_prompt_is_given_and_its_response_learnt(tmp_path: Path, with_start: bool):
    """Tokenised as when the response is generated: the prompt by itself, and only it after the token that begins a text."""
    path = write(tmp_path / "p.jsonl", {"text": "12"}, {"prompt": "The sum of 12", "response": " is 24."})
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    if with_start:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{MASK} $A", special_tokens=[(MASK, 1)])
    stream = encode_documents(tokenizer, read_documents([path]), END)
    start, (text, prompt, response) = (
        [1] * with_start,
        (TOKENIZER.encode(each).ids for each in ("12", "The sum of 12", " is 24.")),
    )
    assert stream.tokens.tolist() == [*start, *text, END, *start, *prompt, *response, END]
    out = len(start) + len(prompt)
    assert stream.in_loss.tolist() == [True] * (len(start) + len(text) + 1) + [False] * out + [True] * (len(response) + 1)


def test_only_a_newline_ends_a_record(tmp_path: Path):
    text = "one\u2028two\u0085three\x1dfour\r"
    path = write(tmp_path / "lines.jsonl", {"text": text}, {"text": "next"})
    assert read_jsonl(path) == [{"text": text}, {"text": "next"}]
    path.write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}')
    assert read_jsonl(path) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"text": "a"}\n\n{"text": \n', r"data\.jsonl:3: not JSON"),
        (b'{"text": "a"}\n[1]\n', r"data\.jsonl:2: expected a JSON object, found \[1\]"),
        (b'{"text": "a"}\n{"prompt": "p"}\n', r"data\.jsonl, record 2: expected a record with"),
        (b'{"text": 3}\n', r"data\.jsonl, record 1: expected a record with"),
        (b'{"text": "\xff"}\n', r"data\.jsonl:1: not UTF-8 \(byte 11 of the line\)"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_documents([path])


def test_what_is_no_text_is_named(tmp_path: Path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.txt: not UTF-8 text"):
        read_documents([tmp_path])
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        read_documents([tmp_path / "absent"])


@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_tokens(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_the_tokenizer_merges_words_and_keeps_digits_apart():
    assert TOKENIZER.get_vocab_size() == 300
    assert [TOKENIZER.token_to_id(token) for token in (END_OF_TEXT, MASK)] == [0, 1]
    tokens = TOKENIZER.encode("    return a + 345").tokens
    assert len(tokens) < len("    return a + 345")
    assert tokens[-3:] == ["Ġ3", "4", "5"]


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    assert train_tokenizer(CORPUS, 258).get_vocab_size() == 258
    with pytest.raises(ValueError, match="at least 258, found 257"):
        train_tokenizer(CORPUS, 257)


def test_documents_are_closed_by_the_end_token():
    stream = encode_documents(TOKENIZER, CORPUS, END)
    assert stream.in_loss.all()
    assert stream.tokens.dtype == np.int32
    cuts = np.flatnonzero(stream.tokens == END)
    assert len(cuts) == len(CORPUS)
    assert [TOKENIZER.decode(part.tolist()) for part in np.split(stream.tokens, cuts + 1)[:-1]] == TEXTS
    assert len(encode_documents(TOKENIZER, [], END).tokens) == 0


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 200), st.integers(0, 5), st.integers(0, 5))
def test_windows_cover_the_stream_once(length: int, batch: int, more: int, seed: int, epoch: int):
    n = length + more
    stream = numbered(n)
    batches = list(stream.windows(length, batch, seed, epoch))
    assert len(batches) >= stream.steps_per_epoch(length, batch)
    for tokens, flags in batches:
        assert tokens.shape == flags.shape == (batch, length)
        np.testing.assert_array_equal(flags, tokens % 2 == 0)
        np.testing.assert_array_equal(np.diff(tokens, axis=1), 1)
    starts = [int(start) for tokens, _ in batches for start in tokens[:, 0]]
    assert len(set(starts)) == len(starts)
    assert len({start % length for start in starts}) <= 1, "the windows of an epoch do not overlap"
    # What is left out: less than a window at either end, and the windows that fill no batch.
    assert n - length * len(starts) < 2 * length + length * (batch - 1) + 1


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 40))
def test_steps_per_epoch_is_the_least_of_all_offsets(length: int, batch: int, more: int):
    stream = numbered(length * (batch + 1) + more)
    counts = [len(list(stream.windows(length, batch, 0, epoch))) for epoch in range(8 * length)]
    assert min(counts) >= stream.steps_per_epoch(length, batch) >= 1
    require_windows(stream, length, batch, "the text")
    # The bound is not far off: the worst offset costs at most one window.
    assert max(counts) <= stream.steps_per_epoch(length, batch) + 1


def test_the_order_is_a_function_of_seed_and_epoch():
    stream = numbered(500)

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [tokens[:, 0].tolist() for tokens, _ in stream.windows(7, 3, seed, epoch)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert sorted(order(0, 0)) != order(0, 0), "windows come shuffled"


def test_a_text_too_short_for_a_batch_is_refused():
    require_windows(numbered(50), 10, 4, "the text")
    with pytest.raises(ValueError, match="the text has 49 tokens; a batch of 4 windows of 10 needs 50"):
        require_windows(numbered(49), 10, 4, "the text")


def test_a_text_with_nothing_to_learn_is_refused():
    given = TokenStream(np.arange(50, dtype=np.int32), np.zeros(50, bool))
    with pytest.raises(ValueError, match="the text has no token to be predicted: its 50 are all given"):
        require_windows(given, 10, 4, "the text")


@given(st.integers(2, 60), st.floats(0.01, 0.9), st.integers(0, 3))
def test_documents_are_split_without_overlap(count: int, share: float, seed: int):
    documents = [Document(f"document {i}") for i in range(count)]
    trained, held_out = split_documents(documents, share, seed)
    assert sorted(document.text for document in trained + held_out) == sorted(document.text for document in documents)
    assert len(held_out) == max(1, round(share * count))
    assert (trained, held_out) == split_documents(documents, share, seed)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=24), st.integers(0, 3))
def test_what_has_one_prompt_or_one_text_stays_on_one_side(numbers: list[int], seed: int):
    """Answers to one prompt differ; a text that equals a prompt is another thing."""
    documents = [Document(f"answer {n}", f"{key}") if key % 2 else Document(f"{key - 1}") for n, key in enumerate(numbers)]
    trained, held_out = split_documents(documents, 0.3, seed)
    apart = [{document.prompt or f"text {document.text}" for document in side} for side in (trained, held_out)]
    assert apart[0].isdisjoint(apart[1])
    assert len(apart[1]) == max(1, round(0.3 * len(set(numbers))))
    assert len(trained) + len(held_out) == len(documents)


def test_the_split_depends_on_the_seed():
    documents = [Document(f"document {i}") for i in range(60)]
    assert len({tuple(split_documents(documents, 0.1, seed)[1]) for seed in range(4)}) == 4


def test_a_tokenizer_without_an_end_is_refused():
    assert TOKENIZER.token_to_id(END_OF_TEXT) == END
    with pytest.raises(ValueError, match=r"lacks the token <\|endoftext\|>"):
        end_of_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
