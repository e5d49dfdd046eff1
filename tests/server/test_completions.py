"""`/v1/completions`, over an engine that repeats the prompt's tokens."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine, model_without_weights
from tilewright.runtime.sampling import Sampling
from tilewright.server.answers import Completion
from tilewright.server.defaults import SamplingDefaults

TEXT = "def add(a, b):\n    return a"
HELLO = [{"role": "user", "content": "hello there, you"}]


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": TEXT, **body})
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json())
    return answer.json()


def chunks(client: TestClient, route: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams end."""
    answer = client.post(
        route,
        json={
            "stream": True,
            **({"prompt": TEXT} if route.endswith("/completions") and "messages" not in body else {}),
            **body,
        },
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def tokens_of(text: str) -> list[int]:
    return model_without_weights().encode(text)


def test_a_completion_has_text_usage_and_an_end(client: Client):
    tokens = tokens_of(TEXT)
    found = complete(client(), max_tokens=len(tokens))
    assert found["object"] == "text_completion"
    assert found["model"] == "demo"
    assert found["id"].startswith("cmpl-")
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}
    assert found["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": len(tokens),
        "total_tokens": 2 * len(tokens),
        "prompt_tokens_details": {"cached_tokens": len(tokens) // 2},
    }


def test_sixteen_tokens_are_the_default_or_what_is_left(client: Client):
    assert complete(client())["usage"]["completion_tokens"] == 16
    length = len(tokens_of(TEXT))
    assert complete(client(FakeEngine(context=length + 5)))["usage"]["completion_tokens"] == 5


def test_drafts_are_told_as_vllm_tells_them(client: Client):
    # Updates of 3 tokens with 3 drafts each, of which 2 are accepted; the last one is cut.
    found = complete(client(), max_tokens=7)["metrics"]["speculative_decoding"]
    assert found == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": pytest.approx(2 / 3),
        "acceptance_histogram": [0, 0, 3, 0],
        "acceptance_histogram_by_draft_length": {"3": [0, 0, 3, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }
    assert complete(client(), n=2)["metrics"] == {"speculative_decoding": None}


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client: Client):
    engine = FakeEngine()
    found = complete(client(engine), prompt=["one two", "three"], n=2, max_tokens=2, seed=2**63 - 1, temperature=0.5)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    wanted = [model_without_weights().tokenizer.decode(tokens_of(text)[:2]) for text in ("one two", "three")]
    lengths = [len(tokens_of(text)) for text in ("one two", "three")]
    assert lengths[1] >= 1
    assert [choice["text"] for choice in found["choices"]][:2] == [wanted[0]] * 2
    assert [ask.sampling.seed for ask in engine.received] == [2**63 - 1, -(2**63)] * 2
    assert found["usage"]["prompt_tokens"] == sum(lengths)
    assert found["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], [[5], [6, 7]]])
def test_prompts_may_be_tokens(client: Client, prompt: list[Any]):
    engine = FakeEngine()
    found = complete(client(engine), prompt=prompt, max_tokens=1)
    wanted = prompt if isinstance(prompt[0], list) else [prompt]
    assert [list(ask.prompt) for ask in engine.received] == wanted
    assert len(found["choices"]) == len(wanted)


def test_a_stop_string_ends_a_choice_and_is_not_in_it(client: Client):
    found = complete(client(), stop=["b)"], max_tokens=50)
    assert found["choices"][0]["text"] == "def add(a, "
    assert found["choices"][0]["finish_reason"] == "stop"
    assert complete(client(), stop="nowhere", max_tokens=5)["choices"][0]["finish_reason"] == "length"


def test_the_end_of_sequence_token_ends_a_choice_unless_it_is_ignored(client: Client):
    prompt = [*tokens_of("one"), 0]
    found = complete(client(), prompt=prompt, max_tokens=9)
    assert found["choices"][0]["text"] == "one"
    assert found["choices"][0]["finish_reason"] == "stop"
    on = complete(client(), prompt=prompt, max_tokens=9, ignore_eos=True)
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 9


def test_sampling_reaches_the_engine(client: Client):
    engine = FakeEngine()
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1}
    given |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "ignore_eos": True}
    complete(client(engine, deadline_s=60.0), **given, stop=["a stop"], max_tokens=3)
    (ask,) = engine.received
    assert {name: getattr(ask.sampling, name) for name in given} == given
    assert (ask.sampling.max_new_tokens, ask.sampling.stop, ask.deadline_s) == (3, ("a stop",), 60.0)
    complete(client(engine), top_k=-1)
    plain = engine.received[-1].sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.seed) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"seed": -1}, {"seed": None}),
        ({"top_p": 0}, {"top_p": 0.0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 1e-3}, {"temperature": 1e-3}),
        ({"stop": [str(n) for n in range(100, 150)]}, {"stop": tuple(str(n) for n in range(100, 150))}),
        ({"logit_bias": {"5": -100, "7": 2.5}}, {"logit_bias": ((5, -100.0), (7, 2.5))}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"stop_token_ids": [4, 6.0]}, {"stop_token_ids": (4, 6)}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ],
)
def test_what_vllm_takes_reaches_the_engine(client: Client, fields: dict[str, Any], meant: dict[str, Any]):
    engine = FakeEngine()
    complete(client(engine), **fields)
    assert {name: getattr(engine.received[-1].sampling, name) for name in meant} == meant


