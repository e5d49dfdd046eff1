"""A real server that is ready with its first programs answers as it does with all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.conftest import on_a_port
from tilewright.llm.language_model import load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 2), capacities=(256,), chunks=(16, 64), widths=(4,))
PROMPTS = ("def add(first, second):\n    return first + second\n\ndef", "import os\n", "x = [1, 2,")
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5})
WAIT_S = 120.0


def test_answers_from_the_first_moment_on_are_those_of_plain_decoding(monkeypatch: pytest.MonkeyPatch):
    lm = load("demo", "ngram", block_size=4, table=TABLE, dtype="float32")
    asks = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    wanted = [lm.generate(prompt, Sampling(24, **sampling), speculative=False)[0].text for prompt, sampling in asks]
    engine = lm.engine(EngineOptions(table=TABLE))
    programs = engine.decoding.programs
    first = engine.decoding.first_keys()
    compile = programs.compile
    gate = threading.Event()

    def gated(key: Any) -> Any:
        assert key in first or gate.wait(WAIT_S)
        return compile(key)

    monkeypatch.setattr(programs, "compile", gated)
    engine.warm(wait_for_programs=False)
    engine.start()
    compiling = engine.compiling
    assert compiling is not None
    with (
        on_a_port(engine) as server,
        httpx2.Client(base_url=server.url, timeout=WAIT_S) as http,
        ThreadPoolExecutor() as threads,
    ):

        def answer(ask: tuple[str, dict[str, Any]]) -> str:
            prompt, sampling = ask
            found = http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 24, **sampling})
            return found.json()["choices"][0]["text"]

        def counts() -> tuple[float, float]:
            samples = {
                sample.name: sample.value
                for family in text_string_to_metric_families(http.get("/metrics").text)
                for sample in family.samples
            }
            health = http.get("/health").json()
            found = (health["programs_ready"], health["programs_declared"])
            assert found == (samples["tilewright_programs_ready"], samples["tilewright_programs_declared"])
            return found

        assert http.get("/ready").json() == {"status": "ready"}
        declared = len(engine.decoding.program_keys())
        assert list(threads.map(answer, asks)) == wanted
        assert counts() == (len(first), declared)
        gate.set()
        compiling.thread.join(WAIT_S)
        assert list(threads.map(answer, asks)) == wanted
        assert counts() == (declared, declared)
    assert engine.stop(WAIT_S)
    assert engine.stats().compilations == 0
