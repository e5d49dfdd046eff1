"""Figures of predictions for chips that are not here: their ranges, and what they were calibrated against."""

from tilewright.metrics.metric import Metric

RANGES = (
    Metric("draws", "", "of the Latin hypercube"),
    Metric("seed"),
    Metric("constants", "", "each constant that was drawn: low end, value that is used, high end"),
    Metric(
        "predictions",
        "`unit`",
        "by name: `value` at the constants that are used; `range`, the 10th and 90th percentile of the draws, widened to the "
        "value; `first`, in how many draws it is the smallest; `decides`, the constant with the largest rank correlation "
        "(Spearman's) with it, and this",
    ),
    Metric("calibrated_against", "", "measurements that constants were fitted to"),
    Metric(
        "residual",
        "",
        "geometric mean of how far measurements that were held out of the fit are off, as a factor above 1, less 1",
    ),
    Metric("roofline_share", "", "largest share of a program's compute time in operations without an estimate"),
    Metric("text", "", "the same in sentences"),
)
"""Of predictions that are set against each other."""

CALIBRATION = (
    Metric("kind", "", "the collective, in how many ranks, and of how many bytes", head="collective", words=True),
    Metric("devices", head="ranks"),
    Metric("bytes", "bytes", head="bytes", form=",.0f"),
    Metric("measured_us", "µs", "what was measured, and what the fitted model gives", head="measured us", digits=3),
    Metric("modelled_us", "µs", head="modelled us", digits=3),
    Metric("role", "", "whether it was fitted to or held out", head="role", words=True),
)
"""Of a measurement that constants are fitted to: `points` of `tilewright neuron calibrate`."""
