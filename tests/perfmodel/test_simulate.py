"""The simulator: order, bounds, what it conserves, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models import SMALL, inferentia, trainium, without_limits
from perfmodel.packets import Packets
from tilewright.perfmodel.inference import Work, inference_program
from tilewright.perfmodel.machine import Settings, machine_of
from tilewright.perfmodel.program import Collective, NeuronProgram, QueuedOp
from tilewright.perfmodel.results import trace
from tilewright.perfmodel.sharing import Flows
from tilewright.perfmodel.simulate import simulate

MACHINE = inferentia(8, streams=2)


DRAWN = st.lists(
    st.tuples(
        st.sampled_from(["tensor", "vector", "scalar", "gpsimd", "dma", "cc"]),
        st.integers(0, 10**7),
        st.sets(st.integers(1, 6), max_size=3),
        st.sampled_from(["all-gather", "reduce-scatter", "all-reduce", "permute"]),
        st.integers(0, 3),
        st.sampled_from([None, 0, 1]),
    ),
    min_size=1,
    max_size=12,
)
"""Engines, sizes, how far back what is needed stands, kinds of collectives, queues, layers."""


def made(drawn: list) -> NeuronProgram:
    ops: list[QueuedOp] = []
    for number, (engine, size, back, kind, queue, layer) in enumerate(drawn):
        needs = tuple(sorted(number - each for each in back if each <= number))
        if engine == "cc":
            collective = Collective(kind, float(size), stream=queue % 2)
            ops.append(QueuedOp(f"op{number}", engine, needs, collective=collective, layer=layer))
        elif engine == "dma":
            held = "hbm" if queue % 2 else ""
            ops.append(
                QueuedOp(
                    f"op{number}", engine, needs, bytes=float(size), queue=queue, holds=held, holds_bytes=size, layer=layer
                )
            )
        else:
            ops.append(QueuedOp(f"op{number}", engine, needs, cycles=size / 10, layer=layer))
    return NeuronProgram("drawn", tuple(ops))


def communication_alone_s(program: NeuronProgram) -> float:
    """The longest way through a program's needs and queues, without compute and with every transfer by itself.

    Simulating the program without compute is no bound: transfers then meet others than they did, and may end a little later.
    """
    ends: list[float] = []
    last: dict[tuple[str, int], float] = {}
    for op in program.ops:
        alone = 0.0
        if op.engine in ("dma", "cc"):
            alone = simulate(NeuronProgram("one", (QueuedOp(**{**vars(op), "needs": ()}),)), MACHINE).total_s
            alone -= 1e-6 * MACHINE.settings.signal_us if op.engine == "cc" else 0.0
        ends.append(max([last.get(op.line, 0.0), *(ends[need] for need in op.needs)]) + alone)
        last[op.line] = ends[-1]
    return max(ends)


@given(DRAWN)
def test_a_program_ends_no_sooner_than_its_bounds_and_as_one_without_the_other(drawn: list):
    program = made(drawn)
    result = simulate(program, MACHINE)
    assert len(result.spans) == len(program.ops), "all have run"
    assert result.spans == simulate(program, MACHINE).spans, "the same again"
    free = simulate(program, without_limits(MACHINE))
    slack = 1 - 1e-9
    assert result.total_s >= max(free.total_s, communication_alone_s(program)) * slack - 1e-12
    compute = [op for op in program.ops if op.engine not in ("dma", "cc")]
    clocks = {op.engine: MACHINE.engine_hz(op.engine) for op in compute}
    alone = {engine: sum(op.cycles for op in compute if op.engine == engine) / hz for engine, hz in clocks.items()}
    assert free.total_s >= max(alone.values(), default=0.0) * slack
    for engine, seconds in alone.items():
        assert result.busy_s[engine] == pytest.approx(seconds)
    assert sum(result.moments_s.values()) == pytest.approx(result.total_s)
    assert sum(result.exposed_s.values()) == pytest.approx(result.moments_s["exposed"])
    # What passed the DMA engines took them at least as long as their rate allows.
    assert result.total_s >= sum(result.dma_bytes.values()) / MACHINE.dma_bytes_per_s * slack


def test_infinite_bandwidth_leaves_compute_and_no_compute_leaves_communication():
    work = QueuedOp("work", "tensor", cycles=2.8e6), QueuedOp("more", "tensor", (0, 2), cycles=2.8e6)
    sent = QueuedOp("sent", "cc", (0,), collective=Collective("all-gather", 8e6))
    program = NeuronProgram("chain", (work[0], work[1], sent))
    free = simulate(
        NeuronProgram(
            "chain",
            (work[0], QueuedOp("sent", "cc", (0,), collective=sent.collective), QueuedOp("more", "tensor", (1,), cycles=2.8e6)),
        ),
        without_limits(MACHINE),
    )
    assert free.total_s == pytest.approx(2e-3)
    assert simulate(program, without_limits(MACHINE)).total_s == pytest.approx(2e-3)
    only = simulate(NeuronProgram("sent", (QueuedOp("sent", "cc", collective=sent.collective),)), MACHINE)
    idle = simulate(
        NeuronProgram("chain", (QueuedOp("a", "tensor"), QueuedOp("sent", "cc", (0,), collective=sent.collective))), MACHINE
    )
    assert idle.total_s == pytest.approx(only.total_s + 1e-6 * MACHINE.settings.signal_us)


def test_packets_and_flows_give_a_small_layer_the_same_time():
    program = inference_program(SMALL, inferentia(4), Work("decode", 4, 256), "sync", layers=1)
    flows, packets = (simulate(program, inferentia(4), network=network) for network in (Flows, Packets))
    assert flows.total_s == pytest.approx(packets.total_s, rel=0.03)


def test_a_cold_tensor_engine_is_slow_for_its_first_microseconds():
    machine = trainium()
    hz = trainium().engine_hz("tensor")
    once = NeuronProgram("once", (QueuedOp("a", "tensor", cycles=10e-6 * hz),))
    assert simulate(once, machine).total_s == pytest.approx(11.5e-6)  # 3 us at half the clock do 1.5 us of it
    # It stays warm over a short gap, and is cold again after a long one.
    for gap, extra in ((1e-6, 0.0), (5e-6, 1.5e-6)):
        wait = QueuedOp("gap", "vector", (0,), cycles=gap * machine.engine_hz("vector"))
        again = NeuronProgram("again", (*once.ops, wait, QueuedOp("b", "tensor", (1,), cycles=10e-6 * hz)))
        assert simulate(again, machine).total_s == pytest.approx(21.5e-6 + gap + extra)
    assert simulate(once, inferentia(2)).total_s == pytest.approx(10e-6 * hz / inferentia(2).engine_hz("tensor"))


def test_what_does_not_fit_into_sbuf_waits_for_room():
    size = 0.6 * MACHINE.sbuf_bytes
    loads = [QueuedOp(f"load{n}", "dma", bytes=size, holds="sbuf", holds_bytes=size) for n in range(2)]
    uses = [QueuedOp(f"use{n}", "tensor", (n,), cycles=2.8e6) for n in range(2)]
    result = simulate(NeuronProgram("two", (*loads, *uses)), MACHINE)
    spans = {result.program.ops[span.op].name: span for span in result.spans}
    assert spans["load1"].begin_s >= spans["use0"].end_s
    assert result.peak_bytes["sbuf"] == size
    with pytest.raises(ValueError, match="bytes of on-chip memory for a tile"):
        simulate(NeuronProgram("one", (QueuedOp("load", "dma", bytes=1, holds="sbuf", holds_bytes=1e9),)), MACHINE)
    stuck = QueuedOp("use", "tensor", (0, 1), cycles=1.0)
    with pytest.raises(ValueError, match=r"2 operations wait forever, load1 first, with 14\.4 MiB of sbuf"):
        simulate(NeuronProgram("both", (*loads, stuck)), MACHINE)


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ([QueuedOp("a", "tensor", (1,)), QueuedOp("b", "vector", (0,))], "found a cycle: a -> b -> a"),
        ([QueuedOp("a", "tensor", (1,)), QueuedOp("b", "tensor")], "found a cycle: a -> b -> a"),
        ([QueuedOp("a", "tensr")], r"for operation 0 \(a\) of tensor.*found 'tensr' \(did you mean tensor\?\)"),
        ([QueuedOp("a", "tensor", (3,))], r"expected operation 0 \(a\) to need operations below 1, found 3"),
        ([QueuedOp("a", "tensor", cycles=-1)], "cycles and bytes of 0 or more"),
        ([QueuedOp("a", "cc")], "expected a collective on the engine cc and nowhere else"),
    ],
)
def test_programs_that_cannot_run_are_refused(ops: list[QueuedOp], problem: str):
    with pytest.raises(ValueError, match=problem):
        simulate(NeuronProgram("wrong", tuple(ops)), MACHINE)


def test_the_trace_has_every_span_on_a_track_of_its_queue():
    program = inference_program(SMALL, inferentia(4), Work("decode", 4, 256), "ring", layers=1)
    result = simulate(program, inferentia(4))
    events = trace([("ring", result)])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(program.ops)
    assert {"tensor", "vector", "scalar", "dma0", "cc0"} <= set(names.values())
    # The signal of the last one's end is no span.
    end = max(event["ts"] + event["dur"] for event in spans)
    assert 1e6 * result.total_s - inferentia(4).settings.signal_us <= end + 1e-6 <= 1e6 * result.total_s + 1e-5
    assert {event["args"]["kind"] for event in spans if names[event["tid"]] == "cc0"} == {"permute", "all-gather"}


def test_settings_that_the_runtime_does_not_take_are_refused():
    with pytest.raises(ValueError, match="at least 4096 bytes for DMA, found 2048"):
        Settings(dma_packet_bytes=2048)
    with pytest.raises(ValueError, match="of 1 to 65536 bytes for collectives, found 131072"):
        Settings(cc_packet_bytes=(131072,))
    assert machine_of(MACHINE.instance, Settings(cc_packet_bytes=(65536, 4096)), tp=2).settings.cc_packet(5) == 4096
