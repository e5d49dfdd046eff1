"""A model served by two processes: the answers of one, their common end, and what is left when one dies."""

import importlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def children(pid: int) -> Iterator[int]:
    """Processes that a process has started, in the order of their numbers."""
    for status in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if parent == pid:
            yield int(status.parent.name)


@pytest.mark.slow
def test_two_processes_answer_as_one_does(folders: tuple[Path, Path]):
    """Without grammars, which the words of this model do not spell; what drafts is chosen by times, and may be nothing."""
    bodies = compared.asked(REQUESTS, VOCAB, grammars=False)
    (alone, one), (together, several) = (compared.run(*map(str, folders), count, bodies) for count in (1, 2))
    assert together == alone
    for figures in (one, several):
        assert (figures["compiled"], figures["status"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the process that it ends in /proc")
def test_the_end_of_one_that_follows_is_the_servers(folders: tuple[Path, Path], capfd: pytest.CaptureFixture[str]):
    with compared.serving(str(folders[0]), "none", 2) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "seed": 1}
        assert server.choices(body)
        _, follower = children(server.process.pid)
        os.kill(follower, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            for _ in range(100):
                server.post(body)
        assert server.process.wait(60) != 0
        assert time.monotonic() - began < 60
    assert "process 1 ended with status 137, and the others are stopped" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (("serve", "demo"), "expected --tensor-parallel 2, the devices of all 2 processes, found none"),
        (("serve", "demo-diffusion"), "expected one process to serve a diffusion model, found several"),
    ],
)
@pytest.mark.slow
def test_what_processes_cannot_serve_together_is_said_once(words: tuple[str, ...], said: str):
    command = [sys.executable, "-m", "tilewright", "launch", "--", *words, "--port", "0"]
    path = str(Path(compared.tilewright.__file__).parents[1])
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"tilewright: {said}\n"
