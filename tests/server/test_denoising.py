"""The server over a diffusion model: what is served is what the model gives alone, and what cannot be asked is said by name."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from diffusion.denoising import model_of
from server.conftest import Real, on_a_port
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import MODES, Denoising, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import Denoised, DiffusionModel
from tilewright.models.tokenizer import decode_after
from tilewright.server.answers import Chat, Completion

TABLE = DiffusionTable(batches=(1, 3), positions=(48,), responses=(24,), blocks=(12,), buckets=(12,))
DEFAULTS = Denoising(12, block_length=4, mode="sparse", threshold=0.2, saliency=Saliency(0.9, full_steps=1, every=3))
OPTIONS = DiffusionEngineOptions(table=TABLE, modes=("dense", "dual", "sparse"), defaults=DEFAULTS)
PROMPTS = ([3, 17, 8, 25, 11], [2, 5], [30, 1, 7, 7, 9, 4])
ROUTES = {"/v1/completions": {"prompt": [1, 2]}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "t1 t2"}]}}


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    """Reference of the server, warmed up because nothing compiles beside a server."""
    made = model_of("dream", table=replace(TABLE, batches=(1,)))
    made.warm(MODES)
    return made


@pytest.fixture(scope="module")
def real(model: DiffusionModel) -> Iterator[Real]:
    """Dispatches have two steps each."""
    engine = model.engine(OPTIONS)
    engine.warm()
    engine.decoding.pace.most = lambda seconds, hurry: 2  # type: ignore[method-assign]
    engine.start()
    with on_a_port(engine) as server:
        yield server
    assert engine.stop(20.0)
    stats = engine.stats()
    assert (stats.compilations, stats.running, stats.waiting) == (0, 0, 0)


@pytest.fixture(scope="module")
def http(real: Real) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real.url, timeout=60) as made:
        yield made


def complete(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    Completion.model_validate(answer.json())
    return answer.json()


def chunks(http: httpx2.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = http.post(route, json={**body, "stream": True}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def words(prompt: list[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


def check_answer(answer: dict[str, Any], text: str, want: Denoised, prompt: list[int]) -> None:
    """The model's own text, end and steps; the end of the sequence counts as a token."""
    ended = want.finish_reason == "eos"
    count = len(want.tokens) + ended
    assert text == want.text
    assert answer["choices"][0]["finish_reason"] == ("stop" if ended else "length")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    usage |= {"denoising_passes": want.passes, "tokens_per_pass": pytest.approx(count / want.passes)}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    details = {"steps": want.steps, "tokens_per_step": pytest.approx(count / want.steps)}
    assert answer["metrics"] == {"speculative_decoding": None, "denoising": details}


REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"steps": 6}, {"steps": 6, "threshold": None}),
    ({"max_tokens": 24, "block_length": 8}, {"new_tokens": 24, "block_length": 8}),
    ({"threshold": 0.6}, {"threshold": 0.6}),
    ({"mode": "dense"}, {"mode": "dense"}),
    ({"suffix_window": 0}, {"suffix_window": 0}),
    ({"mode": "dual", "threshold": 1}, {"mode": "dual", "threshold": 1.0}),
    ({"tau": 0.01, "steps": 12.0}, {"saliency": replace(DEFAULTS.saliency, tau=0.01), "steps": 12, "threshold": None}),
    ({"remasking": "random", "steps": 12, "seed": 5}, {"remasking": "random", "steps": 12, "threshold": None, "seed": 5}),
    ({"remasking": "entropy", "steps": 12}, {"remasking": "entropy", "steps": 12, "threshold": None}),
    ({"temperature": 0.9, "top_p": 0.8, "seed": 3}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}),
    ({"ignore_eos": True, "max_tokens": 24}, {"ignore_eos": True, "new_tokens": 24}),
    ({"mode": "dual", "first_alone": True}, {"mode": "dual", "first_alone": True}),
    (
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4, "steps": 12},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4, "steps": 12, "threshold": None},
    ),
    ({"logit_bias": {"5": 6, "9": -100}}, {"logit_bias": ((5, 6.0), (9, -100.0))}),
    (
        {"temperature": 1.2, "top_k": 4, "min_p": 0.1, "min_tokens": 9, "seed": 3},
        {"temperature": 1.2, "top_k": 4, "min_p": 0.1, "min_tokens": 9, "seed": 3},
    ),
    ({"logits_eos_inf": True}, {"logits_eos_inf": True}),
]


