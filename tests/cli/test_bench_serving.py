"""`tilewright bench serving` against a scripted server: what it sends, prints and writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.sse_server import Step, answered, completion_chunks, scripted, streamed
from cli.conftest import Run

DRAFTS = {"num_spec_steps": 3, "num_accepted_draft_tokens": 5, "num_draft_tokens": 9, "acceptance_histogram": [1, 0, 1, 1]}
BUSY = answered(503, {"error": {"message": "full"}}, "Retry-After: 2\r\n")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def answer(body: dict[str, Any], number: int) -> list[Step]:
    """As many tokens as were asked for, three to a chunk, and the characters of a text as its tokens' number times four."""
    wanted = body.get("max_tokens") or body["max_completion_tokens"]
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    counts = [3] * (wanted // 3) + [wanted % 3] * (wanted % 3 > 0)
    tokens = -(-len(text) // 4) if isinstance(text, str) else len(text)
    return streamed(completion_chunks(counts, tokens, chat="messages" in body, metrics=DRAFTS))


def trace_file(text: str = "1,8,4\n2,16,7\n1.5,4,1\n2,80,20\n") -> str:
    Path("trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{text}")
    return "trace.csv"


def prompt_file(*prompts: str) -> str:
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return "prompts.jsonl"


def test_a_trace_of_token_ids(run: Run):
    with scripted(answer) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            server.url,
            "--trace",
            trace_file(),
            "--arrivals",
            100,
            "--vocab-size",
            9,
            "--goodput",
            "ttft:60000",
            "e2e:60000",
            "--percentiles",
            50,
            99.9,
            "--json",
            "-",
            "--detailed",
        )
    assert ran.status == 0, ran.err
    figures = ran.json
    expected = {
        "model": "scripted",
        "url": f"{server.url}/v1",
        "route": "/completions",
        "trace": "trace.csv",
        "arrivals": "100",
        "vocab_size": 9,
        "ignore_eos": True,
        "length_scale": 1.0,
        "max_new_tokens": None,
        "requests": 4,
        "completed": 4,
        "failed": 0,
        "failures": [],
        "prompt_tokens": 108,
        "output_tokens": 32,
        "output_tokens_counted_by": "usage",
        "tokens_per_chunk": 32 / 13,
        "requests_within_goodput": 4,
        "goodput": {"ttft": 60000.0, "e2e": 60000.0},
    }
    assert {name: figures[name] for name in expected} == expected
    assert figures["output_tokens_per_s"] == pytest.approx(32 / figures["duration_s"])
    assert figures["requests_per_s"] == figures["goodput_requests_per_s"]
    assert figures["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 5 / 9,
        "acceptance_histogram": [4, 0, 4, 4],
        "num_spec_steps": 12,
        "num_accepted_draft_tokens": 20,
        "num_draft_tokens": 36,
        "requests": 4,
    }
    assert "ttft_p99.9_ms" in figures
    assert "ttft_p90_ms" not in figures
    records = figures["request_records"]
    assert [record["due_s"] for record in records] == pytest.approx([0, 0.005, 0.01, 0.01])
    assert [(record["prompt_tokens"], record["output_tokens"]) for record in records] == [(8, 4), (4, 1), (16, 7), (80, 20)]
    sent = sorted((len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) for _, body in server.bodies)
    assert sent == [(4, 1, True), (8, 4, True), (16, 7, True), (80, 20, True)]
    assert all(0 <= token < 9 for _, body in server.bodies for token in body["prompt"])
    for shown in (
        "scripted at",
        "4 requests of trace.csv, 100 times as fast as the trace",
        "4 completed",
        "τ 2.67",
        "first token",
        "p99.9",
    ):
        assert shown in ran.err


def test_a_trace_scaled_to_a_context_with_text(run: Run):
    with scripted(answer) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            server.url,
            "--trace",
            trace_file(),
            "--arrivals",
            "burst",
            "--context",
            50,
            "--prompt-file",
            prompt_file("abcdefgh" * 10, "ijkl" * 10),
            "--concurrency",
            1,
            "--chat",
            "--json",
            "figures.json",
        )
    assert ran.status == 0, ran.err
    figures = json.loads(Path("figures.json").read_text())
    assert (figures["length_scale"], figures["characters_per_token_source"]) == (0.5, "measured")
    assert figures["characters_per_token"] == pytest.approx(13 / 4), "of all and of half of the text"
    (_, whole), (_, half), *sent = server.bodies
    assert [len(each["messages"][0]["content"]) for each in (whole, half)] == [25, 12]
    assert whole["max_completion_tokens"] == half["max_completion_tokens"] == 1
    lengths = [(len(body["messages"][0]["content"]), body["max_completion_tokens"]) for _, body in sent]
    assert lengths == [(round(n * 13 / 4), new) for n, new in [(4, 2), (2, 1), (8, 3), (40, 10)]]
    assert {route for route, _ in sent} == {"/v1/chat/completions"}
    assert server.most_under_way == figures["peak_concurrency"] == 1
    assert "the trace's lengths are scaled by 0.5" in ran.out
    assert "3.25 characters per token (measured)" in ran.out


