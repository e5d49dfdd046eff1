"""Programs of tensor-parallel inference: a prefill or a decode step of a decoder, under a tensor-parallel strategy.

- `sync`: an all-reduce after each half of a layer, without overlap. A kernel loads its weights when its input is ready.
- `sequence`: the residual stream is sharded over ranks by rows, padded to equal numbers; an all-gather before each half and a
  reduce-scatter after it, without overlap.
- `domino`: two micro-batches, of rows or, for a batch of one row, of positions; the all-reduce of one runs under the compute of
  the other. Weights that fit into SBUF serve both; other weights are read twice.
- `column`: the second matmul of a half in tiles of columns; the all-reduce of a tile runs under the compute of the next tile.
- `tiles+ring`: as `column`, with all-reduces as hops around a ring.
- `ring`: reduce-scatters and all-gathers as hops around a ring, under tiles of the matmuls before and after them; over rows
where
  each rank has a tile of rows, else over the hidden dim.

All collectives have the same costs (`hardware/collectives.py`): a hop takes as long as the same step of the runtime's ring,
plus a start and a completion, because compute orders it and waits for it. A hop that only passes on received data needs no
start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Literal

from tilewright.hardware.collectives import ring_chunks
from tilewright.hardware.ranged import refuse_name
from tilewright.perfmodel.builder import BF16, SBUF_SHARE, TILE, Builder, WeightTiles, element_cycles, product_cycles
from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import PSUM, SBUF, Algorithm, NeuronProgram
from tilewright.perfmodel.shapes import Config, Share

SCHEDULES = ("sync", "sequence", "domino", "column", "tiles+ring", "ring")

HOPS = ("tiles+ring", "ring")
"""Strategies that issue hops themselves, without an algorithm of the runtime."""

TILED = ("column", "tiles+ring")
"""Strategies with tiles of columns."""

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Work:
    """Work of an inference program: phase, sizes and tiling.

    Attributes:
        phase: `prefill`, or one step of `decode`.
        rows: number of sequences.
        positions: tokens of each row in a prefill; cached positions in a decode step.
        tile_bytes: bytes of a weight tile.
        tiles: number of column tiles, for strategies with column tiles.
        prefetch: weights may load before the input of their kernel is ready, while SBUF has room.
        algorithm: algorithm of the collectives of the runtime.
    """

    phase: Phase
    rows: int
    positions: int
    tile_bytes: float = 2**21
    tiles: int = 2
    prefetch: bool = False
    algorithm: Algorithm = "auto"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.positions < 1:
            raise ValueError(f"expected at least one row and one position, found {self.rows} and {self.positions}")
        if self.tiles < 1 or self.tile_bytes <= 0:
            raise ValueError(f"expected at least one tile, and bytes in each, found {self.tiles} and {self.tile_bytes:g}")

    @property
    def tokens(self) -> int:
        """Rows of the matmuls."""
        return self.rows * (self.positions if self.phase == "prefill" else 1)


@dataclass(frozen=True)
class InferenceBatch:
    """A micro-batch.

    Attributes:
        sequences: number of sequences.
        queries: queries of each sequence.
        keys: keys that the queries attend to; the queries' own keys are the last ones.
        causal: causal attention.
    """

    sequences: int
    queries: int
    keys: int
    causal: bool

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    @property
    def mask_share(self) -> float:
        """Share of query-key pairs that the mask allows."""
        return 1 - self.queries / (2 * self.keys) if self.causal else 1.0

    @property
    def loads(self) -> bool:
        """True if keys and values are loaded from the cache; a first causal chunk has all of them on chip."""
        return not self.causal or self.keys > self.queries


def parts_of(work: Work, count: int) -> list[InferenceBatch]:
    """Splits a phase into micro-batches of nearly equal size.

    Raises:
        ValueError: fewer rows and positions than micro-batches.
    """
    prefill = work.phase == "prefill"
    if work.rows >= count:
        sizes = [work.rows // count + (n < work.rows % count) for n in range(count)]
        return [InferenceBatch(size, work.positions if prefill else 1, work.positions, prefill) for size in sizes]
    if not prefill or work.positions < count:
        raise ValueError(f"expected at least {count} rows for {count} micro-batches, found {work.rows}")
    ends = [work.positions * n // count for n in range(count + 1)]
    return [InferenceBatch(work.rows, end - begin, end, True) for begin, end in pairwise(ends)]


class LayerBuilder:
    """Builder of decoder layers on one rank, half by half."""

    def __init__(self, config: Config, machine: Machine, work: Work):
        self.share = Share(config, machine.mesh.size("tp"))
        self.work = work
        self.machine = machine
        self.build = Builder(machine, tile_bytes=work.tile_bytes)

    def gate(self, needs: Sequence[int]) -> Sequence[int]:
        """Operations after which a kernel's weight loads may begin."""
        return () if self.work.prefetch else needs

    def norm(self, part_tokens: int, needs: Sequence[int]) -> list[int]:
        return [self.build.elements("norm", part_tokens * self.share.config.hidden_size, needs)]

    def attend(self, part: InferenceBatch, needs: Sequence[int], gate: Sequence[int]) -> list[int]:
        """Adds attention of a micro-batch over the cache, and the append to the cache."""
        build = self.build
        share = self.share
        scores, values, count = share.attention_cycles(part.sequences, part.queries, part.keys, part.mask_share)
        rotated = build.elements("rotate", part.tokens * (share.heads + share.kv_heads) * share.config.head_dim, needs)
        build.move("append", share.cache_bytes(part.tokens, 1), [rotated])
        cached = share.cache_bytes(part.sequences, part.keys)
        tiles = max(1, min(8, round(cached / self.work.tile_bytes)))
        tiles = max(tiles, ceil(cached / (SBUF_SHARE * self.machine.sbuf_bytes / 4)))
        results = []
        for _ in range(tiles):
            held = {"holds": SBUF, "holds_bytes": cached / tiles}
            read = [build.move("load keys and values", cached / tiles, gate, 0, **held)] if part.loads else []
            psum = {"holds": PSUM, "holds_bytes": min(4 * count / tiles, self.machine.psum_bytes / 4)}
            score = build.add("scores", "tensor", [rotated, *read], cycles=scores / tiles, **psum)
            exp = build.add("softmax", "scalar", [score], cycles=element_cycles(count / tiles))
            build.elements("softmax sum", count / tiles, [exp])
            results.append(build.add("values", "tensor", [exp, *read], cycles=values / tiles))
        return [build.elements("take values", part.tokens * share.heads * share.config.head_dim, results)]

    def attention(self, part: InferenceBatch, weights: Sequence[WeightTiles], needs: Sequence[int], keep: bool) -> list[int]:
        """Adds a layer's attention; returns the operations of its partial sums."""
        qkv, output = weights
        gate = self.gate(needs)
        found = self.build.product(qkv, part.tokens, self.norm(part.tokens, needs), gate, keep)
        return self.build.product(output, part.tokens, self.attend(part, found, gate), gate, keep)

    def mlp(self, part: InferenceBatch, weights: Sequence[WeightTiles], needs: Sequence[int], keep: bool) -> list[int]:
        """Adds a layer's MLP; returns the operations of its partial sums."""
        gate_up, down = weights
        gate = self.gate(needs)
        found = self.build.product(gate_up, part.tokens, self.norm(part.tokens, needs), gate, keep)
        return self.build.product(down, part.tokens, self.activate(part.tokens, found), gate, keep)

    def activate(self, tokens: int, needs: Sequence[int]) -> list[int]:
        inner = tokens * self.share.columns
        gated = self.build.add("silu", "scalar", needs, cycles=element_cycles(inner))
        return [self.build.elements("gate", inner, [gated])]

    def sum_up(self, tokens: int, sums: Sequence[int], part: int, share: float = 1.0) -> list[int]:
        """Adds the all-reduce of micro-batch `part`, or of a share of its columns, on a stream chosen by `part`."""
        return self.collective("all-reduce", tokens * share, sums, part % self.machine.settings.streams)

    def collective(self, kind: str, tokens: float, needs: Sequence[int], stream: int = 0) -> list[int]:
        """Adds a collective of the residual stream of `tokens` tokens; nothing on a single rank."""
        if self.share.ranks == 1:
            return list(needs)
        size = BF16 * tokens * self.share.config.hidden_size
        return [self.build.collect(kind, kind, size, needs, algorithm=self.work.algorithm, stream=stream)]

    def residual(self, tokens: int, needs: Sequence[int], share: float = 1.0) -> list[int]:
        """Adds a sum to the residual stream.

        Call it right before the next use: engines run in program order, and an earlier addition would stall its engine.
        """
        return [self.build.elements("residual", tokens * self.share.config.hidden_size * share, needs)]

    def halves(self) -> list[tuple[list[WeightTiles], bool]]:
        """Returns the weights of a layer's attention and MLP, each with True if they stay in SBUF for a second micro-batch."""
        found = [[self.share.qkv(), self.share.output()], [self.share.gate_up(), self.share.down()]]
        return [(each, self.build.stays(*each)) for each in found]

    def head(self, streams: Sequence[int]) -> None:
        """Adds the head: norm and logits of each row's last position, and the best token over all ranks."""
        self.build.layer = None
        normed = self.norm(self.work.rows, streams)
        logits = self.build.product(self.share.head(), self.work.rows, normed, self.gate(normed))
        best = [self.build.elements("argmax", self.work.rows * self.share.vocab, logits)]
        if self.share.ranks > 1:
            self.build.collect("best of ranks", "all-gather", 8 * self.work.rows * self.share.ranks, best)

    def program(self, schedule: str, positions: int) -> NeuronProgram:
        """Returns the program, with weights and caches as resident memory."""
        config = self.share.config
        work = self.work
        resident = self.share.model_bytes + config.num_layers * self.share.cache_bytes(work.rows, positions)
        name = f"{work.phase} of {work.rows} x {work.positions}, {schedule} over {self.share.ranks}"
        return self.build.program(name, resident, self.share.notes)


