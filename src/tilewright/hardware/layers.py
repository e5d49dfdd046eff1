"""Cost model of a decoder layer that devices divide, by which schedules are chosen before anything is compiled.

A product takes the longer of its operations at the chip's peak and its bytes at the memory's bandwidth. Transfers are those of
`links.Fabric`. Left out is what is the same under all schedules, attention above all. `tilewright inspect overlap` shows what a
compiler makes of each; the constants below were read from that, for Llama-3-8B's layers over eight chips.
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
"""Of an activation or a weight: bfloat16."""

TILE_US: Mapping[str, float] = MappingProxyType({"v5e": 3.3, "v5p": 3.1, "v6e": 0.8})
"""Microseconds of each tile of a product beyond its roofline, by libtpu's estimates."""

TILE_PASSES = 5
"""Passes of rows and sums through memory where products are cut into tiles, all rows of the stream each time."""

LEAST_GAIN = 0.1
"""Share by which another schedule has to be faster than `sync` to be chosen: by so much these estimates were off."""

LATE_SHARE = 0.4
"""Exposed part of queued hops that compute could hide, as a part of the share of the time in which links are busy: where
that is large, hops wait for one another."""

MICRO_BATCHES = 2

SPREAD = 3.0
"""Standard deviations above the mean for which a capacity has room: one round is enough for nearly all pairs of devices, if
rows choose evenly."""

CHOICE_BYTES = 8
"""Of the number of an expert and its weight, which go with a row."""

MULTIPLE = 8
"""Rows of which capacities are multiples."""


class Product(NamedTuple):
    """A matrix that devices divide: `inputs` and `columns` are one device's.

    Attributes:
        experts, chosen: how many such matrices all devices have, and how many of them a row is multiplied with; inputs or
            columns are then those of a row's, divided.
    """

    inputs: int
    columns: int
    experts: int = 1
    chosen: int = 1

    def read(self, rows: float) -> float:
        """Reads of its numbers for so many rows, which choose evenly: those of more experts than a row's."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows) / self.chosen


@dataclass(frozen=True)
class LayerShapes:
    """A device's products in a layer.

    Attributes:
        hidden: size of the residual stream.
        halves: the product that begins each half of a layer and the one that ends it, of attention and of the MLP.
        shared: there is an expert that every row goes to besides, of which each device has a part: rows are gathered for it.
    """

    hidden: int
    halves: tuple[tuple[Product, Product], tuple[Product, Product]]
    shared: bool = False

    @property
    def experts(self) -> int:
        """Experts of the second half; 1 where that is an MLP."""
        return self.halves[1][0].experts

    @property
    def chosen(self) -> int:
        """Number of them that a row goes to."""
        return self.halves[1][0].chosen


def divided_layer(
    hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, devices: int, experts: int = 1, chosen: int = 1
) -> LayerShapes:
    """A layer of these sizes over so many devices; key/value heads that are fewer than they are held by several of them.

    Args:
        mlp: columns of all experts that a row goes to, where there are such.
    """
    own = heads // devices
    kv = max(1, kv_heads // devices)
    of = (experts, chosen)
    attention = Product(hidden, (own + 2 * kv) * head_dim), Product(own * head_dim, hidden)
    return LayerShapes(hidden, (attention, (Product(hidden, 2 * mlp // devices, *of), Product(mlp // devices, hidden, *of))))


class LayerEstimate(NamedTuple):
    """Estimated time of a layer: its products, norms and additions, and what of its communication nothing hides."""

    compute_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class Costs:
    """Of products and transfers on the devices of a fabric, in seconds."""

    fabric: Fabric

    @property
    def devices(self) -> int:
        return len(self.fabric.places)

    def product_s(self, rows: int, product: Product, tiles: int = 1) -> float:
        """Cut into tiles by its rows: weights are read once, as they stay in VMEM; those of experts, which do not, for each."""
        read = tiles * product.read(rows / tiles) if product.experts > 1 else 1.0
        numbers = read * product.inputs * product.columns + rows * (product.inputs + product.columns)
        flops = 2.0 * rows * product.inputs * product.columns
        least = self.fabric.chip.roofline_seconds(NUMBER_BYTES * numbers, flops)
        chip = self.fabric.chip.name
        return least + (1e-6 * tiles * TILE_US.get(chip, max(TILE_US.values())) if tiles > 1 else 0.0)

    def tiles_s(self, rows: int, product: Product) -> float:
        """A product in as many tiles as there are devices."""
        return self.product_s(rows, product, self.devices)

    def stream_s(self, rows: int, layer: LayerShapes, passes: int = 10) -> float:
        """Rows of the residual stream through memory; by default two norms, and two additions, in place."""
        return self.fabric.chip.roofline_seconds(float(passes) * NUMBER_BYTES * rows * layer.hidden, 0)

    def collective_s(self, kind: str, rows: int, layer: LayerShapes) -> float:
        """Seconds of a collective of all rows; see `transfer_s`."""
        return self.transfer_s(kind, float(NUMBER_BYTES * rows * layer.hidden))

    def transfer_s(self, kind: str, whole: float) -> float:
        """Seconds of a collective of so many bytes (see `Fabric.collective`), along the ways that compilers were seen to take.

        Of three axes along each, where a reduce-scatter is an all-reduce; else round all devices, reduce-scatters in one
        direction. All-to-alls, of which nothing was seen, along each axis.
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
        """One after another, of a ring both ways."""
        return len(ring_chunks(self.devices, 2))

    def hop_s(self, rows: int, layer: LayerShapes) -> float:
        """A device's share of so many rows, to the next device and to the one before."""
        around = {(n, (n + step) % self.devices) for n in range(self.devices) for step in (1, -1)}  # of two, they are the same
        return self.fabric.permute(around, NUMBER_BYTES * rows / self.devices * layer.hidden).seconds

    def ring_exposed_s(self, rows: int, layer: LayerShapes, product: Product) -> float:
        """Of rows that travel under tiles of a product of them.

        One tile is beside a hop: compilers were seen to compute that of the other direction where nothing travels.
        """
        tile = self.product_s(rows, product) / self.devices
        return self.hops * max(0.0, self.hop_s(rows, layer) - tile)


