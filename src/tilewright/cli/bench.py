"""`tilewright bench`: benchmarks, each with a table and `--json`."""

from cyclopts import App

from tilewright.cli.bench_linear import linear
from tilewright.cli.bench_round import bench_round
from tilewright.cli.bench_speculative import speculative

app = App(name="bench", help="Benchmarks.")
app.command(linear)
app.command(bench_round, name="round")
app.command(speculative)
