"""`tilewright launch`: the same tokens from several processes, how they end, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from tilewright.cli import launch, processes

SOURCES = Path(launch.__file__).parents[2]
PROMPTS = ("t4 t4 t9", "t7 t1 t30 t2")
NEW = ("--max-new-tokens", 12, "--temperature", 1)
SECONDS = 240


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes import what is tested, and compile as quickly as tests do."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.mark.usefixtures("sources")
def test_two_processes_of_two_devices_give_the_tokens_of_one(run: Run, pair: list[Any], tmp_path: Path):
    """Drawn without a seed, which the first process chooses for both. It alone prints, and writes the file."""
    path = tmp_path / "several.json"
    devices = ("--tensor-parallel", 4, "--schedule", "ring")
    command = ("generate", *PROMPTS, *pair, "--block-size", 4, *NEW, *devices, "--json", path)
    words = (sys.executable, "-m", "tilewright", "launch", "-n", 2, "--devices-per-process", 2, "--", *command)
    ran = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr
    several = json.loads(path.read_text())
    assert (several["devices"], several["schedule"]) == (4, "ring")
    assert several["speculative_decoding"]["num_spec_steps"] > 0
    assert ran.stdout == "".join(text + "\n" for text in several["text"])
    for prompt, tokens, seed in zip(PROMPTS, several["tokens"], several["seed"], strict=True):
        alone = run("generate", prompt, *pair[:2], *NEW, "--seed", seed, "--json", "-")
        assert alone.json["tokens"] == [tokens]


def environments(count: int) -> list[dict[str, str]]:
    return [{**os.environ, "INDEX": str(index)} for index in range(count)]


def script(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nindex = int(os.environ['INDEX'])\n{code}"]


def test_one_that_fails_ends_all_with_its_status(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = "if index == 1: sys.exit('no such luck')\ntime.sleep(600)"
    began = time.monotonic()
    assert launch.run_all(script(code), environments(3)) == 1
    assert time.monotonic() - began < 60
    assert capfd.readouterr().err == "[1] no such luck\nprocess 1 ended with status 1, and the others are stopped\n"


def test_the_first_one_says_itself_why_it_fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = "if index == 0: sys.exit('no such luck')\ntime.sleep(600)"
    assert launch.run_all(script(code), environments(3)) == 1
    assert capfd.readouterr().err == "no such luck\n"


def test_one_that_a_signal_ends_is_told_as_a_shell_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = "if index == 0: os.kill(os.getpid(), 9)\ntime.sleep(600)"
    assert launch.run_all(script(code), environments(2)) == 137
    assert "process 0 ended with status 137" in capfd.readouterr().err


def test_what_all_refuse_is_said_once(capfd: pytest.CaptureFixture[str]):
    assert launch.run_all(script("print('not this', file=sys.stderr)\nsys.exit(2)"), environments(3)) == 2
    assert capfd.readouterr().err == "not this\n"


def test_the_first_one_alone_is_heard(capfd: pytest.CaptureFixture[str]):
    assert launch.run_all(script("print('out', index)\nprint('err', index, file=sys.stderr)"), environments(2)) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_a_server_hears_the_first_signal_and_its_end_is_everybodys(tmp_path: Path):
    """The others take no notice of signals, as followers do, and are ended all the same."""
    server = f"""
import signal
if index:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    code = f"""
import os, signal, sys
from tilewright.cli import launch
launch.GRACE_S = 0.2
environments = [{{**os.environ, "INDEX": str(index)}} for index in range(2)]
sys.exit(launch.run_all({script(server)!r}, environments, serving=True))
"""
    started = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCES)})
    try:
        while not (tmp_path / "ready").exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        assert started.wait(SECONDS) == 0
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_all(tmp_path: Path, name: str, status: int):
    """Those that were started write down their numbers; none is there afterwards, though they take no notice of requests."""
    child = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({str(tmp_path)!r} + f"/{{index}}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""
    code = f"""
import os, signal, sys
from tilewright.cli import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
sys.exit(launch.run_all({script(child)!r}, [{{**os.environ, "INDEX": str(index)}} for index in range(2)]))
"""
    started = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCES)})
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        while not all(file.is_file() and file.read_text() for file in files):
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(getattr(signal, name))
        assert started.wait(SECONDS) == status
    finally:
        started.kill()
        started.wait()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_standard_input_comes_to_all():
    code = """
import os, signal, sys
from tilewright.cli import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
check = "import sys; sys.exit(sys.stdin.read() != 't1 t2')"
sys.exit(launch.run_all([sys.executable, "-c", check], [dict(os.environ)] * 2, sys.stdin.fileno()))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    ran = subprocess.run([sys.executable, "-c", code], input=b"t1 t2", env=environment, timeout=SECONDS)
    assert ran.returncode == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (("-n", 0, "--", "generate"), "expected --processes from 1, found 0"),
        (("--devices-per-process", 0, "--", "generate"), "expected --devices-per-process from 1, found 0"),
        ((), "'train lm' or 'train diffusion'; found none"),
        (("--", "genrate", "t1"), "found 'genrate'. Did you mean 'generate'?"),
        (("--", "bench", "overlp"), "found 'bench overlp'. Did you mean 'bench overlap'?"),
        (("--", "launch", "--", "generate"), "found 'launch'"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, words: tuple[object, ...], message: str):
    ran = run("launch", *words)
    assert ran.status == 2
    assert message in ran.err


def test_one_of_several_starts_no_others(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(processes.COORDINATOR, "127.0.0.1:1")
    with pytest.raises(ValueError, match="found TILEWRIGHT_COORDINATOR set"):
        launch.launch("generate")


@pytest.mark.parametrize(
    "words, named, message",
    [
        (("chat", "demo"), {}, "expected a command that processes can run together"),
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
