"""Models, tokens, versions, metrics."""

import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tilewright
from server.conftest import Client
from server.fake import FakeEngine, model_without_weights
from tilewright.models.chat import ChatTemplate
from tilewright.server.run import listen


def test_the_one_model_is_listed(client: Client):
    app = client(name="an org/a model")
    (model,) = app.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("an org/a model", "model", 2048)
    assert app.get("/v1/models/an%20org%2Fa%20model").json() == model


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models"])
def test_head_says_what_get_would(client: Client, path: str):
    app = client()
    head = app.head(path)
    get = app.get(path)
    assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])


def test_the_version_is_told(client: Client):
    assert client().get("/version").json() == {"version": tilewright.__version__}


def test_texts_become_tokens_and_back(client: Client):
    app = client()
    lm = model_without_weights()
    for text in ("def f(x):\n", "€<|endoftext|>", ""):
        found = app.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert found["tokens"] == lm.tokenizer.encode(text).ids
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
        assert app.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert found["token_strs"] == []
    assert app.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["token_strs"] is None


def test_a_conversation_becomes_tokens(client: Client):
    found = client().post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert found["tokens"] == model_without_weights().encode("hi\n")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}])
def test_either_a_text_or_a_conversation_is_tokenised(client: Client, body: dict[str, object]):
    answer = client().post("/tokenize", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("expected either prompt or messages")


def test_tokens_outside_the_vocabulary_are_refused(client: Client):
    answer = client().post("/detokenize", json={"tokens": [5, 4096]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_special_tokens_are_told(client: Client):
    found = client().get("/tokenizer_info").json()
    assert found == {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": None}
    template = ChatTemplate.compiled("", "a test's", {"bos_token": "<s>"})
    assert client(template=template).get("/tokenizer_info").json()["bos_token"] == "<s>"


def test_metrics_have_vllms_names_and_our_own(client: Client):
    engine = FakeEngine()
    engine.counters.widths = {"ngram, 4": 3, "plain": 2}
    engine.counters.accepted_at = [5, 2]
    engine.counters.row_rounds = 6
    engine.counters.programs_declared = 9
    engine.counters.padding_rows = 2
    engine.scheduler.pages.take(64)
    app = client(engine)
    app.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 7, "stop": "none"})
    answer = app.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    length = len(model_without_weights().encode("a b c"))
    wanted = {
        ("vllm:num_requests_running",): 0,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prompt_tokens_total",): length,
        ("vllm:generation_tokens_total",): 7,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:request_success_total", "abort"): 0,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 2,
        ("vllm:time_to_first_token_seconds_count",): 1,
        ("vllm:inter_token_latency_seconds_count",): 2,
        ("vllm:e2e_request_latency_seconds_count",): 1,
        ("vllm:request_queue_time_seconds_count",): 1,
        ("vllm:request_prefill_time_seconds_count",): 1,
        ("vllm:request_decode_time_seconds_count",): 1,
        ("tilewright_rounds_total", "ngram, 4"): 3,
        ("tilewright_xla_compilations_total", "warm"): 5,
        ("tilewright_xla_compilations_total", "serving"): 0,
        ("tilewright_warm_seconds",): 1.5,
        ("tilewright_programs_ready",): 5,
        ("tilewright_programs_declared",): 9,
        ("tilewright_padding_ratio",): 0.25,
        ("tilewright_engine_step_age_seconds",): 0,
    }
    assert {key: samples.get(key) for key in wanted} == wanted
    assert 'vllm:spec_decode_num_drafts_total{model_name="demo"}' in answer.text


def test_what_is_accepted_sends_at_once():
    """Without it a small answer waits for the client's acknowledgement of its head."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
