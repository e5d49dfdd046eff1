"""Figures of `tilewright inspect trace`: a prediction beside a profiler's trace of the same program."""

from tilewright.metrics.metric import Metric

TRACED = (
    Metric(
        "program",
        "",
        "as the trace names it, on which devices, and its runs on all of them",
    ),
    Metric("device_kind"),
    Metric("devices"),
    Metric("runs"),
    Metric("run_range_us", "µs", "the shortest and the longest run"),
    Metric(
        "traced_operations",
        "",
        "instructions that the trace has; how many of them the program has by name and, where the trace says them, opcode and "
        "shape; and the part of the measured time that these took",
    ),
    Metric("matched_operations"),
    Metric("matched_share"),
    Metric("untraced_operations", "", "instructions with a predicted time that the trace does not have, and that time"),
    Metric("untraced_us", "µs"),
    Metric(
        "without_estimate",
        "",
        "traced operations for which the compiler has no cycles, so that a roofline stands in; and the part of the measured "
        "time that these took",
    ),
    Metric("without_estimate_share"),
    Metric("notes", "", "assumptions of the prediction"),
)
"""Of a program."""

SIDES = (
    Metric(
        "predicted_us",
        "µs",
        "of one run, by the model of time: what the core takes, and for the end of a transfer what it waits",
        head="predicted us",
        short="predicted\nus",
        digits=3,
    ),
    Metric(
        "measured_us",
        "µs",
        "of one run, without other operations inside it: the median of all runs on all devices",
        head="measured us",
        short="measured\nus",
        digits=3,
    ),
    Metric(
        "measured_over_predicted",
        "",
        "`measured_us` / `predicted_us`; null where one is missing, or nothing was predicted",
        head="measured / predicted",
        short="measured /\npredicted",
        form=".2f",
    ),
)

PARTS = (
    Metric(
        "name",
        "",
        "`compute`; `exposed`: the core waits for a collective; `memory wait`: for a copy to or from HBM; `start`: of either; "
        "`control`: loops, calls, conditions; `not in the program`; `between operations`: the run without all of these; `run`",
    ),
    *SIDES,
    Metric("measured_share", "", "`measured_us` over the run's", head="of run", form=".1%"),
)
"""Of a part of a run."""

OPERATIONS = (
    Metric("name", "", "the instruction, what it is, and where it comes from in the Python program"),
    Metric("opcode", head="opcode", words=True),
    Metric("op_name"),
    Metric("part", "", "the part of a run that it belongs to", head="part", words=True),
    Metric("calls", "", "how often a run has it, in the trace and as the prediction unrolls loops", head="calls", form=",.3g"),
    Metric("predicted_calls"),
    *SIDES,
    Metric("estimated", "", "whether the prediction has the compiler's own estimate", head="estimated", short="esti-\nmated"),
)
"""Of an operation."""
