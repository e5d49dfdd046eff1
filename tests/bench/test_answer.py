"""What a stream of chunks says, on a clock of its own: every figure of an answer by hand."""

import json
from typing import Any

import pytest

from bench.sse_server import completion_chunks
from tilewright.bench.answer import (
    Event,
    EventDecoder,
    Malformed,
    Refused,
    StreamedAnswer,
    StreamedChunk,
    error_message,
)


def answer(*chunks: tuple[float, dict[str, Any] | str]) -> StreamedAnswer:
    """Chunks with the time at which each comes."""
    made = StreamedAnswer()
    for at, chunk in chunks:
        made.add(Event("message", chunk if isinstance(chunk, str) else json.dumps(chunk)), at)
    return made


def timed(chunks: list[dict[str, Any]], first: float = 1.0, step: float = 0.5) -> StreamedAnswer:
    return answer(*((first + step * n, chunk) for n, chunk in enumerate(chunks)))


def text(said: str = "x", reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": said, "finish_reason": reason}], **more}


def usage(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}


def test_chunks_that_say_what_they_bring():
    """Three, one and four tokens at 1, 1.5 and 2 s; the reason of the end and the usage bring none."""
    made = timed(completion_chunks([3, 1, 4], 7))
    assert made.chunks == [StreamedChunk(1.0, 3), StreamedChunk(1.5, 1), StreamedChunk(2.0, 4)]
    assert (made.tokens, made.prompt_tokens, made.counted_by_usage, made.finish_reason) == (8, 7, True, "length")
    assert made.first_s == 1.0
    assert made.gaps_s == [0.5, 0.5]
    assert made.token_gaps_s == [0.5, 0.125, 0.125, 0.125, 0.125]
    assert made.seconds_per_token == 1.0 / 7
    assert (made.ended, made.done) == (True, False)


def test_prompts_in_the_prefix_cache():
    said = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    assert timed([text(usage=said)]).cached_tokens == 4
    assert timed([text(usage={**said, "prompt_tokens_details": None})]).cached_tokens is None
    assert timed([text(**usage(1))]).cached_tokens is None


def test_a_role_is_no_token():
    made = timed(completion_chunks([2, 1], 7, chat=True))
    assert made.first_choice_s == 1.0
    assert made.first_s == 1.5
    assert made.gaps_s == [0.5]
    bare = timed(completion_chunks([2, 1], 7, chat=True, continuous=False))
    assert (bare.first_s, bare.gaps_s) == (1.5, [0.5])


def test_usage_at_the_end_alone():
    made = timed(completion_chunks([3, 1, 4], 7, continuous=False))
    assert [chunk.tokens for chunk in made.chunks] == [None] * 3
    assert (made.tokens, made.counted_by_usage) == (8, True)
    assert made.token_gaps_s is None
    assert made.seconds_per_token == 1.0 / 7
    with_reason = answer((1, text()), (2, text()), (5, text("", "stop", **usage(9))))
    assert [chunk.at_s for chunk in with_reason.chunks] == [1, 2]
    assert (with_reason.tokens, with_reason.token_gaps_s) == (9, None)


def test_without_usage_chunks_count_as_tokens():
    made = answer((1, text()), (2, text("")), (4, text("y", "stop")), (5, "[DONE]"))
    assert (made.tokens, made.prompt_tokens, made.counted_by_usage) == (3, None, False)
    assert made.seconds_per_token == 1.5
    assert made.done


def test_a_token_without_text_counts_where_usage_says_so():
    chunks = [{"choices": [{"delta": {"content": said}}], **usage(n)} for said, n in (("", 0), ("", 1), ("é", 2))]
    made = timed(chunks)
    assert made.chunks == [StreamedChunk(1.5, 1), StreamedChunk(2.0, 1)]


def test_text_without_a_token_ends_no_gap_between_tokens():
    made = answer((1, text("a", **usage(1))), (2, text("b", **usage(1))), (4, text("c", **usage(3))))
    assert made.gaps_s == [1, 2]
    assert made.token_gaps_s == [1.5, 1.5]


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning", "refusal"])
def test_all_that_is_generated_is_text(field: str):
    made = answer(
        (1, {"choices": [{"delta": {"role": "assistant", field: None}}]}), (2, {"choices": [{"delta": {field: "a"}}]})
    )
    assert made.first_s == 2


def test_tokens_that_never_showed():
    made = answer((1, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}), (3, {"choices": [], **usage(2)}))
    assert (made.first_s, made.seconds_per_token, made.tokens) == (1, None, 2)
    assert answer((1, {"choices": []})).first_s is None


