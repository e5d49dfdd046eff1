"""A model served by two processes: the answers of one, their common end, and what is left when one dies."""

import importlib
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from parallel.commands import run_together
from reference.dflash_numpy import as_folders, random_pair

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
compared: Any = importlib.import_module("serve_processes")

PAIR = random_pair(
    3, target_layers=2, drafter_layers=1, taps=(0, 1), block_size=4, max_position_embeddings=128, tie_word_embeddings=True
)
REQUESTS = 24
VOCAB = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return as_folders(tmp_path_factory.mktemp("pair"), PAIR)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here are rules, and programs of two processes are not kept."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")


@pytest.mark.slow
def test_two_processes_answer_as_one_does(folders: tuple[Path, Path]):
    """Without grammars, which the words of this model do not spell; what drafts is chosen by times, and may be nothing."""
    bodies = compared.request_bodies(REQUESTS, VOCAB, grammars=False)
    (alone, one), (together, several) = (compared.run(*map(str, folders), count, bodies) for count in (1, 2))
    assert together == alone
    for figures in (one, several):
        assert (figures["compiled"], figures["status"]) == (0, 0)


@pytest.mark.slow
def test_the_end_of_one_that_follows_is_the_servers(folders: tuple[Path, Path]):
    with compared.serving(str(folders[0]), "none", 2) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "seed": 1}
        assert server.choices(body)
        server.followers[0].kill()
        began = time.monotonic()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            for _ in range(100):
                server.post(body)
        assert server.process.wait(60) != 0
        assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "words, said",
    [
        (("serve", "demo"), "expected --tensor-parallel 2, the devices of all 2 processes, found none"),
        (("serve", "demo-diffusion"), "expected --tensor-parallel 2, the devices of all 2 processes, found none"),
    ],
)
@pytest.mark.slow
def test_what_processes_cannot_serve_together_is_said_once(words: tuple[str, ...], said: str):
    ran = run_together(*words, "--port", 0, devices=1)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"tilewright: {said}\n"