def micro_batched(model: LayerBuilder, layers: int, count: int) -> None:
    """Adds layers with interleaved micro-batches (`domino`); a single micro-batch gives `sync`."""
    build = model.build
    config = model.share.config
    parts = parts_of(model.work, count)
    streams = [[build.elements("embed", part.tokens * config.hidden_size, [])] for part in parts]
    in_flight: list[list[int]] = [[] for _ in parts]
    for layer in range(layers):
        build.layer = layer
        for half, (weights, stays) in zip((model.attention, model.mlp), model.halves(), strict=True):
            for at, part in enumerate(parts):
                if in_flight[at]:
                    streams[at] = model.residual(part.tokens, [*in_flight[at], *streams[at]])
                sums = half(part, weights, streams[at], stays and at + 1 < count)
                in_flight[at] = model.sum_up(part.tokens, sums, at)
    for at, part in enumerate(parts):
        streams[at] = model.residual(part.tokens, [*in_flight[at], *streams[at]])
    model.head([each for stream in streams for each in stream])


def by_sequence(model: LayerBuilder, layers: int) -> None:
    """Adds layers with a sharded residual stream (`sequence`)."""
    build = model.build
    config = model.share.config
    (part,) = parts_of(model.work, 1)
    chunk_tokens = ceil(part.tokens / model.share.ranks)
    padded = chunk_tokens * model.share.ranks
    stream = [build.elements("embed", chunk_tokens * config.hidden_size, [])]
    for layer in range(layers):
        build.layer = layer
        for at, ((first, second), _) in enumerate(model.halves()):
            rows = model.collective("all-gather", padded, model.norm(chunk_tokens, stream))
            gate = model.gate(rows)
            found = build.product(first, part.tokens, rows, gate)
            found = model.attend(part, found, gate) if at == 0 else model.activate(part.tokens, found)
            sums = model.collective("reduce-scatter", padded, build.product(second, part.tokens, found, gate))
            stream = model.residual(chunk_tokens, [*sums, *stream])
    model.head(stream)