def visited_share(experts: int, chosen: int, devices: int) -> float:
    """Share of the devices that a row goes to: 1 - C(E - E / n, K) / C(E, K), if it chooses evenly."""
    return 1 - comb(experts - experts // devices, chosen) / comb(experts, chosen)


def expert_capacity(rows: int, share: float) -> int:
    """Rows that a device sends another one at once, of M of which each goes there with this probability; M at most."""
    wanted = rows * share + SPREAD * (rows * share * (1 - share)) ** 0.5
    return min(rows, ceil(wanted / MULTIPLE) * MULTIPLE)


class ExpertExchange(NamedTuple):
    """A choice of how rows get to their experts.

    Attributes:
        capacity: rows that a pair of devices exchanges at once; None for rows that are gathered.
        why: the estimates in words.
        seconds: of each way, by its name, there and back.
    """

    capacity: int | None
    why: str
    seconds: Mapping[str, float]


def expert_exchange(costs: Costs, rows: int, hidden: int, experts: int, chosen: int) -> ExpertExchange:
    """The way that is estimated to take less time on the links; rows are gathered unless the other is well below.

    Gathered, all rows come to all devices, and partial sums are added up and divided. By all-to-alls a row goes once to each
    device that has one of its experts, with its choices, and one row comes back; before that the devices agree on the number of
    rounds. One round is counted: more, where rows choose unevenly, take as many times as long.

    Args:
        rows: M n.
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
    each = ", ".join(f"{name} {1e6 * of:,.0f} us" for name, of in seconds.items())
    why = f"rows to experts by {found}, for {rows:,} rows on {devices} {costs.fabric.chip.name}: {each}"
    return ExpertExchange(capacity if exchanged else None, why, seconds)


def sync(costs: Costs, rows: int, layer: LayerShapes) -> LayerEstimate:
    """A sum over all devices after each half, by the compiler's own algorithm, with nothing beside it."""
    products = sum(costs.product_s(rows, product) for half in layer.halves for product in half)
    return LayerEstimate(products + costs.stream_s(rows, layer), 2 * costs.collective_s("all-reduce", rows, layer))


def sequence(costs: Costs, rows: int, layer: LayerShapes) -> LayerEstimate:
    """The stream divided along its rows, with nothing beside its all-gathers and reduce-scatters, or all-to-alls to experts."""
    products = sum(costs.product_s(rows, product) for half in layer.halves for product in half)
    both = sum(costs.collective_s(kind, rows, layer) for kind in ("all-gather", "reduce-scatter"))
    second = both
    if layer.experts > 1 and not layer.shared:
        exchange = expert_exchange(costs, rows, layer.hidden, layer.experts, layer.chosen)
        second = exchange.seconds["gather" if exchange.capacity is None else "all-to-all"]
    return LayerEstimate(products + costs.stream_s(rows // costs.devices, layer), both + second)


def ring(costs: Costs, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Each hop of these collectives beside tiles of the product that it belongs to."""
    products = [product for half in layer.halves for product in half]
    compute = sum(costs.tiles_s(rows, product) for product in products) + costs.stream_s(rows, layer, TILE_PASSES)
    return LayerEstimate(compute, sum(costs.ring_exposed_s(rows, layer, product) for product in products))


def domino(costs: Costs, rows: int, layer: LayerShapes) -> LayerEstimate:
    """Micro-batches, whose rows and sums queue for the links beside tiles of all products."""
    own = rows // MICRO_BATCHES
    products = [product for half in layer.halves for product in half]
    tiles = MICRO_BATCHES * sum(costs.tiles_s(own, product) for product in products)
    compute = tiles + costs.stream_s(rows, layer, TILE_PASSES)
    # Of a ring both ways, an all-gather and a reduce-scatter for each half.
    links = MICRO_BATCHES * 2 * len(layer.halves) * (costs.devices - 1) / 2 * costs.hop_s(own, layer)
    return LayerEstimate(compute, max(0.0, links - compute) + LATE_SHARE * links * links / (links + compute))


ESTIMATES: Mapping[str, Callable[[Costs, int, LayerShapes], LayerEstimate]] = MappingProxyType(
    {"sync": sync, "sequence": sequence, "ring": ring, "domino": domino}
)
"""By the names of schedules (`parallel/schedules.py`)."""


class StrategyChoice(NamedTuple):
    """A schedule, why it is that one, and what each was estimated to take."""

    name: str
    why: str
    estimates: Mapping[str, LayerEstimate]


def choose(costs: Costs, rows: int, layer: LayerShapes, micro_batches: bool) -> StrategyChoice:
    """The schedule with the least estimated time, if that is well below `sync`'s.

    Args:
        rows: of the residual stream: rows of a batch times positions.
        micro_batches: whether they can be divided in two that take turns.
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
    each = ", ".join(f"{name} {1e6 * of.total_s:,.0f} us ({1e6 * of.exposed_s:,.0f} exposed)" for name, of in estimates.items())
    return StrategyChoice(
        chosen, f"{chosen} for {rows:,} rows on {costs.devices} {costs.fabric.chip.name}; a layer: {each}", estimates
    )
