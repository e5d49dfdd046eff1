"""`tilewright inspect diff`: what it refuses, what it writes, and how it asks another interpreter. Nothing is compiled here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.conftest import Run
from perfmodel.test_diff import ASYNCHRONOUS, SYNCHRONOUS
from tilewright.cli import inspect_diff
from tilewright.compiled.aot import Compiled

COMMAND = ("inspect", "diff")
NAME = "v5e:2x2 decode:8x4096 sync, 3 layers"
OPTIONS = ("--chip", "v5e:2x2", "--schedule", "sync", "--phase", "decode:8x4096")
OTHER = """#!{python}
import os, shutil, sys
assert "TPU_LIBRARY_PATH" not in os.environ
assert sys.argv[1:5] == ["-m", "tilewright", "inspect", "diff"], sys.argv
words = sys.argv[5:]
assert words[words.index("--schedule") + 1] == "sync"
if "--layers" in words:
    sys.exit("no such libtpu")
shutil.copy({saved!r}, words[words.index("--save") + 1])
"""


def saved(file: Path, made: Compiled, libtpu: str, name: str = NAME) -> Path:
    programs = [{"name": name, **made.record()}]
    file.write_text(json.dumps({"jax_version": "0.12.0", "libtpu_version": libtpu, "programs": programs}))
    return file


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return saved(tmp_path / "old.json", SYNCHRONOUS, "0.0.50"), saved(tmp_path / "new.json", ASYNCHRONOUS, "0.0.52")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SimpleNamespace(chip="v5e:2x2", resolved=lambda phase, name: name)
    monkeypatch.setattr(inspect_diff.OverlapOptions, "setups", lambda _: [setup])
    monkeypatch.setattr(inspect_diff, "compile_layers", lambda *_: SYNCHRONOUS)
    monkeypatch.setattr(inspect_diff, "libtpu_version", lambda: "0.0.50")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/here/libtpu.so")  # as libtpu does when it is imported


def test_two_files(run: Run, files: tuple[Path, Path], tmp_path: Path):
    ran = run(*COMMAND, *files, "--json", tmp_path / "diff.json")
    assert ran.status == 0, ran.err
    assert "all-reduce at jit(f)/layer/psum: 1 synchronous -> 1 asynchronous" in ran.out
    assert "libtpu 0.0.50" in ran.out
    written: dict[str, Any] = json.loads((tmp_path / "diff.json").read_text())
    assert (written["measured"], written["after"]["libtpu_version"]) == (False, "0.0.52")
    (one,) = written["data"]
    assert (one["name"], one["before"]["synchronous"], one["after"]["asynchronous"]) == (NAME, 1, 1)
    assert one["ways"][0]["after"] == {"asynchronous": 1}


def test_what_ends_with_status_1(run: Run, files: tuple[Path, Path]):
    old, new = files
    worse = run(*COMMAND, old, new, "--fail-above", 0.5)
    assert (worse.status, worse.out.count("rose by 100.0%, more than 50.0%")) == (1, 1)
    assert run(*COMMAND, old, new, "--fail-above", 1.01).status == 0
    lost = run(*COMMAND, new, old, "--fail-above", 1)
    assert (lost.status, lost.out.count("1 more synchronous than before")) == (1, 1)


@pytest.mark.usefixtures("compiled")
def test_another_interpreter(run: Run, files: tuple[Path, Path], tmp_path: Path):
    other = tmp_path / "python"
    mine = tmp_path / "mine.json"
    other.write_text(OTHER.format(python=sys.executable, saved=str(files[1])))
    other.chmod(0o700)
    ran = run(*COMMAND, *OPTIONS, "--other", other, "--save", mine)
    assert ran.status == 0, ran.err
    assert "1 synchronous -> 1 asynchronous" in ran.out
    assert json.loads(mine.read_text()) == json.loads(files[0].read_text()) | {"jax_version": inspect_diff.jax.__version__}
    failed = run(*COMMAND, *OPTIONS, "--layers", 3, "--other", other)
    assert (failed.status, "no such libtpu" in failed.err) == (2, True)


def test_a_library_of_unknown_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/elsewhere/libtpu.so")
    with pytest.raises(ValueError, match="found TPU_LIBRARY_PATH=/elsewhere"):
        inspect_diff.libtpu_version()


@pytest.mark.usefixtures("compiled")
def test_what_it_refuses(run: Run, files: tuple[Path, Path], tmp_path: Path):
    other = saved(tmp_path / "other.json", SYNCHRONOUS, "0.0.50", "another program")
    (tmp_path / "list.json").write_text("[]")
    whole = json.loads(files[0].read_text())
    (program,) = whole["programs"]
    for name, programs in (
        ("number", 3),
        ("nameless", [program | {"name": 1}]),
        ("sizes", [program | {"memory": {}}]),
        ("text", [program | {"hlo": None}]),
        ("cost", [program | {"cost": 0}]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(whole | {"programs": programs}))
    (tmp_path / "folder").mkdir()
    for words, message in (
        ((), "expected two files of --save, or --other or --save; found 0 files"),
        ((files[0],), "found 1 files"),
        ((*files, "--save", tmp_path / "x"), "found 2 files"),
        ((*files, "--fail-above", -1), "expected --fail-above from 0, found -1"),
        ((files[0], other), "expected the same programs on both sides"),
        ((files[0], tmp_path / "list.json"), "to be a file of --save"),
        ((files[0], tmp_path / "number.json"), "with a list of named programs"),
        ((files[0], tmp_path / "nameless.json"), "with a list of named programs"),
        ((files[0], tmp_path / "sizes.json"), "found no such argument_size_in_bytes, output_size_in_bytes"),
        ((files[0], tmp_path / "text.json"), "found no such hlo"),
        ((files[0], tmp_path / "cost.json"), "found no such cost"),
        ((*OPTIONS, "--other", tmp_path / "none"), "expected --other to be a Python interpreter or a folder with a libtpu"),
        ((*OPTIONS, "--other", tmp_path / "folder"), "found no libtpu in"),
    ):
        ran = run(*COMMAND, *words)
        assert ran.status == 2, words
        assert message in " ".join(ran.err.split()), ran.err
