"""Programs of sharded training: a step of a decoder over a mesh of fully sharded and tensor-parallel ranks.

A layer is two halves, attention and MLP, each a layer of its own to the shifts, as the source has it
(neuron-runtime/explore/compute-comm-overlap). A half gathers its weights over `fsdp`; over `tp` it gathers its rows before its
products and scatters their sums after them. The backward pass gathers both again, computes the half anew but for its last
product, and scatters the gradients of its weights over `fsdp`.

*Threaded*, collectives are issued in the order in which a token passes through them: in each half its rows, the weights of the
half `prefetch_distance` halves ahead, the gradients of the half `scatter_delay` halves behind, its sums. Left to the compiler,
all weights of a pass are gathered before it and all gradients scattered after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.perfmodel.builder import BF16, Builder, WeightTiles, element_cycles, product_cycles
from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.shapes import Config, Share

STATE_BYTES = 18
"""Of a parameter, on the rank that keeps it: weight in bfloat16, master weight, two moments and gradient in float32."""

UPDATE_BYTES = 26
"""Of them read or written by the optimizer."""


@dataclass(frozen=True)
class TrainingStep:
    """A training step.

    Attributes:
        sequences, positions: of each fully sharded rank.
        threaded: whether a token orders collectives.
        prefetch_distance, scatter_delay: by how many halves weights are gathered ahead and gradients scattered behind.
        layers: how many of the model's; None for all.
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
    """A step in the making."""

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
        """The two matrices of a half."""
        return (self.share.qkv(), self.share.output()) if half % 2 == 0 else (self.share.gate_up(), self.share.down())

    def size(self, half: int) -> float:
        """Bytes of a half's weights on a tensor-parallel rank; of the head, which is the last."""
        if half == self.halves:
            return self.share.head().bytes
        return self.share.mlp_bytes if half % 2 else self.share.attention_bytes

    def gather_weights(self, half: int, needs: Sequence[int]) -> None:
        """Issues the all-gather of a half's weights, which holds them until their last use."""
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
        """Issues the reduce-scatter of a half's gradients."""
        what = {"axis": "fsdp", "purpose": "fsdp", "stream": self.fsdp_stream}
        after = [self.gradients.pop(half), *needs]
        self.scattered.append(self.build.collect(f"scatter gradients {half}", "reduce-scatter", self.size(half), after, **what))

    def rows(self, kind: str, needs: Sequence[int]) -> list[int]:
        """Rows from, or sums to, the tensor-parallel ranks."""
        if self.share.ranks == 1:
            return list(needs)
        size = BF16 * self.step.tokens * self.config.hidden_size
        return [self.build.collect("gather rows" if kind == "all-gather" else "scatter sums", kind, size, needs)]

    def elements(self, name: str, count: float, needs: Sequence[int]) -> list[int]:
        return [self.build.elements(name, count, needs)]

    def own_rows(self, name: str, needs: Sequence[int]) -> list[int]:
        """Element-wise work on the rows that a rank keeps."""
        return self.elements(name, self.step.tokens * self.config.hidden_size / self.share.ranks, needs)

    def inner(self, half: int, needs: Sequence[int], times: float = 1.0) -> list[int]:
        """Adds the operations between a half's two products; its backward takes `times` as much."""
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
        """A half; `window` are the halves whose weights are gathered between its rows and its sums."""
        first, second = self.weights(half)
        rows = self.rows("all-gather", self.own_rows("norm", stream))
        for ahead in window:
            self.gather_weights(ahead, rows)
        gate = [self.gathered[half]]
        found = self.build.product(first, self.step.tokens, rows, gate)
        found = self.build.product(second, self.step.tokens, self.inner(half, found), gate)
        return self.own_rows("residual", [*self.rows("reduce-scatter", found), *stream])

    def backward(self, half: int, stream: list[int], window: Sequence[int], behind: Sequence[int]) -> list[int]:
        """The gradient of a half; `behind` are the halves whose gradients are scattered in it."""
        build, tokens, (first, second) = self.build, self.step.tokens, self.weights(half)
        rows = self.rows("all-gather", self.own_rows("norm", stream))
        upstream = self.rows("all-gather", stream)
        for ahead in window:
            self.gather_weights(ahead, upstream)
        for each in behind:
            self.scatter_gradients(each, upstream)
        gate = [self.gathered[half]]
        inner = self.inner(half, build.product(first, tokens, rows, gate))
        turned = WeightTiles(f"{second.name} backward", second.columns, second.inner)
        found = build.product(turned, tokens, upstream, gate)
        of_second = self.weight_gradient(second, [*inner, *upstream])
        # Attention's backward computes the scores anew, and four products in the place of two.
        found = self.inner(half, [*found, *inner], 2.5 if half % 2 == 0 else 2.0)
        sums = build.product(WeightTiles(f"{first.name} backward", first.columns, first.inner), tokens, found, gate)
        # The sums leave before the gradient of the weights, which hides them.
        stream = self.rows("reduce-scatter", sums)
        of_first = self.weight_gradient(first, [*found, *rows])
        self.gradients[half] = build.add(
            f"gradients {half}", "vector", [of_first, of_second], holds="hbm", holds_bytes=self.size(half)
        )
        return self.own_rows("residual", stream)

    def weight_gradient(self, weights: WeightTiles, needs: Sequence[int]) -> int:
        """The product of a matrix's inputs with the gradient of its results, and its way to device memory."""
        cycles = product_cycles(weights.inner, self.step.tokens, weights.columns)
        done = self.build.add(f"{weights.name} gradient", "tensor", needs, cycles=cycles)
        taken = self.build.elements(f"take {weights.name} gradient", weights.inner * weights.columns, [done])
        return self.build.move(f"store {weights.name} gradient", weights.bytes, [taken], 3)

    def head(self, stream: list[int]) -> list[int]:
        """Logits, loss and the gradient of both."""
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
        """The optimizer: the norm of all gradients, then each half's part."""
        self.build.layer = None
        norm = self.build.elements("gradient norm", 1, self.scattered)
        if self.machine.mesh.cores > 1:
            for axis, size in self.machine.mesh.axes:
                if size > 1:
                    norm = self.build.collect("sum norm", "all-reduce", 4 * size, [norm], axis=axis, purpose="norm")
        for half in range(self.halves + 1):
            own = self.size(half) / BF16 / self.machine.mesh.size("fsdp")
            moved = self.build.move("optimizer state", own * UPDATE_BYTES, [norm], 2)
            self.build.elements("update", 8 * own, [moved])