def test_a_request_that_says_nothing_draws_as_the_model_asks(client: Client):
    engine = FakeEngine()
    defaults = SamplingDefaults(0.6, 0.95, 20, 0.1, 1.05, max_new_tokens=5)
    app = client(engine, sampling=defaults)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for route, body in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", {"messages": HELLO})):
        assert app.post(route, json=body).json()["usage"]["completion_tokens"] == 5
        assert tuple(getattr(engine.received[-1].sampling, name) for name in names) == (0.6, 0.95, 20, 0.1, 1.05)
        sampling = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 7}
        assert app.post(route, json=body | sampling).json()["usage"]["completion_tokens"] == 7
        assert engine.received[-1].sampling == Sampling(7)
    (model,) = app.get("/v1/models").json()["data"]
    assert model["sampling_defaults"] == {**{name: getattr(defaults, name) for name in names}, "max_new_tokens": 5}


def test_a_token_may_end_a_choice_and_is_told(client: Client):
    tokens = tokens_of(TEXT)
    fields = {"max_tokens": 50, "stop_token_ids": [tokens[4]]}
    at = tokens.index(tokens[4])
    (choice,) = complete(client(), **fields)["choices"]
    decode = model_without_weights().tokenizer.decode
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (decode(tokens[:at]), "stop", tokens[4])
    (choice,) = complete(client(), **fields, include_stop_str_in_output=True)["choices"]
    assert choice["text"] == decode(tokens[: at + 1])
    (*_, last) = chunks(client(), **fields)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", tokens[4])


def test_a_stop_string_is_told_and_may_be_kept(client: Client):
    (choice,) = complete(client(), stop=["zzz", "b)"], max_tokens=50, include_stop_str_in_output=True)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("def add(a, b)", "stop", "b)")
    (choice,) = complete(client(), stop=["b)"], max_tokens=50, min_tokens=len(tokens_of(TEXT)))["choices"]
    assert choice["text"] == TEXT + "def add(a, ", "before min_tokens no stop string counts"


def test_special_tokens_may_be_kept(client: Client):
    prompt = [*tokens_of("one"), 0, *tokens_of("two")]
    fields = {"prompt": prompt, "max_tokens": len(prompt), "ignore_eos": True}
    assert complete(client(), **fields)["choices"][0]["text"] == "onetwo"
    kept = complete(client(), **fields, skip_special_tokens=False, logprobs=0)["choices"][0]
    assert kept["text"] == "one<|endoftext|>two"
    assert kept["logprobs"]["text_offset"][-1] + len(kept["logprobs"]["tokens"][-1]) == len(kept["text"])


def test_a_prompt_may_be_given_back_and_nothing_more(client: Client):
    """lm-eval may request likelihoods so: no token is generated, so that the prompt may fill the context."""
    tokens = tokens_of(TEXT)
    found = complete(client(), echo=True, max_tokens=0, logprobs=1)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(tokens) - 1)]
    assert found["usage"]["completion_tokens"] == 0
    full = FakeEngine(context=len(tokens))
    assert complete(client(full), echo=True, max_tokens=0, logprobs=1)["choices"] == found["choices"]
    assert [ask.pooling for ask in full.received] == ["last"]
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0}
    short = client(FakeEngine(context=len(tokens) - 1)).post("/v1/completions", json=body)
    assert (short.status_code, short.json()["error"]["code"]) == (400, "context_length_exceeded")
    streamed = chunks(client(), echo=True, max_tokens=0)
    assert "".join(part["choices"][0]["text"] for part in streamed) == TEXT


