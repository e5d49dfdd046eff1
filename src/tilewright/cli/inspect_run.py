"""`tilewright inspect run`: metrics and curves of training runs."""

from pathlib import Path

from tilewright.cli.outputs import JsonFile, check_output_files, human_console, write_file, write_json
from tilewright.metrics.tables import print_table
from tilewright.report.training import run_table, write_runs
from tilewright.train.log import METRICS, read_log


def inspect_run(
    *folders: Path,
    html: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Shows the metrics of training runs, also of one that is still training.

    Args:
        folders: folders of --out of `tilewright train`.
        html: write an HTML page with the curves of the runs to this file.
    """
    if not folders:
        raise ValueError("expected folders of training runs, found none")
    check_output_files({"--html": html, "--json": json_file})
    console = human_console(json_file)
    runs = {str(folder): read_log(folder / "training" / METRICS) for folder in folders}
    if without := [name for name, rows in runs.items() if not rows]:
        raise ValueError(f"expected rows in training/{METRICS}, found none yet in {', '.join(without)}")
    print_table(console, run_table(runs))
    write_file(console, html, lambda path: write_runs(path, runs))
    write_json(json_file, runs)
