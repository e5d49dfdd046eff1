"""The reader of event streams: any way of cutting the bytes gives the same events, and the standard's rules hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.bench import sse
from tilewright.bench.sse import Event, EventReader


def read(*parts: bytes) -> list[Event]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)]


def messages(*data: str) -> list[Event]:
    return [Event("message", each) for each in data]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", messages("a")),
        (b"data:a\n\ndata:  b\n\n", messages("a", " b")),
        (b"data: a\ndata\ndata: b\n\n", messages("a\n\nb")),
        (b"\xef\xbb\xbfdata: a\r\n\r\ndata: b\r\rdata: c\n\n", messages("a", "b", "c")),
        (b"event: error\ndata: {}\n\ndata: x\n\n", [Event("error", "{}"), *messages("x")]),
        (b": comment\n\n:\n\nid: 3\nretry: 10\ndata: a\n\n", messages("a")),
        (b"event: lost\n\ndata: a\n\n", messages("a")),
        (b"data: unfinished\n", []),
        (b"data\n\n", messages("")),
        (b"\n\n\n", []),
        ("data: é\u2028∗\n\n".encode(), messages("é\u2028∗")),
        (b"unknown: x\ndata: [DONE]\n\n", messages("[DONE]")),
    ],
)
def test_streams(stream: bytes, events: list[Event]):
    assert read(stream) == events
    assert read(*(bytes([each]) for each in stream)) == events


LINE = st.sampled_from(
    [b"data: a", b"data:", b"data: \xc3\xa9", b"event: error", b": hm", b"id: 1", b"retry: 2", b"x", b"", b""]
)
BREAK = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINE, BREAK), max_size=20), st.data())
@settings(max_examples=200)
def test_any_cut_gives_the_same_events(lines: list[tuple[bytes, bytes]], data: st.DataObject):
    stream = b"".join(text + end for text, end in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*parts) == read(stream)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")), min_size=1), BREAK)
def test_data_comes_out_as_it_went_in(texts: list[str], end: bytes):
    lines = [[b"data: " + line.encode() for line in text.split("\n")] for text in texts]
    stream = b"".join(end.join(each) + 2 * end for each in lines)
    assert read(stream) == messages(*texts)


@pytest.mark.parametrize("stream", [b"data: \xff\n", b"data: \xc3\ndata: \xa9\n\n"])
def test_bytes_that_are_no_text_are_an_error(stream: bytes):
    with pytest.raises(ValueError, match="not UTF-8"):
        read(stream)


def test_a_line_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "LONGEST_LINE", 10)
    assert read(b"data: 3456789\n\n") == messages("3456789")
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        read(b"data: ", b"34567")