@pytest.mark.parametrize(("fields", "changes"), REQUESTS, ids=[",".join(fields) or "nothing" for fields, _ in REQUESTS])
def test_what_is_served_is_what_the_model_gives_alone(
    http: httpx2.Client, model: DiffusionModel, fields: dict[str, Any], changes: dict[str, Any]
):
    """Compares both routes, whole and streamed, with the server's defaults and with fields of the request."""
    found = []
    for prompt in PROMPTS:
        (want,) = model.generate([prompt], replace(DEFAULTS, **changes))
        found.append((want.tokens, want.steps))
        answer = complete(http, prompt=prompt, **fields)
        check_answer(answer, answer["choices"][0]["text"], want, prompt)
        said = {"messages": [{"role": "user", "content": words(prompt)}], **fields}
        answer = http.post("/v1/chat/completions", json=said).json()
        Chat.model_validate(answer)
        check_answer(answer, answer["choices"][0]["message"]["content"], want, prompt)
        parts = chunks(http, "/v1/chat/completions", said)
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == want.text
    plainly = [(each.tokens, each.steps) for each in model.generate(list(PROMPTS), DEFAULTS)]
    assert (found == plainly) == (not fields)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 10])
def test_a_response_of_any_length_is_cut_from_whole_blocks(http: httpx2.Client, model: DiffusionModel, max_tokens: int):
    """Of 4 tokens each; what is returned counts, and its end is its length, even where the rest of the block has one."""
    blocks = -(-max_tokens // 4)
    for prompt in PROMPTS:
        (whole,) = model.generate([prompt], replace(DEFAULTS, new_tokens=4 * blocks))
        cut = len(whole.tokens) >= max_tokens
        kept = whole.tokens[:max_tokens]
        reason, count = (
            ("length", max_tokens) if cut else ("stop" if whole.finish_reason == "eos" else "length", len(whole.tokens) + 1)
        )
        fields = {"max_tokens": max_tokens}
        answer = complete(http, prompt=prompt, **fields)
        assert answer["choices"][0]["text"] == decode_after(model.tokenizer, prompt, kept)
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == count
        said = {"messages": [{"role": "user", "content": words(prompt)}], "max_completion_tokens": max_tokens}
        parts = chunks(http, "/v1/chat/completions", {**said, "stream_options": {"include_usage": True}})
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1]) == decode_after(
            model.tokenizer, prompt, kept
        )
        assert (parts[-2]["choices"][0]["finish_reason"], parts[-1]["usage"]["completion_tokens"]) == (reason, count)


def test_a_stream_has_blocks_as_they_finish(http: httpx2.Client, model: DiffusionModel):
    """Two steps of a dispatch commit half a block; each chunk but the last of all has a whole one."""
    fields = {
        "prompt": PROMPTS[0],
        "steps": 12,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "include_rounds": True},
    }
    (want,) = model.generate([PROMPTS[0]], replace(DEFAULTS, threshold=None, steps=12, ignore_eos=True))
    *parts, last = chunks(http, "/v1/completions", fields)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "length"]
    assert "".join(part["choices"][0]["text"] for part in parts) == want.text
    for number, part in enumerate(parts):
        (shown,) = part["rounds"]
        assert [token["text"].strip() for token in shown["tokens"]] == [f"t{token}" for token in want.tokens[4 * number :][:4]]
        assert (shown["choice"], shown["drafted"], shown["accepted"]) == ("4 steps", 0, 0)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    assert (last["usage"]["denoising_passes"], last["usage"]["tokens_per_pass"]) == (12, 1.0)
    assert last["metrics"]["denoising"] == {"steps": 12, "tokens_per_step": 1.0}


