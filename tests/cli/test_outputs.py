"""Files that commands write: whole or not at all, and whatever a path names stays what it is."""

import errno
import logging
import os
import re
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from tilewright.cli import outputs
from tilewright.cli.common import notice
from tilewright.cli.outputs import (
    PageFiles,
    ProgramsColumn,
    check_output_file,
    check_output_files,
    check_output_folder,
    progress,
    working,
    write_text,
)
from tilewright.cli.serve import StandardError
from tilewright.compiled.ledger import Ledger, ProgramRecord


def test_the_target_of_a_link_is_written(tmp_path: Path):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "figures.json"
    link = tmp_path / "link.json"
    target.write_text("before")
    link.symlink_to(target)
    write_text(link, "after")
    assert (link.is_symlink(), target.read_text()) == (True, "after")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["figures.json", "link.json", "there"]


def test_a_pipe_is_written_as_it_is(tmp_path: Path):
    pipe = tmp_path / "pipe"
    read = list[str]()
    os.mkfifo(pipe)
    check_output_file("--json", str(pipe))
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "figures")
    reader.join(20)
    assert (read, pipe.is_fifo(), [path.name for path in tmp_path.iterdir()]) == (["figures"], True, ["pipe"])


def test_a_file_that_is_a_mount_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def replace(old: Path, new: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(outputs.os, "replace", replace)
    write_text(tmp_path / "figures.json", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("figures.json", "after")]


@pytest.mark.parametrize("name", ["new.json", "device"])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    os.mkfifo(tmp_path / "device")
    tried: list[Path] = []

    def refuse(dir: Path, **_: object) -> None:
        tried.append(dir)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(outputs.os, "access", lambda path, mode: tried.append(path))
    monkeypatch.setattr(outputs, "NamedTemporaryFile", refuse)
    with pytest.raises(ValueError, match=f"--json .*{name}: it cannot be written: (Read-only|Permission)"):
        check_output_file("--json", str(tmp_path / name))
    assert tried == [tmp_path / "device" if name == "device" else tmp_path]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that makes no files, whoever asks")
def test_a_file_system_is_asked_for_what_permissions_do_not_tell(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--json /proc/new\.json: it cannot be written"):
        check_output_file("--json", "/proc/new.json")
    with pytest.raises(ValueError, match=r"--html .*: it cannot be written: File name too long"):
        check_output_file("--html", str(tmp_path / ("n" * 250)))
    with pytest.raises(ValueError, match=r"--out /proc/new/training: it cannot be written"):
        check_output_folder("--out", Path("/proc/new/training"))
    check_output_folder("--out", tmp_path / "new" / "training")
    assert not list(tmp_path.iterdir())


def test_one_file_for_two_outputs_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected different files, found .* for --html and --json"):
        PageFiles(json_file=str(tmp_path / "a"), html=tmp_path / ".." / tmp_path.name / "a")
    check_output_files({"--json": "-", "--out": tmp_path / "a", "--save": tmp_path / "b", "--csv": None})
    check_output_files({"--json": "/dev/null", "--html": "/dev/null"})


def test_without_a_terminal_long_work_tells_of_itself_now_and_then(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now)
    for terminal, shown, wanted in (
        (False, True, "25 %  second\n50 %  [third]\n75 %  [third]\n"),
        (False, False, ""),
        (True, False, ""),
    ):
        written = StringIO()
        now = 0.0
        console = Console(file=written, force_terminal=terminal)
        with progress(console, 8, "first", shown) as step:
            for name in ("second", "second", "[third]", "[third]", "[third]", "[third]"):
                now += 35.0
                step(name)
        assert written.getvalue().replace("\x1b[?25l", "").replace("\x1b[?25h", "") == wanted


def test_notes_stand_above_what_is_on_display(monkeypatch: pytest.MonkeyPatch):
    """A spinner takes over what goes to standard error meanwhile, of the log as well, so that no line runs into it."""
    screen = StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr("sys.stderr", screen)
    handler = StandardError()
    with terminal.status("compiling") as status:
        status.update("compiling", spinner="dots")  # which draws it at once
        notice("measuring what rounds cost")
        handler.emit(logging.LogRecord("tilewright", logging.INFO, "", 0, "compiled 1 of 2 programs", None, None))
    erased = screen.getvalue().replace("\x1b[2K", "\n")  # what stood in the line before
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", erased).splitlines()
    assert any(line.strip() == "measuring what rounds cost" for line in lines)
    assert any(line.strip() == "compiled 1 of 2 programs" for line in lines)
    assert not any("compiling" in line and ("measuring" in line or "compiled" in line) for line in lines)


def test_work_shows_its_programs():
    """How many were compiled, and how many were loaded."""
    ledger = Ledger()
    column = ProgramsColumn(ledger)
    progress = Progress(column)
    progress.add_task("work")
    (task,) = progress.tasks
    assert column.render(task).plain == ""
    ledger.programs = [ProgramRecord("f", 0.1, from_disk=disk) for disk in (True, False, False)]
    assert column.render(task).plain == "2 programs compiled, 1 loaded"
    screen = StringIO()
    with working(Console(file=screen, force_terminal=True, width=80), "getting [ready]") as say:
        say("measuring [now]")
    assert "getting [ready]" in screen.getvalue()
    quiet = StringIO()
    with working(Console(file=quiet, width=80), "getting ready"):
        pass
    assert quiet.getvalue() == "", "a file or a pipe has no lines of it"
