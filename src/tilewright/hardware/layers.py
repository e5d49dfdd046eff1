"""Cost model of a tensor-parallel decoder layer, used to choose a strategy before anything is compiled.

A matmul takes the longer of its operations at the chip's peak and its bytes at the memory's bandwidth. Transfers follow
`links.Fabric`. Costs that all strategies share, such as attention, are left out. `tilewright inspect overlap` shows what the
compiler produces for each strategy; the constants below were read from its output for Llama-3-8B's layers on eight chips.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, comb
from types import MappingProxyType
from typing import NamedTuple

from tilewright.hardware.collectives import ring_chunks
from tilewright.hardware.links import Fabric

NUMBER_BYTES = 2
"""Bytes of an activation or a weight (bfloat16)."""

TILE_US: Mapping[str, float] = MappingProxyType({"v5e": 3.3, "v5p": 3.1, "v6e": 0.8})
"""Microseconds per tile of a matmul beyond its roofline, by libtpu's estimates."""

TILE_PASSES = 5
"""Passes of all tokens' activations and partial sums through memory where matmuls are split into tiles."""

LEAST_GAIN = 0.1
"""Fraction by which a strategy must beat `sync` to be chosen: the error that these estimates had."""

QUEUED_SHARE = 0.4
"""Exposed fraction of queued hops that compute could hide, times the fraction of time in which links are busy. Hops wait for
one another where links are busy most of the time."""

MICRO_BATCHES = 2

SPREAD = 3.0
"""Standard deviations above the mean that a capacity covers. If tokens choose experts evenly, one round suffices for nearly all
pairs of devices."""

CHOICE_BYTES = 8
"""Bytes of an expert's index and weight, sent with each token."""

MULTIPLE = 8
"""Expert capacities are multiples of this number of tokens."""


class MatmulShape(NamedTuple):
    """A matrix that is sharded over devices.

    Attributes:
        inputs, columns: sizes of one device's shard.
        experts: number of such matrices over all devices.
        chosen: experts per token; `inputs` or `columns` then count all chosen experts, divided by the devices.
    """

    inputs: int
    columns: int
    experts: int = 1
    chosen: int = 1

    def weight_reads(self, rows: float) -> float:
        """Returns how often each of the matrix's numbers is read for this many tokens that choose experts evenly."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows) / self.chosen


@dataclass(frozen=True)
class LayerShapes:
    """Matrices of one device in a layer.

    Attributes:
        hidden: size of the residual stream.
        sublayers: first and last matrix of the attention sublayer and of the MLP sublayer.
        shared: True if a shared expert is sharded over all devices; tokens are then gathered for it.
    """

    hidden: int
    sublayers: tuple[tuple[MatmulShape, MatmulShape], tuple[MatmulShape, MatmulShape]]
    shared: bool = False

    @property
    def experts(self) -> int:
        """Number of experts of the MLP sublayer; 1 for a dense MLP."""
        return self.sublayers[1][0].experts

    @property
    def chosen(self) -> int:
        """Experts per token."""
        return self.sublayers[1][0].chosen


def sharded_layer(
    hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, devices: int, experts: int = 1, chosen: int = 1
) -> LayerShapes:
    """Returns the shapes of a layer sharded over devices; key/value heads are replicated if there are fewer than devices.

    Args:
        mlp: MLP columns of one token, summed over its chosen experts.
    """
    local_heads = heads // devices
    kv = max(1, kv_heads // devices)
    mixture = (experts, chosen)
    attention = MatmulShape(hidden, (local_heads + 2 * kv) * head_dim), MatmulShape(local_heads * head_dim, hidden)
    mlp_pair = MatmulShape(hidden, 2 * mlp // devices, *mixture), MatmulShape(mlp // devices, hidden, *mixture)
    return LayerShapes(hidden, (attention, mlp_pair))


class LayerEstimate(NamedTuple):
    """Estimated time of a layer: compute (matmuls, norms, additions) and communication that no compute hides, in seconds."""

    compute_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class StrategyCosts:
    """Estimates seconds of matmuls and transfers on the devices of a fabric."""

    fabric: Fabric

    @property
    def devices(self) -> int:
        return len(self.fabric.places)

    def product_s(self, rows: int, product: MatmulShape, tiles: int = 1) -> float:
        """Returns the time of a matmul split into tiles by its rows.

        Dense weights stay in VMEM and are read once. Weights of experts do not fit and are read for each tile.
        """
        reads = tiles * product.weight_reads(rows / tiles) if product.experts > 1 else 1.0
        numbers = reads * product.inputs * product.columns + rows * (product.inputs + product.columns)
        flops = 2.0 * rows * product.inputs * product.columns
        least = self.fabric.chip.roofline_seconds(NUMBER_BYTES * numbers, flops)
        chip = self.fabric.chip.name
        return least + (1e-6 * tiles * TILE_US.get(chip, max(TILE_US.values())) if tiles > 1 else 0.0)

    def tiles_s(self, rows: int, product: MatmulShape) -> float:
        """Returns the time of a matmul split into one tile per device."""
        return self.product_s(rows, product, self.devices)

    def stream_s(self, rows: int, layer: LayerShapes, passes: int = 10) -> float:
        """Returns the time to move the residual stream through memory; by default two norms and two in-place additions."""
        return self.fabric.chip.roofline_seconds(float(passes) * NUMBER_BYTES * rows * layer.hidden, 0)

    def collective_s(self, kind: str, rows: int, layer: LayerShapes) -> float:
        """Returns the time of a collective over all rows; see `transfer_s`."""
        return self.transfer_s(kind, float(NUMBER_BYTES * rows * layer.hidden))

    def transfer_s(self, kind: str, whole: float) -> float:
        """Returns the time of a collective over `whole` bytes (see `Fabric.collective`), by the algorithms that compilers use.

        On three axes a collective runs along each axis, and a reduce-scatter becomes an all-reduce. On fewer axes it runs round
        all devices, and a reduce-scatter uses one direction. No compiled all-to-all was inspected; it is assumed to run along
        each axis.
        """
        axes = sum(size > 1 for size in self.fabric.torus.sizes)
        if kind == "all-to-all":
            return self.fabric.collective(kind, [range(self.devices)], whole, by_axis=axes > 1).seconds
        by_axis = axes > 2
        scatters = kind == "reduce-scatter"
        kind = "all-reduce" if by_axis and scatters else kind
        directions = 1 if scatters and not by_axis else 2
        return self.fabric.collective(kind, [range(self.devices)], whole, directions, by_axis).seconds

    @cached_property
    def hops(self) -> int:
        """Number of sequential hops of a ring with two directions."""
        return len(ring_chunks(self.devices, 2))

    def hop_s(self, rows: int, layer: LayerShapes) -> float:
        """Returns the time to send a device's shard of these rows to both neighbours."""
        # A set, because both neighbours are the same device where there are two.
        around = {(n, (n + step) % self.devices) for n in range(self.devices) for step in (1, -1)}
        return self.fabric.permute(around, NUMBER_BYTES * rows / self.devices * layer.hidden).seconds

    def ring_exposed_s(self, rows: int, layer: LayerShapes, product: MatmulShape) -> float:
        """Returns the exposed time of rows that travel round a ring while tiles of their matmul run.

        Each hop overlaps with one tile: compilers were seen to compute the other direction's tile while nothing travels.
        """
        tile = self.product_s(rows, product) / self.devices
        return self.hops * max(0.0, self.hop_s(rows, layer) - tile)