def by_columns(model: LayerBuilder, layers: int, hop_by_hop: bool) -> None:
    """Adds layers with second matmuls and sums in tiles of columns (`column`, `tiles+ring`).

    The next half begins after all tiles.

    Args:
        hop_by_hop: sums are hops around a ring, ordered after the next tile's matmul, instead of all-reduces.
    """
    build = model.build
    config = model.share.config
    tiles = model.work.tiles
    (part,) = parts_of(model.work, 1)
    ring = RingBuilder(model)
    stream = [build.elements("embed", part.tokens * config.hidden_size, [])]
    for layer in range(layers):
        build.layer = layer
        for at, ((first, second), _) in enumerate(model.halves()):
            gate = model.gate(stream)
            found = build.product(first, part.tokens, model.norm(part.tokens, stream), gate)
            found = model.attend(part, found, gate) if at == 0 else model.activate(part.tokens, found)
            summed = []
            waiting = []
            for tile in range(tiles):
                columns = WeightTiles(second.name, second.inner, ceil(second.columns / tiles))
                sums = build.product(columns, part.tokens, found, gate)
                if not hop_by_hop:
                    summed.append(model.sum_up(part.tokens, sums, tile, 1 / tiles))
                elif waiting:
                    summed.append(ring.all_reduce(waiting, 1 / tiles))
                waiting = sums
            if hop_by_hop:
                summed.append(ring.all_reduce(waiting, 1 / tiles))
            stream = [each for one in summed for each in model.residual(part.tokens, [*one, *stream], 1 / tiles)]
    model.head(stream)


