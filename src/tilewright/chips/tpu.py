"""TPUs, a row each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TpuChip:
    """One chip, all its cores together.

    Attributes:
        name: the kind, as topologies name it.
        hbm_gb_per_s: bandwidth of its device memory, in 1e9 bytes a second.
        bf16_tflop_per_s: peak of its matrix units for bfloat16 products.
        flops_per_cycle: what they do in a cycle of the clock: units, times the products in a unit, times 2.
        vmem_mib: vector memory of one core.
    """

    name: str
    hbm_gb_per_s: float
    bf16_tflop_per_s: float
    flops_per_cycle: int
    vmem_mib: int

    @property
    def clock_ghz(self) -> float:
        """The clock that its peak implies."""
        return 1e3 * self.bf16_tflop_per_s / self.flops_per_cycle

    def roofline_seconds(self, moved_bytes: float, flops: float) -> float:
        """The least time in which it can move these bytes to and from device memory and do these operations, side by side."""
        return max(moved_bytes / (1e9 * self.hbm_gb_per_s), flops / (1e12 * self.bf16_tflop_per_s))

    def roofline_cycles(self, moved_bytes: float, flops: float) -> float:
        """The same in cycles of its clock."""
        return self.roofline_seconds(moved_bytes, flops) * 1e9 * self.clock_ghz


CHIPS = {
    chip.name: chip
    for chip in (
        # docs.cloud.google.com/tpu/docs/v5e: 819 GB/s, 197 TFLOP/s, 4 matrix units of 128 x 128 in its one core.
        # VMEM: jax/_src/pallas/mosaic/tpu_info.py, as for the others.
        TpuChip("v5e", 819, 197, 2 * 4 * 128 * 128, 128),
        # docs.cloud.google.com/tpu/docs/v5p: 2765 GB/s, 459 TFLOP/s, two cores with 4 matrix units of 128 x 128 each.
        TpuChip("v5p", 2765, 459, 2 * 8 * 128 * 128, 64),
        # docs.cloud.google.com/tpu/docs/v6e: 1638 GB/s, 918 TFLOP/s. Matrix units: that page said 4 and now says 2; only
        # 4 of 256 x 256 agree with what libtpu estimates for a large product, 4.6e5 operations a cycle.
        TpuChip("v6e", 1638, 918, 2 * 4 * 256 * 256, 128),
    )
}
"""By kind."""


def chip_of(topology: str) -> TpuChip:
    """The chip of a topology such as `v5e:2x2`.

    Raises:
        ValueError: a kind that is not in `CHIPS`.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"expected a TPU of {', '.join(CHIPS)}, found {topology!r}")
    return CHIPS[kind]
