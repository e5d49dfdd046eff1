"""Where commands' output goes: consoles, files and progress."""

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
from tilewright.cli.options import option_class
from tilewright.compiled.ledger import Ledger
from tilewright.llm.language_model import LanguageModel
from tilewright.parallel.mesh import is_first_process
from tilewright.report.replay import write_replay
from tilewright.runtime.sampling import Sampling

LINE_S = 60.0
"""Seconds between two lines that tell of long work where there is no terminal."""

JsonFile = Annotated[
    str | None,
    Parameter(
        name="--json", allow_leading_hyphen=True, help='Write the figures as JSON to this file, "-" for standard output.'
    ),
]
"""Where to write the figures as JSON."""


def human_console(json_file: str | None) -> Console:
    """Console that people read: standard output, or standard error when the figures go to standard output.

    Of several processes that run a command together, the first one speaks.

    Raises:
        ValueError: the figures cannot be written to that file.
    """
    check_output_file("--json", json_file)
    return Console(stderr=json_file == "-", highlight=False, emoji=False, quiet=not is_first_process())


def progress_console(console: Console) -> Console | None:
    """Console for the progress of loading; None if the output is a file or a pipe, which bars would put empty lines into."""
    return console if console.is_terminal else None


def partial_file(path: Path) -> Path:
    """The file that is written before it becomes `path`."""
    return path.with_name(path.name + ".partial")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write to, which becomes `path` at the end; if something fails there is none, and `path` stays as it was.

    Of a link it becomes what that points to; a device or a pipe is written as it is. Of several processes that run a command
    together, the first one's file is kept.
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
            copyfile(partial, path)  # mounted by itself, into a container say
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file, which appears whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(json_file: str | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures where `--json` says."""
    if json_file is None or not is_first_process():
        return
    text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(json_file), text)


def check_output_file(option: str, name: str | None) -> None:
    """Refuses, before any work, a place that cannot be written to; "-" is standard output, for `--json` alone."""
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
    """Makes and removes a file beside `path`, as `whole_file` will: permissions alone do not tell what a file system takes.

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
    """Raises a `ValueError`, before any work, for a folder that cannot be written to or made."""
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
    """Refuses outputs that cannot be written, and one file for two of them, before any work.

    Args:
        files: each by its option; None is none.
    """
    options: dict[Path, str] = {}
    for option, name in files.items():
        check_output_file(option, None if name is None else str(name))
        path = None if name is None or str(name) == "-" else Path(name).resolve()
        if path is not None and not (path.exists() and not path.is_file()) and options.setdefault(path, option) != option:
            raise ValueError(f"expected different files, found {name} for {options[path]} and {option}")


def write_file(console: Console, path: Path | None, write: Callable[[Path], object]) -> None:
    """Has a file written, if one is asked for, which appears whole or not at all, and says so."""
    if path is not None:
        with whole_file(path) as partial:
            write(partial)
        console.print(f"{path} written", markup=False)


def now_and_then(console: Console) -> Callable[[str], None]:
    """A function that prints a line where there is no terminal, and a minute went by since the last one."""
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if not console.is_terminal and time.monotonic() - told > LINE_S:
            console.print(line, highlight=False)
            told = time.monotonic()

    return tell


@contextmanager
def progress(console: Console, total: float, name: str = "", shown: bool = True) -> Iterator[Callable[..., None]]:
    """A bar in a terminal, which goes when the work is done; elsewhere a line now and then.

    What it yields counts a step, or `count`, and may name what comes next.
    """
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(escape(name), total=total)
        tell = now_and_then(console)

        def step(name: str | None = None, count: float = 1) -> None:
            bar.update(task, advance=count, description=None if name is None else escape(name))
            if shown:
                tell(f"{bar.tasks[task].percentage:.0f} %  {bar.tasks[task].description}".rstrip())

        yield step


class ProgramsColumn(ProgressColumn):
    """Column of how many programs were compiled since, and how many were loaded from the disk."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def render(self, task: Task) -> Text:
        loaded = self.ledger.loaded
        compiled = self.ledger.compilations - self.ledger.loaded
        parts = [f"{count} {what}" for count, what in ((compiled, "programs compiled"), (loaded, "loaded")) if count]
        return Text(", ".join(parts), style="dim")


@contextmanager
def working(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """Shows in a terminal what is being done, for how long, and the programs that were compiled for it.

    What it yields says what is being done from then on.
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
    """Decodes the prompts, each with its title, once more round by round, and writes the page that plays them."""
    with progress(console, len(prompts), "replay") as step:
        shown = replay(lm, names, prompts, sampling, step)
    write_file(console, path, lambda partial: write_replay(partial, shown))


def circumstances(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The foot of a page: what the figures depend on, with the command and the day."""
    return {**facts, "command": shlex.join(["tilewright", *sys.argv[1:]]), "date": datetime.date.today().isoformat()}


@option_class
class OutputFiles:
    """Places where figures go, besides the terminal.

    Attributes:
        json_file: the figures as JSON; "-" is standard output.
    """

    json_file: JsonFile = None

    def __post_init__(self) -> None:
        files = {f"--{name}": path for name, path in vars(self).items() if isinstance(path, Path)}
        check_output_files({**files, "--json": self.json_file})

    def console(self) -> Console:
        """Console that people read. Raises a `ValueError` for a file that cannot be written."""
        return human_console(self.json_file)

    def notes(self, console: Console) -> Console:
        """Console for all but a text: the same, or standard error where standard output is a file or a pipe, for the text."""
        piped = self.json_file != "-" and not console.is_terminal
        return Console(stderr=True, highlight=False, emoji=False, quiet=console.quiet) if piped else console


@option_class
class PageFiles(OutputFiles):
    """Options of where figures and a page go.

    Attributes:
        html: a page with tables and charts.
    """

    html: Path | None = None

    def write(self, console: Console, figures: Mapping[str, Any], write_page: Callable[[Path], object]) -> None:
        """Writes the figures and the page, each if it was asked for."""
        write_json(self.json_file, figures)
        write_file(console, self.html, write_page)


@option_class
class TracedFiles(PageFiles):
    """The same, with what runs when.

    Attributes:
        trace: what runs when as a Chrome trace, which Perfetto opens.
    """

    trace: Path | None = None

    def write_trace(self, console: Console, events: Callable[[], Any]) -> None:
        """Writes the trace, if it was asked for."""
        write_file(console, self.trace, lambda path: path.write_text(json.dumps(events()), encoding="utf-8"))


@option_class
class TableFiles(PageFiles):
    """The same, with the table as CSV.

    Attributes:
        csv: the table as CSV.
    """

    csv: Path | None = None
