"""TPUs, a row each."""

from dataclasses import dataclass

from tilewright.hardware.ranged import Ranged


@dataclass(frozen=True)
class TpuChip:
    """One chip, all its cores together.

    Attributes:
        name: the kind, as topologies name it.
        hbm_gb_per_s: bandwidth of its device memory, in 1e9 bytes a second.
        bf16_tflop_per_s: peak of its matrix units for bfloat16 products.
        cores: TensorCores.
        matrix_units: of all cores together.
        matrix_dim: rows, and columns, of such a unit.
        vmem_mib: vector memory of one core.
        hbm_gb: size of its device memory, in 1e9 bytes.
        ici_gb_per_s: what a link to a neighbour carries in one direction, in 1e9 bytes a second; it has as much in the other.
        ici_axes: axes of its torus; two links on each, one either way.
        wrap_multiple: along an axis whose length is a multiple of this the last chip has a link to the first.
        wraps_whole: whether there are such links only where all axes are such multiples (cubes joined by optical switches).
        clock_ghz: of its cores; by default what the peak implies. A copy with a fitted rate of products keeps it.
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
        """Operations of its matrix units in a cycle of the clock: a product and a sum in each place."""
        return 2 * self.matrix_units * self.matrix_dim**2

    @property
    def operations_per_link_byte(self) -> float:
        """Peak bfloat16 operations in the time in which a link passes a byte."""
        return 1e3 * self.bf16_tflop_per_s / self.ici_gb_per_s

    @property
    def operations_per_memory_byte(self) -> float:
        """Of bfloat16, at the peak, while a byte passes to or from device memory."""
        return 1e3 * self.bf16_tflop_per_s / self.hbm_gb_per_s

    @property
    def loading_rows(self) -> int:
        """Rows of a product that take as long as loading its weights: as many as a matrix unit has, for each core.

        Cores divide the rows, and each of them loads the weights.
        """
        return self.matrix_dim * self.cores

    def roofline_seconds(self, moved_bytes: float, flops: float) -> float:
        """The least time in which it can move these bytes to and from device memory and do these operations, side by side."""
        return max(moved_bytes / (1e9 * self.hbm_gb_per_s), flops / (1e12 * self.bf16_tflop_per_s))

    def roofline_cycles(self, moved_bytes: float, flops: float) -> float:
        """Roofline time in cycles of its clock."""
        return self.roofline_seconds(moved_bytes, flops) * 1e9 * self.clock_ghz


LINK_SHARE = 0.74
"""Of what links are said to carry: an all-gather of 33.6 MB over a row of four v5e chips took 680 us, of which three hops are
3, and so 37 of 50 GB/s (jax-ml.github.io/scaling-book/sharding, pop quiz 2). Taken for the others too."""


CHIPS = {
    chip.name: chip
    for chip in (
        # docs.cloud.google.com/tpu/docs/v5e: 819 GB/s, 197 TFLOP/s, 4 matrix units of 128 x 128 in its one core.
        # VMEM: jax/_src/pallas/mosaic/tpu_info.py, as for the others.
        # The same page in 2026: 800 GiB/s.
        # Of all: sizes of memory, links and where they wrap, jax-ml.github.io/scaling-book/tpus, tables of chips and of links.
        TpuChip("v5e", Ranged(819, 859), 197, 1, 4, 128, 128, 16, Ranged(50, LINK_SHARE * 50), 2, 16, False),
        # docs.cloud.google.com/tpu/docs/v5p: 2765 GB/s, 459 TFLOP/s, two cores with 4 matrix units of 128 x 128 each.
        TpuChip("v5p", 2765, 459, 2, 8, 128, 64, 96, Ranged(100, LINK_SHARE * 100), 3, 4, True),
        # docs.cloud.google.com/tpu/docs/v6e: 1638 GB/s, 918 TFLOP/s. Matrix units: that page said 4 and now says 2; only
        # 4 of 256 x 256 agree with what libtpu estimates for a large product, 4.6e5 operations a cycle.
        TpuChip("v6e", 1638, 918, 1, 4, 256, 128, 32, Ranged(100, LINK_SHARE * 100), 2, 16, False),
    )
}
"""By kind."""

KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
"""The names of `CHIPS` by what JAX calls a device's kind."""


SLICES = {2: {2: "2x1", 4: "2x2", 8: "4x2", 16: "4x4"}, 3: {2: "2x1x1", 4: "2x2x1", 8: "2x2x2", 16: "4x2x2"}}
"""By the axes of a chip's torus and the number of devices: the slice that is compiled for."""


def chip_of(topology: str) -> TpuChip:
    """The chip of a topology such as `v5e:2x2`.

    Raises:
        ValueError: a kind that is not in `CHIPS`.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"expected a TPU of {', '.join(CHIPS)}, found {topology!r}")
    return CHIPS[kind]


def slice_of(kind: str, devices: int) -> str:
    """The topology of a kind of chip over which a model is divided.

    Raises:
        ValueError: a kind or a number of devices that there is none for.
    """
    if kind not in CHIPS:
        raise ValueError(f"expected a kind of TPU of {', '.join(CHIPS)}, found {kind!r}")
    slices = SLICES[CHIPS[kind].ici_axes]
    if devices not in slices:
        raise ValueError(f"expected tensor parallelism over {', '.join(map(str, slices))} devices of {kind}, found {devices}")
    return f"{kind}:{slices[devices]}"