class RingBuilder:
    """Builder of collectives as hops around a ring, under tiles of matmuls."""

    def __init__(self, model: LayerBuilder):
        self.model = model
        self.build = model.build
        self.ranks = model.share.ranks
        self.tokens = model.work.tokens
        self.hidden = model.share.config.hidden_size
        self.by_rows = self.tokens >= TILE * self.ranks
        # Bidirectional where the stream has a collective core for each direction.
        self.directions = 2 if model.machine.channels(0) > 1 and self.ranks > 2 else 1
        self.chunks = ring_chunks(self.ranks, self.directions)

    def hop(self, chunks: int, needs: Sequence[int] = (), reduces: bool = False, share: float = 1.0) -> int:
        """Adds a hop of chunks of a share of the columns; a hop without needs passes on the received data of the last hop."""
        size = chunks * BF16 * self.tokens * self.hidden * share / self.ranks
        return self.build.collect("hop", "permute", size, needs, directions=self.directions, reduces=reduces)

    def all_reduce(self, sums: Sequence[int], share: float) -> list[int]:
        """Adds a ring all-reduce of partial sums of a share of the columns: a reduce-scatter, then an all-gather.

        The GPSIMD engine adds, so that the vector engine is free for the concurrent tile.
        """
        added = list(sums)
        for chunks in self.chunks:
            arrived = self.hop(chunks, added, True, share)
            elements = chunks * self.tokens * self.hidden * share / self.ranks
            added = [self.build.elements("add", elements, [arrived, *sums], "gpsimd")]
        for at, chunks in enumerate(self.chunks):
            added = [self.hop(chunks, added if at == 0 else (), share=share)]
        return added

    def tile(
        self, weights: WeightTiles, chunks: int, split_inner: bool, needs: Sequence[int], gate: Sequence[int]
    ) -> list[int]:
        """Adds the matmul of `chunks` chunks: some rows with all weights, or all rows with part of the weights.

        Args:
            split_inner: the part of the weights is a share of the inner dim, else of the columns.
        """
        share = chunks / self.ranks
        if not self.by_rows:
            inner, columns = (
                (ceil(weights.inner * share), weights.columns)
                if split_inner
                else (weights.inner, ceil(weights.columns * share))
            )
            return self.build.product(WeightTiles(weights.name, inner, columns), self.tokens, needs, gate)
        rows = ceil(self.tokens * share)
        if weights.loads:  # already in SBUF
            cycles = product_cycles(rows, weights.inner, weights.columns)
            done = self.build.add(weights.name, "tensor", [*needs, *weights.loads], cycles=cycles)
            return [self.build.elements(f"take {weights.name}", rows * weights.columns, [done])]
        return self.build.product(weights, rows, needs, gate, self.build.stays(weights))

    def gather(self, weights: WeightTiles, chunk: Sequence[int]) -> list[int]:
        """Adds a collective matmul: a ring all-gather of rows with a matmul of each arriving chunk."""
        gate = self.model.gate(chunk)
        results = self.tile(weights, 1, True, chunk, gate)
        for at, chunks in enumerate(self.chunks):
            arrived = [self.hop(chunks, chunk if at == 0 else ())]
            results += self.tile(weights, chunks, True, arrived, gate)
        weights.loads = []
        return results

    def scatter(self, weights: WeightTiles, needs: Sequence[int], gate: Sequence[int]) -> list[int]:
        """Adds a collective matmul: a ring reduce-scatter of partial sums, with the next chunk's matmul under each hop."""
        in_flight: list[int] = []
        sizes = [*self.chunks, 1]
        ahead = self.tile(weights, sizes[0], False, needs, gate)
        for at, chunks in enumerate(sizes):
            sums = ahead
            last = at + 1 == len(sizes)
            if not last:
                ahead = self.tile(weights, sizes[at + 1], False, needs, gate)
            added = self.build.elements("add", chunks * self.tokens * self.hidden / self.ranks, [*sums, *in_flight])
            in_flight = [added] if last else [self.hop(chunks, [added], True)]
        weights.loads = []
        return in_flight


