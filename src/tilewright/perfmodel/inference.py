"""Programs of tensor-parallel inference: a prefill or a decoding step of a decoder under a schedule.

- `sync`: an all-reduce after each half of a layer, and nothing beside it. A kernel loads its weights when its input is there.
- `sequence`: the residual stream divided over ranks by its rows, padded to as many for each; an all-gather before each half and
  a reduce-scatter after it, and nothing beside them.
- `domino`: two micro-batches, rows of the batch or, where there is one row, positions; while the sum of one is under way, the
  other computes. Weights that fit into SBUF serve both, others are read twice.
- `column`: the second product of a half in tiles of its columns; while the sum of one tile is under way, the next is computed.
- `tiles+ring`: the same tiles, whose sums go from neighbour to neighbour, hop by hop, while the next tile is computed.
- `ring`: sums as reduce-scatters and all-gathers hop by hop around a ring, under tiles of the products before and after; over
  rows where each rank has a tile of them, else over the hidden dim.

All are charged alike (`hardware/collectives.py`): a hop takes what the same step of the runtime's own ring takes, and as it is
ordered by compute and waited for by it, a start and a completion besides. Only a hop that passes on what the one before it
brought needs no start.
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
"""Schedules whose sums are hops of their own: no algorithm of the runtime's is chosen for them."""

