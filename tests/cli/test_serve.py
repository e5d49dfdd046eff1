"""`tilewright serve`: its options, and a process from its start to its end by a signal."""

import json
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.conftest import Run
from cli.server_process import process
from models.published_files import NAME, install
from server.fake import FakeEngine
from tilewright.cli import main as command_line
from tilewright.cli.common import DeviceOptions, DraftingSettings, MemorySettings, ModelOptions
from tilewright.cli.options import TemplateOptions
from tilewright.cli.serve import (
    DEMO_TEMPLATES,
    ApiSettings,
    CapacityOptions,
    CompileSettings,
    HttpOptions,
    LimitSettings,
    ServedModelOptions,
    engine_of,
    print_defaults,
    ready_line,
    template_of,
)
from tilewright.cli.serve_diffusion import ServedDenoising
from tilewright.runtime.engine import Engine
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.api import Api
from tilewright.server.defaults import SamplingDefaults

TABLE = {"batches": [1], "capacities": [128], "chunks": [16], "widths": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--model", "b"], "expected one model, found a and --model b"),
        (["--port", "70000"], "a port from 0 to 65535, found 70000"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot listen at 203.0.113.1"),
        (["--port", "0", "--limits", "drain_s=-1"], "--limits: expected drain_s of at least 0"),
        (["--port", "0", "--limits", "deadline_s=0"], "deadline_s above 0"),
        (["--port", "0", "--limits", "body_mb=0"], "expected body_mb above 0, found 0"),
        (["--port", "0", "--limits", "body_mb=inf"], "expected body_mb above 0, found inf"),
        (["--port", "0", "--api-key", ""], "API keys of printable characters"),
        (["--port", "0", "--lora", "sql"], "--lora: expected NAME=FOLDER, each name once, found 'sql'"),
        (["--port", "0", "--lora", "a=x", "--lora", "a=y"], "--lora: expected NAME=FOLDER, each name once, found 'a=y'"),
        (["--port", "0", "--lora", "demo=x"], "--lora: expected another name than the model's, found 'demo'"),
        (["--port", "0", "--lora", "a=/none"], "adapter a: expected adapter_config.json in /none, found none"),
        (["--port", "0", "--tls", "key=key.pem"], "--tls: expected cert beside key, found none"),
        (["--port", "0", "--log", "traces=localhost"], "expected a URL of http or https"),
        (["--port", "0", "--api", "pooling=cls"], "--api: expected pooling=last|mean, found pooling=cls"),
    ],
)
def test_bad_options_are_said_before_anything_is_loaded(run: Run, arguments: list[str], said: str):
    ran = run("serve", *([] if "--model" in arguments else ["demo"]), *arguments)
    assert ran.status == 2
    assert said in ran.err
    assert ran.out == ""


def test_a_taken_port_is_said(run: Run):
    with HeldPort() as port:
        ran = run("serve", "demo", "--port", port)
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
    memory = MemorySettings(page_size=32, pages=9, prefix_cache=False)
    capacity = CapacityOptions(memory=memory, compile=CompileSettings(tmp_path / "shapes.json", "warn"))
    options = capacity.served_options(LimitSettings(queue_requests=7))
    assert options.queue_requests == 7
    assert options.table == ShapeTable((1,), (128,), (16,), ())
    assert (options.page_size, options.pages, options.prefix_cache, options.guard) == (32, 9, False, "warn")
    table = CapacityOptions(slots=3).served_options(LimitSettings()).shapes(2048)
    assert (table.batches, table.capacities) == ((1, 2, 3), (2048,))
    assert CapacityOptions().served_options(LimitSettings()).table is None
    with pytest.raises(ValueError, match="slots of at least 1, found 0"):
        CapacityOptions(slots=0).served_options(LimitSettings())


def test_a_folder_is_served_under_its_name(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    assert HttpOptions().server_options(str(tmp_path / "my-model"), None).name == "my-model"
    assert HttpOptions().server_options("org/model", None).name == "org/model"
    assert HttpOptions(api=ApiSettings(name="x")).server_options("org/model", None).name == "x"


def test_requests_draw_as_the_models_folder_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    models = ModelOptions(model=str(tmp_path))
    console = Console(stderr=True)
    assert HttpOptions().sampling(models, console) == SamplingDefaults()
    said = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 2048, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = HttpOptions().sampling(models, console)
    assert found == SamplingDefaults(temperature=0.6, top_k=20, max_new_tokens=2048)
    assert HttpOptions(api=ApiSettings(generation_config="none")).sampling(models, console) == SamplingDefaults()
    print_defaults(found, Console(stderr=True, width=500))
    line = "default sampling of the model: temperature 0.6, top_k 20, max_new_tokens 2048 (--api generation_config=none"
    assert line in capsys.readouterr().err
    print_defaults(SamplingDefaults(), console)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": -1}, "expected temperature from 0 to 1e+06, found -1"),
        ({"top_k": 2.5}, "expected top_k from -1 to"),
        ({"top_p": "0.9"}, "expected top_p from 0 to 1, found '0.9'"),
        ({"max_new_tokens": 0}, "expected max_new_tokens from 1 to"),
        ({"min_p": True}, "expected min_p from 0 to 1, found True"),
    ],
)
def test_a_folder_that_asks_for_what_cannot_be_is_said(tmp_path: Path, said: dict[str, Any], message: str):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingDefaults.from_folder(tmp_path)