def test_one_chunk_has_no_time_between_tokens():
    made = timed(completion_chunks([5], 7))
    assert (made.seconds_per_token, made.gaps_s, made.token_gaps_s) == (None, [], [])
    assert answer((1, text("a", **usage(1))), (2, text("b", **usage(1)))).seconds_per_token is None


def test_drafts():
    counts = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 8}
    assert timed(completion_chunks([5], 7, metrics={**counts, "more": [1]})).speculative == {**counts, "more": [1]}
    assert answer((1, text(metrics={"speculative_decoding": counts}))).speculative == counts
    for metrics in (None, [], {"speculative_decoding": None}, {"speculative_decoding": {**counts, "num_spec_steps": 1.5}}):
        assert answer((1, text(metrics=metrics))).speculative is None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("{", "expected JSON in the stream, found '{'"),
        ("[" * 100_000, "expected JSON"),
        ("[]", r"expected an object in the stream, found \[\]"),
        ('{"choices": [1]}', "expected a list of choices"),
        ('{"choices": {"0": {}}}', "expected a list of choices"),
        ('{"usage": 3}', "expected completion_tokens in the usage, found 3"),
        ('{"usage": {"completion_tokens": -1}}', "expected completion_tokens"),
        ('{"usage": {"completion_tokens": true}}', "expected completion_tokens"),
    ],
)
def test_what_is_no_chunk(data: str, problem: str):
    with pytest.raises(Malformed, match=problem):
        answer((1, data))


def test_a_count_that_falls_is_no_count():
    with pytest.raises(Malformed, match="expected completion_tokens of at least 5, found 4"):
        answer((1, usage(5)), (2, usage(4)))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("message", '{"error": {"message": "broke", "type": "server_error"}}'), "broke"),
        (Event("error", '{"message": "broke"}'), "broke"),
        (Event("error", '"broke"'), "broke"),
        (Event("message", '{"error": "broke", "choices": []}'), "broke"),
    ],
)
def test_errors_in_the_stream(event: Event, message: str):
    with pytest.raises(Refused, match=message) as caught:
        StreamedAnswer().add(event, 1.0)
    assert caught.value.kind == "error_event"


@pytest.mark.parametrize(
    ("said", "message"),
    [({"detail": "Not Found"}, "Not Found"), ({"error": {"code": 3}}, "{'code': 3}"), ([1], "[1]"), (None, "None")],
)
def test_errors_of_other_forms(said: Any, message: str):
    assert error_message(said) == message


def decoded(*parts: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for part in parts for event in decoder.feed(part)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata:b\n\n", [("message", "a"), ("message", "b")]),
        (b"data: a\ndata\ndata: b\r\n\r\n", [("message", "a\n\nb")]),
        (b"event: error\ndata: {}\n\ndata: x\n\n", [("error", "{}"), ("message", "x")]),
        (b": comment\n\n:\n\nid: 3\nretry: 10\ndata: a\n\n", [("message", "a")]),
        (b"event: lost\n\ndata: a\n\n", [("message", "a")]),
        (b"data: unfinished\n", []),
        ("data: é\u2028∗\n\n".encode(), [("message", "é\u2028∗")]),
    ],
)
def test_events(stream: bytes, events: list[tuple[str, str]]):
    expected = [Event(*each) for each in events]
    assert decoded(stream) == expected
    assert decoded(*(bytes([each]) for each in stream)) == expected


def test_bytes_that_are_not_utf8():
    with pytest.raises(Malformed, match="not UTF-8"):
        decoded(b"data: \xff\n")