TILED = ("column", "tiles+ring")
"""Schedules with tiles of columns."""

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Work:
    """Work of an inference program: its phase, its sizes, and how it is cut.

    Attributes:
        phase: `prefill` of `positions` tokens in each row, or a step of `decode` with so many cached.
        rows: sequences.
        tile_bytes: weights loaded at a time.
        tiles: of columns, where sums go in such.
        prefetch: whether weights may be loaded before the input of their kernel is there, as far as SBUF has room.
        algorithm: of the collectives that a schedule leaves to the runtime.
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
        """Rows of the products."""
        return self.rows * (self.positions if self.phase == "prefill" else 1)


@dataclass(frozen=True)
class InferenceBatch:
    """A micro-batch: sequences, queries of each, and keys that they see.

    Attributes:
        keys: those of the queries are the last of them.
        causal: whether a query sees none behind its own.
    """

    sequences: int
    queries: int
    keys: int
    causal: bool

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    @property
    def seen(self) -> float:
        """Share of all pairs of queries and keys that are scores."""
        return 1 - self.queries / (2 * self.keys) if self.causal else 1.0

    @property
    def loads(self) -> bool:
        """True if keys and values come from the cache; those of the queries alone are there."""
        return not self.causal or self.keys > self.queries


def parts_of(work: Work, count: int) -> list[InferenceBatch]:
    """The micro-batches of a phase, as equal as they can be.

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
    """The halves of a decoder's layers on one rank, as operations of a program."""

    def __init__(self, config: Config, machine: Machine, work: Work):
        self.share = Share(config, machine.mesh.size("tp"))
        self.work = work
        self.machine = machine
        self.build = Builder(machine, tile_bytes=work.tile_bytes)

    def gate(self, needs: Sequence[int]) -> Sequence[int]:
        """After which a kernel's loads begin."""
        return () if self.work.prefetch else needs

    def norm(self, part_tokens: int, needs: Sequence[int]) -> list[int]:
        return [self.build.elements("norm", part_tokens * self.share.config.hidden_size, needs)]

    def attend(self, part: InferenceBatch, needs: Sequence[int], gate: Sequence[int]) -> list[int]:
        """Attention of a part over keys and values in the cache, which it appends to."""
        build = self.build
        share = self.share
        scores, values, count = share.attention_cycles(part.sequences, part.queries, part.keys, part.seen)
        turned = build.elements("rotate", part.tokens * (share.heads + share.kv_heads) * share.config.head_dim, needs)
        build.move("append", share.cache_bytes(part.tokens, 1), [turned])
        cached = share.cache_bytes(part.sequences, part.keys)
        tiles = max(1, min(8, round(cached / self.work.tile_bytes)))
        tiles = max(tiles, ceil(cached / (SBUF_SHARE * self.machine.sbuf_bytes / 4)))
        results = []
        for _ in range(tiles):
            held = {"holds": SBUF, "holds_bytes": cached / tiles}
            read = [build.move("load keys and values", cached / tiles, gate, 0, **held)] if part.loads else []
            psum = {"holds": PSUM, "holds_bytes": min(4 * count / tiles, self.machine.psum_bytes / 4)}
            score = build.add("scores", "tensor", [turned, *read], cycles=scores / tiles, **psum)
            exp = build.add("softmax", "scalar", [score], cycles=element_cycles(count / tiles))
            build.elements("softmax sum", count / tiles, [exp])
            results.append(build.add("values", "tensor", [exp, *read], cycles=values / tiles))
        return [build.elements("take values", part.tokens * share.heads * share.config.head_dim, results)]

    def attention(self, part: InferenceBatch, weights: Sequence[WeightTiles], needs: Sequence[int], keep: bool) -> list[int]:
        """The partial sums of a layer's attention."""
        qkv, output = weights
        gate = self.gate(needs)
        found = self.build.product(qkv, part.tokens, self.norm(part.tokens, needs), gate, keep)
        return self.build.product(output, part.tokens, self.attend(part, found, gate), gate, keep)

    def mlp(self, part: InferenceBatch, weights: Sequence[WeightTiles], needs: Sequence[int], keep: bool) -> list[int]:
        """The partial sums of a layer's MLP."""
        gate_up, down = weights
        gate = self.gate(needs)
        found = self.build.product(gate_up, part.tokens, self.norm(part.tokens, needs), gate, keep)
        return self.build.product(down, part.tokens, self.activate(part.tokens, found), gate, keep)

    def activate(self, tokens: int, needs: Sequence[int]) -> list[int]:
        inner = tokens * self.share.columns
        gated = self.build.add("silu", "scalar", needs, cycles=element_cycles(inner))
        return [self.build.elements("gate", inner, [gated])]

    def sum_up(self, tokens: int, sums: Sequence[int], part: int, share: float = 1.0) -> list[int]:
        """The sum over ranks of a part, or of a share of its columns; parts have streams of their own as far as there are."""
        return self.collective("all-reduce", tokens * share, sums, part % self.machine.settings.streams)

    def collective(self, kind: str, tokens: float, needs: Sequence[int], stream: int = 0) -> list[int]:
        """A collective of the residual stream of so many tokens; nothing on a single rank."""
        if self.share.ranks == 1:
            return list(needs)
        size = BF16 * tokens * self.share.config.hidden_size
        return [self.build.collect(kind, kind, size, needs, algorithm=self.work.algorithm, stream=stream)]

    def residual(self, tokens: int, needs: Sequence[int], share: float = 1.0) -> list[int]:
        """A sum added to the residual stream: in an engine's order it stands where its result is wanted, not before."""
        return [self.build.elements("residual", tokens * self.share.config.hidden_size * share, needs)]

    def halves(self) -> list[tuple[list[WeightTiles], bool]]:
        """The weights of a layer's attention and of its MLP, and whether each stays in SBUF for a second micro-batch."""
        found = [[self.share.qkv(), self.share.output()], [self.share.gate_up(), self.share.down()]]
        return [(each, self.build.stays(*each)) for each in found]

    def head(self, streams: Sequence[int]) -> None:
        """Norm and logits of each row's last position, and the best of all ranks."""
        self.build.layer = None
        normed = self.norm(self.work.rows, streams)
        logits = self.build.product(self.share.head(), self.work.rows, normed, self.gate(normed))
        best = [self.build.elements("argmax", self.work.rows * self.share.vocab, logits)]
        if self.share.ranks > 1:
            self.build.collect("best of ranks", "all-gather", 8 * self.work.rows * self.share.ranks, best)

    def program(self, schedule: str, positions: int) -> NeuronProgram:
        """The program of what has been built, with what it keeps in device memory."""
        config = self.share.config
        work = self.work
        resident = self.share.model_bytes + config.num_layers * self.share.cache_bytes(work.rows, positions)
        name = f"{work.phase} of {work.rows} x {work.positions}, {schedule} over {self.share.ranks}"
        return self.build.program(name, resident, self.share.notes)


def micro_batched(model: LayerBuilder, layers: int, count: int) -> None:
    """Layers over micro-batches that take turns; of one it is `sync`."""
    build = model.build
    config = model.share.config
    parts = parts_of(model.work, count)
    streams = [[build.elements("embed", part.tokens * config.hidden_size, [])] for part in parts]
    under_way: list[list[int]] = [[] for _ in parts]
    for layer in range(layers):
        build.layer = layer
        for half, (weights, stays) in zip((model.attention, model.mlp), model.halves(), strict=True):
            for at, part in enumerate(parts):
                if under_way[at]:
                    streams[at] = model.residual(part.tokens, [*under_way[at], *streams[at]])
                sums = half(part, weights, streams[at], stays and at + 1 < count)
                under_way[at] = model.sum_up(part.tokens, sums, at)
    for at, part in enumerate(parts):
        streams[at] = model.residual(part.tokens, [*under_way[at], *streams[at]])
    model.head([each for stream in streams for each in stream])


