"""Every script of examples/ runs, on models and sizes that a test can afford, and prints what it promises."""

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

CASES = {
    "speculative": (["--model", "demo", "--prompt", "def fibonacci(n):", "--max-new-tokens", "32"], "same tokens: True"),
    "structured_output": (["--model", "demo"], "parsed: "),
    "diffusion": (["--new-tokens", "64"], "sparse, threshold 0.9"),
    "graph_edges": (["--epochs", "60"], "nodes of each class: "),
    "graph_relations": (["--epochs", "30"], "accuracy on other authors: 0.8"),
    "serve_and_call": (["--model", "demo", "--prompt", "def fibonacci(n):"], 'JSON: {"capital"'),
    "train_drafter": (["docs", "--target", "demo", "--steps", "2", "--prompt", "def f(x):"], "tokens per pass of the target"),
    "tpu_schedule": ([], "communication hidden"),
    "token_threading": ([], "all-gather"),
}
"""Arguments of each example, and a part of its output."""
HERE = ("diffusion", "graph_edges", "graph_relations", "speculative", "structured_output")
"""Examples that run within the test's process. The others set up JAX's devices or start processes."""
SOURCES = os.pathsep.join(str(EXAMPLES.parent / folder) for folder in ("src", "tests", "benchmarks"))


def test_every_example_has_a_case():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    arguments, expected = CASES[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(CASES) - set(HERE)))
def test_an_example_runs_in_a_process_of_its_own(name: str, tmp_path: Path):
    if name == "tpu_schedule" and find_spec("libtpu") is None:
        pytest.skip("no libtpu; the extra `tpu` brings it")
    arguments, expected = CASES[name]
    arguments = [str(EXAMPLES.parent / "docs") if each == "docs" else each for each in arguments]
    path = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": ""}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert expected in ran.stdout