def ringed(model: LayerBuilder, layers: int) -> None:
    """Adds layers with a sharded residual stream and collective matmuls (`ring`)."""
    build = model.build
    config = model.share.config
    work = model.work
    (part,) = parts_of(work, 1)
    ring = RingBuilder(model)
    chunk_tokens = ceil(part.tokens / ring.ranks)
    stream = [build.elements("embed", chunk_tokens * config.hidden_size, [])]
    for layer in range(layers):
        build.layer = layer
        for at, ((first, second), _) in enumerate(model.halves()):
            found = ring.gather(first, model.norm(chunk_tokens, stream))
            gate = model.gate(stream)
            found = model.attend(part, found, gate) if at == 0 else model.activate(part.tokens, found)
            sums = ring.scatter(second, found, gate)
            stream = [build.elements("residual", chunk_tokens * config.hidden_size, [*sums, *stream])]
    model.head(stream)


def inference_program(
    config: Config, machine: Machine, work: Work, schedule: str, layers: int | None = None, cached: int | None = None
) -> NeuronProgram:
    """Builds a prefill or a decode step.

    Args:
        machine: machine with a mesh axis `tp`.
        schedule: tensor-parallel strategy, one of `SCHEDULES`.
        layers: number of layers; by default all layers of the model.
        cached: positions of the caches; by default those of `work`.

    Raises:
        ValueError: an unknown strategy, more ranks than heads, or too few rows for micro-batches.
    """
    if schedule not in SCHEDULES:
        refuse_name("a schedule", schedule, SCHEDULES)
    model = LayerBuilder(config, machine, work)
    count = config.num_layers if layers is None else layers
    if not 1 <= count <= config.num_layers:
        raise ValueError(f"expected 1 to {config.num_layers} layers, found {count}")
    alone = model.share.ranks == 1
    if schedule == "ring" and not alone:
        ringed(model, count)
    elif schedule == "sequence":
        by_sequence(model, count)
    elif schedule in TILED:
        by_columns(model, count, schedule == "tiles+ring" and not alone)
    else:
        micro_batched(model, count, 2 if schedule == "domino" else 1)
    return model.program(schedule, work.positions if cached is None else cached)
