"""`tilewright neuron`: programs on a simulated Neuron chip, and the environment of real ones. Imported when called."""

from cyclopts import App

app = App(name="neuron", help="Programs on a simulated Neuron chip, and the environment of real ones.")
app.command(
    "tilewright.cli.neuron_simulate:simulate_program",
    name="simulate",
    help="Simulates a program on a Neuron chip that need not be there, and shows what its engines do.\n\n"
    "A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.",
)
app.command(
    "tilewright.cli.neuron_tools:environment",
    name="env",
    help="Prints the environment that AWS recommends for training that hides its collectives, with what each variable does.",
)
app.command(
    "tilewright.cli.neuron_tools:calibrate_command",
    name="calibrate",
    help="Fits latency and rate of collectives to half of what was measured, and says how well the other half is predicted.",
)