def test_prompts_have_logprobs_and_ids_where_they_are_asked_for(client: Client):
    tokens = tokens_of(TEXT)
    (choice,) = complete(client(), prompt_logprobs=2, return_token_ids=True, max_tokens=3)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == (tokens, tokens[:3], None)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    texts = [model_without_weights().tokenizer.decode([token]) for token in tokens]
    for token, text, place in zip(tokens[1:], texts[1:], rest, strict=True):
        assert place[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
        assert [each["rank"] for each in place.values()] == [1, 2]
    both = complete(client(), prompt_logprobs=3, logprobs=1, max_tokens=2)["choices"][0]
    assert [len(each) for each in both["logprobs"]["top_logprobs"]] == [1, 1]
    assert {len(place) for place in both["prompt_logprobs"][1:]} == {3}
    streamed = chunks(client(), return_token_ids=True, max_tokens=7)
    assert [part["choices"][0].get("prompt_token_ids") for part in streamed] == [tokens, None, None]
    assert [token for part in streamed for token in part["choices"][0]["token_ids"]] == tokens[:7]


def test_special_tokens_of_a_prompt_may_be_left_out(client: Client):
    engine = FakeEngine()
    complete(client(engine), add_special_tokens=False)
    assert list(engine.received[-1].prompt) == model_without_weights().tokenizer.encode(TEXT, add_special_tokens=False).ids


def test_null_is_as_if_it_were_not_there(client: Client):
    names = (
        "max_tokens temperature top_p n stop seed logprobs echo stream stream_options user logit_bias suffix best_of"
    ).split()
    assert complete(client(), **dict.fromkeys(names))["choices"] == complete(client())["choices"]


def test_logprobs_come_with_each_token(client: Client):
    tokens = tokens_of(TEXT)
    found = complete(client(), logprobs=2, max_tokens=len(tokens))["choices"][0]["logprobs"]
    texts = [model_without_weights().tokenizer.decode([token]) for token in tokens]
    assert found["tokens"] == texts
    assert found["token_logprobs"] == [-0.5] * len(tokens)
    assert [list(each.values()) for each in found["top_logprobs"]] == [[-0.5, -1.5]] * len(tokens)
    assert [next(iter(each)) for each in found["top_logprobs"]] == texts
    assert found["text_offset"] == [len("".join(texts[:n])) for n in range(len(texts))]


def test_without_alternatives_there_is_the_token_itself(client: Client):
    found = complete(client(), logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert [list(each.values()) for each in found["top_logprobs"]] == [[-0.5], [-0.5]]


def test_echo_gives_the_prompt_back_with_its_logprobs(client: Client):
    """lm-eval requests likelihoods so: one token after the prompt, whose first token has no probability."""
    tokens = tokens_of(TEXT)
    for prompt in (TEXT, tokens):
        found = complete(client(), prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
        assert found["text"] == TEXT + model_without_weights().tokenizer.decode(tokens[:1])
        logprobs = found["logprobs"]
        assert len(logprobs["tokens"]) == len(tokens) + 1
        assert "".join(logprobs["tokens"]) == found["text"]
        assert logprobs["token_logprobs"] == [None, *[-0.5] * len(tokens)]
        assert logprobs["top_logprobs"][0] is None
        assert [max(each.values()) for each in logprobs["top_logprobs"][1:]] == [-0.5] * len(tokens)
        assert [
            found["text"][at:].startswith(text) for at, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        ]
        assert logprobs["text_offset"][-1] == len(TEXT)
    plain = complete(client(), echo=True, max_tokens=1)["choices"][0]
    assert plain["logprobs"] is None
    assert plain["text"].startswith(TEXT)


def test_a_stream_says_what_the_whole_says(client: Client):
    fields = {"logprobs": 1, "echo": True, "n": 2, "max_tokens": 10, "stream_options": {"include_usage": True}}
    got = chunks(client(), **fields)
    del fields["stream_options"]
    whole = complete(client(), **fields)
    *parts, last = got
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]
    for index in (0, 1):
        choice_chunks = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in choice_chunks) == whole["choices"][index]["text"]
        assert [each["finish_reason"] for each in choice_chunks] == [None] * (len(choice_chunks) - 1) + ["length"]
        for name, value in whole["choices"][index]["logprobs"].items():
            assert [one for each in choice_chunks for one in each["logprobs"][name]] == value
    assert len({part["id"] for part in got}) == 1


def test_one_chunk_is_one_update_of_the_engine(client: Client):
    got = chunks(client(FakeEngine(per_update=4)), max_tokens=10)
    assert len(got) == 3
    assert "usage" not in got[0]
    assert "metrics" not in got[0]


def test_usage_comes_at_the_end_or_as_it_goes(client: Client):
    got = chunks(client(), max_tokens=7, stream_options={"include_usage": True})
    assert [part["usage"] for part in got[:-1]] == [None] * 3
    assert got[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    going = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(client(), max_tokens=7, stream_options=going)
    assert [part["usage"]["completion_tokens"] for part in got] == [3, 6, 7, 7]


def test_a_stream_tells_of_rounds_where_it_is_asked_to(client: Client):
    got = chunks(client(), prompt=[5, 6, 7], max_tokens=4, stream_options={"include_rounds": True})
    texts = [model_without_weights().tokenizer.decode([token]) for token in (5, 6, 7)]
    drafted = [{"text": text, "drafted": n < 2} for n, text in enumerate(texts)]
    assert [part["rounds"] for part in got] == [
        [{"tokens": drafted, "drafted": 3, "accepted": 2, "choice": "ngram, 4"}],
        [{"tokens": drafted[:1], "drafted": 3, "accepted": 2, "choice": "ngram, 4"}],
    ]


def test_tokens_with_one_text_and_tokens_that_are_no_text_are_told_apart(client: Client):
    lm = model_without_weights()
    assert len(lm.encode("€")) > 1, "the tokenizer has no token for it"
    found = complete(client(), prompt=lm.encode("a€"), logprobs=1, max_tokens=len(lm.encode("a€")))["choices"][0]
    assert found["text"] == "a€"
    assert found["logprobs"]["tokens"][1].startswith("bytes:\\x")
    joined = "".join(text.removeprefix("bytes:").replace("\\x", "") for text in found["logprobs"]["tokens"][1:])
    assert bytes.fromhex(joined).decode() == "€"
    assert found["logprobs"]["text_offset"][:2] == [0, 1]
