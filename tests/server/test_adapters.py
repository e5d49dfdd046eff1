"""Low-rank adapters as models of their own: listed, asked for in every API, and named in answers."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine, model_without_weights
from tilewright.runtime.model import Model

CHAT = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 3}
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "def f", "max_tokens": 3}, "model"),
    "/v1/chat/completions": (CHAT, "model"),
    "/v1/messages": (CHAT, "model"),
    "/v1/responses": ({"input": "def f", "max_output_tokens": 3}, "model"),
}


def with_adapters(*names: str) -> FakeEngine:
    engine = FakeEngine()
    made = object.__new__(Model)
    vars(made).update({**vars(model_without_weights()), "adapters": names})
    engine.decoding.model = made
    return engine


@pytest.fixture
def adapted(client: Client) -> tuple[TestClient, FakeEngine]:
    engine = with_adapters("tuned", "other")
    return client(engine), engine


@pytest.mark.parametrize("route", BODIES)
def test_an_adapter_is_asked_for_by_its_name(adapted: tuple[TestClient, FakeEngine], route: str) -> None:
    http, engine = adapted
    body, field = BODIES[route]
    for name in ("tuned", "demo"):
        answer = http.post(route, json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()[field] == name
    assert [request.lora for request in engine.received] == ["tuned", None]
    unknown = http.post(route, json={**body, "model": "tune"})
    assert unknown.status_code == 404
    assert "'demo', 'tuned', 'other'" in unknown.text


def test_adapters_are_listed_with_their_parent(adapted: tuple[TestClient, FakeEngine]) -> None:
    http, _ = adapted
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("demo", None), ("tuned", "demo"), ("other", "demo")]
    assert http.get("/v1/models/other").json()["parent"] == "demo"
    assert http.get("/v1/models/none").status_code == 404
    described = http.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert described["anyOf"][0]["enum"] == ["demo", "tuned", "other"]


def test_an_adapter_has_another_name_than_the_model(client: Client) -> None:
    with pytest.raises(ValueError, match="adapter names other than the model's, found 'demo'"):
        client(with_adapters("demo"))
