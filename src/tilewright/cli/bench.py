"""`tilewright bench`: benchmarks, each with a table and `--json`."""

from cyclopts import App

from tilewright.cli.bench_graph import bench_graph
from tilewright.cli.bench_linear import linear
from tilewright.cli.bench_round import bench_round
from tilewright.cli.bench_speculative import speculative

app = App(name="bench", help="Benchmarks.")
app.command(bench_graph, name="graph")
app.command(linear)
app.command(bench_round, name="round")
app.command(speculative)
