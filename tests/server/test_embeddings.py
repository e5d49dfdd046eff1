"""Embeddings and scores over HTTP: forms, errors, and OpenAI's own client."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from diffusion.support import build
from server.conftest import Client, on_a_port
from server.fake import DIMENSIONS, FakeEngine
from server.test_openapi import DENOISING
from tilewright.models.tokenizer import encode
from tilewright.server.api import Api, ServerOptions
from tilewright.server.app import make_app
from tilewright.server.defaults import embedding_dimensions
from tilewright.server.embeddings import EmbeddingsAnswer, ScoresAnswer

TEXTS = ["def f(x):", "return 1", "def f(x):\n    return 1"]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine(context=64)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def http(client: Client, engine: FakeEngine) -> TestClient:
    return client(engine, started=True, embedding_dimensions=(2, 4))


def expected(engine: FakeEngine, text: str) -> np.ndarray:
    counts = np.bincount(np.asarray(encode(engine.tokenizer, text)) % DIMENSIONS, minlength=DIMENSIONS)
    return counts / np.linalg.norm(counts)


def test_texts_get_vectors_in_their_order(http: TestClient, engine: FakeEngine) -> None:
    answer = http.post("/v1/embeddings", json={"model": "demo", "input": TEXTS})
    assert answer.status_code == 200, answer.text
    found = EmbeddingsAnswer.model_validate(answer.json())
    assert [each.index for each in found.data] == [0, 1, 2]
    for each, text in zip(answer.json()["data"], TEXTS, strict=True):
        np.testing.assert_allclose(each["embedding"], expected(engine, text), rtol=1e-6)
    tokens = sum(len(encode(engine.tokenizer, text)) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (tokens, tokens, "demo")
    assert {request.pooling for request in engine.received} == {"last"}


def test_numbers_come_as_bytes_where_that_is_asked(http: TestClient) -> None:
    body = {"input": TEXTS[0]}
    (numbers,) = http.post("/v1/embeddings", json=body).json()["data"]
    (coded,) = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tolist() == numbers["embedding"]


def test_tokens_are_taken_for_texts(http: TestClient, engine: FakeEngine) -> None:
    tokens = encode(engine.tokenizer, TEXTS[0])
    for given in (tokens, [tokens]):
        (got,) = http.post("/v1/embeddings", json={"input": given}).json()["data"]
        np.testing.assert_allclose(got["embedding"], expected(engine, TEXTS[0]), rtol=1e-6)


def test_only_declared_dimensions_are_cut_to(http: TestClient, engine: FakeEngine) -> None:
    whole = expected(engine, TEXTS[2])
    for size in (2, 4, DIMENSIONS):
        (got,) = http.post("/v1/embeddings", json={"input": TEXTS[2], "dimensions": size}).json()["data"]
        np.testing.assert_allclose(got["embedding"], whole[:size] / np.linalg.norm(whole[:size]), rtol=1e-6)
    refused = http.post("/v1/embeddings", json={"input": TEXTS[2], "dimensions": 3})
    assert refused.status_code == 400
    assert "expected one of 2, 4, 8, found 3" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [["a"]]}, 400, "input"),
        ({"input": [10**9]}, 400, "input"),
        ({"input": "a " * 5000}, 400, "input"),
        ({"input": list(range(65))}, 400, "input"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": ["a"] * 257}, 400, "input"),
        ({"text_1": "a", "text_2": list(map(str, range(257)))}, 400, "text_2"),
        ({"text_1": list(map(str, range(300))), "text_2": ["a"] * 300}, 400, "text_1"),
        ({"text_1": ["a", "a " * 5000], "text_2": ["b", "c"]}, 400, "text_1"),
        ({"text_1": "a", "text_2": ["b", "a " * 5000]}, 400, "text_2"),
    ],
)
def test_what_is_wrong_is_named(http: TestClient, body: dict[str, Any], status: int, param: str) -> None:
    answer = http.post("/v1/score" if "text_1" in body else "/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "choices" not in error["message"]


@pytest.mark.parametrize("route", ["/v1/score", "/score"])
def test_scores_are_cosines(http: TestClient, engine: FakeEngine, route: str) -> None:
    one = http.post(route, json={"text_1": TEXTS[0], "text_2": TEXTS})
    assert one.status_code == 200, one.text
    found = ScoresAnswer.model_validate(one.json())
    vectors = [expected(engine, text) for text in TEXTS]
    np.testing.assert_allclose([each.score for each in found.data], [vectors[0] @ each for each in vectors], rtol=1e-6)
    assert found.data[0].score == pytest.approx(1)
    many = http.post(route, json={"text_1": TEXTS[:2], "text_2": TEXTS[1:]}).json()["data"]
    np.testing.assert_allclose([each["score"] for each in many], [vectors[0] @ vectors[1], vectors[1] @ vectors[2]], rtol=1e-6)


def test_scores_count_each_text_as_often_as_it_was_sent(http: TestClient, engine: FakeEngine) -> None:
    """Though equal ones are computed once."""
    first, second = (len(engine.encode(text)) for text in TEXTS[:2])
    before = len(engine.received)
    found = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": [TEXTS[1], TEXTS[0], TEXTS[1]]}).json()
    assert found["usage"] == {"prompt_tokens": 2 * first + 2 * second, "total_tokens": 2 * first + 2 * second}
    assert len(engine.received) - before == 2


def test_scores_need_as_many_texts(http: TestClient) -> None:
    answer = http.post("/v1/score", json={"text_1": TEXTS[:2], "text_2": TEXTS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text_2"


def test_openais_client_gets_embeddings(engine: FakeEngine) -> None:
    """OpenAI's client requests base64 and decodes it."""
    with on_a_port(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="demo", input=TEXTS)
        for each, text in zip(found.data, TEXTS, strict=True):
            np.testing.assert_allclose(each.embedding, expected(engine, text), rtol=1e-6)
        with pytest.raises(openai.BadRequestError, match="found 3"):
            client.embeddings.create(model="demo", input=TEXTS, dimensions=3)


def test_a_model_that_denoises_has_none() -> None:
    app = make_app(Api(build("tiny").engine(DENOISING), ServerOptions("demo", "0.1")))
    assert TestClient(app).post("/v1/embeddings", json={"input": "a"}).status_code == 404


def test_dimensions_are_those_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [64, 128]}')
    assert embedding_dimensions(tmp_path) == (64, 128)
    (tmp_path / "config.json").write_text("{}")
    assert embedding_dimensions(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [64, true]}')
    with pytest.raises(ValueError, match=r"config\.json: expected matryoshka_dimensions"):
        embedding_dimensions(tmp_path)
