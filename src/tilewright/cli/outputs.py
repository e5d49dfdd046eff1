"""Output of commands: consoles, files and progress."""

import datetime
import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from tilewright.bench.replay import replay
from tilewright.cli.options import OUTPUT, option_class
from tilewright.compiled.ledger import Ledger
from tilewright.llm.language_model import LanguageModel
from tilewright.parallel.mesh import is_first_process
from tilewright.report.replay import write_replay
from tilewright.runtime.sampling import Sampling

LINE_S = 60.0
"""Seconds between two lines of progress without a terminal."""

JsonFile = Annotated[
    str | None,
    Parameter(
        name="--json",
        allow_leading_hyphen=True,
        group=OUTPUT,
        help='write the figures as JSON to this file, "-" for standard output.',
    ),
]
"""Destination of the figures as JSON."""


def human_console(json_file: str | None) -> Console:
    """Makes the console for people: standard output, or standard error if the figures go to standard output.

    Of several processes of one command, only the first prints.

    Raises:
        ValueError: the file of the figures cannot be written.
    """
    check_output_file("--json", json_file)
    return Console(stderr=json_file == "-", highlight=False, emoji=False, quiet=not is_first_process())


def progress_console(console: Console) -> Console | None:
    """Returns the console for progress bars; None for a file or a pipe, where bars leave empty lines."""
    return console if console.is_terminal else None


def partial_file(path: Path) -> Path:
    """Path of the temporary file that is renamed to `path`."""
    return path.with_name(path.name + ".partial")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary file that replaces `path` at the end. After an error, `path` stays as it was.

    A symbolic link stays, and its target is replaced; a device or a pipe is written directly. Of several processes of one
    command, only the first writes `path`.
    """
    if not is_first_process():
        with TemporaryDirectory() as folder:
            yield Path(folder) / path.name
        return
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    partial = partial_file(path)
    try:
        yield partial
        try:
            os.replace(partial, path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            copyfile(partial, path)  # a file that is a mount point cannot be replaced
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(json_file: str | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures to the destination of `--json`."""
    if json_file is None or not is_first_process():
        return
    text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(json_file), text)


def check_output_file(option: str, name: str | None) -> None:
    """Raises a `ValueError` for a file that cannot be written; "-" is standard output, for `--json` only."""
    if name is None or (name == "-" and option == "--json"):
        return
    if name.startswith("-"):
        or_standard = ', or "-" for standard output' if option == "--json" else ""
        raise ValueError(f"{option} {name}: expected a file{or_standard}")
    path = Path(name)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {name}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"{option} {name}: expected a file, found a folder")
    try:
        try_writing(path)
    except OSError as error:
        raise ValueError(f"{option} {name}: it cannot be written: {error.strerror}") from error


def try_writing(path: Path) -> None:
    """Creates and removes a file beside `path`, because permissions do not show what a file system accepts.

    Raises:
        OSError: `path` cannot be written.
    """
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with NamedTemporaryFile(dir=path.resolve().parent, prefix=partial_file(path).name):
        pass


