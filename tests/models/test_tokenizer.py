"""Reading a tokenizer, and streaming its text."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tilewright.models.tokenizer import StreamDecoder, decode_after, load_tokenizer, without_unfinished

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


def fallback_tokenizer(*last: Any) -> Tokenizer:
    """SentencePiece's BPE: words that start with a space mark, single bytes for the rest; ids of bytes are the bytes."""
    words = ["▁one", "▁two", "three", "▁", "▁▁", "\N{REPLACEMENT CHARACTER}", "<unk>"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def word_tokenizer(model: Any, decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["added"])
    return tokenizer


MARKED = ["▁one", "▁", "two", "▁▁", "é", "\N{REPLACEMENT CHARACTER}", "!"]
PIECES = ["one", "##two", "##.", ",", "n't", "'", "do", "\N{REPLACEMENT CHARACTER}", "[UNK]"]
ENDED = ["one</w>", "t", "wo</w>", "</w>", "\N{REPLACEMENT CHARACTER}"]
BYTES = byte_tokenizer()
FALLBACK = fallback_tokenizer(decoders.Strip(" ", 1, 0))
KINDS = {
    "byte-level": BYTES,
    "llama-2": FALLBACK,
    "gemma": fallback_tokenizer(),
    "metaspace": word_tokenizer(models.Unigram([(word, -1.0) for word in MARKED], 0, False), decoders.Metaspace()),
    "wordpiece": word_tokenizer(models.WordPiece({word: n for n, word in enumerate(PIECES)}), decoders.WordPiece()),
    "suffix": word_tokenizer(models.BPE({word: n for n, word in enumerate(ENDED)}, []), decoders.BPEDecoder()),
    "no decoder": word_tokenizer(models.WordLevel({"one": 0, "two": 1}, "one"), None),
}


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


def characters(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of every kind: bytes, at random and as whole characters, words, special ones, one that there is no entry for."""
    some = st.integers(0, tokenizer.get_vocab_size() + 1).map(lambda token: [token])
    rare = st.integers(min(256, tokenizer.get_vocab_size() - 3), tokenizer.get_vocab_size() + 1).map(lambda token: [token])
    of_bytes = st.sampled_from("xé漢😀").map(lambda letter: list(letter.encode()))
    parts = st.lists(some | rare | (of_bytes if tokenizer.get_vocab_size() > 256 else rare), max_size=40)
    return parts.map(lambda found: [token for part in found for token in part])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(st.data(), st.integers(1, 5), st.booleans())
def test_pieces_of_any_tokens_add_up(kind: str, data: st.DataObject, size: int, skip: bool):
    ids = data.draw(characters(KINDS[kind]))
    assert "".join(pieces(StreamDecoder(KINDS[kind], skip), ids, size)) == KINDS[kind].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(st.data(), st.integers(1, 5), st.booleans())
def test_pieces_are_the_text_that_ids_add_to_a_prompt(kind: str, data: st.DataObject, size: int, skip: bool):
    tokenizer = KINDS[kind]
    prompt = data.draw(characters(tokenizer))
    ids = data.draw(characters(tokenizer))
    kept = [
        token for token in prompt if tokenizer.id_to_token(token) and not (skip and token == tokenizer.token_to_id("<|end|>"))
    ]
    before = without_unfinished(tokenizer, kept, tokenizer.decode(prompt, skip_special_tokens=skip))
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    assert "".join(pieces(StreamDecoder(tokenizer, skip, prompt), ids, size)) == whole[len(before) :]


SPACED = FALLBACK.token_to_id("▁one"), FALLBACK.token_to_id("▁▁"), FALLBACK.token_to_id("three")


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ([SPACED[0]], [SPACED[0]], " one"),
        ([SPACED[2]], [SPACED[1], SPACED[0]], "   one"),  # an indent of three spaces
        ([], [SPACED[0]], "one"),
        ([END + 7], [SPACED[0]], "one"),  # behind a token that is left out the text begins
        ([*"é😀".encode()[:4]], [*"😀".encode()[2:]], "é😀"),  # adjacent bytes are a text together or not at all
        ([SPACED[2], *"😀".encode()], [SPACED[2]], "three"),
        ([SPACED[2], *"\N{REPLACEMENT CHARACTER}".encode()], [SPACED[2]], "three"),
        ([SPACED[2]] * 500, [SPACED[0]], " one"),
    ],
)
def test_a_text_goes_on_where_the_prompt_ends(prompt: list[int], ids: list[int], text: str):
    assert decode_after(FALLBACK, prompt, ids) == text


def test_a_character_that_the_prompt_begins_comes_whole():
    whole = BYTES.encode("a😀b").ids
    for cut in (2, 3, 4):
        assert decode_after(BYTES, whole[:cut], whole[cut:]) == "😀b"
    assert decode_after(BYTES, whole[:5], whole[5:]) == "b"
    replacement = BYTES.encode("a\N{REPLACEMENT CHARACTER}").ids
    assert decode_after(BYTES, replacement, BYTES.encode("b").ids) == "b"


PREFIXED = {
    "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "first": pre_tokenizers.Metaspace(prepend_scheme="first"),
}


def prefixed_tokenizer(kind: str) -> Tokenizer:
    """SentencePiece's with a space before a text, as Llama 2 and Phi-3 write it (of each part), and Mistral (of the first)."""
    words = [
        "<unk>",
        "<s>",
        "▁",
        "▁▁▁",
        "▁The",
        "▁cap",
        "▁is",
        "▁Paris",
        "is",
        "x",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {word: n for n, word in enumerate(dict.fromkeys([*words, *"ThecapsriP"]))}
    merges = [("▁", "▁")]
    for word in words[4:8]:
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            merges.append((word[: end - 1], word[end - 1]))
    vocab.setdefault("▁▁", len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [*merges, ("▁▁", "▁")], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    if kind == "normalizer":
        tokenizer.normalizer = PREFIXED[kind]
    else:
        tokenizer.pre_tokenizer = PREFIXED[kind]
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<|user|>", normalized=False)])
    return tokenizer


def behind(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **options: Any) -> str:
    stream = StreamDecoder(tokenizer, prompt=prompt, **options)
    return "".join(pieces(stream, ids, 1))


@pytest.mark.parametrize("kind", PREFIXED)
def test_text_behind_a_prompt_keeps_its_first_space(kind: str):
    tokenizer = prefixed_tokenizer(kind)
    token_id = tokenizer.get_vocab().__getitem__
    prompt = tokenizer.encode("<s>The cap is" if kind == "first" else "The cap is").ids
    assert [tokenizer.id_to_token(token) for token in prompt][-2:] == ["▁cap", "▁is"]
    assert behind(tokenizer, prompt, [token_id("▁Paris")]) == " Paris"
    assert behind(tokenizer, prompt, [token_id("▁▁▁"), token_id("x")]) == "   x"
    assert behind(tokenizer, prompt, [token_id("is")]) == "is"
    assert behind(tokenizer, [token_id("<s>")], [token_id("▁The")]) == "The"
    assert behind(tokenizer, [], [token_id("▁The")]) == "The"


@pytest.mark.parametrize(("kind", "text"), [("normalizer", "Paris"), ("always", "Paris"), ("first", " Paris")])
@pytest.mark.parametrize("skip", [False, True])
def test_a_space_that_encoding_puts_behind_an_added_token_is_none_of_the_text(kind: str, text: str, skip: bool):
    tokenizer = prefixed_tokenizer(kind)
    begin = tokenizer.encode("The cap<|user|>").ids
    whole = tokenizer.encode(f"The cap<|user|>{text}").ids
    assert whole == [*begin, tokenizer.token_to_id("▁Paris")]
    assert behind(tokenizer, begin, whole[len(begin) :], skip_special_tokens=skip) == text
    assert behind(tokenizer, begin, whole[len(begin) :], skip_special_tokens=skip, verbatim=True) == " Paris"
    assert behind(tokenizer, begin[-1:], whole[len(begin) :], skip_special_tokens=skip, verbatim=True) == " Paris"


def test_bytes_beside_one_another_wait_for_what_follows():
    """A decoder that falls back to bytes replaces all of them if one is wrong: what was right by itself, too."""
    stream = StreamDecoder(FALLBACK)
    assert [stream.push([token]) for token in (*"é".encode(), END + 2)] == ["", "", "éthree"]
    assert stream.push([*"é".encode(), 0xFF]) == ""
    assert stream.push([END + 2]) == "\N{REPLACEMENT CHARACTER}" * 3 + "three"


@pytest.mark.parametrize("kind", ["byte-level", "llama-2"])
@pytest.mark.parametrize("endless", ["words", "invalid", "special"])
def test_a_token_costs_the_same_after_thousands(kind: str, endless: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = KINDS[kind]
    decoded = []
    token = {"words": 256 + 2 if kind == "llama-2" else 65, "invalid": 0xBD, "special": tokenizer.token_to_id("<|end|>")}[
        endless
    ]
    ids = [token] * 3000
    decode = StreamDecoder._decode
    monkeypatch.setattr(StreamDecoder, "_decode", lambda self, ids, *skip: decoded.append(len(ids)) or decode(self, ids, *skip))
    assert "".join(pieces(StreamDecoder(tokenizer), ids, 1)) == tokenizer.decode(ids)
    assert sum(decoded) < 200 * len(ids)


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


DREAM = {"<|endoftext|>": 300, "<|mask|>": 303, "<think>": 304}
CORPUS = ["Let's say it's naïve: 漢字 cost 1234 yen.\n\n  They're there, weren't they?", TEXT] * 3


@pytest.fixture(scope="module")
def qwen2() -> Tokenizer:
    """A small tokenizer put together as Qwen2's `tokenizer.json` is, with added tokens and gaps between their ids."""
    tokenizer = Tokenizer(models.BPE())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def write_dream(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """The files of a tokenizer as Dream's checkpoints have them."""
    tokenizer.model.save(str(folder))
    (folder / "added_tokens.json").write_text(json.dumps(DREAM))
    special = {"mask_token": {"content": "<|mask|>"}, "additional_special_tokens": ["<|endoftext|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DreamTokenizer"} | config))
    return folder


LISTED = {
    str(number): {"content": token, "special": token != "<think>", "normalized": False} for token, number in DREAM.items()
}


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": LISTED}])
def test_a_tokenizer_is_built_from_the_files_of_dream(tmp_path: Path, qwen2: Tokenizer, config: dict[str, Any]):
    """Text is cut as Qwen2's tokenizer cuts it, and added tokens keep their ids, gaps and all."""
    built = load_tokenizer(write_dream(tmp_path, qwen2, **config))
    for text in (*CORPUS, "e\N{COMBINING ACUTE ACCENT} WE'LL 12 \t \r\n x  ", "  a\n b"):
        assert built.encode(text).ids == qwen2.encode(text).ids
        assert built.decode(built.encode(text).ids) == unicodedata.normalize("NFC", text)
    parts = "one<|mask|><think>two<|endoftext|>"
    one = qwen2.encode("one").ids
    two = qwen2.encode("two").ids
    assert built.encode(parts).ids == [*one, 303, 304, *two, 300]
    assert built.decode(built.encode(parts).ids) == "one<think>two"
    assert built.decode(built.encode(parts).ids, skip_special_tokens=False) == parts


def test_what_a_tokenizer_lacks_is_said(tmp_path: Path, qwen2: Tokenizer):
    write_dream(tmp_path, qwen2, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(ValueError, match=r"expected a tokenizer_class among .*DreamTokenizer, found 'GPT2Tokenizer'"):
        load_tokenizer(tmp_path)
    write_dream(tmp_path, qwen2, added_tokens_decoder={"first": {"content": "x"}})
    with pytest.raises(ValueError, match="added_tokens_decoder must map ids to tokens"):
        load_tokenizer(tmp_path)
    write_dream(tmp_path, qwen2)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nno such\n")
    with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt are no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"expected tokenizer\.json, or vocab\.json, .*; found no merges\.txt"):
        load_tokenizer(tmp_path)


def test_load_errors(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(tmp_path)
