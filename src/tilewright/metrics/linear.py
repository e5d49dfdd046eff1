"""Figures of `tilewright bench linear`; `bench/linear.py` computes them."""

from tilewright.metrics.metric import Metric

LINEAR = (
    Metric("layer", "", "its name; `inputs` and `outputs` are its sizes"),
    Metric("rows", "", "of the input"),
    Metric("median_ms", "ms", "of the layer: the median over the repetitions, all sides in turns", head="ms", digits=4),
    Metric("range_ms", "ms", "the least and the most of them"),
    Metric("over_one_row", "", "`median_ms` over that of one row", head="× 1 row", short="×\n1 row", form=".2f"),
    Metric("weight_mb", "1e6 bytes", "of one copy of the weights; several take turns, as the layers of a model do"),
    Metric("weights_gb_per_s", "GB/s", "bytes of the weights over the median", head="GB/s", form=".1f"),
    Metric("copy_gb_per_s", "GB/s", "of memory when a buffer is copied, in the same turns; of it, `weights_gb_per_s`"),
    Metric("share_of_copy_bandwidth", head="of copy", short="of\ncopy", form=".0%"),
    Metric("read_gb_per_s", "GB/s", "of memory when a buffer is read, in the same turns; of it, `weights_gb_per_s`"),
    Metric("share_of_read_bandwidth", head="of read", short="of\nread", form=".0%"),
    Metric(
        "gflop_per_s",
        "GFLOP/s",
        "two operations for each weight and row, over the median",
        head="GFLOP/s",
        short="GFLOP\n/s",
        form=".0f",
    ),
    Metric(
        "dot_gflop_per_s", "GFLOP/s", "of dot products of 8-bit numbers in registers, in the same turns; of it, `gflop_per_s`"
    ),
    Metric("share_of_dot_products", head="of dot", short="of\ndot", form=".0%"),
)
"""Of one layer, format and number of rows. Other sides have `<side>_ms` and `ratio_to_<side>`, their time over ours."""
