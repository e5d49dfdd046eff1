"""`tilewright inspect run`: training runs side by side."""

from pathlib import Path

import pytest

from cli.conftest import Run
from report.reading import Page
from tilewright.train.log import LogOptions, TrainingLog


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Folders of two runs, of which the second one has trained twice as long."""
    for number in (1, 2):
        log = TrainingLog(LogOptions(every=1), ("tokens", 8))
        log.open(tmp_path / str(number) / "training", 0, "run", {})
        for step in range(1, 4 * number + 1):
            log.note(step, {"loss": number / step})
        log.close()
    return [tmp_path / "1", tmp_path / "2"]


def test_runs_are_compared(run: Run, runs: list[Path], tmp_path: Path):
    ran = run("inspect", "run", *runs, "--html", tmp_path / "page.html", "--json", tmp_path / "rows.json")
    assert ran.status == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert [str(runs[0]), "4", "0.2500"] in [line[:3] for line in lines]
    assert [str(runs[1]), "8", "0.2500"] in [line[:3] for line in lines]
    data = Page(tmp_path / "page.html").data()
    assert [row["loss"] for row in data[str(runs[0])]] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_folders_without_rows_are_refused(run: Run, runs: list[Path], tmp_path: Path):
    (runs[1] / "training" / "metrics.jsonl").write_text("")
    for arguments, problem in (
        ([], "expected folders of training runs, found none"),
        (runs, f"expected rows in training/metrics.jsonl, found none yet in {runs[1]}"),
        ([tmp_path], "metrics.jsonl cannot be read: No such file or directory"),
    ):
        ran = run("inspect", "run", *arguments, "--html", tmp_path / "page.html")
        assert (ran.status, problem in " ".join(ran.err.split())) == (2, True), ran.err
    assert not (tmp_path / "page.html").exists()
