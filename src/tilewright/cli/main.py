"""`tilewright`: collects the commands, and turns a user's mistake into one line and exit status 2."""

import sys

from cyclopts import App, CycloptsError
from rich.console import Console

from tilewright import __version__
from tilewright.cli.bench import app as bench
from tilewright.cli.doctor import doctor
from tilewright.cli.generate import generate

app = App(name="tilewright", help="Irregular models on machines that want fixed shapes.", version=__version__)
app.command(generate)
app.command("tilewright.cli.train:app", name="train", help="Training.")  # imported when called: it needs the train extra
app.command(bench)
app.command(doctor)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    try:
        app(arguments, exit_on_error=False, print_error=False, error_console=errors)
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if getattr(missing, "name", None) != "optax":
            raise
        errors.print("tilewright: training needs the train extra: pip install 'tilewright[train]'", style="red", markup=False)
        sys.exit(2)
    except (ValueError, OSError, CycloptsError) as error:
        message = " ".join(str(error).split())
        errors.print(f"tilewright: {message}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