def check_output_folder(option: str, folder: Path) -> None:
    """Raises a `ValueError` for a folder that cannot be written or created."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{option} {place}: expected a folder, found a file")
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    try:
        with NamedTemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder}: it cannot be written: {error.strerror}") from error


def check_output_files(files: Mapping[str, str | Path | None]) -> None:
    """Raises a `ValueError` for files that cannot be written, and for one file of two options.

    Args:
        files: file of each option; None for no file.
    """
    options: dict[Path, str] = {}
    for option, name in files.items():
        check_output_file(option, None if name is None else str(name))
        path = None if name is None or str(name) == "-" else Path(name).resolve()
        if path is not None and not (path.exists() and not path.is_file()) and options.setdefault(path, option) != option:
            raise ValueError(f"expected different files, found {name} for {options[path]} and {option}")


def write_file(console: Console, path: Path | None, write: Callable[[Path], object]) -> None:
    """Writes a file atomically, unless `path` is None, and prints its path."""
    if path is not None:
        with whole_file(path) as partial:
            write(partial)
        console.print(f"{path} written", markup=False)


def now_and_then(console: Console) -> Callable[[str], None]:
    """Returns a function that prints a line at most once a minute, and only without a terminal."""
    last = time.monotonic()

    def print_line(line: str) -> None:
        nonlocal last
        if not console.is_terminal and time.monotonic() - last > LINE_S:
            console.print(line, highlight=False)
            last = time.monotonic()

    return print_line


@contextmanager
def progress(console: Console, total: float, name: str = "", shown: bool = True) -> Iterator[Callable[..., None]]:
    """Shows a progress bar in a terminal, which disappears at the end; elsewhere prints a line once a minute.

    Yields:
        a function that adds a step, or `count` steps, and may set the text of the bar.
    """
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(escape(name), total=total)
        print_line = now_and_then(console)

        def step(name: str | None = None, count: float = 1) -> None:
            bar.update(task, advance=count, description=None if name is None else escape(name))
            if shown:
                print_line(f"{bar.tasks[task].percentage:.0f} %  {bar.tasks[task].description}".rstrip())

        yield step


class ProgramsColumn(ProgressColumn):
    """Column with the number of programs compiled and loaded from disk since the start."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def render(self, task: Task) -> Text:
        loaded = self.ledger.loaded
        compiled = self.ledger.compilations - self.ledger.loaded
        parts = [f"{count} {noun}" for count, noun in ((compiled, "programs compiled"), (loaded, "loaded")) if count]
        return Text(", ".join(parts), style="dim")


@contextmanager
def working(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner in a terminal with a text, the elapsed time and the number of compiled programs.

    Yields:
        a function that changes the text.
    """
    with Ledger() as ledger:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), ProgramsColumn(ledger))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
            task = shown.add_task(escape(name), total=None)
            yield lambda text: shown.update(task, description=escape(text))


def write_replay_page(
    path: Path,
    lm: LanguageModel,
    names: tuple[str, str],
    prompts: Sequence[tuple[str, Sequence[int]]],
    sampling: Sampling | Sequence[Sampling],
    console: Console,
) -> None:
    """Decodes the prompts again round by round, and writes the page that replays them."""
    with progress(console, len(prompts), "replay") as step:
        shown = replay(lm, names, prompts, sampling, step)
    write_file(console, path, lambda partial: write_replay(partial, shown))


def circumstances(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts at the foot of a page, with the command and the date."""
    return {**facts, "command": shlex.join(["tilewright", *sys.argv[1:]]), "date": datetime.date.today().isoformat()}


@option_class(group=OUTPUT)
class OutputFiles:
    """Output files of a command."""

    json_file: JsonFile = None

    def __post_init__(self) -> None:
        files = {f"--{name}": path for name, path in vars(self).items() if isinstance(path, Path)}
        check_output_files({**files, "--json": self.json_file})

    def console(self) -> Console:
        """Makes the console for people. Raises a `ValueError` for a file that cannot be written."""
        return human_console(self.json_file)

    def notes(self, console: Console) -> Console:
        """Returns the console for all lines but the text: standard error if the text goes to a file or a pipe."""
        piped = self.json_file != "-" and not console.is_terminal
        return Console(stderr=True, highlight=False, emoji=False, quiet=console.quiet) if piped else console


@option_class(group=OUTPUT)
class PageFiles(OutputFiles):
    """Output files of a command with an HTML page.

    Attributes:
        html: write an HTML page with tables and charts to this file.
    """

    html: Path | None = None

    def write(self, console: Console, figures: Mapping[str, Any], write_page: Callable[[Path], object]) -> None:
        """Writes the figures and the page to the files of `--json` and `--html`."""
        write_json(self.json_file, figures)
        write_file(console, self.html, write_page)


@option_class(group=OUTPUT)
class TracedFiles(PageFiles):
    """Output files of a command with a trace.

    Attributes:
        trace: write the timeline as a Chrome trace, for Perfetto, to this file.
    """

    trace: Path | None = None

    def write_trace(self, console: Console, events: Callable[[], Any]) -> None:
        """Writes the trace to the file of `--trace`."""
        write_file(console, self.trace, lambda path: path.write_text(json.dumps(events()), encoding="utf-8"))


@option_class(group=OUTPUT)
class TableFiles(PageFiles):
    """Output files of a command with a table.

    Attributes:
        csv: write the table as CSV to this file.
    """

    csv: Path | None = None
