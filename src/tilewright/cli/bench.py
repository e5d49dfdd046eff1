"""`tilewright bench`: benchmarks, each with a table and `--json`. Imported when called, like every command."""

from cyclopts import App

app = App(name="bench", help="Benchmarks.")
app.command(
    "tilewright.cli.bench_diffusion:bench_diffusion",
    name="diffusion",
    help="Denoises the same prompts in every mode, in turns, and prints speed, accuracy and what each step changed.\n\n"
    "Every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.bench_graph:bench_graph",
    name="graph",
    help="Compares graph neural networks on neighbour tables with gathering, masking and summing, side by side.\n\n"
    "Every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.bench_linear:linear",
    name="linear",
    help="Times the linear layers of real models against XLA and against the machine's memory.",
)
app.command(
    "tilewright.cli.bench_overlap:bench_overlap",
    name="overlap",
    help="Times to the first token and for each further one, by schedule and number of devices, for fixed shapes.\n\n"
    "Predicted from compiled programs for TPUs that aren't here, and run on a small model where several devices are. --micro "
    "shows what compilers make of single collectives beside a product. Every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.bench_round:bench_round",
    name="round",
    help="Times drafting, verifying, both heads and the extension of the context apart, with random weights.",
)
app.command(
    "tilewright.cli.bench_serving:serving",
    name="serving",
    help="Sends a trace's requests or a file's prompts to an OpenAI-compatible server, and prints what a client sees.\n\n"
    "Times to the first token and between tokens, throughput, goodput, τ. Exit status 1 if every request failed. Every figure "
    "is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.bench_speculative:speculative",
    name="speculative",
    help="Decodes the prompts of each file with every drafter and without one, alternating, and prints the papers' table.\n\n"
    "Every figure is defined in docs/metrics.md.",
)
