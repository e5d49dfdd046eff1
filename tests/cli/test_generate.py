"""`tilewright generate`: where prompts come from, what is printed, the JSON, and interruptions."""

import json
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from cli.conftest import Ran, Run
from tilewright.decode.session import Piece, Session

PROMISED = set(
    "autoregressive_tokens_per_s speculative_tokens_per_s speedup mean_acceptance_length acceptance_histogram rounds identical "
    "tokens text compilations chip dtype".split()
)
"""The fields that `--json` always has."""

NEW = ["--max-new-tokens", 12]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[str, tuple[list[int], str]]:
    """Tokens and text that the target alone gives for each prompt."""
    prompts = ["t1 t2 t3", "t7", "t5 t5 t9 t30"]
    results = tw.load(folders[0]).generate(prompts, tw.Sampling(12))
    return {prompt: (result.tokens, result.text) for prompt, result in zip(prompts, results, strict=True)}


def test_one_prompt_is_printed_with_its_text(run: Run, pair: list[Any], expected: dict[str, Any]):
    ran = run("generate", "t1 t2 t3", *pair, *NEW)
    assert ran.status == 0
    assert "accepted draft tokens, tokens from the target\n" in ran.out
    assert "t1 t2 t3" + expected["t1 t2 t3"][1] + "\n" in ran.out
    histogram = ran.out.split("rounds by accepted draft tokens\n")[1].splitlines()
    assert [line.split()[0] for line in histogram] == ["0", "1", "2", "3"]
    assert ran.err == ""


def test_several_prompts_form_a_batch(run: Run, pair: list[Any], expected: dict[str, Any]):
    ran = run("generate", *expected, *pair, *NEW, "--json", "-")
    assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
    assert ran.json["text"] == [text for _, text in expected.values()]
    assert ran.json["finish_reason"] == ["length"] * 3
    for number, (prompt, (_, text)) in enumerate(expected.items(), 1):
        assert f" {number} of 3 (length) " in ran.err
        assert prompt + text in ran.err


