"""The server over the real engine and the demo's model: what is served is what the model gives alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conftest import Real, on_a_port
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Result
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 2), capacities=(256,), chunks=(16, 64), widths=(4,))
PROMPT = "def add(first, second):\n    return first + second\n\ndef add_all(first, second, third):\n    return first +"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load("demo", "ngram", block_size=4, table=TABLE, dtype="float32")


SAMPLINGS = (Sampling(40, 0.0), Sampling(40, 0.8, seed=5, top_p=0.9), Sampling(60, 0.0, stop=("\n\n",)))
PROMPTS = (PROMPT, "import os\n", "class A:\n    def", PROMPT + " second", "x = [1, 2,")
Alone = tuple[list[Result], list[str]]


@pytest.fixture(scope="module")
def alone(lm: LanguageModel) -> Alone:
    """Outputs of the model without a server: for the first prompt with each sampling, and for each prompt."""
    by_sampling = [result for sampling in SAMPLINGS for result in lm.generate(PROMPT, sampling)]
    return by_sampling, [result.text for prompt in PROMPTS for result in lm.generate(prompt, Sampling(24))]


DRAWN: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 7})
Changed = tuple[Sampling, Result]


@pytest.fixture(scope="module")
def changed(lm: LanguageModel) -> list[Changed]:
    """What plain decoding gives where logits are changed, and how: of what it gives otherwise one token is biased away, and
    two end it, later."""
    found = []
    for drawn in DRAWN:
        (usual,) = lm.generate(PROMPT, Sampling(24, **drawn), speculative=False)
        stops = (usual.tokens[8], usual.tokens[0])
        sampling = Sampling(
            24, **drawn, logit_bias=((usual.tokens[2], -100.0),), min_tokens=12, stop_token_ids=stops, include_stop=True
        )
        found.append((sampling, lm.generate(PROMPT, sampling, speculative=False)[0]))
    return found


@pytest.fixture(scope="module")
def real(lm: LanguageModel, alone: Alone, changed: list[Changed]) -> Iterator[Real]:
    engine = lm.engine(EngineOptions(table=TABLE))
    engine.warm()
    engine.start()
    with on_a_port(engine) as server:
        yield server
    assert engine.stop(20.0)
    stats = engine.stats()
    assert (stats.compilations, stats.running, stats.waiting, stats.pages_used) == (0, 0, 0, 0)


@pytest.fixture
def client(real: Real) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def http(real: Real) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real.url, timeout=60) as made:
        yield made


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
def test_what_is_served_is_what_the_model_gives_alone(client: openai.OpenAI, alone: Alone, number: int):
    sampling = SAMPLINGS[number]
    wanted = alone[0][number]
    fields: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
    fields |= {"top_p": sampling.top_p, "stop": list(sampling.stop)}
    found = client.completions.create(model="demo", prompt=PROMPT, **fields)
    assert found.choices[0].text == wanted.text
    assert found.choices[0].finish_reason == ("length" if wanted.finish_reason == "length" else "stop")
    assert found.usage is not None
    assert found.usage.completion_tokens == len(wanted.tokens)
    stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **fields)
    assert "".join(part.choices[0].text for part in stream) == wanted.text


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_biases_and_ends_are_served_as_plain_decoding_gives_them(client: openai.OpenAI, changed: list[Changed], number: int):
    """Under speculation: a token that is biased away, tokens that may not end it yet, and then do."""
    sampling, wanted = changed[number]
    bias = dict(sampling.logit_bias)
    stops = [*sampling.stop_token_ids]
    assert not bias.keys() & set(wanted.tokens)
    assert not {*stops} & {*wanted.tokens[: sampling.min_tokens]}
    body = {"min_tokens": sampling.min_tokens, "stop_token_ids": stops, "include_stop_str_in_output": True}
    found = client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        logit_bias={str(token): int(each) for token, each in bias.items()},
        extra_body=body | {"return_token_ids": True},
    )
    (choice,) = found.choices
    assert choice.model_extra is not None
    assert (choice.text, choice.model_extra["token_ids"]) == (wanted.text, wanted.tokens)
    assert choice.finish_reason == ("length" if wanted.finish_reason == "length" else "stop")
    with pytest.raises(openai.BadRequestError, match="vocabulary size"):
        client.completions.create(model="demo", prompt=PROMPT, logit_bias={"999999": 1})


def test_what_is_served_beside_others_is_the_same(client: openai.OpenAI, alone: Alone):
    def ask(prompt: str) -> str:
        return client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0).choices[0].text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == alone[1]
    together = client.completions.create(model="demo", prompt=list(PROMPTS), max_tokens=24, temperature=0)
    assert [choice.text for choice in together.choices] == alone[1]


def test_drafts_are_counted_as_the_model_counts_them(client: openai.OpenAI):
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0)
    assert found.model_extra is not None
    counts = found.model_extra["metrics"]["speculative_decoding"]
    assert counts["num_spec_tokens"] == 3
    assert counts["num_accepted_draft_tokens"] == sum(n * count for n, count in enumerate(counts["acceptance_histogram"])) > 0


def test_a_prompt_that_fills_the_context_has_logprobs(client: openai.OpenAI):
    prompt = [5 + n % 90 for n in range(TABLE.capacities[0])]
    fields: dict[str, Any] = {"model": "demo", "logprobs": 0, "echo": True}
    whole = client.completions.create(**fields, prompt=prompt, max_tokens=0).choices[0].logprobs
    part = client.completions.create(**fields, prompt=prompt[:-1], max_tokens=1).choices[0].logprobs
    assert whole is not None
    assert part is not None
    assert len(whole.token_logprobs or []) == len(prompt)
    assert (whole.token_logprobs or [])[1:-1] == pytest.approx((part.token_logprobs or [])[1:-1], abs=2e-4)
    with pytest.raises(openai.BadRequestError, match="context has 256 positions; the prompt has 257"):
        client.completions.create(**fields, prompt=[*prompt, 5], max_tokens=0)


def test_logprobs_of_a_prompt_are_those_of_generating_it(client: openai.OpenAI):
    """Text that the model gave, put to it as a prompt, has the log-probabilities that it had when it was given."""
    given = client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, temperature=0, logprobs=3).choices[0]
    assert given.logprobs is not None
    prompt = client.completions.create(
        model="demo", prompt=PROMPT + given.text, max_tokens=1, temperature=0, logprobs=3, echo=True
    ).choices[0]
    assert prompt.logprobs is not None
    assert prompt.text.startswith(PROMPT + given.text)
    old = given.logprobs.token_logprobs or []
    new = prompt.logprobs.token_logprobs or []
    assert new[0] is None
    assert old == pytest.approx(new[-21:-1], abs=2e-4)
    again = client.completions.create(model="demo", prompt=PROMPT + given.text, max_tokens=0, logprobs=3, echo=True).choices[0]
    assert again.text == PROMPT + given.text
    assert again.logprobs is not None
    assert (again.logprobs.token_logprobs or [])[1:] == pytest.approx(new[1:-1], abs=2e-4)
    tops = prompt.logprobs.top_logprobs or []
    assert [max(top, key=lambda text: top[text]) for top in tops[-21:-1]] == given.logprobs.tokens
    offsets = prompt.logprobs.text_offset or []
    tokens = prompt.logprobs.tokens or []
    assert [prompt.text[at : at + len(text)] for at, text in zip(offsets, tokens, strict=True)] == tokens


def test_a_second_asking_finds_the_prompt_in_the_cache(client: openai.OpenAI):
    prompt = PROMPT * 3
    client.completions.create(model="demo", prompt=prompt, max_tokens=2, temperature=0)
    found = client.completions.create(model="demo", prompt=prompt, max_tokens=2, temperature=0)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert (found.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_chats_stream(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "def main():"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
    )
    parts = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == "length"
    entries = [one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content or ()]
    assert len(entries) == 12
    assert "".join(entry.token for entry in entries) == "".join(part.choices[0].delta.content or "" for part in parts)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries), "at temperature 0 the best is taken"


def test_a_client_that_goes_away_frees_its_slot(real: Real, client: openai.OpenAI):
    """Sixteen answers for two slots: long enough that some are left to cancel, however fast the machine."""
    before = real.engine.stats().ended
    fields = {"model": "demo", "max_tokens": 150, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client.completions.create(prompt=PROMPT, stream=True, n=16, **fields) as stream:
        next(iter(stream))
    end = time.monotonic() + 20
    while (stats := real.engine.stats()).running + stats.waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    ended = {reason: stats.ended.get(reason, 0) - before.get(reason, 0) for reason in ("cancelled", "length")}
    assert sum(ended.values()) == 16
    assert ended["cancelled"] > 0


# The server runs in threads of this process; what they draw from `random` meanwhile is none of the strategy's doing.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@given(
    given=st.fixed_dictionaries(
        {"prompt": st.sampled_from(PROMPTS), "max_tokens": st.integers(1, 12), "seed": st.integers(0, 2**32 - 1)},
        optional={
            "temperature": st.sampled_from([0, 1e-6, 0.3, 1, 2.5, 1e6]),
            "top_p": st.floats(1e-6, 1),
            "top_k": st.integers(-1, 5000),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.001, 1000),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "n": st.integers(1, 3),
            "logprobs": st.integers(0, 20),
            "echo": st.booleans(),
            "ignore_eos": st.booleans(),
            "stop": st.lists(st.sampled_from(["\n", "a", "return", ":"]), max_size=3),
        },
    )
)
def test_whatever_is_asked_a_stream_says_what_the_whole_says(http: httpx2.Client, given: dict[str, Any]):
    answer = http.post("/v1/completions", json=given)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    streamed = http.post("/v1/completions", json={**given, "stream": True}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in streamed[:-2]]
    for choice in whole["choices"]:
        chunks = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert (choice["logprobs"] is None) == ("logprobs" not in given)
        if choice["logprobs"] is not None:
            logprobs = choice["logprobs"]
            assert [text for part in chunks for text in part["logprobs"]["tokens"]] == logprobs["tokens"]
            assert all(one is None or one <= 0 for one in logprobs["token_logprobs"])
            assert {len(top) for top in logprobs["top_logprobs"] if top is not None} <= {
                given["logprobs"],
                given["logprobs"] + 1,
            }


LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate

url, folder = sys.argv[1:]
task = {
    "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": folder + "/data.jsonl"}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
    "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}
generating = {
    "task": "say", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": folder + "/data.jsonl"}},
    "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}", "target_delimiter": "",
    "doc_to_target": "{{choices[answer]}}", "generation_kwargs": {"until": ["\\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
about = {"model": "demo", "base_url": url + "/v1/completions", "max_length": 256, "batch_size": int(2)}
found = simple_evaluate("local-completions", model_args=about, tasks=[task, generating], bootstrap_iters=0, log_samples=True)
samples = {name: [each["filtered_resps"] for each in of] for name, of in found["samples"].items()}
print("FOUND " + json.dumps(samples))
"""


