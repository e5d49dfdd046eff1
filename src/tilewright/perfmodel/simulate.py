"""Discrete-event simulation of a program on a Neuron machine.

All ranks of a mesh run the same program in step, so one simulated rank stands for all of them: its sends take as long as its
receives, over the busiest link of the communication pattern.
"""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from tilewright.hardware.collectives import CollectiveStep
from tilewright.perfmodel.collectives import steps_of
from tilewright.perfmodel.machine import CC_PACKET_BYTES, DESCRIPTOR_NS, Limits, Machine
from tilewright.perfmodel.memory import OnChipMemory
from tilewright.perfmodel.program import CC, DMA, HBM, PSUM, SBUF, Collective, NeuronProgram, QueuedOp
from tilewright.perfmodel.results import OpSpan, SimulationResult
from tilewright.perfmodel.sharing import DmaTransfer, Flows

Process = Generator[simpy.Event, Any, None]
CC_RINGS = 8
"""First ring of an engine that belongs to a collective stream; the rings below belong to compute."""


def simulate(
    program: NeuronProgram,
    machine: Machine,
    progress: Callable[[int], None] = lambda _: None,
    network: Callable[[simpy.Environment, Limits], Any] = Flows,
) -> SimulationResult:
    """Simulates a program to its end.

    Args:
        progress: called from time to time with the number of operations that have ended.
        network: model of the transfers, see `sharing.py`.

    Raises:
        ValueError: the program cannot run, or needs more on-chip memory than the machine has.
    """
    program.check()
    run = Simulation(program, machine, progress, network)
    run.env.run()
    run.check_done()
    return run.result()


