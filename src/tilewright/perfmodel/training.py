"""Programs of sharded training: a train step of a decoder over a mesh of fully sharded and tensor-parallel ranks.

A layer has two halves, attention and MLP; shifts count halves, as in the source (neuron-runtime/explore/compute-comm-overlap).
A half all-gathers its weights over `fsdp`. Over `tp` it all-gathers rows before its matmuls and reduce-scatters sums after
them. The backward pass gathers both again, recomputes the half except its last matmul, and reduce-scatters weight gradients
over `fsdp`.

In a *threaded* step, a token fixes the order of collectives. Each half issues the gather of its rows, the weights of the half
`prefetch_distance` halves ahead, the gradients of the half `scatter_delay` halves behind, and its sums. The compiler's own
order gathers all weights before a pass and scatters all gradients after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.perfmodel.builder import BF16, Builder, WeightTiles, element_cycles, product_cycles
from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.shapes import Config, Share

STATE_BYTES = 18
"""State bytes of a parameter on its rank: bfloat16 weight, and float32 master weight, two moments and gradient."""

UPDATE_BYTES = 26
"""Bytes that the optimizer reads or writes per parameter."""


@dataclass(frozen=True)
class TrainingStep:
    """A train step.

    Attributes:
        sequences, positions: sequences, and positions per sequence, of each fully sharded rank.
        threaded: a token fixes the order of collectives.
        prefetch_distance: half layers by which weights are gathered ahead.
        scatter_delay: half layers by which gradients are scattered behind.
        layers: number of layers; None for all layers of the model.
    """

    sequences: int = 1
    positions: int = 4096
    threaded: bool = True
    prefetch_distance: int = 1
    scatter_delay: int = 0
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.positions < 1:
            raise ValueError(f"expected at least one sequence and position, found {self.sequences} and {self.positions}")
        if self.prefetch_distance < 0 or self.scatter_delay < 0:
            raise ValueError(
                f"expected shifts of 0 or more, found a prefetch distance of {self.prefetch_distance} and "
                f"a scatter delay of {self.scatter_delay}"
            )

    @property
    def tokens(self) -> int:
        return self.sequences * self.positions


class TrainingBuilder:
    """Builder of a train step."""

    def __init__(self, config: Config, machine: Machine, step: TrainingStep):
        self.step = step
        self.machine = machine
        self.config = config
        self.share = Share(config, machine.mesh.size("tp"))
        self.build = Builder(machine)
        self.layers = config.num_layers if step.layers is None else step.layers
        self.halves = 2 * self.layers
        if not 1 <= self.layers <= config.num_layers:
            raise ValueError(f"expected 1 to {config.num_layers} layers, found {self.layers}")
        for name, shift in (("prefetch_distance", step.prefetch_distance), ("scatter_delay", step.scatter_delay)):
            if shift > self.halves:
                raise ValueError(f"expected --{name.replace('_', '-')} of at most {self.layers} layers, found {shift / 2:g}")
        self.fsdp_stream = min(1, machine.settings.streams - 1)
        self.gathered: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.scattered: list[int] = []
        self.stream: list[int] = []

    def weights(self, half: int) -> tuple[WeightTiles, WeightTiles]:
        """Returns the two matrices of a half."""
        return (self.share.qkv(), self.share.output()) if half % 2 == 0 else (self.share.gate_up(), self.share.down())

    def size(self, half: int) -> float:
        """Bytes of a half's weights on a tensor-parallel rank; the last half is the head."""
        if half == self.halves:
            return self.share.head().bytes
        return self.share.mlp_bytes if half % 2 else self.share.attention_bytes

    def gather_weights(self, half: int, needs: Sequence[int]) -> None:
        """Adds the all-gather of a half's weights, which are held until their last use."""
        size = self.size(half)
        self.gathered[half] = self.build.collect(
            f"gather weights {half}",
            "all-gather",
            size,
            needs,
            axis="fsdp",
            purpose="fsdp",
            stream=self.fsdp_stream,
            holds_bytes=size,
        )

    def scatter_gradients(self, half: int, needs: Sequence[int]) -> None:
        """Adds the reduce-scatter of a half's gradients."""
        options = {"axis": "fsdp", "purpose": "fsdp", "stream": self.fsdp_stream}
        after = [self.gradients.pop(half), *needs]
        self.scattered.append(
            self.build.collect(f"scatter gradients {half}", "reduce-scatter", self.size(half), after, **options)
        )

    def rows(self, kind: str, needs: Sequence[int]) -> list[int]:
        """Adds the all-gather of rows or the reduce-scatter of sums over the tensor-parallel ranks."""
        if self.share.ranks == 1:
            return list(needs)
        size = BF16 * self.step.tokens * self.config.hidden_size
        return [self.build.collect("gather rows" if kind == "all-gather" else "scatter sums", kind, size, needs)]

    def elements(self, name: str, count: float, needs: Sequence[int]) -> list[int]:
        return [self.build.elements(name, count, needs)]

    def own_rows(self, name: str, needs: Sequence[int]) -> list[int]:
        """Adds an element-wise operation on the rank's own rows."""
        return self.elements(name, self.step.tokens * self.config.hidden_size / self.share.ranks, needs)

    def inner(self, half: int, needs: Sequence[int], times: float = 1.0) -> list[int]:
        """Adds the operations between a half's two matmuls, `times` as many cycles in the backward pass."""
        build = self.build
        share = self.share
        tokens = self.step.tokens
        if half % 2:
            silu = build.add("silu", "scalar", needs, cycles=times * element_cycles(tokens * share.columns))
            return self.elements("gate", times * tokens * share.columns, [silu])
        scores, values, count = share.attention_cycles(self.step.sequences, self.step.positions, self.step.positions, 0.5)
        results = []
        for _ in range(4):
            score = build.add("scores", "tensor", needs, cycles=times * scores / 4)
            exp = build.add("softmax", "scalar", [score], cycles=times * element_cycles(count / 4))
            build.elements("softmax sum", times * count / 4, [exp])
            results.append(build.add("values", "tensor", [exp], cycles=times * values / 4))
        return self.elements("take values", tokens * share.heads * self.config.head_dim, results)

    def forward(self, half: int, stream: list[int], window: Sequence[int]) -> list[int]:
        """Adds a half.

        Args:
            window: halves with weights to gather between this half's rows and sums.
        """
        first, second = self.weights(half)
        rows = self.rows("all-gather", self.own_rows("norm", stream))
        for ahead in window:
            self.gather_weights(ahead, rows)
        gate = [self.gathered[half]]
        found = self.build.product(first, self.step.tokens, rows, gate)
        found = self.build.product(second, self.step.tokens, self.inner(half, found), gate)
        return self.own_rows("residual", [*self.rows("reduce-scatter", found), *stream])

    def backward(self, half: int, stream: list[int], window: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Adds the gradient of a half.

        Args:
            window: halves with weights to gather during this half.
            behind: halves with gradients to scatter during this half.
        """
        build, tokens, (first, second) = self.build, self.step.tokens, self.weights(half)
        rows = self.rows("all-gather", self.own_rows("norm", stream))
        upstream = self.rows("all-gather", stream)
        for ahead in window:
            self.gather_weights(ahead, upstream)
        for each in behind:
            self.scatter_gradients(each, upstream)
        gate = [self.gathered[half]]
        inner = self.inner(half, build.product(first, tokens, rows, gate))
        transposed = WeightTiles(f"{second.name} backward", second.columns, second.inner)
        found = build.product(transposed, tokens, upstream, gate)
        of_second = self.weight_gradient(second, [*inner, *upstream])
        # Attention's backward pass recomputes the scores and has four matmuls instead of two.
        found = self.inner(half, [*found, *inner], 2.5 if half % 2 == 0 else 2.0)
        sums = build.product(WeightTiles(f"{first.name} backward", first.columns, first.inner), tokens, found, gate)
        # The sums are scattered before the weight gradient, which hides them.
        stream = self.rows("reduce-scatter", sums)
        of_first = self.weight_gradient(first, [*found, *rows])
        self.gradients[half] = build.add(
            f"gradients {half}", "vector", [of_first, of_second], holds="hbm", holds_bytes=self.size(half)
        )
        return self.own_rows("residual", stream)

    def weight_gradient(self, weights: WeightTiles, needs: Sequence[int]) -> int:
        """Adds the matmul of a weight gradient and its store to device memory."""
        cycles = product_cycles(weights.inner, self.step.tokens, weights.columns)
        done = self.build.add(f"{weights.name} gradient", "tensor", needs, cycles=cycles)
        read = self.build.elements(f"take {weights.name} gradient", weights.inner * weights.columns, [done])
        return self.build.move(f"store {weights.name} gradient", weights.bytes, [read], 3)

    def head(self, stream: list[int]) -> list[int]:
        """Adds logits, loss and their gradients."""
        build = self.build
        tokens = self.step.tokens
        head = self.share.head()
        build.layer = None
        rows = self.rows("all-gather", self.own_rows("norm", stream))
        gate = [self.gathered[self.halves]]
        logits = build.product(head, tokens, rows, gate)
        loss = self.elements("loss", tokens * self.share.vocab, logits)
        found = build.product(WeightTiles("head backward", head.columns, head.inner), tokens, loss, gate)
        self.gradients[self.halves] = self.weight_gradient(head, [*loss, *rows])
        return self.own_rows("norm backward", self.rows("reduce-scatter", found))

    def update(self) -> None:
        """Adds the optimizer: the norm of all gradients, then the update of each half."""
        self.build.layer = None
        norm = self.build.elements("gradient norm", 1, self.scattered)
        if self.machine.mesh.cores > 1:
            for axis, size in self.machine.mesh.axes:
                if size > 1:
                    norm = self.build.collect("sum norm", "all-reduce", 4 * size, [norm], axis=axis, purpose="norm")
        for half in range(self.halves + 1):
            elements = self.size(half) / BF16 / self.machine.mesh.size("fsdp")
            moved = self.build.move("optimizer state", elements * UPDATE_BYTES, [norm], 2)
            self.build.elements("update", 8 * elements, [moved])


def training_program(config: Config, machine: Machine, step: TrainingStep) -> NeuronProgram:
    """Builds a train step.

    Args:
        machine: machine with mesh axes `fsdp` and `tp`.

    Raises:
        ValueError: shifts exceed the layers, or more tensor-parallel ranks than heads.
    """
    builder = TrainingBuilder(config, machine, step)
    forward_pass(builder, order := list(range(builder.halves)))
    builder.build.layer = None
    backward_pass(builder, order[::-1])
    builder.update()
    parameters = (builder.layers * builder.share.layer_bytes + builder.share.table_bytes) / BF16
    saved = builder.halves * BF16 * step.tokens * config.hidden_size / builder.share.ranks
    resident = STATE_BYTES * parameters / machine.mesh.size("fsdp") + saved
    shifts = f"prefetch {step.prefetch_distance / 2:g}, delay {step.scatter_delay / 2:g}"
    kind = shifts if step.threaded else "left to the compiler"
    return builder.build.program(f"training step, {kind}", resident, builder.share.notes)


def forward_pass(builder: TrainingBuilder, order: Sequence[int]) -> None:
    """Adds the forward pass, from the embedding to the head."""
    step = builder.step
    last = builder.halves
    stream = builder.own_rows("embed", [])
    distance = step.prefetch_distance if step.threaded else last + 1
    for half in (*order, last)[: max(distance, 1) if step.threaded else None]:
        builder.gather_weights(half, [])
    for half in order:
        builder.build.layer = half // 2
        if step.threaded and distance == 0 and half not in builder.gathered:
            builder.gather_weights(half, stream)
        window = [half + distance] if step.threaded and distance and half + distance <= last else []
        stream = builder.forward(half, stream, window)
    builder.build.layer = None
    if last not in builder.gathered:
        builder.gather_weights(last, stream)
    builder.stream = builder.head(stream)


def backward_pass(builder: TrainingBuilder, order: Sequence[int]) -> None:
    """Adds the backward pass, from the last half to the first."""
    step = builder.step
    stream = builder.stream
    builder.gathered = {}
    first = order[: max(step.prefetch_distance, 1)] if step.threaded else order
    for half in first:
        builder.gather_weights(half, stream)
    waiting = [builder.halves]
    for at, half in enumerate(order):
        builder.build.layer = half // 2
        if step.threaded and half not in builder.gathered:
            builder.gather_weights(half, stream)
        ahead = at + step.prefetch_distance
        window = [order[ahead]] if step.threaded and step.prefetch_distance and ahead < len(order) else []
        full = step.threaded and len(waiting) > max(step.scatter_delay - 1, 0)
        behind = [waiting.pop(0)] if full and step.scatter_delay else []
        stream = builder.backward(half, stream, window, behind)
        waiting.append(half)
        if step.threaded and step.scatter_delay == 0:
            while waiting:
                builder.scatter_gradients(waiting.pop(0), [])
    builder.build.layer = None
    for half in waiting:
        builder.scatter_gradients(half, stream)
