"""Reading a tokenizer, and streaming its text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tilewright.models.tokenizer import StreamDecoder, load_tokenizer

TEXT = "naïve café — 漢字かな交じり文, 👩‍👩‍👧‍👦 und 😀!\n\tEnd.<|end|> and <|end|>more 🏳️‍🌈"
END = 256


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII is spread over several tokens; id 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece style: words that start with a space mark, single bytes for the rest; decoding drops the first space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(["▁one", "▁two", "three", "<unk>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BYTES, FALLBACK = byte_tokenizer(), byte_fallback_tokenizer()


def pieces(stream: StreamDecoder, ids: list[int], size: int) -> list[str]:
    return [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)] + [stream.flush()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("skip", [False, True])
def test_pieces_add_up_and_hold_no_half_character(size: int, skip: bool):
    ids = BYTES.encode(TEXT).ids
    assert ids.count(END) == 2
    got = pieces(StreamDecoder(BYTES, skip), ids, size)
    assert "".join(got) == BYTES.decode(ids, skip_special_tokens=skip) == (TEXT.replace("<|end|>", "") if skip else TEXT)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in got)


def test_text_comes_as_soon_as_its_last_byte():
    stream = StreamDecoder(BYTES)
    got = [stream.push([i]) for i in BYTES.encode("a漢b").ids]
    assert got == ["a", "", "", "漢", "b"]
    assert stream.flush() == ""


@given(st.lists(st.integers(0, 256), max_size=40), st.integers(1, 5), st.booleans())
def test_any_bytes_add_up(ids: list[int], size: int, skip: bool):
    assert "".join(pieces(StreamDecoder(BYTES, skip), ids, size)) == BYTES.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.sampled_from("xé漢😀"), max_size=12), st.integers(1, 5))
def test_byte_fallback_adds_up(letters: list[str], size: int):
    words = {"x": [256, 257, 258]}
    ids = [i for letter in letters for i in words.get(letter, list(letter.encode()))]
    assert "".join(pieces(StreamDecoder(FALLBACK), ids, size)) == FALLBACK.decode(ids)


def test_flush_gives_what_never_became_a_character_and_starts_afresh():
    stream = StreamDecoder(BYTES)
    head = BYTES.encode("😀").ids[:2]
    assert stream.push(head) == ""
    assert stream.flush() == BYTES.decode(head) == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(BYTES.encode("next").ids) == "next"


def test_invalid_bytes_come_with_the_next_character():
    stream = StreamDecoder(BYTES)
    invalid = BYTES.encode("é").ids[1]  # a continuation byte without its first
    assert stream.push([invalid] * 3) == ""
    assert stream.push(BYTES.encode("a").ids) == "\N{REPLACEMENT CHARACTER}" * 3 + "a"


def test_load(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT).ids == BYTES.encode(TEXT).ids


def test_load_errors(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a folder without a tokenizer: it has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(tmp_path)