def test_rows_in_different_phases_share_steps(http: httpx2.Client, model: DiffusionModel, real: Real):
    """More of them than slots, of all modes and lengths, at once."""
    ways = [changes for _, changes in REQUESTS] * 2
    wanted = [model.generate([PROMPTS[n % 3]], replace(DEFAULTS, **changes))[0] for n, changes in enumerate(ways)]
    before = real.engine.stats()

    def ask(n: int) -> str:
        return complete(http, prompt=PROMPTS[n % 3], **REQUESTS[n % len(REQUESTS)][0])["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(len(ways)))) == [want.text for want in wanted]
    after = real.engine.stats()
    assert after.row_rounds - before.row_rounds == sum(want.steps for want in wanted)
    together = complete(http, prompt=[*PROMPTS, *PROMPTS], mode="dense")
    alone = [each.text for each in model.generate(list(PROMPTS), replace(DEFAULTS, mode="dense"))]
    assert [choice["text"] for choice in together["choices"]] == alone * 2


def test_each_choice_has_a_seed_of_its_own(http: httpx2.Client, model: DiffusionModel):
    last = 2**63 - 1
    fields = {"prompt": PROMPTS[1], "n": 3, "seed": last, "temperature": 1.0}
    requests = [replace(DEFAULTS, temperature=1.0, seed=seed) for seed in (last, -(2**63), 1 - 2**63)]
    want = [model.generate([PROMPTS[1]], each)[0].text for each in requests]
    found = complete(http, **fields)
    assert [choice["text"] for choice in found["choices"]] == want
    assert len(set(want)) == 3
    passes = sum(model.generate([PROMPTS[1]], each)[0].passes for each in requests)
    assert found["usage"]["denoising_passes"] == passes
    assert found["metrics"] == {"speculative_decoding": None}
    drawn = complete(http, **{**fields, "seed": None, "n": 4})
    assert len({choice["text"] for choice in drawn["choices"]}) > 1, "without a seed each draws by itself"


def test_stop_strings_and_echo(http: httpx2.Client, model: DiffusionModel):
    (want,) = model.generate([PROMPTS[0]], replace(DEFAULTS, ignore_eos=True))
    stop = " ".join(want.text.split()[5:7])
    found = complete(http, prompt=words(PROMPTS[0]), ignore_eos=True, stop=[stop, "nothing"], echo=True)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == words(PROMPTS[0]) + want.text[: want.text.index(stop)]


def test_a_stop_token_ends_the_output(http: httpx2.Client):
    plain = complete(http, prompt=PROMPTS[0], return_token_ids=True)["choices"][0]["token_ids"]
    found = complete(http, prompt=PROMPTS[0], stop_token_ids=[plain[2]], return_token_ids=True)
    (choice,) = found["choices"]
    count = plain.index(plain[2]) + 1
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", plain[2], plain[:count])
    assert found["usage"]["completion_tokens"] == count
    included = complete(http, prompt=PROMPTS[0], stop_token_ids=[plain[2]], include_stop_str_in_output=True)["choices"][0]
    assert included["text"] == choice["text"] + f" t{plain[2]}"


def test_log_probabilities_come_with_each_token(http: httpx2.Client):
    plain = complete(http, prompt=PROMPTS[0])
    choice = complete(http, prompt=PROMPTS[0], logprobs=2)["choices"][0]
    assert choice["text"] == plain["choices"][0]["text"]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == plain["usage"]["completion_tokens"]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(each) >= 2 for each in logprobs["top_logprobs"])
    said = {"messages": [{"role": "user", "content": words(PROMPTS[0])}], "logprobs": True, "top_logprobs": 1}
    answer = http.post("/v1/chat/completions", json=said).json()["choices"][0]
    assert [len(each["top_logprobs"]) for each in answer["logprobs"]["content"]] == [1] * len(answer["logprobs"]["content"])


