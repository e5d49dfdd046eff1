"""`tilewright inspect`: what compilers make of programs, also for chips that aren't here, and of grammars."""

from cyclopts import App

app = App(name="inspect", help="Shows what compilers make of programs, also for chips that aren't here, and of grammars.")
app.command(
    "tilewright.cli.inspect_overlap:inspect_overlap",
    name="overlap",
    help="Compiles a model's layers for TPUs and shows how much of their communication each schedule hides.\n\n"
    "Compiler estimates and a model of links and memory, no measurements; every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.inspect_training:inspect_training",
    name="training",
    help="Compiles a train step over a mesh for TPUs and shows how much of its communication each shift hides, and at what "
    "memory.\n\nBeside it the same step without tokens, and the auto-sharded one (GSPMD) with the flags that MaxText sets. "
    "Compiler estimates and a model of links and memory, no measurements; every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.inspect_diff:inspect_diff",
    name="diff",
    help="Compares what two versions of the TPU compiler make of the same program: bytes, cycles, collectives, fusions, copies."
    "\n\nCompiler estimates, no measurements; every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.inspect_trace:inspect_trace",
    name="trace",
    help="Sets a profiler's trace of a program beside the prediction of it, operation by operation.\n\n"
    "The prediction is of compiler estimates and a model of links and memory; every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.inspect_grammar:inspect_grammar",
    name="grammar",
    help="Shows for each grammar whether a device makes its masks, how deep and how large it is, or why the host makes them.",
)
