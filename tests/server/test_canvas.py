"""The server over a model that refines canvases: what is served is what the model gives alone, and among others."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from reference.canvas_numpy import Options, generate, random_model
from reference.self_speculation_numpy import as_folder
from server.conftest import on_a_port
from tilewright.llm.language_model import load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.answers import Completion

TABLE = ShapeTable(batches=(4,), capacities=(96,), chunks=(16,))
PROMPT = [3, 17, 8, 25, 11, 2, 9]
REQUESTS: list[tuple[dict[str, Any], Options]] = [
    ({}, Options(6)),
    (
        {"steps": 9, "entropy_bound": 1, "t_max": 0.3, "t_min": 0.1, "stability_threshold": 0, "confidence_threshold": 0.3},
        Options(9, 1.0, 0.3, 0.1, 0, 0.3),
    ),
]


@pytest.fixture(scope="module")
def wanted() -> list[tuple[list[int], list[int]]]:
    """Tokens and passes of the published loop for `REQUESTS`, made before the server runs, since it compiles."""
    return [generate(random_model(1), PROMPT, 18, options, 3) for _, options in REQUESTS]


@pytest.fixture(scope="module")
def http(wanted: list[tuple[list[int], list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = as_folder(tmp_path_factory.mktemp("canvas"), random_model(1))  # type: ignore[arg-type]
    (folder / "generation_config.json").write_text(json.dumps({"max_denoising_steps": 6}))
    engine = load(folder, table=TABLE).engine(EngineOptions(TABLE, page_size=16, dispatch_s=0.002))
    engine.warm()
    engine.start()
    with on_a_port(engine) as server, httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0


def completed(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 18, "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json())
    return answer.json()


@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=["defaults", "all"])
def test_answers_are_those_of_the_published_loop(http: httpx2.Client, wanted: list[tuple[list[int], list[int]]], number: int):
    """Whole and streamed, with the number of passes and of tokens per pass."""
    fields, _ = REQUESTS[number]
    tokens, passes = wanted[number]
    text = "".join(f" t{token}" for token in tokens)
    answer = completed(http, **fields)
    assert answer["choices"][0]["text"] == text
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["denoising_passes"]) == (18, sum(passes))
    assert usage["tokens_per_pass"] == pytest.approx(18 / sum(passes))
    events = http.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 18, "seed": 3, "stream": True, **fields}
    ).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == text


def test_a_request_gets_the_same_bytes_alone_and_among_others(http: httpx2.Client):
    alone = completed(http)["choices"]
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(completed, http, prompt=[n % 30 + 1, 4, n % 7], max_tokens=3 + n % 20, seed=n, steps=n % 5 + 1)
            for n in range(20)
        ]
        among = [pool.submit(completed, http) for _ in range(3)]
        assert [each.result()["choices"] for each in among] == [alone] * 3
        assert all(each.result()["choices"] for each in others)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 0.7}, "is not supported for a model that refines canvases, whose temperatures are t_max and t_min"),
        ({"top_p": 0.9}, "is not supported for a model that refines canvases"),
        ({"presence_penalty": 1}, "is not supported for a model that refines canvases"),
        ({"logprobs": 2}, "expected no logprobs, which is not supported for a model that refines canvases"),
        ({"strategy": "sequential"}, "strategy"),
        ({"t_min": 2}, "expected t_min from 0 to below t_max"),
    ],
    ids=str,
)
def test_fields_without_a_meaning_are_refused_by_name(http: httpx2.Client, fields: dict[str, Any], said: str):
    answer = http.post("/v1/completions", json={"prompt": PROMPT, **fields})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_defaults_name_no_temperature(http: httpx2.Client):
    assert "sampling_defaults" not in http.get("/v1/models").json()["data"][0]
