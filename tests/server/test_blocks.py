"""The server over a model whose blocks are denoised: what is served is what the model gives alone, and among others."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from reference.block_diffusion_numpy import random_model
from reference.self_speculation_numpy import as_folder
from server.conftest import Real, on_a_port
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.pace import FIRST_ROUNDS
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.answers import Completion

TABLE = ShapeTable(batches=(1, 4), capacities=(128,), chunks=(16,))
PROMPT = [3, 17, 8, 25, 11, 2, 9]
REQUESTS: list[tuple[dict[str, Any], Sampling, BlockDenoising]] = [
    ({}, Sampling(18), BlockDenoising()),
    ({"threshold": 0.3}, Sampling(18), BlockDenoising(threshold=0.3)),
    ({"strategy": "low_confidence_static", "steps": 2}, Sampling(18), BlockDenoising("low_confidence_static", steps=2)),
    ({"strategy": "sequential"}, Sampling(18), BlockDenoising("sequential")),
    ({"small_block_size": 2}, Sampling(18), BlockDenoising(small_block_size=2)),
    (
        {"strategy": "joint_threshold", "threshold": 0.3, "edit_threshold": 0.0, "max_post_steps": 3},
        Sampling(18),
        BlockDenoising("joint_threshold", 0.3, edit_threshold=0.0, max_post_steps=3),
    ),
    ({"temperature": 0.9, "top_k": 7, "seed": 3}, Sampling(18, 0.9, top_k=7, seed=3), BlockDenoising()),
    (
        {"presence_penalty": 1.5, "logit_bias": {"5": 3}},
        Sampling(18, presence_penalty=1.5, logit_bias=((5, 3.0),)),
        BlockDenoising(),
    ),
]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Reference of the server, warmed up because nothing compiles beside a server."""
    made = load(as_folder(tmp_path_factory.mktemp("blocks"), random_model(3)), table=TABLE)  # type: ignore[arg-type]
    made.warm()
    return made


@pytest.fixture(scope="module")
def real(lm: LanguageModel) -> Iterator[Real]:
    engine = lm.engine(EngineOptions(TABLE, page_size=16, dispatch_s=0.002))
    engine.warm()
    engine.start()
    with on_a_port(engine) as server:
        yield server
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0


@pytest.fixture(scope="module")
def http(real: Real) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real.url, timeout=60) as made:
        yield made


def completed(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 18, **body})
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json())
    return answer.json()


@pytest.mark.parametrize(
    ("fields", "sampling", "options"), REQUESTS, ids=[",".join(fields) or "nothing" for fields, *_ in REQUESTS]
)
def test_answers_are_those_of_the_model(
    http: httpx2.Client, lm: LanguageModel, fields: dict[str, Any], sampling: Sampling, options: BlockDenoising
):
    """Whole and streamed, with the number of passes and of tokens per pass."""
    fields = {"temperature": 0, **fields}
    want = lm.generate([PROMPT], sampling, denoising=options)[0]
    answer = completed(http, **fields)
    assert answer["choices"][0]["text"] == want.text
    assert answer["usage"]["completion_tokens"] == 18
    steps = answer["metrics"]["denoising"]["steps"]
    assert (answer["usage"]["denoising_passes"], answer["usage"]["tokens_per_pass"]) == (steps, pytest.approx(18 / steps))
    assert want.passes == steps
    assert answer["metrics"]["denoising"]["tokens_per_step"] == pytest.approx(18 / steps)
    events = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 18, "stream": True, **fields}).text.split(
        "\n\n"
    )
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == want.text
    chunks = sum(bool(part["choices"] and part["choices"][0]["text"]) for part in parts)
    assert chunks > 1 or steps <= 2 * FIRST_ROUNDS, "expected several chunks, unless one dispatch may hold all passes"


def test_a_request_gets_the_same_bytes_alone_and_among_others(http: httpx2.Client):
    """With a seed, log-probabilities and a stop string, beside 40 others that run and end meanwhile."""
    body = {"temperature": 1.0, "seed": 11, "logprobs": 3, "threshold": 0.4, "stop": "t7 t7 t7"}

    def kept(answer: dict[str, Any]) -> str:
        return json.dumps([answer["choices"], answer["metrics"]])

    alone = completed(http, **body)
    assert len(alone["choices"][0]["logprobs"]["tokens"]) > 1
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(completed, http, prompt=[n % 30 + 1, 4, n % 7], max_tokens=3 + n % 20, seed=n, temperature=0.8)
            for n in range(40)
        ]
        among = [pool.submit(completed, http, **body) for _ in range(3)]
        assert [kept(each.result()) for each in among] == [kept(alone)] * 3
        assert all(each.result()["choices"] for each in others)


def test_later_requests_use_the_pages_of_finished_blocks(http: httpx2.Client):
    prompt = [*PROMPT * 6]
    first, again = (completed(http, prompt=prompt, seed=1) for _ in range(2))
    assert first["choices"] == again["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"strategy": "best"}, "strategy"),
        ({"threshold": 1.5}, "threshold"),
        ({"steps": 5}, "steps"),
        ({"small_block_size": 3}, "small_block_size"),
        ({"edit_threshold": 1.5}, "edit_threshold"),
        ({"max_post_steps": -1}, "max_post_steps"),
        ({"edit_threshold": 0.5}, "edit_threshold"),
        ({"strategy": "sequential", "threshold": 0.5}, "threshold"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_fields_that_are_not_supported_are_named(http: httpx2.Client, fields: dict[str, Any], name: str):
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 18, **fields})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