@pytest.mark.slow
def test_lm_eval_measures_likelihoods_and_generates(real: Real, client: openai.OpenAI, tmp_path: Path):
    """The harness tokenises through the server, and sums the log-probabilities of each choice."""
    questions = [
        {"question": "def add(a, b):\n    return a", "choices": [" + b", " zebra", " import"], "answer": 0},
        {"question": "for i in range(", "choices": ["class", "10):", "€"], "answer": 1},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "any"}
    command = [sys.executable, "-c", LM_EVAL, real.url, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | offline, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    for question, measured in zip(questions, found["tiny"], strict=True):
        for choice, (likelihood, greedy) in zip(question["choices"], measured, strict=True):
            fields = {"model": "demo", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
            logprobs = client.completions.create(prompt=question["question"] + choice, **fields).choices[0].logprobs
            assert logprobs is not None
            begins = len(question["question"])
            each = [
                (p, at)
                for p, at in zip(logprobs.token_logprobs or [], logprobs.text_offset or [], strict=True)
                if begins <= at < begins + len(choice)
            ]
            assert float(likelihood) == pytest.approx(sum(p for p, _ in each if p is not None), abs=1e-3)
            assert greedy in (True, False, "True", "False")
    for question, said in zip(questions, found["say"], strict=True):
        alone = client.completions.create(
            model="demo", prompt=question["question"], max_tokens=8, temperature=0, stop=["\n"]
        ).choices[0]
        assert said == [alone.text]
