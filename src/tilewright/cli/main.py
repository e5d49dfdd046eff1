"""`tilewright`: collects the commands, and turns a user's mistake into one line and exit status 2."""

import sys

from cyclopts import App, CycloptsError
from rich.console import Console

from tilewright import __version__
from tilewright.cli.bench import app as bench
from tilewright.cli.generate import generate
from tilewright.cli.train import app as train

app = App(name="tilewright", help="Irregular models on machines that want fixed shapes.", version=__version__)
app.command(generate)
app.command(train)
app.command(bench)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    try:
        app(arguments, exit_on_error=False, print_error=False, error_console=errors)
    except (ValueError, OSError, CycloptsError) as error:
        message = " ".join(str(error).split())
        errors.print(f"tilewright: {message}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
