"""A request's text: characters out of tokens, stop strings, ends."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.output import OutputProcessor, beginning_of_stop, find_stop
from tilewright.runtime.sampling import Sampling


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()
EOS = 256


@settings(max_examples=200)
@given(
    st.text("abé😀", min_size=1, max_size=20),
    st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3),
    st.integers(1, 7),
    st.booleans(),
)
def test_any_text_with_any_stops(text: str, stops: list[str], size: int, eos: bool):
    """A row fed with bytes, some at a time, until it ends: by a stop, by EOS, or by length."""
    ids = BYTES.encode(text).ids + ([EOS] if eos else [])
    row = OutputProcessor(0, [0], Sampling(len(ids), stop=tuple(stops)), StreamDecoder(BYTES))
    shown = ""
    for at in range(0, len(ids), size):
        if row.finish_reason is None:
            shown += "".join(piece.text for piece in row.add_round(ids[at : at + size], 0, 0, [EOS]))
    result = row.result()
    # A text ends where the first of its stops is complete; among those complete at once, the one that begins first counts.
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    if ends:
        whole = text[: ends[0]]
        assert result.text == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
        assert result.finish_reason == "stop"
        assert result.tokens == BYTES.encode(whole).ids
    else:
        assert (result.text, result.tokens) == (text, ids)
        assert result.finish_reason == ("eos" if eos else "length")
    assert shown == result.text
    assert sum(result.acceptance_lengths) == len(result.tokens)


def test_half_a_character_is_shown_when_a_row_is_interrupted_and_only_then():
    ids = BYTES.encode("a😀b").ids
    row = OutputProcessor(0, [0], Sampling(10), StreamDecoder(BYTES))
    row.add_round(ids[:3], 0, 0, [])
    assert row.result().text == "a\N{REPLACEMENT CHARACTER}"
    row.add_round(ids[3:], 0, 0, [])
    assert row.result().text == "a😀b"


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_beginning_of_stop(text: str, stops: list[str]):
    held = beginning_of_stop(text, stops)
    tails = {n for stop in stops for n in range(len(stop)) if text[len(text) - n :] == stop[:n] and n <= len(text)}
    assert held == max(tails, default=0)


def test_find_stop():
    assert find_stop("abcabd", ["bd", "ca"]) == 2
    assert find_stop("abc", ["d"]) is None
    assert find_stop("abc", []) is None
    assert find_stop("abxab", ["ab"], 4) == 3
    assert find_stop("abx", ["ab"], 2) is None, "it ended before"


@given(st.text("ab", min_size=1, max_size=12), st.text("ab", min_size=1, max_size=3), st.integers(0, 12), st.booleans())
def test_a_stop_string_counts_after_min_tokens_and_may_be_kept(text: str, stop: str, least: int, kept: bool):
    ids = BYTES.encode(text).ids
    sampling = Sampling(len(ids), stop=(stop,), min_tokens=min(least, len(ids)), include_stop=kept)
    row = OutputProcessor(0, [0], sampling, StreamDecoder(BYTES))
    shown = "".join(piece.text for piece in row.add_round(ids, 0, 0, [EOS]))
    # A stop string may begin before min_tokens, and ends behind them.
    ends = [n for n in range(sampling.min_tokens + 1, len(text) + 1) if text[:n].endswith(stop)]
    result = row.result()
    assert result.text == shown
    if ends:
        assert result.text == text[: ends[0] if kept else ends[0] - len(stop)]
        assert (result.finish_reason, result.stop_reason, len(result.tokens)) == ("stop", stop, ends[0])
    else:
        assert (result.text, result.finish_reason, result.stop_reason) == (text, "length", None)


def test_of_stop_strings_that_begin_alike_the_one_that_ends_behind_min_tokens_is_told():
    row = OutputProcessor(0, [0], Sampling(9, stop=("a", "ab"), min_tokens=1, include_stop=True), StreamDecoder(BYTES))
    row.add_round(BYTES.encode("abc").ids, 0, 0, [])
    assert (row.result().text, row.result().stop_reason) == ("ab", "ab")


def test_a_token_that_ends_a_row_is_in_its_text_where_it_is_asked_for():
    for eos, kept in itertools.product((False, True), repeat=2):
        end = BYTES.encode("c").ids
        sampling = Sampling(10, stop_token_ids=() if eos else tuple(end), include_stop=kept, ignore_eos=False)
        row = OutputProcessor(0, [0], sampling, StreamDecoder(BYTES))
        row.add_round(BYTES.encode("abcd").ids, 0, 0, end if eos else [])
        result = row.result()
        assert (result.text, result.tokens) == ("abc" if kept else "ab", BYTES.encode("abc").ids)
        assert (result.finish_reason, result.stop_reason) == (("eos", None) if eos else ("stop", end[0]))
