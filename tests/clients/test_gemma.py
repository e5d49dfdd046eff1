"""OpenAI's client against a base model, Gemma 3 270M, which has no chat template.

`make gemma` fetches the file for users who accept its terms; without it this test is skipped.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import tilewright as tw
from server.conftest import Real, on_a_port
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.shapes import ShapeTable

FILE = Path(__file__).parents[2] / "build" / "gemma-3-270m-q4_k_m.gguf"
pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="needs Gemma 3 270M: `make gemma` fetches it, if you accept its terms"
)
NAME = "gemma-3-270m"
TEXT = "One, two, three, four, one, two,"
TABLE = ShapeTable(batches=(1,), capacities=(64,), chunks=(32,), widths=(4,))
NEW = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Real]:
    """A server of the model in the file's own bits, with n-grams."""
    engine = tw.load(FILE, "ngram", weights="int4").engine(EngineOptions(table=TABLE))
    engine.warm()
    engine.start()
    with on_a_port(engine, name=NAME, template=None) as made:
        yield made
    engine.stop()
    assert engine.stats().compilations == 0


def test_openai_completes_streams_and_has_log_probabilities(server: Real):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": NAME, "prompt": TEXT, "max_tokens": NEW, "temperature": 0}
    whole = client.completions.create(**body, logprobs=2)
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert text.startswith(" three, four")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == NEW
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == NEW
    assert "".join(logprobs.tokens) == text
    for token, logprob, best in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert best is not None
        assert len(best) == 2
        assert logprob == best[token] == max(best.values())
        assert sum(math.exp(value) for value in best.values()) <= 1 + 1e-4
    parts = list(client.completions.create(**body, stream=True))
    assert len(parts) > 1
    assert "".join(part.choices[0].text for part in parts) == text
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": TEXT}])
