"""`tilewright`: the command line. A mistake of the user gives one line on standard error and exit status 2.

A command is imported when it is called, because JAX takes a second to import. Its help is the docstring in its source file.
"""

import os
import re
import signal
import sys
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from inspect import cleandoc

from cyclopts import App, CycloptsError, Group
from rich.console import Console

from tilewright import __version__
from tilewright.cli.extras import EXTRAS, installation
from tilewright.cli.platforms import leave_tpus_out, platforms_not_here
from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES, end_together, join
from tilewright.compiled.allocator import keep_freed_memory

COMMANDS = {
    "demo": "demo:demo",
    "generate": "generate:generate",
    "diffuse": "diffuse:diffuse",
    "serve": "serve:serve",
    "chat": "chat:chat",
    "chips": "chips:chips",
    "verify-exact": "verify_exact:verify_exact",
    "doctor": "doctor:doctor",
}
"""The module and the function of each command."""

GROUPS = {
    "train": (
        "Training.",
        {
            "lm": "train:lm",
            "lora": "train_lora:lora",
            "drafter": "train_drafter:drafter",
            "diffusion": "train_diffusion:diffusion",
            "gnn": "train_gnn:gnn",
        },
    ),
    "plan": (
        "Plans runs on chips that are absent.",
        {
            "training": "plan_training:plan_training",
        },
    ),
    "bench": (
        "Benchmarks.",
        {
            "diffusion": "bench_diffusion:bench_diffusion",
            "graph": "bench_graph:bench_graph",
            "overlap": "bench_overlap:bench_overlap",
            "serving": "bench_serving:serving",
            "speculative": "bench_speculative:speculative",
        },
    ),
    "inspect": (
        "Inspects compiled programs, also for absent chips, training runs and grammars.",
        {
            "overlap": "inspect_overlap:inspect_overlap",
            "training": "inspect_training:inspect_training",
            "run": "inspect_run:inspect_run",
            "diff": "inspect_diff:inspect_diff",
            "trace": "inspect_trace:inspect_trace",
            "grammar": "inspect_grammar:inspect_grammar",
        },
    ),
    "neuron": (
        "Simulates programs on Neuron chips, and prints environment variables for real ones.",
        {
            "plan": "neuron_plan:plan",
            "simulate": "neuron_simulate:simulate_program",
            "env": "neuron_tools:environment",
            "calibrate": "neuron_tools:calibrate_command",
        },
    ),
}
"""Help and commands of each group."""


def add_commands(app: App, places: dict[str, str]) -> App:
    """Adds commands to an application without importing them."""
    for name, place in places.items():
        module, function = place.split(":")
        source = files("tilewright.cli").joinpath(f"{module}.py").read_text(encoding="utf-8")
        found = re.search(rf'^def {function}\(.*?^    """(.*?)(\n    Args:\n|""")', source, re.MULTILINE | re.DOTALL)
        assert found is not None, f"{place} has no docstring"
        app.command(f"tilewright.cli.{place}", name=name, help=cleandoc(found[1]))
    return app


app = App(
    name="tilewright",
    help="Speculative decoding, diffusion language models and graph networks on chips that need fixed shapes.",
    version=__version__,
    version_format="plaintext",
    group_parameters=Group("Options", sort_key=9),
)
add_commands(app, COMMANDS)
for name, (about, places) in GROUPS.items():
    app.command(add_commands(App(name=name, help=about), places))


VARIABLES = (
    "TILEWRIGHT_API_KEY",
    "TILEWRIGHT_CACHE",
    "TILEWRIGHT_COMPILE_CACHE",
    "TILEWRIGHT_CPU_ISA",
    "TILEWRIGHT_MAKE",
    "TILEWRIGHT_NO_NATIVE",
    "TILEWRIGHT_UNCHECKED",
    COORDINATOR,
    PROCESSES,
    INDEX,
)
"""Environment variables of the package."""


def check_variables() -> None:
    """Raises a `ValueError` for a misspelt variable, and for the variables of several processes without a coordinator.

    Other variables with the prefix are allowed: Kubernetes derives some from the name of a service.
    """
    for name in os.environ:
        near = get_close_matches(name, VARIABLES, 1, 0.85) if name.startswith("TILEWRIGHT_") else []
        if near and name not in VARIABLES:
            raise ValueError(f"unknown environment variable {name}. Did you mean {near[0]}?")
    if COORDINATOR not in os.environ and (incomplete := [name for name in (PROCESSES, INDEX) if name in os.environ]):
        raise ValueError(f"expected {COORDINATOR} beside {incomplete[0]}, found none")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, in one process or as one of the processes that the environment names."""
    if "jax" not in sys.modules:
        leave_tpus_out()
    if sys.stdin is None:  # the caller closed standard input
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    arguments = sys.argv[1:] if arguments is None else arguments
    if "jax" not in sys.modules and arguments[:1] == ["train"] and arguments[1:2] != ["gnn"]:
        keep_freed_memory()  # reading large graphs would keep several times what training needs
    if COORDINATOR in os.environ:
        end_together(partial(run, arguments))
    else:
        run(arguments)


def run(arguments: list[str]) -> None:
    """Runs the command line in this process."""
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    try:
        check_variables()
        if COORDINATOR in os.environ:
            join(arguments)
        app(arguments, exit_on_error=False, print_error=False, error_console=errors)
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        missing_extras = (extra for extra, (modules, _) in EXTRAS.items() if getattr(missing, "name", None) in modules)
        if (extra := next(missing_extras, None)) is None:
            raise
        line = f"tilewright: {EXTRAS[extra][1]} needs the {extra} extra: {installation(extra)}"
        errors.print(line, style="red", markup=False)
        sys.exit(2)
    except (ValueError, OSError, CycloptsError, FloatingPointError) as error:
        # A file's error without its number: "FILE: No such file or directory".
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
            text = f"{error.filename}: {error.strerror}"
        message = " ".join(text.split())
        errors.print(f"tilewright: {message}", style="red", markup=False, highlight=False)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    except KeyboardInterrupt:  # during the import of a command; later, commands handle Ctrl-C themselves
        sys.exit(128 + signal.SIGINT)
    except (RuntimeError, AssertionError) as error:
        if (platforms := platforms_not_here()) is None:
            raise
        line = " ".join(f"expected JAX_PLATFORMS to name available devices, found {platforms}. {error}".split())
        errors.print(f"tilewright: {line} (see `tilewright doctor`)", style="red", markup=False, highlight=False)
        sys.exit(2)