def test_prompts_from_a_file(run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path):
    records = [{"prompt": "t1 t2 t3"}, {"problem": "t7"}, {"turns": ["t5 t5 t9 t30", "t1"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ran = run("generate", "--prompt-file", tmp_path / "prompts.jsonl", *pair, *NEW, "--json", "-")
    assert ran.json["text"] == [text for _, text in expected.values()]


def test_a_question_becomes_a_prompt(run: Run, pair: list[Any], tmp_path: Path):
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "t4 t4", "answer": "t9"}\n')
    ran = run("generate", "--prompt-file", tmp_path / "gsm8k.jsonl", *pair, *NEW)
    assert "Question: t4 t4\nAnswer: " in ran.out


@pytest.mark.parametrize("argument", [[], ["-"]], ids=["piped", "dash"])
def test_prompt_from_standard_input(run: Run, pair: list[Any], expected: dict[str, Any], argument: list[str]):
    ran = run("generate", *argument, *pair, *NEW, "--json", "-", stdin="t1 t2 t3")
    assert ran.json["text"] == [expected["t1 t2 t3"][1]]


def test_text_is_printed_as_it_is(run: Run, pair: list[Any]):
    """Neither markup nor emoji names are interpreted, in prompts or in what follows them."""
    for prompts in (["[bold]t1[/bold] :warning:  t2"], ["[red]t1", ":warning:", "t1"]):
        ran = run("generate", *prompts, *pair, *NEW)
        assert ran.status == 0
        for prompt in prompts:
            assert prompt in ran.out


def check_types(figures: dict[str, Any]) -> None:
    assert figures.keys() >= PROMISED
    assert figures["dtype"] == "float32"
    assert isinstance(figures["chip"], str)
    assert isinstance(figures["compilations"], int)


def test_json_of_a_comparison(run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path):
    path = tmp_path / "figures.json"
    ran = run("generate", *expected, *pair, *NEW, "--compare", "--repetitions", 2, "--json", path)
    figures = json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]
    check_types(figures)
    assert not [name for name in PROMISED if figures[name] is None]
    assert figures["identical"] is True
    assert figures["speedup"] == figures["speculative_tokens_per_s"] / figures["autoregressive_tokens_per_s"]
    assert figures["tokens"] == [tokens for tokens, _ in expected.values()]
    counts = figures["acceptance_histogram"]
    assert len(counts) == figures["block_size"] == 4
    assert sum((n + 1) * count for n, count in enumerate(counts)) == 36
    assert figures["mean_acceptance_length"] == 36 / sum(counts)
    assert figures["rounds"] <= sum(counts) <= 3 * figures["rounds"]
    assert figures["repetitions"] == 2
    for shown in (f"{figures['speedup']:.2f}x", "outputs identical", "yes", f"{figures['mean_acceptance_length']:.2f} of 4"):
        assert shown in ran.out


def test_json_without_a_comparison(run: Run, pair: list[Any]):
    figures = run("generate", "t1 t2 t3", *pair, *NEW, "--json", "-").json
    check_types(figures)
    assert [figures[name] for name in ("autoregressive_tokens_per_s", "speedup", "identical")] == [None] * 3
    assert figures["speculative_tokens_per_s"] > 0
    assert sum((n + 1) * count for n, count in enumerate(figures["acceptance_histogram"])) == 12
    assert figures["compilations"] >= 3, "allocation, prefill and the decode loop"


def test_json_without_a_drafter(run: Run, folders: tuple[Path, Path], expected: dict[str, Any]):
    ran = run("generate", "t7", "--model", folders[0], *NEW, "--json", "-")
    check_types(ran.json)
    drafting = ("speculative_tokens_per_s", "speedup", "identical", "mean_acceptance_length", "acceptance_histogram")
    assert [ran.json[name] for name in drafting] == [None] * 5
    assert ran.json["autoregressive_tokens_per_s"] > 0
    assert ran.json["rounds"] == 12
    assert ran.json["text"] == [expected["t7"][1]]
    assert "accepted draft" not in ran.err


def test_sampling_options_reach_the_generation(run: Run, folders: tuple[Path, Path], pair: list[Any]):
    options = ["--temperature", 0.9, "--top-p", 0.8, "--top-k", 7, "--seed", 5]
    sampling = tw.Sampling(12, temperature=0.9, top_p=0.8, top_k=7, seed=5)
    want = tw.load(*folders).generate("t1 t2 t3", sampling)[0]
    assert want.tokens != tw.load(*folders).generate("t1 t2 t3", tw.Sampling(12))[0].tokens
    assert run("generate", "t1 t2 t3", *pair, *NEW, *options, "--json", "-").json["tokens"] == [want.tokens]


def test_a_stop_string_ends_the_text(run: Run, pair: list[Any], expected: dict[str, Any]):
    words = expected["t1 t2 t3"][1].split()
    stop = f" {words[5]}"
    figures = run("generate", "t1 t2 t3", *pair, *NEW, "--stop", stop, "--json", "-").json
    assert figures["finish_reason"] == ["stop"]
    assert figures["text"] == [expected["t1 t2 t3"][1].split(stop)[0]]


def test_block_size_and_window_change_no_token(run: Run, pair: list[Any], expected: dict[str, Any]):
    figures = run("generate", "t1 t2 t3", *pair, *NEW, "--block-size", 2, "--draft-window", 5, "--json", "-").json
    assert figures["tokens"] == [expected["t1 t2 t3"][0]]
    assert len(figures["acceptance_histogram"]) == 2


def interrupt_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the given number of dispatches on, all further ones meet Ctrl-C."""
    advance, done = Session.advance, []

    def interrupted(self: Session, steps: int = 64) -> list[Piece]:
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(self)
        return advance(self, min(steps, 2))

    monkeypatch.setattr(Session, "advance", interrupted)


def check_interrupted(ran: Ran, prompts: list[str], expected: dict[str, Any], path: Path) -> dict[str, Any]:
    """What was generated is printed and written; it is the beginning of what would have come."""
    assert ran.status == 0
    assert "interrupted" in ran.out
    figures = json.loads(path.read_text())
    check_types(figures)
    assert figures["finish_reason"] == ["interrupted"] * len(prompts)
    for prompt, tokens, text in zip(prompts, figures["tokens"], figures["text"], strict=True):
        assert len(tokens) < 12
        assert tokens == expected[prompt][0][: len(tokens)]
        assert prompt + text in ran.out
    return figures


@pytest.mark.parametrize("count", [1, 3], ids=["one", "several"])
def test_an_interruption_keeps_what_was_generated(
    run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    prompts = list(expected)[:count]
    interrupt_after(1, monkeypatch)
    ran = run("generate", *prompts, *pair, *NEW, "--compare", "--json", tmp_path / "figures.json")
    figures = check_interrupted(ran, prompts, expected, tmp_path / "figures.json")
    assert all(figures["tokens"])
    assert figures["mean_acceptance_length"] >= 1
    assert figures["speedup"] is None


def test_an_interruption_before_the_first_token(
    run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    interrupt_after(0, monkeypatch)
    ran = run("generate", "t7", *pair, *NEW, "--json", tmp_path / "figures.json")
    figures = check_interrupted(ran, ["t7"], expected, tmp_path / "figures.json")
    assert figures["tokens"] == [[]]
    assert figures["mean_acceptance_length"] is None
    assert figures["acceptance_histogram"] == [0, 0, 0, 0]
