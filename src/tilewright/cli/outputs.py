"""Options that measuring commands share: checks of their ranges, and the files that figures go to besides the terminal."""

import datetime
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from rich.console import Console

from tilewright.cli.common import JsonFile, check_output_file, human_console, whole_file, write_json
from tilewright.report.page import Report


def check_least(options: object, **least: int) -> None:
    """Raises a `ValueError` for an option, or one of its values, that is less than it may be; and for several that are none."""
    for name, smallest in least.items():
        given = getattr(options, name)
        values = given if isinstance(given, tuple) else (smallest if given is None else given,)
        if not values or min(values) < smallest:
            raise ValueError(f"expected {name} of at least {smallest}, found {', '.join(map(str, values)) or 'none'}")


def check_some(options: object, *names: str) -> None:
    """Raises a `ValueError` for an option of several values that has none, or has one twice."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            found = ", ".join(map(str, values)) or "none"
            raise ValueError(f"expected {'different ' if values else ''}{name}, found {found}")


def circumstances(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The foot of a page: what the figures depend on, with the command and the day."""
    return {**facts, "command": shlex.join(["tilewright", *sys.argv[1:]]), "date": datetime.date.today().isoformat()}


@Parameter(name="*")
@dataclass(frozen=True)
class PageFiles:
    """Places where figures go, besides the terminal.

    Attributes:
        json_file: the figures as JSON; "-" is standard output.
        html: a page with tables and charts.
    """

    json_file: JsonFile = None
    html: Path | None = None

    def check(self) -> None:
        """Raises a `ValueError` for a file that cannot be written."""
        check_output_file("--json", self.json_file)
        for name, path in vars(self).items():
            if isinstance(path, Path):
                check_output_file(f"--{name}", str(path))

    def console(self) -> Console:
        """Console that people read."""
        return human_console(self.json_file)

    def write(
        self, console: Console, figures: Mapping[str, Any], report: Report, write_page: Callable[[Path, Report], None]
    ) -> None:
        """Writes the figures and the page, each if it was asked for."""
        write_json(self.json_file, figures)
        if self.html is not None:
            with whole_file(self.html) as partial:
                write_page(partial, report)
            console.print(f"{self.html} written", markup=False)


@Parameter(name="*")
@dataclass(frozen=True)
class TableFiles(PageFiles):
    """The same, with the table as CSV.

    Attributes:
        csv: the table as CSV.
    """

    csv: Path | None = None
