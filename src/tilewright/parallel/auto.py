"""`Auto`: the schedule that the cost model of `hardware/layers.py` finds best, for each shape that is compiled."""

from dataclasses import dataclass, replace
from typing import Any

from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from tilewright.hardware.layers import Costs, LayerShapes, StrategyChoice, choose
from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import CHIPS, KINDS
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.exact import Exact
from tilewright.parallel.rings import Axis
from tilewright.parallel.schedules import CollectiveMatmul, Sequence, TensorParallel
from tilewright.parallel.turns import cut

SCHEDULES: dict[str, type[TensorParallel]] = {
    "sync": TensorParallel,
    "sequence": Sequence,
    "ring": CollectiveMatmul,
    "domino": Domino,
    "column": Column,
    "exact": Exact,
}
"""By the names that users have for them; `AUTO` is one more."""

AUTO = "auto"


@dataclass(frozen=True)
class Auto(TensorParallel):
    """A schedule for each number of rows: that of the least estimated time, or `sync` where nothing is known of the links.

    Embedding and head are those of `TensorParallel`.

    Attributes:
        layer: what a device computes of a layer.
        fabric: the links between the devices of the axis, in their order; None where there are no figures of them.
    """

    layer: LayerShapes | None = None
    fabric: Fabric | None = None

    def choice(self, rows: int, micro_batches: bool) -> StrategyChoice:
        """See `chips.layers.choose`."""
        if self.layer is None or self.fabric is None:
            return StrategyChoice("sync", f"sync for {rows:,} rows: no figures of the links between these devices", {})
        return choose(Costs(self.fabric), rows, self.layer, micro_batches)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`."""
        try:
            cut(x, rows, kept, 2)
            divisible = stack.norms is not None
        except ValueError:
            divisible = False
        return self.chosen(self.choice(x.shape[0] * x.shape[1], divisible).name).run(stack, x, rows, kept, taps)

    def chosen(self, name: str) -> TensorParallel:
        """The schedule of this name for the layer and the fabric."""
        return schedule_of(name, self.axis, self.layer, self.fabric)


def schedule_of(name: str, axis: Axis, layer: LayerShapes | None, fabric: Fabric | None) -> TensorParallel:
    """The schedule of a name of `SCHEDULES`, or `AUTO`, whose choices go by the layer and the fabric."""
    if name == AUTO:
        return Auto(axis, layer, fabric)
    made = SCHEDULES[name](axis)
    if fabric is not None and isinstance(made, Domino):
        chip = fabric.chip
        per_link = chip.operations_per_link_byte
        per_memory = chip.operations_per_memory_byte
        return replace(made, intensity=per_link, loading=chip.loading_rows, moving=per_memory)
    if fabric is not None and isinstance(made, Sequence) and not isinstance(made, CollectiveMatmul):
        return replace(made, fabric=fabric)
    return made


def fabric_of(mesh: Mesh) -> Fabric | None:
    """The links between the devices of a mesh, in its order; None for other devices than the TPUs of `chips.tpu.CHIPS`."""
    devices = list(mesh.devices.flat)
    kind = KINDS.get(devices[0].device_kind)
    if kind is None:
        return None
    coords = [tuple(device.coords)[: CHIPS[kind].ici_axes] for device in devices]
    least, most = (tuple(map(by, zip(*coords, strict=True))) for by in (min, max))
    places = tuple(tuple(at - first for at, first in zip(place, least, strict=True)) for place in coords)
    sizes = [last - first + 1 for first, last in zip(least, most, strict=True)]
    return Fabric(CHIPS[kind], torus_of(CHIPS[kind], sizes), places)
