"""Simulated programs: scheduled HLO, a DFlash round, a gather-reduce, a sparse denoising step."""

from math import ceil

from tilewright.hardware.tpu import TpuChip
from tilewright.perfmodel.builder import BF16, LEAST_ISSUE_CYCLES, TILE, Builder, element_cycles
from tilewright.perfmodel.inference import InferenceBatch, LayerBuilder, Work
from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import CC, SBUF, Collective, NeuronProgram
from tilewright.perfmodel.schedule import COPY, PERMUTE, Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.shapes import Config, Share


def hlo_program(graph: ScheduleGraph, chip: TpuChip, machine: Machine, name: str = "scheduled HLO") -> NeuronProgram:
    """Converts a program that XLA scheduled for a TPU to a program of a Neuron core.

    Operations of the TPU's core run on the tensor engine in the same order, with times scaled by the ratio of peaks.
    Collectives run on stream 0 over the axis `tp`, copies on the DMA engines. Waits of the TPU's core become waits of the
    tensor engine.

    Raises:
        ValueError: a collective over more devices than ranks of the axis.
    """
    build = Builder(machine)
    numbers = {}
    ratio = 1e12 * chip.bf16_tflop_per_s / machine.tensor_flop_per_s
    cycles = ratio * machine.engine_hz("tensor") / (1e9 * chip.clock_ghz)
    core: list[int] = []
    notes = [*graph.notes, f"compute times of a TPU {chip.name} scaled by {ratio:.2f}, the ratio of peaks"]
    for number, node in enumerate(graph.nodes):
        needs = [numbers[need] for need in node.needs if need in numbers]
        build.layer = node.layer
        if node.transfer is not None:
            numbers[number] = transfer_of(build, node, node.transfer, [*needs, *core])
            if node.role == "sync":
                core = [numbers[number]]
        elif node.role == "done" and node.start in numbers:
            numbers[number] = numbers[node.start]
            core = list(dict.fromkeys([*core, numbers[number]]))
        elif node.role == "run" and node.cycles:
            numbers[number] = build.add(node.name, "tensor", [*needs, *core], cycles=node.cycles * cycles)
            core = [numbers[number]]
    return build.program(name, notes=notes)


def transfer_of(build: Builder, node: Node, transfer: ScheduledTransfer, needs: list[int]) -> int:
    """Adds a collective or a copy of scheduled HLO."""
    if transfer.kind == COPY:
        return build.move(node.name, transfer.bytes, needs)
    ranks = len(transfer.groups[0]) if transfer.groups else build.machine.mesh.size("tp")
    if ranks > build.machine.mesh.size("tp"):
        had = build.machine.mesh.size("tp")
        raise ValueError(f"expected collectives over at most the {had} ranks of tp, found {ranks} in {node.name}")
    kinds = {"all-gather": ("all-gather", ranks), "reduce-scatter": ("reduce-scatter", 1), "all-reduce": ("all-reduce", 1)}
    # An all-to-all sends nearly all of its bytes, like a permute.
    kind, times = kinds.get(transfer.kind, ("permute", 1))
    directions = transfer.directions if transfer.kind != PERMUTE else 1
    one = Collective(kind, times * transfer.bytes, directions=directions if kind == "permute" else 1)  # type: ignore[arg-type]
    return build.add(node.name, CC, needs, collective=one)


def dflash_program(
    config: Config, machine: Machine, rows: int, block: int, cached: int, drafter_layers: int = 5
) -> NeuronProgram:
    """Builds a round of block-diffusion speculative decoding: the drafter drafts a block, the target verifies it.

    Args:
        rows: number of sequences.
        block: tokens of a block, the last token included.
        cached: positions before the block.
        drafter_layers: layers of the drafter, of the target's sizes (arXiv 2602.06036: five) and with its cache length.

    Raises:
        ValueError: fewer than one row, a block of fewer than two tokens, or more ranks than heads.
    """
    if block < 2 or drafter_layers < 1:
        raise ValueError(f"expected a block from 2 and a drafter of at least one layer, found {block} and {drafter_layers}")
    model = LayerBuilder(config, machine, Work("decode", rows, cached))
    part = InferenceBatch(rows, block, cached + block, False)
    stream = [model.build.elements("embed", part.tokens * config.hidden_size, [])]
    for name, layers in (("draft", drafter_layers), ("verify", config.num_layers)):
        for layer in range(layers):
            model.build.layer = layer if name == "verify" else None
            stream = whole_layer(model, part, stream)
        stream = block_head(model, part, stream)
    share = model.share
    resident = share.model_bytes + drafter_layers * share.layer_bytes
    resident += (config.num_layers + drafter_layers) * share.cache_bytes(rows, cached + block)
    return model.build.program(f"DFlash round of {rows} x {block} over {share.ranks}", resident, share.notes)


