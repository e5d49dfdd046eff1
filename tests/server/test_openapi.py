"""The OpenAPI description, and Schemathesis over it: what it allows is served, what it does not is refused, never by a 5xx."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from diffusion.support import build
from server.conftest import TEMPLATE
from server.fake import FakeEngine
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionTable
from tilewright.server.api import Api, ServerOptions
from tilewright.server.app import make_app
from tilewright.server.parse import NOT_INSTALLED

# Hypothesis blames a strategy if `random` was used while it drew, and any thread's use counts: those of Schemathesis' own.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

DENOISING = DiffusionEngineOptions(
    table=DiffusionTable(batches=(4,), positions=(256,), responses=(64,), blocks=(16,), buckets=()),
    defaults=Denoising(16, block_length=8),
)
TOGETHER = {"invalid_value", "context_length_exceeded", "previous_response_not_found"}
"""Codes of what a JSON schema cannot say: fields that do not go together, prompts too long, responses that are not kept.

It does not say either whether a server was started with grammars; this one was not.
"""


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    engine = FakeEngine(context=128, per_update=64)
    engine.start()
    yield make_app(Api(engine, ServerOptions("demo", "0.1", TEMPLATE)))
    engine.stop()


@pytest.fixture(scope="module")
def denoising() -> Any:
    """The application over a small diffusion model that is not warm: it is described, and serves nothing."""
    return make_app(Api(build("tiny").engine(DENOISING), ServerOptions("demo", "0.1", TEMPLATE)))


@pytest.fixture(scope="module")
def description(app: Any) -> Any:
    return described(app)


def described(app: Any) -> Any:
    """Loads an application's OpenAPI schema into Schemathesis."""
    config = schemathesis.Config()
    project = config.projects.default
    project.checks.positive_data_acceptance.expected_statuses = ["200", "400", "404"]
    project.checks.negative_data_rejection.expected_statuses = ["400", "404", "405", "413", "415"]
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=config)


def operations(description: Any) -> dict[str, Any]:
    """Every operation but the one that only says how things stand in text."""
    return {each.ok().label: each.ok() for each in description.get_all_operations()}


POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/tokenize",
    "/detokenize",
)
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/ping", "/load", "/ready", "/metrics", "/version", "/tokenizer_info")
RESPONSE = "/v1/responses/{name}"
OTHERS = ("POST /ping", f"GET {RESPONSE}", f"DELETE {RESPONSE}", f"POST {RESPONSE}/cancel")


def test_every_route_is_described(description: Any):
    expected = [f"POST {path}" for path in POSTS] + [f"GET {path}" for path in GETS] + list(OTHERS)
    assert sorted(operations(description)) == sorted(expected)


def test_the_description_knows_the_model(description: Any):
    schemas = description.raw_schema["components"]["schemas"]
    assert schemas["CompletionBody"]["properties"]["model"]["anyOf"][0]["enum"] == ["demo"]
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == 4095
    assert schemas["CompletionBody"]["additionalProperties"] is False


def test_every_field_of_a_request_body_is_described(description: Any, denoising: Any):
    for schemas in (each.raw_schema["components"]["schemas"] for each in (description, described(denoising))):
        for name, schema in schemas.items():
            if name.endswith("Body") and not name.endswith("ErrorBody"):
                missing = [field for field, about in schema["properties"].items() if "description" not in about]
                assert not missing, name
                assert "Attributes:" not in schema["description"]
    chat = description.raw_schema["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["temperature"]["description"] == "Sampling temperature; 0 is greedy."
    assert chat["user"]["description"] == "Accepted and ignored."


def test_the_description_of_a_diffusion_model_has_the_fields_of_its_steps(denoising: Any, description: Any):
    schemas = described(denoising).raw_schema["components"]["schemas"]
    plain = description.raw_schema["components"]["schemas"]
    for route in ("Completion", "Chat"):
        denoising_body = schemas[f"Denoising{route}Body"]
        plain_body = plain[f"{route}Body"]
        assert denoising_body["additionalProperties"] is False
        assert set(denoising_body["properties"]) - set(plain_body["properties"]) == {
            "steps",
            "block_length",
            "threshold",
            "suffix_window",
            "mode",
            "remasking",
            "tau",
            "first_alone",
            "logits_eos_inf",
            "confidence_eos_eot_inf",
        }
        assert denoising_body["properties"]["mode"]["anyOf"][0]["enum"] == ["dense", "prefix", "dual", "sparse"]
        assert denoising_body["properties"]["threshold"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        assert denoising_body["properties"]["top_k"] == plain_body["properties"]["top_k"]
        assert f"{route}Body" not in schemas
    assert schemas["DenoisingCompletionBody"]["properties"]["prompt_logprobs"]["type"] == "null"


def check_all(description: Any, label: str, mode: GenerationMode, examples: int) -> list[int]:
    """Calls one operation with that many examples; every answer must be as described. Returns the statuses."""
    operation = operations(description)[label]
    statuses = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def called(case: Any) -> None:
        response = case.call_and_validate()
        statuses.append(response.status_code)
        assert response.status_code < 500
        assert response.headers["x-request-id"]
        if mode is GenerationMode.POSITIVE and response.status_code == 400:
            error = response.json()["error"]
            assert error["code"] in TOGETHER or NOT_INSTALLED in error["message"], response.text

    called()
    return statuses


def positive_and_negative(description: Any, path: str, examples: int) -> None:
    served = check_all(description, f"POST {path}", GenerationMode.POSITIVE, examples)
    refused = check_all(description, f"POST {path}", GenerationMode.NEGATIVE, examples)
    assert 200 in served, f"nothing that the schema allows is served: {served}"
    assert set(refused) <= {400, 404, 405, 413, 415}, refused


@pytest.mark.parametrize("path", POSTS)
def test_what_the_schema_says_holds(description: Any, path: str):
    # The bodies of the other APIs are deep, and dear to make; what becomes of them is a chat.
    positive_and_negative(description, path, 4 if path.startswith(("/v1/messages", "/v1/responses")) else 25)


@pytest.mark.parametrize("path", GETS)
def test_what_the_schema_says_of_reading_holds(description: Any, path: str):
    statuses = check_all(description, f"GET {path}", GenerationMode.POSITIVE, 5)
    assert set(statuses) <= ({200} if "{" not in path else {200, 404})


@pytest.mark.parametrize("label", OTHERS)
def test_what_the_schema_says_of_other_methods_holds(description: Any, label: str):
    assert set(check_all(description, label, GenerationMode.POSITIVE, 5)) <= ({200} if "{" not in label else {404})


@pytest.mark.slow(seconds=16)
@pytest.mark.parametrize("path", POSTS)
def test_what_the_schema_says_holds_at_length(description: Any, path: str):
    positive_and_negative(description, path, 300)


@pytest.fixture(scope="module")
def denoiser() -> Iterator[Any]:
    engine = build("tiny").engine(DENOISING)
    engine.warm()
    engine.start()
    yield described(make_app(Api(engine, ServerOptions("demo", "0.1", TEMPLATE))))
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_schema_says_of_a_diffusion_model_holds(denoiser: Any, path: str):
    positive_and_negative(denoiser, path, 100)
