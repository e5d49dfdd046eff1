"""Commands in several processes: the tokens of one process, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from parallel.commands import run_together
from tilewright.cli import processes

PROMPTS = ("t4 t4 t9", "t7 t1 t30 t2")
NEW = ("--max-new-tokens", 12, "--temperature", 1)


def test_two_processes_of_two_devices_give_the_tokens_of_one(run: Run, pair: list[Any], tmp_path: Path):
    """The first process chooses the seeds of both, prints, and writes the file."""
    path = tmp_path / "several.json"
    devices = ("--tensor-parallel", 4, "--schedule", "ring")
    ran = run_together("generate", *PROMPTS, *pair, "--block-size", 4, *NEW, *devices, "--json", path)
    assert ran.returncode == 0, ran.stderr
    several = json.loads(path.read_text())
    assert (several["devices"], several["schedule"]) == (4, "ring")
    assert several["speculative_decoding"]["num_spec_steps"] > 0
    assert ran.stdout == "".join(text + "\n" for text in several["text"])
    for prompt, tokens, seed in zip(PROMPTS, several["tokens"], several["seed"], strict=True):
        alone = run("generate", prompt, *pair[:2], *NEW, "--seed", seed, "--json", "-")
        assert alone.json["tokens"] == [tokens]


@pytest.mark.parametrize(
    "words, named, message",
    [
        (("chat", "demo"), {}, "expected a command that processes can run together"),
        (("genrate", "t1"), {}, "found 'genrate'. Did you mean 'generate'?"),
        (("bench", "overlp"), {}, "found 'bench overlp'. Did you mean 'bench overlap'?"),
        ((), {}, "'train lm', 'train lora' or 'train diffusion'; found none"),
        (("generate", "t1"), {}, "expected a whole number in TILEWRIGHT_PROCESSES beside TILEWRIGHT_COORDINATOR, found ''"),
        (("generate", "t1"), {"TILEWRIGHT_PROCESSES": "2", "TILEWRIGHT_PROCESS": "-1"}, "number in TILEWRIGHT_PROCESS beside"),
    ],
)
def test_a_process_that_cannot_join_ends_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: dict[str, str], message: str
):
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    for name, value in {processes.COORDINATOR: "127.0.0.1:1", **named}.items():
        monkeypatch.setenv(name, value)
    ran = run(*words)
    assert ends == [2]
    assert message in ran.err
