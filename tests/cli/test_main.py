"""`tilewright` itself: what it imports and when, and the help that stands in for commands that are not imported yet."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from cyclopts.command_spec import CommandSpec

import tilewright as tw
from cli.conftest import Run
from tilewright.cli.main import VARIABLES, app, main

HEAVY = ("jax", "numpy", "tokenizers", "safetensors", "huggingface_hub")


@pytest.mark.parametrize("argument", ["--version", "--help", "bench --help"])
def test_no_library_is_imported_to_tell_what_there_is(argument: str):
    """In a process of its own, as this one has imported everything."""
    report = f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    run = f"from tilewright.cli.main import main\nmain({argument.split()})"
    code = f"import atexit, sys\natexit.register(lambda: {report})\n{run}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stderr == "[]\n"
    assert (tw.__version__ if argument == "--version" else "Usage: tilewright") in ran.stdout


@pytest.mark.parametrize(("command", "called"), [("train lm", "[True]"), ("train gnn", "[]"), ("bench", "[]")])
def test_a_training_process_keeps_freed_memory(command: str, called: str):
    """In a process of its own, which has not imported JAX."""
    arguments = [*command.split(), "--help"]
    replaced = "from tilewright.cli import main\ncalls = []\nmain.keep_freed_memory = lambda: calls.append(True)"
    code = f"import atexit, sys\n{replaced}\natexit.register(lambda: print(calls, file=sys.stderr))\nmain.main({arguments})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stderr == f"{called}\n"


def lazy_commands(parent: App) -> Iterator[tuple[App, str]]:
    """Every command that is named by where it is, with its parent."""
    for name, command in parent._commands.items():
        if isinstance(command, CommandSpec):
            yield parent, name
        elif name not in ("--help", "-h", "--version"):
            yield from lazy_commands(command)


@pytest.mark.parametrize(("parent", "name"), [pytest.param(*each, id=each[1]) for each in lazy_commands(app)])
def test_the_help_of_a_command_is_its_own(parent: App, name: str):
    """It stands beside the command's place, since the command is not imported for it; both must say the same."""
    shown = parent._commands[name].help
    command = parent[name]
    if command.default_command is None:
        assert shown is None or shown == command.help
        return
    summary = re.split(r"Args:\n", command.default_command.__doc__ or "")[0]
    assert shown is not None
    assert " ".join(summary.split()) == " ".join(shown.split())


def test_a_platform_that_is_not_here_is_named():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "zpu"}
    command = [sys.executable, "-m", "tilewright", "generate", "hi", "--model", "demo"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("tilewright: expected JAX_PLATFORMS to name available devices, found zpu. ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "TILEWRIGHT_CPU_ISAS",
            "unknown environment variable TILEWRIGHT_CPU_ISAS. Did you mean TILEWRIGHT_CPU_ISA?",
        ),
        ("TILEWRIGHT_ISA", "Did you mean TILEWRIGHT_CPU_ISA?"),
        ("TILEWRIGHT_PROCESSES", "expected TILEWRIGHT_COORDINATOR beside TILEWRIGHT_PROCESSES, found none"),
    ],
)
def test_a_variable_that_would_change_nothing_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, problem: str):
    monkeypatch.setenv(name, "2")
    ran = run("chips", "--json", "-")
    assert (ran.status, ran.out) == (2, "")
    assert problem in ran.err


def test_variables_of_others_pass(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Kubernetes names some after a service."""
    for name in ("TILEWRIGHT_PORT", "TILEWRIGHT_API_PORT", "TILEWRIGHT_SERVICE_HOST", *VARIABLES[:1]):
        monkeypatch.setenv(name, "tcp")
    assert run("chips").status == 0


def test_every_variable_of_the_package_is_known():
    """In Python's sources; those of C++ are the compiler's."""
    texts = [path.read_text() for path in Path(tw.__file__).parent.rglob("*.py")]
    assert {name for text in texts for name in re.findall(r"TILEWRIGHT_[A-Z_]+", text)} == set(VARIABLES) | {"TILEWRIGHT_ISA"}


def test_a_closed_standard_input_is_an_empty_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        main(["--version"])
    with sys.stdin as empty:
        assert empty.read() == ""


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.cli.main.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_public_names_are_those_of_the_documents_and_no_others():
    usage = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `tw\.(\w+)` \|", usage, re.MULTILINE)
    assert set(documented) == set(tw.__all__) <= set(dir(tw))
    for name in tw.__all__:
        assert getattr(tw, name) is not None
    assert tw.load.__module__ == "tilewright.llm.load"
    with pytest.raises(AttributeError, match="nope"):
        _ = tw.nope  # type: ignore[attr-defined]
