"""Options that measuring commands share: checks of their ranges, and the files that figures go to besides the terminal."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from tilewright.bench.replay import replay
from tilewright.cli.common import JsonFile, check_output_file, human_console, whole_file, write_json
from tilewright.llm.language_model import LanguageModel
from tilewright.report.replay import write_replay
from tilewright.runtime.sampling import Sampling


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


def check_share(option: str, share: float | None) -> None:
    """Raises a `ValueError` for a share that is not from 0 to 1."""
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"expected {option} from 0 to 1, found {share:g}")


def write_file(console: Console, path: Path | None, write: Callable[[Path], object]) -> None:
    """Has a file written, if one is asked for, which appears whole or not at all, and says so."""
    if path is not None:
        with whole_file(path) as partial:
            write(partial)
        console.print(f"{path} written", markup=False)


@contextmanager
def progress(console: Console, total: float, name: str = "") -> Iterator[Callable[..., None]]:
    """A bar in a terminal, which goes when the work is done. What it yields counts a step, or `count`, and may name it."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def step(name: str | None = None, count: float = 1) -> None:
            bar.update(task, advance=count, description=name)

        yield step


def write_replay_page(
    path: Path, lm: LanguageModel, names: tuple[str, str], prompts: Sequence[tuple[str, Sequence[int]]],
    sampling: Sampling | Sequence[Sampling], console: Console,
) -> None:  # fmt: skip
    """Decodes the prompts, each with its title, once more round by round, and writes the page that plays them."""
    with progress(console, len(prompts), "replay") as step:
        shown = replay(lm, names, prompts, sampling, step)
    write_file(console, path, lambda partial: write_replay(partial, shown))


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

    def write(self, console: Console, figures: Mapping[str, Any], write_page: Callable[[Path], object]) -> None:
        """Writes the figures and the page, each if it was asked for."""
        write_json(self.json_file, figures)
        write_file(console, self.html, write_page)


@Parameter(name="*")
@dataclass(frozen=True)
class TracedFiles(PageFiles):
    """The same, with what runs when.

    Attributes:
        trace: what runs when as a Chrome trace, which Perfetto opens.
    """

    trace: Path | None = None

    def write_trace(self, console: Console, events: Callable[[], Any]) -> None:
        """Writes the trace, if it was asked for."""
        write_file(console, self.trace, lambda path: path.write_text(json.dumps(events()), encoding="utf-8"))


@Parameter(name="*")
@dataclass(frozen=True)
class TableFiles(PageFiles):
    """The same, with the table as CSV.

    Attributes:
        csv: the table as CSV.
    """

    csv: Path | None = None
