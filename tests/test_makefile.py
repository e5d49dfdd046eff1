"""The Makefile: which environment an interpreter has, and what pip says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(MAKEFILE, folder)
    (folder / "pyproject.toml").touch()
    # `make test` gives its tests the variables of its own command line, PYTHON among them.
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(["make", *arguments], cwd=folder, env=kept, capture_output=True, text=True, check=False)


def environment(folder: Path, *arguments: str) -> str:
    """The environment that `make demo` installs into."""
    found = re.search(r" -m venv (\S+)", make(folder, "-n", "demo", *arguments).stdout)
    assert found is not None
    return found[1]


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_every_interpreter_has_environments_of_its_own(tmp_path: Path):
    """Paths of many end in bin/python."""
    assert environment(tmp_path) == ".venv"
    assert environment(tmp_path, "PYTHON=python3.13") == ".venv-python3.13"
    version = "cpython{}.{}".format(*sys.version_info)
    assert re.fullmatch(rf"\.venv-{version}-[0-9a-f]{{8}}", environment(tmp_path, f"PYTHON={sys.executable}"))
    others = [script(tmp_path / name / "bin" / "python", f"echo pypy3.11-{name}") for name in ("a", "b")]
    assert [environment(tmp_path, f"PYTHON={other}") for other in others] == [".venv-pypy3.11-a", ".venv-pypy3.11-b"]
    for target in ("oracle", "clients", "scale"):
        said = make(tmp_path, "-n", target, f"PYTHON={others[0]}").stdout
        assert f"{others[0]} -m venv .venv-pypy3.11-a-{target}\n" in said
        assert f".venv-{target}" not in said


def test_an_interpreter_that_does_not_run_is_said(tmp_path: Path):
    ran = make(tmp_path, "-n", "demo", "PYTHON=./none/python")
    assert ran.returncode == 2
    assert "PYTHON=./none/python is no interpreter that runs" in ran.stderr


def test_the_demo_is_told_how_make_was_called(tmp_path: Path):
    """It says what to type next."""
    assert 'TILEWRIGHT_MAKE="make" .venv/bin/tilewright demo' in make(tmp_path, "-n", "demo").stdout
    other = script(tmp_path / "bin" / "python", "echo pypy3.11-a")
    said = make(tmp_path, "-n", "demo", f"PYTHON={other}", "VENV=mine").stdout
    assert f'TILEWRIGHT_MAKE="make PYTHON={other} VENV=mine" mine/bin/tilewright demo' in said


@pytest.mark.parametrize("status", [0, 1])
def test_pip_speaks_where_it_fails_alone(tmp_path: Path, status: int):
    script(tmp_path / "mine" / "bin" / "python", f"echo Collecting; echo 'ERROR: no network' >&2; exit {status}")
    ran = make(tmp_path, "VENV=mine", "mine/installed-base")
    assert "Installing JAX and Tilewright into mine" in ran.stdout
    assert ("Collecting\nERROR: no network\n" in ran.stdout) == (status == 1)
    assert (ran.returncode == 0) == (status == 0)
    assert (tmp_path / "mine" / "installed-base").exists() == (status == 0)
