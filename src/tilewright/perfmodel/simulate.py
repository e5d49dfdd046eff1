"""Runs a program on a machine, event by event.

All ranks of a mesh run the same program in step, so that one of them stands for all: what it sends to the next one takes as
long as what it gets from the one before, over the busiest link of the pattern. `ranks` simulates as many as are asked for,
each with its own engines and with semaphores between neighbours; a test holds both to the same times.
"""

from collections.abc import Callable, Generator
from typing import Any, Literal

import simpy

from tilewright.hardware.collectives import CollectiveStep
from tilewright.perfmodel.collectives import steps_of
from tilewright.perfmodel.machine import CC_PACKET_BYTES, DESCRIPTOR_NS, Machine
from tilewright.perfmodel.memory import OnChipMemory
from tilewright.perfmodel.program import CC, DMA, HBM, PSUM, SBUF, Collective, NeuronProgram, QueuedOp
from tilewright.perfmodel.results import OpSpan, SimulationResult
from tilewright.perfmodel.sharing import DmaTransfer, Flows, Packets

Process = Generator[simpy.Event, Any, None]
CC_RINGS = 8
"""Rings of an engine below this number are compute's, the others belong to streams of collectives."""


def simulate(
    program: NeuronProgram,
    machine: Machine,
    ranks: int = 1,
    sharing: Literal["flows", "packets"] = "flows",
    progress: Callable[[int], None] = lambda _: None,
) -> SimulationResult:
    """Runs a program to its end.

    Args:
        ranks: how many are simulated: 1, or all of the mesh.
        sharing: how transfers share the DMA engines; see `sharing.py`.
        progress: is told how many operations are done, now and then.

    Raises:
        ValueError: the program cannot run, or needs more on-chip memory than there is; or `ranks` is neither.
    """
    program.check()
    if ranks not in (1, machine.mesh.cores):
        raise ValueError(f"expected 1 rank to be simulated, or all {machine.mesh.cores}, found {ranks}")
    run = Simulation(program, machine, ranks, sharing, progress)
    run.env.run()
    run.check_done()
    return run.result()


class Core:
    """One simulated core: its memories, and how warm its tensor engine is."""

    def __init__(self, env: simpy.Environment, machine: Machine, rank: int, operations: int):
        self.rank = rank
        self.memory = {
            SBUF: OnChipMemory(env, machine.sbuf_bytes),
            PSUM: OnChipMemory(env, machine.psum_bytes),
            HBM: OnChipMemory(env, float("inf")),
        }
        self.done: list[simpy.Event] = [env.event() for _ in range(operations)]
        self.done_at = [0.0] * operations
        self.busy: list[tuple[float, float]] = []
        self.cold_s = 0.0


