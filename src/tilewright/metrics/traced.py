"""Figures of `tilewright inspect trace`: a prediction compared with a profiler's trace."""

from tilewright.metrics.metric import Metric

TRACED = (
    Metric(
        "program",
        "",
        "program, devices and number of runs in the trace",
    ),
    Metric("device_kind"),
    Metric("devices"),
    Metric("runs"),
    Metric("run_range_us", "µs", "shortest and longest run"),
    Metric(
        "traced_operations",
        "",
        "operations in the trace; those found in the program; their share of the measured time",
    ),
    Metric("matched_operations"),
    Metric("matched_share"),
    Metric("untraced_operations", "", "predicted operations missing in the trace, and their time"),
    Metric("untraced_us", "µs"),
    Metric(
        "without_estimate",
        "",
        "traced operations without a compiler estimate; their share of the measured time",
    ),
    Metric("without_estimate_share"),
    Metric("notes", "", "assumptions of the prediction"),
)
"""Figures of a program."""

SIDES = (
    Metric(
        "predicted_us",
        "µs",
        "per run: core time, or waiting time at a transfer's end",
        head="predicted us",
        short="predicted\nus",
        digits=3,
    ),
    Metric(
        "measured_us",
        "µs",
        "per run, without nested operations: median over runs and devices",
        head="measured us",
        short="measured\nus",
        digits=3,
    ),
    Metric(
        "measured_over_predicted",
        "",
        "`measured_us` / `predicted_us`",
        head="measured / predicted",
        short="measured /\npredicted",
        form=".2f",
    ),
)

PARTS = (
    Metric(
        "name",
        "",
        "`compute`; `exposed` (waiting for collectives); `memory wait` (HBM copies); `start` (of either); "
        "`control` (loops, calls, conditions); `not in the program`; `between operations`; `run`",
    ),
    *SIDES,
    Metric("measured_share", "", "`measured_us` over the run's", head="of run", form=".1%"),
)
"""Figures of a part of a run."""

OPERATIONS = (
    Metric("name", "", "instruction, opcode, location in the Python program"),
    Metric("opcode", head="opcode", words=True),
    Metric("op_name"),
    Metric("part", "", "part of the run", head="part", words=True),
    Metric("calls", "", "executions per run: measured, predicted", head="calls", form=",.3g"),
    Metric("predicted_calls"),
    *SIDES,
    Metric("estimated", "", "true if the compiler has an estimate", head="estimated", short="esti-\nmated"),
)
"""Figures of an operation."""