def training_program(config: Config, machine: Machine, step: TrainingStep) -> NeuronProgram:
    """A training step.

    Args:
        machine: whose mesh has axes `fsdp` and `tp`.

    Raises:
        ValueError: shifts that are longer than the model, or more tensor-parallel ranks than heads.
    """
    made = TrainingBuilder(config, machine, step)
    forward_pass(made, order := list(range(made.halves)))
    made.build.layer = None
    backward_pass(made, order[::-1])
    made.update()
    parameters = (made.layers * made.share.layer_bytes + made.share.table_bytes) / BF16
    saved = made.halves * BF16 * step.tokens * config.hidden_size / made.share.ranks
    resident = STATE_BYTES * parameters / machine.mesh.size("fsdp") + saved
    shifts = f"prefetch {step.prefetch_distance / 2:g}, delay {step.scatter_delay / 2:g}"
    kind = shifts if step.threaded else "left to the compiler"
    return made.build.program(f"training step, {kind}", resident, made.share.notes)


def forward_pass(made: TrainingBuilder, order: Sequence[int]) -> None:
    """From the embedding to the last half."""
    step = made.step
    last = made.halves
    stream = made.own_rows("embed", [])
    distance = step.prefetch_distance if step.threaded else last + 1
    for half in (*order, last)[: max(distance, 1) if step.threaded else None]:
        made.gather_weights(half, [])
    for half in order:
        made.build.layer = half // 2
        if step.threaded and distance == 0 and half not in made.gathered:
            made.gather_weights(half, stream)
        window = [half + distance] if step.threaded and distance and half + distance <= last else []
        stream = made.forward(half, stream, window)
    made.build.layer = None
    if last not in made.gathered:
        made.gather_weights(last, stream)
    made.stream = made.head(stream)


def backward_pass(made: TrainingBuilder, order: Sequence[int]) -> None:
    """From the last half to the first."""
    step = made.step
    stream = made.stream
    made.gathered = {}
    first = order[: max(step.prefetch_distance, 1)] if step.threaded else order
    for half in first:
        made.gather_weights(half, stream)
    waiting = [made.halves]
    for at, half in enumerate(order):
        made.build.layer = half // 2
        if step.threaded and half not in made.gathered:
            made.gather_weights(half, stream)
        ahead = at + step.prefetch_distance
        window = [order[ahead]] if step.threaded and step.prefetch_distance and ahead < len(order) else []
        full = step.threaded and len(waiting) > max(step.scatter_delay - 1, 0)
        behind = [waiting.pop(0)] if full and step.scatter_delay else []
        stream = made.backward(half, stream, window, behind)
        waiting.append(half)
        if step.threaded and step.scatter_delay == 0:
            while waiting:
                made.scatter_gradients(waiting.pop(0), [])
    made.build.layer = None
    for half in waiting:
        made.scatter_gradients(half, stream)