def test_what_changes_nothing_is_taken(http: httpx2.Client):
    plain = complete(http, prompt=PROMPTS[0])["choices"]
    nothing = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    nothing |= {"logit_bias": {}, "min_tokens": 0, "stop_token_ids": [], "include_stop_str_in_output": False, "seed": -1}
    nothing |= {"skip_special_tokens": True, "prompt_logprobs": None, "temperature": 1e-9, "top_p": 1, "cache_prompt": True}
    assert complete(http, prompt=PROMPTS[0], logprobs=None, steps=None, threshold=None, **nothing)["choices"] == plain
    said = ROUTES["/v1/chat/completions"]
    assert http.post("/v1/chat/completions", json={**said, "top_k": -1, "logprobs": False}).status_code == 200


def test_metrics_tell_what_steps_looked_at(http: httpx2.Client):
    complete(http, prompt=PROMPTS[0])
    text = http.get("/metrics").text
    stats = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(stats['tilewright_rounds_total{choice="whole",model_name="demo"}']) > 0
    assert float(stats['tilewright_slots{model_name="demo"}']) == 3
    assert float(stats['tilewright_xla_compilations_total{model_name="demo",phase="serving"}']) == 0
    assert float(stats['vllm:kv_cache_usage_perc{model_name="demo"}']) == 0


def refused(http: httpx2.Client | TestClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


MANY = "is not supported for a diffusion model, which commits several tokens at once"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"top_k": -2}, "top_k", "greater than or equal to -1, found -2"),
        ({"logit_bias": {"40": 1}}, None, "expected logit_bias of tokens below the vocabulary size 40, found 40"),
        ({"min_tokens": 13}, None, "expected min_tokens from 0 to the length limit, 12, found 13"),
        ({"min_tokens": 3, "max_tokens": 2}, None, "expected min_tokens from 0 to the length limit, 2, found 3"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "started without the grammar extra"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", MANY),
        ({"mode": "thin"}, "mode", "'dense', 'prefix', 'dual' or 'sparse', found \"thin\""),
        ({"mode": "prefix"}, None, "expected a mode among dense, dual, sparse, found prefix"),
        ({"remasking": "best"}, "remasking", 'found "best"'),
        ({"threshold": 0}, "threshold", "greater than 0, found 0"),
        ({"threshold": 1.5}, "threshold", "less than or equal to 1, found 1.5"),
        ({"threshold": True}, "threshold", "found true"),
        ({"tau": 2.5}, "tau", "less than or equal to 2, found 2.5"),
        ({"tau": 0}, "tau", "greater than 0, found 0"),
        ({"steps": 0}, "steps", "greater than or equal to 1, found 0"),
        ({"steps": 2.5}, "steps", "found 2.5"),
        ({"suffix_window": -1}, "suffix_window", "greater than or equal to 0, found -1"),
        ({"first_alone": True}, None, "expected the mode prefix or dual with first_alone, found sparse"),
        (
            {"confidence_eos_eot_inf": True},
            None,
            "expected no confidence_eos_eot_inf, since the model names no end-of-turn token",
        ),
        ({"block_length": 0}, "block_length", "greater than or equal to 1, found 0"),
        ({"max_tokens": 10, "steps": 10}, None, "expected steps that are a multiple of the 3 blocks, found 10"),
        ({"steps": 7}, None, "expected steps that are a multiple of the 3 blocks, found 7"),
        ({"steps": 15}, None, "expected steps of at most one a token, 12, found 15"),
        ({"steps": 6, "threshold": 0.5}, None, "expected steps or a threshold, not both"),
        ({"threshold": 0.5, "remasking": "random"}, None, "expected no threshold with random, which ranks by chance"),
        ({"remasking": "origin"}, None, "expected no threshold with origin, which ranks by chance, found 0.2"),
        ({"max_tokens": 28}, None, "expected responses of at most 24, the largest declared, found 28"),
        ({"max_tokens": 16, "block_length": 16}, None, "expected blocks of at most 12, the largest declared, found 16"),
    ],
    ids=str,
)
def test_a_bad_field_is_named_by_both_routes(http: httpx2.Client, fields: dict[str, Any], param: str | None, said: str):
    for route, needed in ROUTES.items():
        error = refused(http, route, needed | fields)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert said in error["message"]


