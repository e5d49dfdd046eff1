"""TPU chips and slices."""

from dataclasses import dataclass

from tilewright.hardware.ranged import Ranged


@dataclass(frozen=True)
class TpuChip:
    """A TPU chip with all its cores.

    Attributes:
        name: the kind, as topologies name it.
        hbm_gb_per_s: bandwidth of device memory, in 1e9 bytes per second.
        bf16_tflop_per_s: peak of the matrix units for bfloat16 matmuls.
        cores: TensorCores.
        matrix_units: matrix units of all cores.
        matrix_dim: rows, and columns, of a matrix unit.
        vmem_mib: vector memory of one core.
        hbm_gb: size of device memory, in 1e9 bytes.
        ici_gb_per_s: bandwidth of a link to a neighbour in each direction, in 1e9 bytes per second.
        ici_axes: axes of the torus, each with two links per chip.
        wrap_multiple: an axis has a link from its last chip to its first if its length is a multiple of this.
        wraps_whole: True if axes only wrap where all lengths are such multiples (cubes joined by optical switches).
        clock_ghz: clock of the cores; by default derived from the peak. A copy with another, fitted peak keeps its clock.
    """

    name: str
    hbm_gb_per_s: float
    bf16_tflop_per_s: float
    cores: int
    matrix_units: int
    matrix_dim: int
    vmem_mib: int
    hbm_gb: float
    ici_gb_per_s: float
    ici_axes: int
    wrap_multiple: int
    wraps_whole: bool
    clock_ghz: float = 0.0

    def __post_init__(self) -> None:
        if not self.clock_ghz:
            object.__setattr__(self, "clock_ghz", 1e3 * self.bf16_tflop_per_s / self.flops_per_cycle)

    @property
    def flops_per_cycle(self) -> int:
        """Peak operations of all matrix units per clock cycle: a multiply and an add per element."""
        return 2 * self.matrix_units * self.matrix_dim**2

    @property
    def operations_per_link_byte(self) -> float:
        """Peak bfloat16 operations in the time in which a link transfers a byte."""
        return 1e3 * self.bf16_tflop_per_s / self.ici_gb_per_s

    @property
    def operations_per_memory_byte(self) -> float:
        """Peak bfloat16 operations in the time in which device memory transfers a byte."""
        return 1e3 * self.bf16_tflop_per_s / self.hbm_gb_per_s

    @property
    def loading_rows(self) -> int:
        """Rows of a matmul that take as long as loading its weights into the matrix units: `matrix_dim` per core.

        Cores divide the rows, and each core loads the weights.
        """
        return self.matrix_dim * self.cores

    def roofline_seconds(self, moved_bytes: float, flops: float) -> float:
        """Returns the lower bound in seconds to move these bytes to and from device memory and do these operations."""
        return max(moved_bytes / (1e9 * self.hbm_gb_per_s), flops / (1e12 * self.bf16_tflop_per_s))

    def roofline_cycles(self, moved_bytes: float, flops: float) -> float:
        """Returns the roofline time in clock cycles."""
        return self.roofline_seconds(moved_bytes, flops) * 1e9 * self.clock_ghz


LINK_SHARE = 0.74
"""Achieved fraction of the published link bandwidth, applied to all chips: an all-gather of 33.6 MB over a row of four v5e
chips took 680 us, of which three hops are 3, so 37 of 50 GB/s (jax-ml.github.io/scaling-book/sharding, pop quiz 2)."""


CHIPS = {
    chip.name: chip
    for chip in (
        # docs.cloud.google.com/tpu/docs/v5e: 819 GB/s (in 2026: 800 GiB/s), 197 TFLOP/s, 4 matrix units of 128 x 128 in one
        # core. VMEM of all: jax/_src/pallas/mosaic/tpu_info.py.
        # Memory sizes, links and wrap-around of all: jax-ml.github.io/scaling-book/tpus, tables of chips and of links.
        TpuChip("v5e", Ranged(819, 859), 197, 1, 4, 128, 128, 16, Ranged(50, LINK_SHARE * 50), 2, 16, False),
        # docs.cloud.google.com/tpu/docs/v5p: 2765 GB/s, 459 TFLOP/s, two cores with 4 matrix units of 128 x 128 each.
        TpuChip("v5p", 2765, 459, 2, 8, 128, 64, 96, Ranged(100, LINK_SHARE * 100), 3, 4, True),
        # docs.cloud.google.com/tpu/docs/v6e: 1638 GB/s, 918 TFLOP/s. Matrix units: the page said 4 and now says 2. Only
        # 4 of 256 x 256 agree with libtpu's estimate for a large matmul, 4.6e5 operations per cycle.
        TpuChip("v6e", 1638, 918, 1, 4, 256, 128, 32, Ranged(100, LINK_SHARE * 100), 2, 16, False),
    )
}
"""Chips by kind."""

KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
"""Kinds of `CHIPS` by JAX's `device_kind`."""


SLICES = {2: {2: "2x1", 4: "2x2", 8: "4x2", 16: "4x4"}, 3: {2: "2x1x1", 4: "2x2x1", 8: "2x2x2", 16: "4x2x2"}}
"""Slice that is compiled for, by the number of torus axes and the number of devices."""


def chip_of(topology: str) -> TpuChip:
    """Returns the chip of a topology such as `v5e:2x2`.

    Raises:
        ValueError: a kind that is not in `CHIPS`.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"expected a TPU of {', '.join(CHIPS)}, found {topology!r}")
    return CHIPS[kind]


def slice_of(kind: str, devices: int) -> str:
    """Returns the topology over which a model is sharded on this many chips of a kind.

    Raises:
        ValueError: an unknown kind, or a number of devices without a slice.
    """
    if kind not in CHIPS:
        raise ValueError(f"expected a TPU kind of {', '.join(CHIPS)}, found {kind!r}")
    slices = SLICES[CHIPS[kind].ici_axes]
    if devices not in slices:
        raise ValueError(f"expected {', '.join(map(str, slices))} devices of {kind}, found {devices}")
    return f"{kind}:{slices[devices]}"
