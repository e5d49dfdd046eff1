"""`tilewright serve`: its options, and a process from its start to its end by a signal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from tilewright.cli import main as command_line
from tilewright.cli.common import ModelOptions
from tilewright.cli.serve import DEMO_TEMPLATES, CapacityOptions, HttpOptions, SpeculationOptions
from tilewright.decode.shapes import ShapeTable

TABLE = {"batches": [1], "capacities": [128], "chunks": [16], "widths": []}


@pytest.mark.parametrize(
    ("given", "drafter", "block_size"),
    [
        ('{"method": "dflash", "model": "a/b", "num_speculative_tokens": 15}', "a/b", 16),
        ('{"method": "eagle3", "model": "a/b"}', "a/b", None),
        ('{"model": "a/b"}', "a/b", None),
        ('{"method": "ngram", "num_speculative_tokens": 3}', "ngram", 4),
        ('{"model": "[ngram]"}', "ngram", None),
    ],
)
def test_vllms_way_of_naming_a_drafter_is_understood(given: str, drafter: str, block_size: int | None):
    models = SpeculationOptions(given).applied(ModelOptions())
    assert (models.drafter, models.block_size) == (drafter, block_size)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--speculative-config", "{"], "--speculative-config: not JSON"),
        (["--speculative-config", "[]"], "--speculative-config: expected a JSON object, found []"),
        (["--speculative-config", '{"method": "medusa", "model": "x"}'], "among dflash, eagle3, ngram, found 'medusa'"),
        (["--speculative-config", '{"method": "dflash"}'], "folder or id as model, found None"),
        (["--speculative-config", '{"model": "x", "num_speculative_tokens": 0}'], "of at least 1, found 0"),
        (["--speculative-config", '{"model": "x", "draft_tensor_parallel_size": 1}'], "found 'draft_tensor_parallel_size'"),
        (["--speculative-config", '{"model": "x"}', "--drafter", "ngram"], "leave --drafter and --block-size out"),
        (["a", "--model", "b"], "expected one model, found a and --model b"),
        (["--port", "70000"], "a port from 0 to 65535, found 70000"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot listen at 203.0.113.1"),
        (["--port", "0", "--drain", "-1"], "--drain of at least 0"),
        (["--port", "0", "--deadline", "0"], "deadline_s above 0"),
        (["--port", "0", "--max-body-mb", "0"], "max_body_bytes above 0"),
        (["--port", "0", "--api-key", ""], "API keys of printable characters"),
    ],
)
def test_bad_options_are_said_before_anything_is_loaded(run: Run, arguments: list[str], said: str):
    ran = run("serve", *arguments)
    assert ran.status == 2
    assert said in ran.err
    assert ran.out == ""


def test_a_taken_port_is_said(run: Run):
    with HeldPort() as port:
        ran = run("serve", "--port", port)
    assert (ran.status, "Address already in use" in ran.err) == (2, True)


class HeldPort:
    def __enter__(self) -> int:
        from tilewright.server.run import listen

        self.socket = listen("127.0.0.1", 0)
        return self.socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_capacity_becomes_the_engines_options(tmp_path: Path):
    (tmp_path / "shapes.json").write_text(json.dumps(TABLE))
    options = CapacityOptions(tmp_path / "shapes.json", page_size=32, pages=9, prefix_cache=False, guard="warn").engine_options(
        128
    )
    assert options.table == ShapeTable((1,), (128,), (16,), ())
    assert (options.page_size, options.pages, options.prefix_cache, options.guard) == (32, 9, False, "warn")
    table = CapacityOptions(slots=3).engine_options(2048).table
    assert table is not None
    assert (table.batches, table.capacities) == ((1, 2, 3), (2048,))
    assert CapacityOptions().engine_options(2048).table is None
    with pytest.raises(ValueError, match="--slots of at least 1, found 0"):
        CapacityOptions(slots=0).engine_options(2048)


def test_a_folder_is_served_under_its_name(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    assert HttpOptions().server_options(str(tmp_path / "my-model"), None).name == "my-model"
    assert HttpOptions().server_options("org/model", None).name == "org/model"
    assert HttpOptions(served_model_name="x").server_options("org/model", None).name == "x"


def test_the_demos_are_given_what_was_said():
    said = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def main():"}]
    assert DEMO_TEMPLATES["demo"].render(said) == "import os\ndef main():"
    assert DEMO_TEMPLATES["demo-diffusion"].render(said) == "def main():\n"


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "prometheus_client", "pydantic"])
def test_without_its_extra_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch, module: str):
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(command_line, "app", missing)
    ran = run("serve")
    assert ran.status == 2
    assert "serving needs the serve extra: pip install 'tilewright[serve]'" in ran.err


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: object):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TILEWRIGHT_COMPILE_CACHE": "0"}
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TILEWRIGHT_API_KEY": "secret"}
        anywhere = () if "--port" in arguments else ("--port", "0")
        command = [sys.executable, "-m", "tilewright", "serve", *anywhere, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.url = ""

    def wait_until_ready(self) -> str:
        """The line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http")), "")
        return line

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "authorization": "Bearer secret"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ended(self) -> tuple[int, str]:
        """Its status and what it wrote to standard error."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def process(*arguments: object) -> Iterator[Process]:
    made = Process(*arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_a_server_ends_with_status_0_when_told_to_after_what_runs(folders: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "shapes.json").write_text(json.dumps(TABLE))
    with process(folders[0], "--shapes", tmp_path / "shapes.json") as server:
        line = server.wait_until_ready()
        assert line == f"target with no drafter at {server.url} (context 128)\n"
        with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as ready:
            assert json.load(ready) == {"status": "ready"}
        answers: list[dict[str, Any]] = []
        asked = {"prompt": [1, 2, 3], "max_tokens": 120, "ignore_eos": True, "n": 8}
        asking = threading.Thread(target=lambda: answers.append(server.post(asked)))
        asking.start()
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        asking.join()
        assert server.ended() == (0, "")
        assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["length"] * 8


def test_a_server_that_is_told_to_end_while_it_warms_up_does(folders: tuple[Path, Path]):
    """It listens from before the model is loaded, and answers as soon as programs are being compiled."""
    with HeldPort() as port:
        pass
    with process(folders[0], "--drafter", "ngram", "--port", port) as server:
        while server.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as health:
                    assert json.load(health)["status"] in ("warming", "ok")
                    break
            except urllib.error.URLError:
                time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == (0, "")
