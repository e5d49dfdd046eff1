"""`Auto`: chooses the tensor-parallel strategy with the least estimated time for each compiled shape.

Estimates come from the cost model of `hardware/layers.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from tilewright.hardware.layers import LayerShapes, StrategyChoice, StrategyCosts, choose
from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import CHIPS, KINDS
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.exact import Exact
from tilewright.parallel.micro_batches import split_batch
from tilewright.parallel.rings import Axis
from tilewright.parallel.strategies import CollectiveMatmul, Sequence, TensorParallel

STRATEGIES: dict[str, type[TensorParallel]] = {
    "sync": TensorParallel,
    "sequence": Sequence,
    "ring": CollectiveMatmul,
    "domino": Domino,
    "column": Column,
    "exact": Exact,
}
"""Tensor-parallel strategies by name; `AUTO` is another valid name."""

AUTO = "auto"


@dataclass(frozen=True)
class Auto(TensorParallel):
    """Strategy that runs the layers under the fastest strategy by estimate, per number of tokens.

    Runs `sync` where the links between the devices are unknown. Embedding and head run as under `TensorParallel`.

    Attributes:
        layer: shapes of a device's part of a layer.
        fabric: links between the devices of the axis, in device order; None where their bandwidth is unknown.
    """

    layer: LayerShapes | None = None
    fabric: Fabric | None = None

    def choice(self, rows: int, micro_batches: bool) -> StrategyChoice:
        """Returns the estimated fastest strategy for `rows` tokens; see `hardware.layers.choose`."""
        if self.layer is None or self.fabric is None:
            return StrategyChoice(
                "sync", f"sync for {rows:,} rows: the bandwidth of the links between these devices is unknown", {}
            )
        return choose(StrategyCosts(self.fabric), rows, self.layer, micro_batches)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`."""
        try:
            split_batch(x, rows, caches, 2)
            divisible = stack.norms is not None
        except ValueError:
            divisible = False
        return self.chosen(self.choice(x.shape[0] * x.shape[1], divisible).name).run(stack, x, rows, caches, taps)

    def chosen(self, name: str) -> TensorParallel:
        """Builds the strategy of a name for the layer and the fabric."""
        return strategy_of(name, self.axis, self.layer, self.fabric)


def strategy_of(name: str, axis: Axis, layer: LayerShapes | None, fabric: Fabric | None) -> TensorParallel:
    """Builds the strategy of a name: one of `STRATEGIES`, or `AUTO`, which chooses by the layer and the fabric."""
    if name == AUTO:
        return Auto(axis, layer, fabric)
    strategy = STRATEGIES[name](axis)
    if fabric is not None and isinstance(strategy, Domino):
        chip = fabric.chip
        per_link = chip.operations_per_link_byte
        per_memory = chip.operations_per_memory_byte
        return replace(strategy, intensity=per_link, loading=chip.loading_rows, moving=per_memory)
    if fabric is not None and isinstance(strategy, Sequence) and not isinstance(strategy, CollectiveMatmul):
        return replace(strategy, fabric=fabric)
    return strategy


def mesh_fabric(mesh: Mesh) -> Fabric | None:
    """Returns the links between the devices of a mesh, in mesh order; None for chips missing from `hardware.tpu.CHIPS`."""
    devices = list(mesh.devices.flat)
    kind = KINDS.get(devices[0].device_kind)
    if kind is None:
        return None
    coords = [tuple(device.coords)[: CHIPS[kind].ici_axes] for device in devices]
    lowest, highest = (tuple(map(bound, zip(*coords, strict=True))) for bound in (min, max))
    places = tuple(tuple(at - first for at, first in zip(place, lowest, strict=True)) for place in coords)
    sizes = [last - first + 1 for first, last in zip(lowest, highest, strict=True)]
    return Fabric(CHIPS[kind], torus_of(CHIPS[kind], sizes), places)
