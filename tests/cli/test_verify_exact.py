"""`tilewright verify-exact`: what it prints and writes, and its exit status."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax import Array

from cli.conftest import Run
from llm.support import plain_step
from tilewright.bench.exact_paths import QUICK
from tilewright.runtime.state import DecodeState, Target, Verified, verify

PROMPTS = ["t1 t2 t1 t2 t1", "t3 t4 t5 " * 9, "t9", "t7 t8 " * 12]
LENGTHS = [5, 27, 1, 24]


@pytest.fixture
def command(tmp_path: Path, folders: tuple[Path, Path]) -> list[object]:
    """A small verification, with n-gram drafting alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    options = ["--drafter", "ngram", "--batch-size", 2, "--max-new-tokens", 12, "--prompt-file", file, "--quick"]
    return ["verify-exact", folders[0], *options]


@pytest.mark.slow
def test_all_is_well(run: Run, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the engine, which tests of `bench.exact` run."""
    monkeypatch.setattr("tilewright.cli.verify_exact.QUICK", replace(QUICK, arrivals=()))
    ran = run(*command, "--json", tmp_path / "found.json", columns=200)
    assert ran.status == 0, ran.out + ran.err
    written = json.loads((tmp_path / "found.json").read_text())
    names = ("same", "drafters", "batches", "seed", "requests_compared", "requests_agreeing", "prompt_tokens", "dtype")
    assert [written[name] for name in names] == [True, ["ngram"], [1, 2], 0, 8, 8, LENGTHS, "float32"]
    assert set(written["plain"]) == {"greedy", "sampled"}
    rows = written["findings"]
    assert {row["drafter"] for row in rows} == {"none", "ngram", "auto"}
    paths = ["one at a time", "batches of 2", "one at a time", "batches of 2", "batches of 2, random widths"]
    assert [row["path"] for row in rows if row["sampling"] == "greedy"] == paths
    for row in rows:
        assert row["same"]
        assert row["sha256"] == written["plain"][row["sampling"]]
        assert (row["differences"], row["problem"]) == ([], "")
        assert row["exercised"]["rounds"] > 0
        assert row["seconds"] > 0
        shown = next(line for line in ran.out.splitlines() if f" {row['path']} " in line and f" {row['drafter']} " in line)
        assert row["sha256"][:8] in shown
        assert " yes " in shown
    assert "5 of 5 paths give the tokens of plain decoding" in ran.out
    assert "8 of 8 requests" in ran.out


@pytest.mark.slow  # as `bench/test_exact.py` has it, through the command
def test_a_wrong_token_is_shown(run: Run, command: list[object], monkeypatch: pytest.MonkeyPatch):
    """Rounds take another token than the target's at position 30, in the engine and without; one of the requests gets there."""
    monkeypatch.setattr(
        "tilewright.cli.verify_exact.QUICK", replace(QUICK, alone=("greedy",), served=("greedy",), arrivals=("as given",))
    )

    def careless(target: Target, params: Any, state: DecodeState, block: Array, *rest: Any) -> Verified:
        verified = verify(target, params, state, block, *rest)
        place = state.last_position[:, None] + 1 + jnp.arange(block.shape[1])[None]
        return verified._replace(tokens=jnp.where(place == 30, (verified.tokens + 1) % 40, verified.tokens))

    monkeypatch.setattr("tilewright.runtime.rounds.verify", careless)
    monkeypatch.setattr("tilewright.runtime.rounds.autoregressive_step", plain_step)
    ran = run(*command, "--json", "-")
    assert ran.status == 1
    assert not ran.json["same"]
    assert (ran.json["requests_agreeing"], ran.json["requests_compared"]) == (3, 4)
    by_drafter = {name: [row for row in ran.json["findings"] if row["drafter"] == name] for name in ("none", "ngram")}
    assert all(row["same"] for row in by_drafter["none"])
    for row in by_drafter["ngram"]:
        (found,) = row["differences"]
        assert (found["number"], found["position"]) == (1, 30 - LENGTHS[1]), row["path"]
        assert found["token"] == (found["plain_token"] + 1) % 40
        assert found["lead"] >= found["margin"] > 0
    assert "ngram: one at a time, greedy: request 1 differs from token 3 on: " in ran.err
    assert "the target's best two logits there are " in ran.err
    assert " no " in ran.err
    assert "4 of 11 paths give the tokens of plain decoding." in ran.err


def test_the_model_may_be_named_either_way(run: Run, folders: tuple[Path, Path]):
    ran = run("verify-exact", folders[0], "--model", folders[1])
    assert (ran.status, "expected one model" in ran.err) == (2, True)


BAD: dict[str, tuple[list[object], str]] = {
    "both efforts": (["--quick", "--thorough"], "expected --quick or --thorough, found both"),
    "no rows": (["--batch-size", 0], "expected batch_size of at least 1, found 0"),
    "rows twice": (["--batch-size", 2, 2], "expected different batch_size, found 2, 2"),
    "no requests": (["--requests", 0], "expected requests of at least 1, found 0"),
    "no tokens": (["--max-new-tokens", 0], "expected max_new_tokens of at least 1, found 0"),
    "a seed too large": (["--seed", 2**63], "expected a seed that is an integer from -2**63 to 2**63 - 1"),
    "a drafter twice": (["--drafter", "ngram", "ngram"], "expected different drafters, found ngram, ngram"),
    "no such option": (["--nope"], "nope"),
    "no such file": (["--prompt-file", "missing.jsonl"], "missing.jsonl"),
    "a place that is none": (["--json", "nowhere/found.json"], "its folder does not exist"),
}


@pytest.mark.parametrize(("options", "message"), list(BAD.values()), ids=list(BAD))
def test_bad_input_is_refused(run: Run, folders: tuple[Path, Path], options: list[object], message: str):
    ran = run("verify-exact", "--model", folders[0], *options)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_the_demos_drafters_are_its_own(run: Run, folders: tuple[Path, Path]):
    names = "none, ngram, suffix, mtp"
    for model, last in ((folders[0], f"{names} or self"), ("smollm2-135m", f"{names}, self or dflash2")):
        ran = run("verify-exact", model, "--drafter", "dflash")
        assert ran.status == 2
        known = f"expected a folder, a Hugging Face id, auto, {last} as drafter of {model}"
        assert f"{known}, found dflash, which belongs to demo" in ran.err


def test_more_requests_than_the_file_has(run: Run, command: list[object]):
    ran = run(*command, "--requests", 5)
    assert ran.status == 2
    assert "expected 5 records, found 4" in ran.err


def test_a_prompt_beyond_the_context(run: Run, command: list[object]):
    ran = run(*[200 if option == 12 else option for option in command])
    assert ran.status == 2
    assert "context of 128" in ran.err
