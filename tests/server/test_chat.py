"""`/v1/chat/completions`, over an engine that repeats the prompt's tokens."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from server.conftest import TEMPLATE, Client
from server.fake import FakeEngine, model_without_weights
from server.test_completions import chunks
from tilewright.models.chat import ChatTemplate
from tilewright.server.answers import Chat, ChatChunk

HELLO = [{"role": "user", "content": "hello there"}]
ROUTE = "/v1/chat/completions"


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(ROUTE, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    Chat.model_validate(answer.json())
    return answer.json()


def prompt_of(engine: FakeEngine) -> str:
    return engine.decoding.model.tokenizer.decode(list(engine.received[-1].prompt))


def test_an_answer_is_a_message(client: Client):
    found = chat(client(), max_tokens=4)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert "hello there\n".startswith(choice["message"]["content"])
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"]["completion_tokens"] == 4
    assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_an_answer_may_take_what_is_left_of_the_context(client: Client):
    engine = FakeEngine(context=64)
    found = chat(client(engine))
    assert found["usage"]["total_tokens"] == 64
    assert chat(client(engine), max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_conversation_goes_through_the_template(client: Client):
    engine = FakeEngine()
    said = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ada"},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    chat(client(engine), messages=said)
    assert prompt_of(engine) == "be short\none\ntwo\nthree\n"


def test_a_template_sees_roles_and_whether_to_think(client: Client):
    source = "{% for m in messages %}{{ m.role }}={{ m.name }} {% endfor %}{{ enable_thinking }} {{ add_generation_prompt }}"
    engine = FakeEngine()
    with_roles = client(engine, template=ChatTemplate.compiled(source, "a test's"))
    said = [{"role": "developer", "content": ""}, {"role": "user", "content": "", "name": "Ada"}]
    chat(with_roles, messages=said, chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(engine) == "system= user=Ada True True"
    chat(with_roles, messages=said)
    assert prompt_of(engine) == "system= user=Ada  True", "what is not said is not defined"


def test_a_template_is_told_any_value(client: Client):
    engine = FakeEngine()
    app = client(
        engine, template=ChatTemplate.compiled("{{ effort }} {{ enable_thinking is defined }} {{ flags[0].on }}", "a test's")
    )
    values = {"effort": "high", "flags": [{"on": True}]}
    chat(app, chat_template_kwargs=values)
    assert prompt_of(engine) == "high False True"
    found = app.post("/tokenize", json={"messages": HELLO, "chat_template_kwargs": values}).json()
    assert found["tokens"] == list(engine.received[-1].prompt)


def test_an_answer_may_go_on_with_the_last_message(client: Client):
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    engine = FakeEngine()
    app = client(engine, template=ChatTemplate.compiled(source, "a test's"))
    said = [*HELLO, {"role": "assistant", "content": "I"}]
    for fields, prompt in (
        ({}, "<hello there><I>a:"),
        ({"add_generation_prompt": False}, "<hello there><I>"),
        ({"continue_final_message": True}, "<hello there><I"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<hello there><I"),
    ):
        chat(app, messages=said, **fields)
        assert prompt_of(engine) == prompt
        found = app.post("/tokenize", json={"messages": said, **fields}).json()
        assert found["tokens"] == list(engine.received[-1].prompt)


def test_messages_may_have_what_answers_have(client: Client):
    engine = FakeEngine()
    part = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    said = [
        {"role": "user", "content": [part], "id": "msg_1"},
        {"role": "assistant", "content": None, "tool_calls": None, "id": "msg_2", "refusal": None},
        {"role": "assistant"},
        {"role": "user", "content": "two"},
    ]
    chat(client(engine), messages=said)
    assert prompt_of(engine) == "one\n\n\ntwo\n"


def test_thoughts_that_come_back_are_shown_to_the_template(client: Client):
    engine = FakeEngine()
    app = client(
        engine, template=ChatTemplate.compiled("{% for m in messages %}{{ m.reasoning_content }}|{% endfor %}", "a test's")
    )
    chat(app, messages=[*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "hm"}])
    assert prompt_of(engine) == "|hm|"


def test_ids_and_prompt_logprobs_come_with_the_answer(client: Client):
    engine = FakeEngine()
    found = chat(client(engine), max_tokens=4, return_token_ids=True, prompt_logprobs=1, n=2)
    prompt = list(engine.received[-1].prompt)
    assert found["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in found["choices"]] == [prompt[:4]] * 2
    assert [choice["logprobs"] for choice in found["choices"]] == [None] * 2
    assert [None if place is None else list(place) for place in found["prompt_logprobs"]] == [
        None,
        *([str(t)] for t in prompt[1:]),
    ]
    streamed = chunks(client(), ROUTE, messages=HELLO, max_tokens=4, return_token_ids=True)
    assert [part.get("prompt_token_ids") for part in streamed] == [prompt, *[None] * (len(streamed) - 1)]
    assert [token for part in streamed for token in part["choices"][0]["token_ids"]] == prompt[:4]


def test_the_role_comes_with_the_first_token_and_one_chunk_ends_each_choice(client: Client):
    got = chunks(client(), ROUTE, messages=HELLO, max_tokens=8, n=2)
    assert [ChatChunk.model_validate(part).object for part in got] == ["chat.completion.chunk"] * len(got)
    for index in (0, 1):
        choice_chunks = [part["choices"][0] for part in got if part["choices"][0]["index"] == index]
        assert [("role" in each["delta"]) for each in choice_chunks] == [True] + [False] * (len(choice_chunks) - 1)
        assert choice_chunks[0]["delta"]["content"]
        assert [each["finish_reason"] for each in choice_chunks] == [None] * (len(choice_chunks) - 1) + ["length"]
        whole = chat(client(), max_tokens=8)["choices"][0]["message"]["content"]
        assert "".join(each["delta"].get("content", "") for each in choice_chunks) == whole


def test_an_end_without_tokens_is_a_chunk_without_content(client: Client):
    """The engine may find out after an update that this was the last one."""
    (*_, last) = chunks(client(FakeEngine(ends=("length", 2))), ROUTE, messages=HELLO, max_tokens=50)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_logprobs_have_bytes_and_alternatives(client: Client):
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    entries = chat(client(), **body)["choices"][0]["logprobs"]["content"]
    lm = model_without_weights()
    tokens = lm.encode("hello there\n")[:3]
    assert [entry["token"] for entry in entries] == [lm.tokenizer.decode([token]) for token in tokens]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == -0.5
        assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.5, -1.5]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = chunks(client(), ROUTE, messages=HELLO, **body)
    assert [one for part in streamed for one in part["choices"][0]["logprobs"]["content"]] == entries
    (bare, *_) = chat(client(), logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert bare["top_logprobs"] == []


def test_a_model_without_a_template_says_so(client: Client):
    answer = client(template=None).post(ROUTE, json={"messages": HELLO})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_chat_template"


def test_a_template_that_refuses_is_quoted_and_one_that_fails_is_not(client: Client):
    refusing = ChatTemplate.compiled("{{ raise_exception('roles must alternate') }}", "/a/place/of/the/server")
    failing = ChatTemplate.compiled("{{ messages[0].content + 1 }}", "/a/place/of/the/server")
    for template, said in ((refusing, "conversation: roles must alternate"), (failing, "refuses this conversation")):
        answer = client(template=template).post(ROUTE, json={"messages": HELLO})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith(said)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused(client: Client, kind: str):
    answer = client().post(ROUTE, json={"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]})
    assert answer.status_code == 400
    assert "not supported" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_the_shared_template_refuses_and_renders():
    assert TEMPLATE.render([{"role": "user", "content": "x"}]) == "x\n"
    with pytest.raises(ValueError, match="no"):
        TEMPLATE.render([{"role": "nobody", "content": "x"}])