@pytest.mark.parametrize("display", [True, False])
def test_the_page_opens_once_the_server_is_ready(
    display: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without a display the address alone is said: Python would start a browser that takes the terminal."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, ":0") if display else monkeypatch.delenv(name, raising=False)
    engine: Any = FakeEngine(context=128)  # of which only the context is said
    api = object.__new__(Api)
    api.engine = engine
    api.options = HttpOptions().server_options("org/model", None)
    for open_page in (False, True):
        ready_line(api, ModelOptions("org/model", drafter="ngram"), "http://127.0.0.1:1", open_page)()
    assert opened == (["http://127.0.0.1:1"] if display else [])
    assert capsys.readouterr().out == "org/model with drafter ngram at http://127.0.0.1:1 (context 128)\n" * 2


def test_a_published_model_is_the_default_and_served_with_its_drafter(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[ModelOptions] = []

    def stop(models: ModelOptions, *rest: Any) -> None:
        loaded.append(models)
        raise ValueError("as far as this test goes")

    install(tmp_path / "site", monkeypatch)
    monkeypatch.setattr("tilewright.cli.serve.engine_of", stop)
    assert "as far as this test goes" in run("serve", "--port", 0).err
    run("serve", NAME, "--port", 0, "--drafter", "none")
    assert [(models.model, models.drafter_name) for models in loaded] == [(NAME, "auto"), (NAME, "none")]


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


def check_log(logged: str) -> None:
    """What a server says of its memory, and of each tenth of its programs, where nobody watches a bar."""
    sizes, *warming = [line.split(": ", 1)[1] for line in logged.splitlines()]
    in_stages = "programs are ready; the others are compiled now"
    warming = [line for line in warming if not line.endswith(in_stages) and "further programs" not in line]
    assert re.match(
        r"weights .* in float32 \(--dtype.*\), .*; KV cache .* pages of 64 .*; context \d+, .*\(--context\)$", sizes
    )
    done = [re.fullmatch(r"compiled (\d+) of (\d+) programs in [\d.]+ s", line) for line in warming]
    assert all(done)
    assert 1 <= len(done) <= 10
    assert done[-1] is not None
    assert done[-1][1] == done[-1][2]


def test_a_server_ends_with_status_0_when_told_to_after_what_runs(folders: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "shapes.json").write_text(json.dumps(TABLE))
    with process(folders[0], "--drafter", "none", "--compile", f"shapes={tmp_path / 'shapes.json'}") as server:
        line = server.wait_until_ready()
        assert line == f"target with no drafter at {server.url} (context 128)\n"
        with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as ready:
            assert json.load(ready) == {"status": "ready"}
        answers: list[dict[str, Any]] = []
        body = {"prompt": [1, 2, 3], "max_tokens": 120, "ignore_eos": True, "n": 8}
        asking = threading.Thread(target=lambda: answers.append(server.post(body)))
        asking.start()
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        asking.join()
        status, logged = server.ended()
        assert status == 0
        check_log(logged)
        assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["length"] * 8


def test_a_server_that_is_told_to_end_while_it_warms_up_does(folders: tuple[Path, Path]):
    """It listens from before the model is loaded, and answers as soon as programs are being compiled."""
    with HeldPort() as port:
        pass
    with process(folders[0], "--drafter", "ngram", "--port", port, "--log", "level=warning") as server:
        while server.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as health:
                    assert json.load(health)["status"] == "ok"
                    break
            except urllib.error.HTTPError:  # 503: it is not ready
                break
            except urllib.error.URLError:
                time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == (0, "")


def test_a_drafters_window_leaves_the_prefix_cache_out_and_says_so(
    run: Run, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    caplog.set_level("INFO", "tilewright")

    def started(capacity: CapacityOptions, window: int | None = None) -> tuple[bool, str]:
        models = ModelOptions(model=str(folders[0]), drafter=str(folders[1]), drafting=DraftingSettings(window))
        caplog.clear()
        engine, _ = engine_of(models, DeviceOptions(), capacity, ServedDenoising(), LimitSettings(), Console(quiet=True))
        assert isinstance(engine, Engine)
        return engine.decoding.prefix_cache, caplog.text

    on, said = started(CapacityOptions())
    assert (on, "prefix cache" in said) == (True, False)
    on, said = started(CapacityOptions(), window=16)
    assert (on, said.count("no prefix cache: the drafter keeps a window of its last positions")) == (False, 1)
    on, said = started(CapacityOptions(memory=MemorySettings(prefix_cache=False)), window=16)
    assert (on, "prefix cache" in said) == (False, False)
    ran = run(
        "serve", folders[0], "--drafter", folders[1], "--drafting", "window=16", "--memory", "prefix_cache=true", "--port", 0
    )
    assert ran.status == 2
    assert "expected no prefix cache: the drafter keeps a window" in ran.err


def test_a_template_that_does_not_compile_has_chats_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of the model's own the server says so and answers completions; one that was named ends the command."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    (tmp_path / "named.jinja").write_text("{{ messages[0].content }}")
    models = ServedModelOptions(model=str(tmp_path))
    console = Console(quiet=True)
    template = template_of(models, TemplateOptions(), False, console)
    assert template is not None
    with pytest.raises(ValueError, match="does not compile"):
        template.render([{"role": "user", "content": "a"}])
    assert "the server refuses chats. Name another template with --chat-template FILE" in caplog.text
    named = template_of(models, TemplateOptions(chat_template=tmp_path / "named.jinja"), False, console)
    assert named is not None
    assert named.render([{"role": "user", "content": "a"}]) == "a"
    (tmp_path / "named.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"named\.jinja: the chat template does not compile"):
        template_of(models, TemplateOptions(chat_template=tmp_path / "named.jinja"), False, console)
    with pytest.raises(ValueError, match="--chat-template: expected a file, found missing"):
        TemplateOptions(chat_template=Path("missing"))
