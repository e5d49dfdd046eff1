"""Files that commands write: whole or not at all, and whatever a path names stays what it is."""

import errno
import os
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.cli import outputs
from tilewright.cli.outputs import check_output_file, progress, write_text


def test_the_target_of_a_link_is_written(tmp_path: Path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "figures.json", tmp_path / "link.json"
    target.write_text("before")
    link.symlink_to(target)
    write_text(link, "after")
    assert (link.is_symlink(), target.read_text()) == (True, "after")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["figures.json", "link.json", "there"]


def test_a_pipe_is_written_as_it_is(tmp_path: Path):
    pipe, read = tmp_path / "pipe", list[str]()
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
    asked: list[Path] = []
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: asked.append(path))
    with pytest.raises(ValueError, match=f"--json .*{name}: it cannot be written"):
        check_output_file("--json", str(tmp_path / name))
    assert asked == [tmp_path / "device" if name == "device" else tmp_path]


def test_without_a_terminal_long_work_tells_of_itself_now_and_then(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now)
    for terminal, shown, wanted in (
        (False, True, "25 %  second\n50 %  [third]\n75 %  [third]\n"),
        (False, False, ""),
        (True, False, ""),
    ):
        written, now = StringIO(), 0.0
        console = Console(file=written, force_terminal=terminal)
        with progress(console, 8, "first", shown) as step:
            for name in ("second", "second", "[third]", "[third]", "[third]", "[third]"):
                now += 35.0
                step(name)
        assert written.getvalue().replace("\x1b[?25l", "").replace("\x1b[?25h", "") == wanted
