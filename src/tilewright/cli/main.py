"""`tilewright`: collects the commands, and turns a user's mistake into one line and exit status 2.

A command is imported when it is called, for JAX takes a second to import. Its help is its docstring, read from its source.
"""

import os
import re
import signal
import sys
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from inspect import cleandoc

from cyclopts import App, CycloptsError
from rich.console import Console

from tilewright import __version__
from tilewright.cli.extras import EXTRAS, installation
from tilewright.cli.platforms import leave_tpus_out, platforms_not_here
from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES, end_together, join

COMMANDS = {
    "demo": "demo:demo",
    "generate": "generate:generate",
    "diffuse": "diffuse:diffuse",
    "serve": "serve:serve",
    "chat": "chat:chat",
    "chips": "chips:chips",
    "launch": "launch:launch",
    "verify-exact": "verify_exact:verify_exact",
    "doctor": "doctor:doctor",
}
"""The module and the function of each command."""

GROUPS = {
    "train": (
        "Training.",
        {
            "lm": "train:lm",
            "drafter": "train_drafter:drafter",
            "diffusion": "train_diffusion:diffusion",
            "gnn": "train_gnn:gnn",
            "demo": "train_demo:demo",
            "evaluate": "train_demo:evaluate",
        },
    ),
    "bench": (
        "Benchmarks.",
        {
            "diffusion": "bench_diffusion:bench_diffusion",
            "graph": "bench_graph:bench_graph",
            "linear": "bench_linear:linear",
            "overlap": "bench_overlap:bench_overlap",
            "round": "bench_round:bench_round",
            "serving": "bench_serving:serving",
            "speculative": "bench_speculative:speculative",
        },
    ),
    "inspect": (
        "Shows what compilers make of programs, also for chips that aren't here, and of grammars.",
        {
            "overlap": "inspect_overlap:inspect_overlap",
            "training": "inspect_training:inspect_training",
            "diff": "inspect_diff:inspect_diff",
            "trace": "inspect_trace:inspect_trace",
            "grammar": "inspect_grammar:inspect_grammar",
        },
    ),
    "plan": (
        "Which schedule, width and settings, on Neuron chips that need not be there.",
        {
            "inference": "plan_inference:plan_inference",
            "training": "plan_training:plan_training",
        },
    ),
    "neuron": (
        "Programs on a simulated Neuron chip, and the environment of real ones.",
        {
            "simulate": "neuron_simulate:simulate_program",
            "env": "neuron_tools:environment",
            "calibrate": "neuron_tools:calibrate_command",
        },
    ),
    "shapes": ("The shapes that serving declares.", {"suggest": "shapes:suggest"}),
}
"""Help and commands of each group."""


def add_commands(to: App, places: dict[str, str]) -> App:
    """The application with commands by their names, none of which is imported for it."""
    for name, place in places.items():
        module, function = place.split(":")
        source = files("tilewright.cli").joinpath(f"{module}.py").read_text(encoding="utf-8")
        found = re.search(rf'^def {function}\(.*?^    """(.*?)(\n    Args:\n|""")', source, re.MULTILINE | re.DOTALL)
        assert found is not None, f"{place} has no docstring"
        to.command(f"tilewright.cli.{place}", name=name, help=cleandoc(found[1]))
    return to


app = App(
    name="tilewright",
    help="Irregular models on machines that want fixed shapes.",
    version=__version__,
    version_format="plaintext",
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
"""Variables of the environment that change what a command does, and what the tests check."""


def check_variables() -> None:
    """Raises a `ValueError` for a misspelt variable, and for a process's number without a coordinator.

    Variables that resemble none of ours pass: Kubernetes makes some of the name of a service.
    """
    for name in os.environ:
        near = get_close_matches(name, VARIABLES, 1, 0.85) if name.startswith("TILEWRIGHT_") else []
        if near and name not in VARIABLES:
            raise ValueError(f"expected no variable {name} in the environment. Did you mean {near[0]}?")
    if COORDINATOR not in os.environ and (alone := [name for name in (PROCESSES, INDEX) if name in os.environ]):
        raise ValueError(f"expected {COORDINATOR} beside {alone[0]}, found none")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, alone or with the processes that the environment names."""
    if "jax" not in sys.modules:
        leave_tpus_out()
    if sys.stdin is None:  # started with it closed
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (until the process ends)
    given = sys.argv[1:] if arguments is None else arguments
    if COORDINATOR in os.environ:
        end_together(partial(run, given))
    else:
        run(given)


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
        needs = (extra for extra, (modules, _) in EXTRAS.items() if getattr(missing, "name", None) in modules)
        if (extra := next(needs, None)) is None:
            raise
        said = f"tilewright: {EXTRAS[extra][1]} needs the {extra} extra: {installation(extra)}"
        errors.print(said, style="red", markup=False)
        sys.exit(2)
    except (ValueError, OSError, CycloptsError, FloatingPointError) as error:
        message = " ".join(str(error).split())
        errors.print(f"tilewright: {message}", style="red", markup=False, highlight=False)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    except KeyboardInterrupt:  # while a command's modules are imported; later commands see to it themselves
        sys.exit(128 + signal.SIGINT)
    except (RuntimeError, AssertionError) as error:
        if (platforms := platforms_not_here()) is None:
            raise
        said = " ".join(f"expected JAX_PLATFORMS to name devices that are here, found {platforms}. {error}".split())
        errors.print(f"tilewright: {said} (`tilewright doctor` tells more)", style="red", markup=False, highlight=False)
        sys.exit(2)