def whole_layer(model: LayerBuilder, part: InferenceBatch, stream: list[int]) -> list[int]:
    """Adds a layer with an all-reduce after each half."""
    for half, (weights, _) in zip((model.attention, model.mlp), model.halves(), strict=True):
        sums = model.sum_up(part.tokens, half(part, weights, stream, False), 0)
        stream = model.residual(part.tokens, [*sums, *stream])
    return stream


def block_head(model: LayerBuilder, part: InferenceBatch, stream: list[int]) -> list[int]:
    """Adds the head: the best token of each position of a block, over all ranks."""
    model.build.layer = None
    normed = model.norm(part.tokens, stream)
    logits = model.build.product(model.share.head(), part.tokens, normed, model.gate(normed))
    best = [model.build.elements("argmax", part.tokens * model.share.vocab, logits)]
    if model.share.ranks > 1:
        best = [model.build.collect("best of ranks", "all-gather", 8 * part.tokens * model.share.ranks, best)]
    return best


def gather_reduce_program(machine: Machine, nodes: int, degree: int, features: int) -> NeuronProgram:
    """Builds a gather-reduce by DMA as in an NKI kernel: a descriptor per neighbour row, 128 nodes at a time.

    Args:
        nodes: rows of the neighbour table.
        degree: columns of the neighbour table.
        features: bfloat16 features of a row.

    Raises:
        ValueError: sizes below 1.
    """
    if min(nodes, degree, features) < 1:
        raise ValueError(f"expected nodes, degree and features from 1, found {nodes}, {degree} and {features}")
    build = Builder(machine)
    row = BF16 * features
    for _ in range(ceil(nodes / TILE)):
        table = build.move("load neighbours", 4 * TILE * degree, holds=SBUF, holds_bytes=4 * TILE * degree)
        added: list[int] = []
        for _ in range(degree):
            held = {"holds": SBUF, "holds_bytes": TILE * row}
            rows = build.move("gather rows", TILE * row, [table], 0, descriptor_bytes=row, **held)
            added = [build.add("add", "vector", [rows, *added], cycles=max(LEAST_ISSUE_CYCLES, features))]
        build.move("store sums", TILE * row, added, 2)
    return build.program(f"gather-reduce of {nodes} x {degree} rows of {features}")


def diffusion_program(config: Config, machine: Machine, rows: int, positions: int, salient: float) -> NeuronProgram:
    """Builds a sparse denoising step: in each layer only salient positions are computed; they attend to all keys.

    A comparison with the previous step selects the salient positions. Their rows are gathered by descriptors, and results are
    scattered back. The first layer computes all positions.

    Args:
        rows, positions: number of sequences and their length.
        salient: share of salient positions, 1 for a dense step.

    Raises:
        ValueError: `salient` is not above 0 and at most 1.
    """
    if not 0 < salient <= 1:
        raise ValueError(f"expected a salient share above 0 and at most 1, found {salient:g}")
    model = LayerBuilder(config, machine, Work("decode", rows, positions))
    build = model.build
    hidden = config.hidden_size
    stream = [build.elements("embed", rows * positions * hidden, [])]
    for layer in range(config.num_layers):
        build.layer = layer
        count = positions if layer == 0 else max(1, ceil(salient * positions))
        part = InferenceBatch(rows, count, positions, False)
        if count < positions:
            compared = build.elements("compare with the step before", rows * positions * hidden / model.share.ranks, stream)
            ranked = build.add("rank positions", "gpsimd", [compared], cycles=element_cycles(rows * positions))
            size = {"descriptor_bytes": BF16 * hidden}
            stream = [build.move("gather salient rows", BF16 * part.tokens * hidden, [ranked], **size)]
        stream = whole_layer(model, part, stream)
        if count < positions:
            size = {"descriptor_bytes": BF16 * hidden}
            stream = [build.move("scatter salient rows", BF16 * part.tokens * hidden, stream, 2, **size)]
    block_head(model, InferenceBatch(rows, max(1, ceil(salient * positions)), positions, False), stream)
    share = Share(config, model.share.ranks)
    resident = share.model_bytes + config.num_layers * share.cache_bytes(rows, positions)
    return build.program(f"denoising step of {rows} x {positions}, {salient:.0%} salient", resident, share.notes)