def by_sequence(model: LayerBuilder, layers: int) -> None:
    """Layers whose residual stream is divided over ranks, gathered before each half and scattered after it."""
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
    """Layers whose second products, and their sums, go in tiles of columns; the next half begins when all are there.

    Args:
        hop_by_hop: whether a sum is hops around a ring, ordered behind the next tile's product, in the place of an all-reduce.
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
    """Collectives hop by hop under tiles of products."""

    def __init__(self, model: LayerBuilder):
        self.model = model
        self.build = model.build
        self.ranks = model.share.ranks
        self.tokens = model.work.tokens
        self.hidden = model.share.config.hidden_size
        self.by_rows = self.tokens >= TILE * self.ranks
        # Both ways round at once, where a stream has a collective core for each.
        self.directions = 2 if model.machine.channels(0) > 1 and self.ranks > 2 else 1
        self.chunks = ring_chunks(self.ranks, self.directions)

    def hop(self, chunks: int, needs: Sequence[int] = (), reduces: bool = False, share: float = 1.0) -> int:
        """Chunks to the neighbours, of a share of the columns; without needs, what the hop before brought is passed on."""
        size = chunks * BF16 * self.tokens * self.hidden * share / self.ranks
        return self.build.collect("hop", "permute", size, needs, directions=self.directions, reduces=reduces)

    def all_reduce(self, sums: Sequence[int], share: float) -> list[int]:
        """Partial sums of a share of the columns, to every rank: added up on their way round, then passed on once more.

        The GPSIMD engine adds, so that the vector engine is free for the tile that is computed meanwhile.
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
        """The product of so many chunks: rows of all weights, or all rows with a part of the weights."""
        share = chunks / self.ranks
        if not self.by_rows:
            inner, columns = (
                (ceil(weights.inner * share), weights.columns)
                if split_inner
                else (weights.inner, ceil(weights.columns * share))
            )
            return self.build.product(WeightTiles(weights.name, inner, columns), self.tokens, needs, gate)
        rows = ceil(self.tokens * share)
        if weights.loads:  # in SBUF by now
            cycles = product_cycles(rows, weights.inner, weights.columns)
            done = self.build.add(weights.name, "tensor", [*needs, *weights.loads], cycles=cycles)
            return [self.build.elements(f"take {weights.name}", rows * weights.columns, [done])]
        return self.build.product(weights, rows, needs, gate, self.build.stays(weights))

    def gather(self, weights: WeightTiles, chunk: Sequence[int]) -> list[int]:
        """Rows from all ranks, each times the weights as it arrives."""
        gate = self.model.gate(chunk)
        results = self.tile(weights, 1, True, chunk, gate)
        for at, chunks in enumerate(self.chunks):
            arrived = [self.hop(chunks, chunk if at == 0 else ())]
            results += self.tile(weights, chunks, True, arrived, gate)
        weights.loads = []
        return results

    def scatter(self, weights: WeightTiles, needs: Sequence[int], gate: Sequence[int]) -> list[int]:
        """Partial sums, each sent on as it is computed, with what has arrived added to it; the next is computed beside that."""
        under_way: list[int] = []
        sizes = [*self.chunks, 1]
        ahead = self.tile(weights, sizes[0], False, needs, gate)
        for at, chunks in enumerate(sizes):
            sums = ahead
            last = at + 1 == len(sizes)
            if not last:
                ahead = self.tile(weights, sizes[at + 1], False, needs, gate)
            added = self.build.elements("add", chunks * self.tokens * self.hidden / self.ranks, [*sums, *under_way])
            under_way = [added] if last else [self.hop(chunks, [added], True)]
        weights.loads = []
        return under_way


def ringed(model: LayerBuilder, layers: int) -> None:
    """Layers whose residual stream is divided over ranks."""
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
    """A prefill or a decoding step.

    Args:
        machine: whose mesh has an axis `tp`.
        layers: how many of the model's; all of them by default.
        cached: positions for which keys and values have room; by default those of `work`.

    Raises:
        ValueError: no such schedule, more ranks than heads, or too few rows for micro-batches.
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