@pytest.mark.parametrize(
    ("route", "fields", "param", "said"),
    [
        (
            "/v1/completions",
            {"logprobs": 3, "echo": True},
            None,
            "'echo' with 'logprobs' is not supported for a diffusion model",
        ),
        ("/v1/completions", {"prompt": [1, 39]}, "prompt", "a prompt without the mask token 39, found one"),
        ("/v1/completions", {"prompt": "t1 t39"}, "prompt", "a prompt without the mask token 39, found one"),
        ("/v1/completions", {"prompt": [1] * 40}, "prompt", "has 48 positions; the prompt has 40 tokens, and at least 12 new"),
        ("/v1/completions", {"prompt": [1] * 40, "max_tokens": 24}, "prompt", "and at least 24 new tokens are required"),
        (
            "/v1/completions",
            {"prompt": [1] * 41, "max_tokens": 7},
            None,
            "room for 7 in the context of 48; new_tokens is 8, in blocks of 4",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "t39"}]}, "messages", "without the mask token 39"),
        ("/v1/chat/completions", {"max_completion_tokens": 48}, "messages", "and at least 48 new tokens are required"),
    ],
    ids=str,
)
def test_a_bad_field_of_one_route_is_named(http: httpx2.Client, route: str, fields: dict[str, Any], param: str, said: str):
    error = refused(http, route, ROUTES[route] | fields)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 4},
        {"block_length": 4},
        {"threshold": 0.5},
        {"suffix_window": 8},
        {"mode": "dense"},
        {"remasking": "random"},
        {"tau": 0.9},
        {"logits_eos_inf": True},
    ],
    ids=str,
)
def test_a_server_that_decodes_token_by_token_knows_none_of_these_fields(shared: TestClient, fields: dict[str, Any]):
    for route, needed in ROUTES.items():
        error = refused(shared, route, needed | fields)
        assert (error["param"], error["code"]) == (next(iter(fields)), "unknown_parameter")


def test_the_other_apis_answer_too_and_refuse_the_same(http: httpx2.Client):
    said = {"messages": [{"role": "user", "content": "t1 t2"}], "max_tokens": 16}
    text = http.post("/v1/chat/completions", json=said).json()["choices"][0]["message"]["content"]
    message = http.post("/v1/messages", json=said)
    response = http.post("/v1/responses", json={"input": "t1 t2", "max_output_tokens": 16})
    assert message.json()["content"][0]["text"] == text
    assert response.json()["output"][0]["content"][0]["text"] == text
    assert message.json()["metrics"]["denoising"]["steps"] == response.json()["metrics"]["denoising"]["steps"]
    usage = [each.json()["usage"] for each in (message, response)]
    assert len({(each["denoising_passes"], each["tokens_per_pass"]) for each in usage}) == 1
    events = http.post("/v1/messages", json={**said, "stream": True}).text
    assert f'"denoising_passes": {usage[0]["denoising_passes"]}' in events
    assert events.rstrip().endswith('data: {"type": "message_stop"}')
    for fields, param in (({"top_k": -2}, "top_k"), ({"block_length": 8}, "block_length")):
        refused = http.post("/v1/messages", json={**said, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    schema = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    refused = http.post("/v1/responses", json={"input": "t1", "text": schema})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")
