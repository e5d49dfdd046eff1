"""Structured output of a model whose blocks are denoised, over HTTP."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from reference.block_diffusion_numpy import random_model
from reference.self_speculation_numpy import CHARACTERS, with_characters
from server.conftest import on_a_port
from tilewright.llm.language_model import load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.structured import Constrain

TABLE = ShapeTable(batches=(1, 4), capacities=(128,), chunks=(16,))


def completed(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_schema_holds_with_a_seed_and_log_probabilities(tmp_path: Path):
    """The same bytes alone and among other requests; streamed token by token."""
    vocab = len(CHARACTERS)
    model = random_model(3, vocab_size=vocab, eos=vocab - 2)
    lm = load(with_characters(tmp_path, model), table=TABLE)
    engine = lm.engine(EngineOptions(TABLE, page_size=16, constraints=True))
    engine.warm()
    engine.start()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 23]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    body = {
        "prompt": "abc",
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}},
    }
    with on_a_port(engine, constrain=Constrain(lm, 10.0)) as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        (alone,) = completed(http, **body)["choices"]
        found = json.loads(alone["text"])
        assert set(found) == {"a", "b"}
        assert found["a"] in (1, 23)
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
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0
