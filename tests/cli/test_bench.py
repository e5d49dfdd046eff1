"""`tilewright bench speculative` on small files."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    """Options that name two files of prompts, of which three and one are taken."""
    prompts = {"first": ["t1 t2", "t3", "t4 t5 t6", "t9"], "[second]": ["t7 t8"]}
    for name, listed in prompts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in listed))
    options = ["--samples", 3, "--max-new-tokens", 8, "--repetitions", 1]
    return ["--data", tmp_path / "first.jsonl", "--data", tmp_path / "[second].jsonl", *options]


def test_table_and_json_have_a_row_for_each_file(run: Run, pair: list[Any], data: list[Any], tmp_path: Path):
    path = tmp_path / "figures.json"
    ran = run("bench", "speculative", *pair, *data, "--json", path)
    assert ran.status == 0
    written = json.loads(path.read_text())
    described = [written[name] for name in ("dtype", "max_new_tokens", "temperature", "batch_size")]
    assert described == ["float32", 8, 0.0, 1]
    assert list(written["data"]) == ["first", "[second]"]
    assert [figures["prompts"] for figures in written["data"].values()] == [3, 1]
    for name, figures in written["data"].items():
        assert figures["identical"] is True
        assert figures["first_differences"] == [None] * figures["prompts"]
        assert figures["speedup"] == figures["speculative_tokens_per_s"] / figures["autoregressive_tokens_per_s"]
        tokens = sum((n + 1) * count for n, count in enumerate(figures["acceptance_histogram"]))
        assert tokens == 8 * figures["prompts"]
        row = next(line for line in ran.out.splitlines() if name in line)
        assert f"{figures['speedup']:.2f}x" in row
        assert f"{figures['prompts']}/{figures['prompts']}" in row
    assert "temperature 0, top-p 1, 8 new tokens, batch 1" in ran.out


def test_rows_may_be_decoded_together(run: Run, pair: list[Any], data: list[Any]):
    alone = run("bench", "speculative", *pair, *data, "--json", "-").json
    together = run("bench", "speculative", *pair, *data, "--batch-size", 4, "--json", "-").json
    assert together["batch_size"] == 4
    first, second = alone["data"]["first"], together["data"]["first"]
    assert second["acceptance_histogram"] == first["acceptance_histogram"]
    assert second["rounds"] < first["rounds"], "a round of a batch serves all its rows"