def test_characters_may_be_given(run: Run):
    with scripted(answer) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            server.url,
            "--trace",
            trace_file(),
            "--arrivals",
            "burst",
            "--characters-per-token",
            2,
            "--max-new-tokens",
            5,
            "--json",
            "-",
        )
    assert ran.json["characters_per_token_source"] == "given"
    assert sorted((len(body["prompt"]), body["max_tokens"]) for _, body in server.bodies) == [
        (8, 1),
        (16, 4),
        (32, 5),
        (160, 5),
    ]


def test_a_server_that_does_not_say_how_it_counts(run: Run):
    counted = [*completion_chunks([1], 5, continuous=False)[:-1]]
    with scripted(lambda body, number: streamed(counted)) as server:
        ran = run("bench", "serving", "--url", server.url, "--trace", trace_file(), "--arrivals", "burst", "--json", "-")
    assert (ran.json["characters_per_token"], ran.json["characters_per_token_source"]) == (4.0, "assumed")
    assert (ran.json["output_tokens_counted_by"], ran.json["prompt_tokens"]) == ("chunks", None)
    assert "each chunk counts as one token" in ran.err


def test_the_prompts_of_a_file(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with scripted(answer) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            f"{server.url}/v1/",
            "--prompt-file",
            prompt_file("one", "two", "three"),
            "--requests",
            4,
            "--warmup",
            1,
            "--rate",
            500,
            "--max-new-tokens",
            6,
            "--temperature",
            0.5,
            "--seed",
            9,
            "--no-continuous-usage",
            "--model",
            "mine",
            "--json",
            "-",
        )
    assert ran.status == 0, ran.err
    assert [body["prompt"] for _, body in server.bodies[:1]] == ["one"], "what warms up is first"
    assert sorted(body["prompt"] for _, body in server.bodies[1:]) == ["one", "three", "two", "two"]
    assert sorted(body["seed"] for _, body in server.bodies) == [9, 10, 11, 12, 13]
    for _, body in server.bodies:
        assert (body["model"], body["max_tokens"], body["stream_options"]) == ("mine", 6, {"include_usage": True})
        assert "ignore_eos" not in body
    assert {fields["authorization"] for fields in server.headers} == {"Bearer s3cret"}
    figures = ran.json
    assert (figures["requests"], figures["warmup"], figures["warmup_failed"], figures["rate_per_s"]) == (4, 1, 0, 500)
    assert (figures["arrivals"], figures["output_tokens"]) == (None, 24)
    assert "the file's 3 records were sent more than once" in ran.err
    assert "the figures exclude 1 warm-up requests" in ran.err
    assert "s3cret" not in ran.out + ran.err


def test_by_itself_it_sends_the_code_that_is_packaged(run: Run):
    with scripted(answer) as server:
        ran = run("bench", "serving", "--url", server.url, "--requests", 2, "--chat", "--ignore-eos", "--concurrency", 2)
    assert ran.status == 0, ran.err
    assert "2 requests of held-out code, sent as slots become free, at most 2 concurrent" in ran.out
    assert [body["max_completion_tokens"] for _, body in server.bodies] == [128, 128]
    assert all(body["ignore_eos"] for _, body in server.bodies)


def test_some_requests_fail(run: Run):
    with scripted(lambda body, number: BUSY if body["prompt"] == "two" else answer(body, number)) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            server.url,
            "--prompt-file",
            prompt_file("one", "two", "three"),
            "--max-new-tokens",
            3,
            "--json",
            "-",
        )
    assert ran.status == 0
    assert (ran.json["completed"], ran.json["failed"], ran.json["rejected"]) == (2, 1, 1)
    assert ran.json["failures"] == [{"kind": "http_503", "requests": 1, "first_message": "full (Retry-After: 2)"}]
    assert "1 × http 503: full (Retry-After: 2)" in ran.err


def test_all_requests_fail(run: Run):
    with scripted(lambda body, number: BUSY) as server:
        ran = run(
            "bench",
            "serving",
            "--url",
            server.url,
            "--prompt-file",
            prompt_file("one", "two"),
            "--warmup",
            1,
            "--goodput",
            "ttft:1",
            "--json",
            "figures.json",
        )
    assert ran.status == 1
    figures = json.loads(Path("figures.json").read_text())
    assert (figures["completed"], figures["rejected"], figures["warmup_failed"]) == (0, 1, 1)
    assert figures["goodput_requests_per_s"] == 0
    assert figures["ttft_p50_ms"] is None


