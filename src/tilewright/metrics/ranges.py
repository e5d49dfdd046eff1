"""Ranges and calibration of predictions for absent chips."""

from tilewright.metrics.metric import Metric

RANGES = (
    Metric("draws", "", "of the Latin hypercube"),
    Metric("seed"),
    Metric("constants", "", "drawn constants: low, used, high"),
    Metric(
        "predictions",
        "`unit`",
        "by name: `value`; `range`, 10th to 90th percentile, widened to `value`; `first`, draws in which it "
        "is smallest; `decides`, constant with the largest Spearman correlation",
    ),
    Metric("calibrated_against", "", "measurements of the fit"),
    Metric(
        "residual",
        "",
        "geometric mean error factor of held-out measurements, minus 1",
    ),
    Metric("roofline_share", "", "largest share of a program's compute without an estimate"),
    Metric("text", "", "the same in sentences"),
)
"""Figures of compared predictions."""

CALIBRATION = (
    Metric("kind", "", "collective, ranks, bytes", head="collective", words=True),
    Metric("devices", head="ranks"),
    Metric("bytes", "bytes", head="bytes", form=",.0f"),
    Metric("measured_us", "µs", "measurement and fitted model", head="measured us", digits=3),
    Metric("modelled_us", "µs", head="modelled us", digits=3),
    Metric("role", "", "fitted or held out", head="role", words=True),
)
"""Figures of a calibration measurement: `points` of `tilewright neuron calibrate`."""