class Simulation:
    """A simulation under way."""

    def __init__(self, program: NeuronProgram, machine: Machine, ranks: int, sharing: str, progress: Callable[[int], None]):
        self.env = simpy.Environment()
        self.program = program
        self.machine = machine
        self.progress = progress
        self.network = (Flows if sharing == "flows" else Packets)(self.env, machine.limits(ranks))
        self.cores = [Core(self.env, machine, rank, len(program.ops)) for rank in range(ranks)]
        self.spans: list[OpSpan] = []
        self.finished = 0
        self.users = [0] * len(program.ops)
        for op in program.ops:
            for need in set(op.needs):
                self.users[need] += 1
        self.steps: dict[Collective, list[CollectiveStep]] = {}
        self.messages: dict[tuple[int, int, int], simpy.Event] = {}
        self.members = {axis: machine.mesh.groups(axis) for axis, _ in machine.mesh.axes}
        self.holders = {rank: list(self.users) for rank in range(ranks)}
        self.tensor_window = 1e-6 * machine.instance.chip.core.warm_up_us
        lines: dict[tuple[str, int], list[int]] = {}
        for number, op in enumerate(program.ops):
            lines.setdefault(op.line, []).append(number)
        for core in self.cores:
            for numbers in lines.values():
                self.env.process(self.line(core, numbers))

    def line(self, core: Core, numbers: list[int]) -> Process:
        """A queue: its operations one after another."""
        for number in numbers:
            op = self.program.ops[number]
            ready = 0.0
            for need in op.needs:
                if not core.done[need].processed:
                    yield core.done[need]
                ready = max(ready, core.done_at[need])
            if op.holds:
                granted = core.memory[op.holds].request(op.holds_bytes)
                if granted is not None:
                    yield granted
            begin = self.env.now
            if op.engine == DMA:
                yield from self.wait_until(ready + self.signal_s(op))
                begin = self.env.now
                yield self.network.start(self.dma(core, op))
            elif op.collective is not None:
                yield from self.wait_until(ready + self.signal_s(op))
                begin = self.env.now
                yield from self.exchange(core, number, op.collective)
            else:
                yield self.env.timeout(self.seconds(core, op))
            self.end(core, number, begin, ready)

    def wait_until(self, at: float) -> Process:
        if at > self.env.now:
            yield self.env.timeout(at - self.env.now)

    def signal_s(self, op: QueuedOp) -> float:
        """From what an operation waits for to its start: nothing where it goes on by itself."""
        settings = self.machine.settings
        if not op.needs:
            return 0.0
        return 1e-6 * settings.signal_us if op.collective is None else settings.costs.begin_s

    def end(self, core: Core, number: int, begin: float, ready: float) -> None:
        """Tells who waits, gives memory back, and takes the span down."""
        op = self.program.ops[number]
        now = self.env.now
        core.done_at[number] = now
        signal_s = self.machine.settings.costs.end_s if op.collective is not None else 0.0
        if signal_s > 0:
            core.done_at[number] += signal_s
            later = self.env.timeout(core.done_at[number] - now)
            later.callbacks.append(lambda _: core.done[number].succeed())  # type: ignore[union-attr]
        else:
            core.done[number].succeed()
        for held in (*set(op.needs), *(() if self.users[number] else (number,))):
            if held != number:
                self.holders[core.rank][held] -= 1
            result = self.program.ops[held]
            if self.holders[core.rank][held] == 0 and result.holds:
                core.memory[result.holds].release(result.holds_bytes)
        if core.rank == 0:
            self.spans.append(OpSpan(number, op.line[0] if op.engine != CC else f"cc{op.line[1]}", ready, begin, now))
        self.finished += 1
        if self.finished % 256 == 0:
            self.progress(self.finished // len(self.cores))

    def seconds(self, core: Core, op: QueuedOp) -> float:
        """Seconds that an engine computes an operation; a cold tensor engine has a share of its clock."""
        full = op.cycles / self.machine.engine_hz(op.engine)
        if op.engine != "tensor" or not self.machine.settings.throttle or self.tensor_window == 0:
            return full
        now = self.env.now
        share = self.machine.instance.chip.core.cold_share
        core.busy = [(begin, end) for begin, end in core.busy if end > now - self.tensor_window]
        worked = sum(end - max(begin, now - self.tensor_window) for begin, end in core.busy)
        if worked < self.tensor_window / 2 and core.cold_s <= 0:
            core.cold_s = self.tensor_window
        taken = full
        if core.cold_s > 0:
            slow = min(full / share, core.cold_s)
            taken = slow + full - slow * share
            core.cold_s -= slow
        core.busy.append((now, now + taken))
        return taken

    def dma(self, core: Core, op: QueuedOp) -> DmaTransfer:
        """A transfer of compute's: to or from device memory, which it touches once."""
        spec = self.machine.instance.chip.core
        factor = 1.0
        if op.descriptor_bytes:
            factor += DESCRIPTOR_NS * spec.dma_gb_per_s / op.descriptor_bytes
        packet = op.packet_bytes or self.machine.settings.dma_packet_bytes
        engines = op.engines * self.machine.width
        uses = ((("hbm", core.rank), 1.0),)
        return DmaTransfer(op.bytes, core.rank, op.queue % CC_RINGS, packet, engines, op.priority, factor, uses)

    def exchange(self, core: Core, number: int, collective: Collective) -> Process:
        """A collective: step by step, and in each the hop's latency before its bytes."""
        if collective not in self.steps:
            self.steps[collective] = steps_of(self.machine.mesh, collective)
        settings = self.machine.settings
        channels = self.machine.channels(collective.stream)
        stream = collective.stream
        for at, step in enumerate(self.steps[collective]):
            yield self.env.timeout(settings.costs.latency_s(step.hops))
            # Only copies' packets can be made smaller.
            packet = CC_PACKET_BYTES if step.reduces else settings.cc_packet(stream)
            uses = (
                (("hbm", core.rank), step.hbm_touches),
                (("link", core.rank), step.link_s_per_byte[-1]),
                (("channel", core.rank, stream), step.link_seconds(channels)),
            )
            engines = self.network.limits.engines
            yield self.network.start(
                DmaTransfer(step.bytes, core.rank, CC_RINGS + stream, packet, engines, self.priority(stream), 1.0, uses)
            )
            if len(self.cores) > 1:
                yield from self.meet(core, number, at, collective.axis)

    def priority(self, stream: int) -> int:
        """With strict priorities: tensor-parallel collectives as compute, further streams behind it."""
        return 0 if stream == 0 else 1

    def meet(self, core: Core, number: int, step: int, axis: str) -> Process:
        """Tells the ranks of a group that this one's part has arrived, and waits for theirs."""
        group = next(each for each in self.members[axis] if core.rank in each)
        self.message(core.rank, number, step).succeed()
        for rank in group:
            arrived = self.message(rank, number, step)
            if not arrived.processed:
                yield arrived

    def message(self, rank: int, number: int, step: int) -> simpy.Event:
        key = (rank, number, step)
        if key not in self.messages:
            self.messages[key] = self.env.event()
        return self.messages[key]

    def check_done(self) -> None:
        """Raises ValueError where operations are left that wait for on-chip memory for ever."""
        core = self.cores[0]
        left = [op for op, done in zip(self.program.ops, core.done, strict=True) if not done.triggered]
        if left:
            held = ", ".join(f"{memory.held / 2**20:.1f} MiB of {name}" for name, memory in core.memory.items())
            raise ValueError(f"{len(left)} operations wait for ever, {left[0].name} first, with {held} held")

    def result(self) -> SimulationResult:
        memory = self.cores[0].memory
        peaks = {name: memory[name].peak for name in (SBUF, PSUM, HBM)}
        return SimulationResult(self.program, self.machine, tuple(self.spans), self.env.now, peaks)
