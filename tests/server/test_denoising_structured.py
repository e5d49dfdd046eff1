"""Structured output of a diffusion model, over HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from reference.diffusion_folder import write_model
from reference.diffusion_model_numpy import random_model
from reference.self_speculation_numpy import CHARACTERS, write_characters
from server.conftest import on_a_port
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionTable
from tilewright.grammar.grammar import Grammar
from tilewright.llm.diffusion_model import DiffusionModel, load
from tilewright.server.structured import Constrain

TABLE = DiffusionTable(batches=(4,), positions=(160,), responses=(64,), blocks=(16,), buckets=(12,))
DEFAULTS = Denoising(64, block_length=16, threshold=0.3)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
PAIR = r'\{"a":(1|23),"b":(true|false)\}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    folder = tmp_path_factory.mktemp("characters")
    vocab = len(CHARACTERS)
    write_model(folder, random_model(3, "dream", vocab, hidden=32, layers=1), vocab - 1, vocab - 2)
    write_characters(folder)
    return load(folder, table=TABLE)


@pytest.fixture(scope="module")
def text(model: DiffusionModel) -> str:
    """The model's text for a grammar. Stop tokens do not end it, since the grammar ends the text."""
    request = Denoising(64, block_length=16, stop_token_ids=tuple(model.encode('"')))
    (found,) = model.generate("abc", request, grammar=Grammar.regex(PAIR))
    assert found.finish_reason == "eos"
    assert found.passes == len(found.tokens) + 1
    return found.text


@pytest.fixture(scope="module")
def http(model: DiffusionModel, text: str) -> Iterator[httpx2.Client]:
    engine = model.engine(DiffusionEngineOptions(table=TABLE, modes=("dense",), defaults=DEFAULTS))
    engine.warm()
    engine.start()
    with on_a_port(engine, constrain=Constrain(model, 10.0)) as server, httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0


def completed(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_expression_holds_as_by_the_model_itself(http: httpx2.Client, text: str, model: DiffusionModel):
    stops = model.encode('"')
    found = completed(http, prompt="abc", structured_outputs={"regex": PAIR}, stop_token_ids=stops)
    assert found["choices"][0]["text"] == text
    assert set(json.loads(text)) == {"a", "b"}
    assert found["metrics"]["structured_outputs"] == {"masks": "host"}
    assert found["usage"]["denoising_passes"] == found["usage"]["completion_tokens"]
    assert found["usage"]["tokens_per_pass"] == 1


def test_a_schema_holds_with_a_seed_and_log_probabilities(http: httpx2.Client):
    """The same bytes alone and among other requests; streamed token by token."""
    body = {"prompt": "abc", "temperature": 1.0, "seed": 3, "logprobs": 2, "response_format": FORMAT}
    (alone,) = completed(http, **body)["choices"]
    assert set(json.loads(alone["text"])) == {"a", "b"}
    assert len(alone["logprobs"]["tokens"]) >= len(alone["text"])
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(completed, http, prompt="x", max_tokens=20, seed=n) for n in range(8)]
        among = [pool.submit(completed, http, **body) for _ in range(2)]
        assert [each.result()["choices"] for each in among] == [[alone]] * 2
        assert all(each.result()["choices"] for each in others)
    events = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    texts = [part["choices"][0]["text"] for part in parts if part["choices"]]
    assert "".join(texts) == alone["text"]
    assert max(map(len, texts)) == 1


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens", "logits_eos_inf"])
def test_fields_that_keep_a_text_from_its_end_are_refused(http: httpx2.Client, field: str):
    value = 1 if field == "min_tokens" else True
    answer = http.post("/v1/completions", json={"prompt": "abc", "response_format": FORMAT, field: value})
    assert answer.status_code == 400
    assert f"expected no {field} with a constraint" in answer.json()["error"]["message"]