def test_a_server_that_is_not_there(run: Run):
    with scripted(answer) as server:
        url = server.url
    ran = run("bench", "serving", "--url", url, "--prompt-file", prompt_file("one", "two"), "--model", "m", "--json", "-")
    assert ran.status == 1
    assert [(row["kind"], row["requests"]) for row in ran.json["failures"]] == [("unreachable", 2)]
    unnamed = run("bench", "serving", "--url", url, "--json", "figures.json")
    assert unnamed.status == 1
    assert unnamed.err.startswith(f"tilewright: no model from {url}/v1/models: no connection to ")
    assert unnamed.err.endswith("; name a model with --model\n")
    assert unnamed.err.count("\n") == 1
    assert not Path("figures.json").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--url", "localhost:8000"], "expected a URL like http://127.0.0.1:8000"),
        (["--temperature", "-1"], "expected a temperature of 0 or more, found -1"),
        (["--temperature", "nan"], "expected a temperature of 0 or more, found nan"),
        (["--timeout", "0"], "expected a timeout above 0 s, found 0"),
        (["--seed", "-1"], "expected seed of at least 0, found -1"),
        (["--api-key", "a\r\nb"], "expected an API key of visible ASCII characters"),
        (["--requests", "0"], "expected requests of at least 1, found 0"),
        (["--warmup", "-1"], "expected warmup of at least 0, found -1"),
        (["--concurrency", "0"], "expected concurrency of at least 1, found 0"),
        (["--max-new-tokens", "0"], "expected max_new_tokens of at least 1, found 0"),
        (["--rate", "0"], "expected rate above 0, found 0"),
        (["--rate", "inf"], "expected rate above 0, found inf"),
        (["--rate", "2", "--arrivals", "burst"], "expected --arrivals or --rate, found both"),
        (["--arrivals", "real"], "--arrivals real needs --trace"),
        (["--context", "9"], "--context needs --trace"),
        (["--vocab-size", "9"], "--vocab-size needs --trace"),
        (["--characters-per-token", "3"], "--characters-per-token needs --trace"),
        (["--trace", "trace.csv", "--context", "1"], "expected context of at least 2, found 1"),
        (["--trace", "trace.csv", "--characters-per-token", "0"], "expected characters_per_token above 0, found 0"),
        (["--trace", "trace.csv", "--arrivals", "soon"], "expected --arrivals real, burst or a factor above 0, found soon"),
        (["--trace", "trace.csv", "--arrivals", "0"], "expected --arrivals real, burst or a factor above 0, found 0"),
        (["--trace", "trace.csv", "--arrivals", "nan"], "expected --arrivals real, burst or a factor above 0, found nan"),
        (["--trace", "trace.csv", "--vocab-size", "9", "--chat"], "expected --chat (text prompts) or --vocab-size"),
        (
            ["--trace", "trace.csv", "--vocab-size", "9", "--prompt-file", "x.jsonl"],
            "expected --prompt-file (text prompts) or",
        ),
        (["--trace", "trace.csv", "--requests", "5"], "trace.csv: expected 5 requests including warm-up, found 4"),
        (["--trace", "trace.csv", "--warmup", "4"], "trace.csv: expected 5 requests including warm-up, found 4"),
        (["--trace", "absent.csv"], "absent.csv cannot be read: No such file or directory"),
        (["--trace", "bare.csv"], "expected arrival times in the trace (arrival_s or TIMESTAMP), found none"),
        (["--prompt-file", "absent.jsonl"], "absent.jsonl cannot be read: No such file or directory"),
        (["--goodput", "ttft"], "expected --goodput of ttft:MS, tpot:MS, e2e:MS, each at most once, found ttft"),
        (["--goodput", "itl:3"], "expected --goodput of"),
        (["--goodput", "ttft:1", "ttft:2"], "each at most once, found ttft:1 ttft:2"),
        (["--goodput", "ttft:-1"], "expected --goodput of"),
        (["--percentiles", "101"], "expected percentiles from 0 to 100, each once, found 101"),
        (["--percentiles", "50", "50"], "expected percentiles from 0 to 100, each once, found 50, 50"),
        (["--percentiles", "nan"], "expected percentiles from 0 to 100, each once, found nan"),
        (["--detailed"], "--detailed needs --json"),
        (["--json", "absent/figures.json"], "--json absent/figures.json: its folder does not exist"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input(run: Run, tmp_path: Path, arguments: list[str], problem: str):
    """One line, exit status 2, no request, no file."""
    trace_file()
    Path("bare.csv").write_text("prompt_tokens,output_tokens\n1,2\n")
    Path("kept.json").write_text("mine")
    with scripted(answer) as server:
        given = [] if "--url" in arguments else ["--url", server.url]
        outputs = [] if {"--json", "--detailed"} & set(arguments) else ["--json", "kept.json"]
        ran = run("bench", "serving", *given, *outputs, *arguments)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.startswith("tilewright: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert server.connections == 0
    assert Path("kept.json").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.csv", "bare.csv", "kept.json"}