class Simulation:
    """A simulation in progress."""

    def __init__(
        self,
        program: NeuronProgram,
        machine: Machine,
        progress: Callable[[int], None],
        network: Callable[[simpy.Environment, Limits], Any],
    ):
        self.env = simpy.Environment()
        self.program = program
        self.machine = machine
        self.progress = progress
        self.network = network(self.env, machine.limits)
        self.memory = {
            SBUF: OnChipMemory(self.env, machine.sbuf_bytes),
            PSUM: OnChipMemory(self.env, machine.psum_bytes),
            HBM: OnChipMemory(self.env, float("inf")),
        }
        self.done: list[simpy.Event] = [self.env.event() for _ in program.ops]
        self.done_at = [0.0] * len(program.ops)
        self.tensor_busy: list[tuple[float, float]] = []
        self.cold_s = 0.0
        self.spans: list[OpSpan] = []
        self.users = [0] * len(program.ops)
        for op in program.ops:
            for need in set(op.needs):
                self.users[need] += 1
        self.pending_users = list(self.users)
        self.steps: dict[Collective, list[CollectiveStep]] = {}
        self.tensor_window = 1e-6 * machine.instance.chip.core.warm_up_us
        queues: dict[tuple[str, int], list[int]] = {}
        for number, op in enumerate(program.ops):
            queues.setdefault(op.line, []).append(number)
        for numbers in queues.values():
            self.env.process(self.run_queue(numbers))

    def run_queue(self, numbers: list[int]) -> Process:
        """Runs the operations of a queue one after another."""
        for number in numbers:
            op = self.program.ops[number]
            ready = 0.0
            for need in op.needs:
                if not self.done[need].processed:
                    yield self.done[need]
                ready = max(ready, self.done_at[need])
            if op.holds:
                granted = self.memory[op.holds].request(op.holds_bytes)
                if granted is not None:
                    yield granted
            begin = self.env.now
            if op.engine == DMA:
                yield from self.wait_until(ready + self.signal_s(op))
                begin = self.env.now
                yield self.network.start(self.dma(op))
            elif op.collective is not None:
                yield from self.wait_until(ready + self.signal_s(op))
                begin = self.env.now
                yield from self.run_collective(op.collective)
            else:
                yield self.env.timeout(self.seconds(op))
            self.end(number, begin, ready)

    def wait_until(self, at: float) -> Process:
        if at > self.env.now:
            yield self.env.timeout(at - self.env.now)

    def signal_s(self, op: QueuedOp) -> float:
        """Seconds from the end of an operation's last need to its start; 0 for an operation without needs."""
        settings = self.machine.settings
        if not op.needs:
            return 0.0
        return 1e-6 * settings.signal_us if op.collective is None else settings.costs.begin_s

    def end(self, number: int, begin: float, ready: float) -> None:
        """Signals the end of an operation, releases memory and records the span."""
        op = self.program.ops[number]
        now = self.env.now
        self.done_at[number] = now
        signal_s = self.machine.settings.costs.end_s if op.collective is not None else 0.0
        if signal_s > 0:
            self.done_at[number] += signal_s
            later = self.env.timeout(self.done_at[number] - now)
            later.callbacks.append(lambda _: self.done[number].succeed())  # type: ignore[union-attr]
        else:
            self.done[number].succeed()
        for used in (*set(op.needs), *(() if self.users[number] else (number,))):
            if used != number:
                self.pending_users[used] -= 1
            result = self.program.ops[used]
            if self.pending_users[used] == 0 and result.holds:
                self.memory[result.holds].release(result.holds_bytes)
        self.spans.append(OpSpan(number, op.line[0] if op.engine != CC else f"cc{op.line[1]}", ready, begin, now))
        if len(self.spans) % 256 == 0:
            self.progress(len(self.spans))

    def seconds(self, op: QueuedOp) -> float:
        """Seconds of a compute operation; a cold tensor engine runs at a reduced clock."""
        full = op.cycles / self.machine.engine_hz(op.engine)
        if op.engine != "tensor" or self.tensor_window == 0:
            return full
        now = self.env.now
        share = self.machine.instance.chip.core.cold_share
        self.tensor_busy = [(begin, end) for begin, end in self.tensor_busy if end > now - self.tensor_window]
        busy_s = sum(end - max(begin, now - self.tensor_window) for begin, end in self.tensor_busy)
        if busy_s < self.tensor_window / 2 and self.cold_s <= 0:
            self.cold_s = self.tensor_window
        seconds = full
        if self.cold_s > 0:
            slow = min(full / share, self.cold_s)
            seconds = slow + full - slow * share
            self.cold_s -= slow
        self.tensor_busy.append((now, now + seconds))
        return seconds

    def dma(self, op: QueuedOp) -> DmaTransfer:
        """Returns the transfer of a DMA operation, which reads or writes device memory once."""
        spec = self.machine.instance.chip.core
        factor = 1.0
        if op.descriptor_bytes:
            factor += DESCRIPTOR_NS * spec.dma_gb_per_s / op.descriptor_bytes
        packet = self.machine.settings.dma_packet_bytes
        return DmaTransfer(op.bytes, op.queue % CC_RINGS, packet, dma_factor=factor, uses=(("hbm", 1.0),))

    def run_collective(self, collective: Collective) -> Process:
        """Runs a collective step by step: in each step the latency of the hops, then the transfer."""
        if collective not in self.steps:
            self.steps[collective] = steps_of(self.machine.mesh, collective)
        settings = self.machine.settings
        stream = collective.stream
        channels = self.machine.channels(stream)
        # Under strict priorities, tensor-parallel collectives (stream 0) share the class of compute.
        priority = 0 if stream == 0 else 1
        for step in self.steps[collective]:
            yield self.env.timeout(settings.costs.latency_s(step.hops))
            # Only packets of copies can be made smaller.
            packet = CC_PACKET_BYTES if step.reduces else settings.cc_packet(stream)
            uses = (
                ("hbm", step.hbm_touches),
                ("link", step.link_s_per_byte[-1]),
                (("channel", stream), step.link_seconds(channels)),
            )
            yield self.network.start(DmaTransfer(step.bytes, CC_RINGS + stream, packet, priority, uses=uses))

    def check_done(self) -> None:
        """Raises ValueError where operations wait for on-chip memory forever."""
        left = [op for op, done in zip(self.program.ops, self.done, strict=True) if not done.triggered]
        if left:
            held = ", ".join(f"{memory.held / 2**20:.1f} MiB of {name}" for name, memory in self.memory.items())
            raise ValueError(
                f"expected operations that fit into on-chip memory, found a deadlock: {len(left)} operations wait forever, "
                f"{left[0].name} first, with {held} in use"
            )

    def result(self) -> SimulationResult:
        peaks = {name: self.memory[name].peak for name in (SBUF, PSUM, HBM)}
        return SimulationResult(self.program, self.machine, tuple(self.spans), self.env.now, peaks)