def visited_share(experts: int, chosen: int, devices: int) -> float:
    """Returns the expected fraction of devices that a token visits: 1 - C(E - E / n, K) / C(E, K), for even choices."""
    return 1 - comb(experts - experts // devices, chosen) / comb(experts, chosen)


def expert_capacity(rows: int, share: float) -> int:
    """Returns the number of rows, at most `rows`, that a device sends to another at once if each goes there with `share`."""
    wanted = rows * share + SPREAD * (rows * share * (1 - share)) ** 0.5
    return min(rows, ceil(wanted / MULTIPLE) * MULTIPLE)


class ExpertExchange(NamedTuple):
    """A choice of how tokens reach their experts.

    Attributes:
        capacity: rows that each pair of devices exchanges at once; None if rows are gathered.
        why: the estimates as text.
        seconds: round-trip time of each method, by name.
    """

    capacity: int | None
    why: str
    seconds: Mapping[str, float]


def expert_exchange(costs: StrategyCosts, rows: int, hidden: int, experts: int, chosen: int) -> ExpertExchange:
    """Returns the faster way to bring rows to their experts; all-to-alls must beat gathering by `LEAST_GAIN`.

    Gathering sends all rows to all devices and reduce-scatters the partial sums. All-to-alls send a row once to each device
    that has one of its experts, with the row's choices, and return one row; before that, the devices agree on the number of
    rounds. The estimate counts one round. Uneven choices need more rounds, each of the same time.

    Args:
        rows: rows over all devices.
    """
    devices = costs.devices
    capacity = expert_capacity(rows // devices, visited_share(experts, chosen, devices))
    pieces = float(devices * capacity)
    row = NUMBER_BYTES * hidden
    seconds = {
        "gather": sum(costs.transfer_s(kind, float(rows * row)) for kind in ("all-gather", "reduce-scatter")),
        "all-to-all": 2 * costs.transfer_s("all-to-all", pieces * row)
        + costs.transfer_s("all-to-all", pieces * CHOICE_BYTES * chosen)
        + costs.transfer_s("all-reduce", 4.0),
    }
    exchanged = seconds["all-to-all"] < (1 - LEAST_GAIN) * seconds["gather"]
    found = f"all-to-all, {capacity:,} rows for each pair of devices" if exchanged else "gather"
    each = ", ".join(f"{name} {1e6 * time:,.0f} us" for name, time in seconds.items())
    why = f"rows to experts by {found}, for {rows:,} rows on {devices} {costs.fabric.chip.name}: {each}"
    return ExpertExchange(capacity if exchanged else None, why, seconds)


def sync(costs: StrategyCosts, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Estimates an all-reduce after each sublayer, by the compiler's algorithm, without overlap."""
    products = sum(costs.product_s(rows, product) for sublayer in layer.sublayers for product in sublayer)
    return LayerEstimate(products + costs.stream_s(rows, layer), 2 * costs.collective_s("all-reduce", rows, layer))


def sequence(costs: StrategyCosts, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Estimates a residual stream sharded by rows: all-gathers and reduce-scatters (or all-to-alls to experts), no overlap."""
    products = sum(costs.product_s(rows, product) for sublayer in layer.sublayers for product in sublayer)
    both = sum(costs.collective_s(kind, rows, layer) for kind in ("all-gather", "reduce-scatter"))
    second = both
    if layer.experts > 1 and not layer.shared:
        exchange = expert_exchange(costs, rows, layer.hidden, layer.experts, layer.chosen)
        second = exchange.seconds["gather" if exchange.capacity is None else "all-to-all"]
    return LayerEstimate(products + costs.stream_s(rows // costs.devices, layer), both + second)


def ring(costs: StrategyCosts, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Estimates collective matmuls: each hop of a collective overlaps with a tile of its own matmul."""
    products = [product for sublayer in layer.sublayers for product in sublayer]
    compute = sum(costs.tiles_s(rows, product) for product in products) + costs.stream_s(rows, layer, TILE_PASSES)
    return LayerEstimate(compute, sum(costs.ring_exposed_s(rows, layer, product) for product in products))


def domino(costs: StrategyCosts, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Estimates micro-batches whose hops queue for the links while tiles of all matmuls run."""
    batch = rows // MICRO_BATCHES
    products = [product for sublayer in layer.sublayers for product in sublayer]
    tiles = MICRO_BATCHES * sum(costs.tiles_s(batch, product) for product in products)
    compute = tiles + costs.stream_s(rows, layer, TILE_PASSES)
    # Each sublayer has an all-gather and a reduce-scatter, both by a ring with two directions.
    links = MICRO_BATCHES * 2 * len(layer.sublayers) * (costs.devices - 1) / 2 * costs.hop_s(batch, layer)
    return LayerEstimate(compute, max(0.0, links - compute) + QUEUED_SHARE * links * links / (links + compute))


ESTIMATES: Mapping[str, Callable[[StrategyCosts, int, LayerShapes], LayerEstimate]] = MappingProxyType(
    {"sync": sync, "sequence": sequence, "ring": ring, "domino": domino}
)
"""Estimate of each strategy, by name (`parallel/strategies.py`)."""


class StrategyChoice(NamedTuple):
    """The chosen strategy, the reason as text, and all estimates by name."""

    name: str
    why: str
    estimates: Mapping[str, LayerEstimate]


def choose(costs: StrategyCosts, rows: int, layer: LayerShapes, micro_batches: bool) -> StrategyChoice:
    """Returns the strategy with the least estimated time if it beats `sync` by `LEAST_GAIN`, else `sync`.

    Args:
        rows: rows of the residual stream: batch size times positions.
        micro_batches: True if the batch can be split into two alternating micro-batches.
    """
    names = ["sync"]
    if rows % costs.devices == 0:
        names += ["sequence", "ring"]
    if micro_batches and rows % (MICRO_BATCHES * costs.devices) == 0:
        names.append("domino")
    estimates = {name: ESTIMATES[name](costs, rows, layer) for name in names}
    best = min(names, key=lambda name: estimates[name].total_s)
    plain = estimates["sync"].total_s
    chosen = best if estimates[best].total_s < (1 - LEAST_GAIN) * plain else "sync"
    each = ", ".join(f"{name} {1e6 * e.total_s:,.0f} us ({1e6 * e.exposed_s:,.0f} exposed)" for name, e in estimates.items())
    return StrategyChoice(
        chosen, f"{chosen} for {rows:,} rows on {costs.devices} {costs.fabric.chip.name}; a layer: {each}", estimates
    )
