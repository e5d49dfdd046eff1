"""`tilewright plan`: which schedule, width and settings, on Neuron chips that need not be there. Imported when called."""

from cyclopts import App

app = App(name="plan", help="Which schedule, width and settings, on Neuron chips that need not be there.")
app.command(
    "tilewright.cli.plan_inference:plan_inference",
    name="inference",
    help="Compares schedules by cores, batch and input: throughput, time to the first token, time per token.\n\n"
    "A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.plan_training:plan_training",
    name="training",
    help="Ranks streams, packet sizes and shifts of a sharded training step, and prints the winner's environment.\n\n"
    "A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.",
)
