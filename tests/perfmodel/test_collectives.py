"""Collectives: their steps, and that the simulation takes for them what closed forms say."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.models import SMALL, inferentia
from tilewright.hardware.collectives import ring_chunks
from tilewright.hardware.links import Fabric, Torus
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.collectives import Mesh, algorithms, chosen_algorithm, steps_of
from tilewright.perfmodel.inference import SCHEDULES, Work, inference_program
from tilewright.perfmodel.machine import Machine, Settings, machine_of
from tilewright.perfmodel.program import ALGORITHMS, Collective, NeuronProgram, QueuedOp
from tilewright.perfmodel.simulate import simulate

MB = 1e6


def alone_s(machine: Machine, collective: Collective) -> float:
    """Without its start, as it waits for nothing, and the signal of its end."""
    program = NeuronProgram("one", (QueuedOp("collective", "cc", collective=collective),))
    return simulate(program, machine).total_s - 1e-6 * machine.settings.signal_us


@pytest.mark.parametrize("ranks", range(2, 33))
def test_a_ring_s_all_gather_takes_its_steps_of_latency_and_chunk(ranks: int):
    """(N - 1)(α + C / β), a core on each chip of a ring of N, β what a link carries in one direction."""
    instance = instance_of("inf2.48xlarge")
    chip = instance.chip
    ring = replace(instance, sizes=(ranks,), chip=replace(chip, cores=1, cc_cores=1, hbm_gb_per_s=1e4))
    machine = machine_of(ring, tp=ranks)
    alpha = 1e-6 * machine.settings.hop_us
    beta = 1e9 * chip.link_gb_per_s
    expected = (ranks - 1) * (alpha + MB / beta)
    assert alone_s(machine, Collective("all-gather", ranks * MB, algorithm="ring")) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize(
    ("instance", "axes", "axis"),
    [
        ("inf2.48xlarge", {"tp": 8}, "tp"),
        ("trn1.32xlarge", {"tp": 32}, "tp"),
        ("trn2.48xlarge", {"fsdp": 16, "tp": 4}, "tp"),
        ("trn2.48xlarge", {"fsdp": 8, "tp": 8}, "fsdp"),
        ("trn3-16", {"tp": 64}, "tp"),
    ],
)
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_every_algorithm_agrees_with_its_closed_form(instance, axes, axis, kind, algorithm, size):
    machine = machine_of(instance_of(instance), **axes)
    collective = Collective(kind, size, axis, algorithm=algorithm)
    if algorithm not in algorithms(machine.mesh, axis):
        with pytest.raises(ValueError, match=rf"expected one of ring, bidirectional.* found {algorithm}"):
            steps_of(machine.mesh, collective)
        return
    costs = machine.settings.costs
    assert alone_s(machine, collective) == pytest.approx(
        machine.collective_s(collective) - costs.begin_s - costs.end_s, rel=1e-6
    )


@pytest.mark.parametrize(
    ("algorithm", "count", "chunks", "fastest_link"),
    [
        ("bidirectional", 32, 63, 0),  # a chunk each way in each step
        ("ring", 63, 63, 1),  # to the next rank, 63 times; one rank of each chip sends over a link
        ("mesh", 2, 15 + 48, 0),  # its part of 15 chips' chunks; then what three others on the chip have of 16 chips
        ("rdh", 5, 1 + 2 + 4 + 8 + 48, 2),  # four distances, twice as much each time; a chip's four ranks over two axes
        ("kangaring", 32, 32, 2),  # every second rank, two chunks each
    ],
)
def test_steps_are_those_of_the_algorithm(algorithm: str, count: int, chunks: int, fastest_link: int):
    """Of an all-gather over 64 ranks, four on each of 16 chips of a torus, in chunks of a byte."""
    instance = instance_of("trn2.48xlarge")
    mesh = Mesh(instance, (("tp", 64),))
    steps = steps_of(mesh, Collective("all-gather", 64, algorithm=algorithm))  # type: ignore[arg-type]
    assert len(steps) == count
    assert sum(step.bytes for step in steps) == chunks
    assert len(steps_of(mesh, Collective("all-reduce", 64, algorithm=algorithm))) == 2 * count  # type: ignore[arg-type]
    if fastest_link:
        rate = 1e9 * instance.chip.link_gb_per_s
        assert steps[0].link_seconds(1) == pytest.approx(fastest_link / rate)


@pytest.mark.parametrize(("kind", "expected"), [("all-gather", 3 / 4), ("reduce-scatter", 4 / 6)])
def test_kangaring_touches_memory_less_often(kind: str, expected: float):
    mesh = Mesh(instance_of("trn2.48xlarge"), (("tp", 64),))

    def touched(algorithm: str) -> float:
        steps = steps_of(mesh, Collective(kind, 64 * MB, algorithm=algorithm))  # type: ignore[arg-type]
        return sum(step.bytes * step.hbm_touches for step in steps) / len(steps)

    # By step of as many ranks passed: a step of KangaRing passes two, so that its bytes count for two of the ring's.
    assert touched("kangaring") / (2 * touched("ring")) == pytest.approx(expected)


def test_two_streams_take_no_less_than_each_alone_and_no_more_than_one_after_another():
    machine = inferentia(24, streams=2)
    one = Collective("all-gather", 24 * MB)
    two = Collective("all-gather", 24 * MB, stream=1)
    program = NeuronProgram("two", (QueuedOp("a", "cc", collective=one), QueuedOp("b", "cc", collective=two)))
    both = simulate(program, machine).total_s
    alone = [alone_s(machine, each) for each in (one, two)]
    assert max(alone) < both < sum(alone)


def test_a_stream_has_what_collective_cores_are_left():
    assert [inferentia(2, streams=n).channels(0) for n in (1, 2, 3)] == [3, 2, 1]
    trainium = machine_of(instance_of("trn2.48xlarge"), Settings(streams=2), tp=4)
    assert (trainium.channels(0), trainium.channels(1)) == (3, 1)
    with pytest.raises(ValueError, match="expected at most 4 streams, one per collective core"):
        machine_of(instance_of("trn2.48xlarge"), Settings(streams=5), tp=4)


def test_sizes_choose_algorithms_as_the_runtime_s_page_says():
    mesh = Mesh(instance_of("trn2.48xlarge"), (("tp", 64),))
    found = [chosen_algorithm(mesh, Collective("all-gather", size)) for size in (1e5, 1e7, 1e8)]
    assert found == ["mesh", "rdh", "kangaring"]
    assert algorithms(mesh, "tp") == ALGORITHMS
    assert algorithms(inferentia(24).mesh, "tp") == ("ring", "bidirectional", "kangaring"), (
        "12 chips that are not all neighbours"
    )
    assert chosen_algorithm(inferentia(24).mesh, Collective("all-reduce", 1e5)) == "ring"


def test_a_mesh_that_the_instance_has_no_cores_for_is_refused():
    with pytest.raises(ValueError, match=r"at most the 24 cores of inf2\.48xlarge, found 25: tp=25"):
        machine_of(instance_of("inf2.48xlarge"), tp=25)
    with pytest.raises(ValueError, match="expected an axis of tp, found 'fsdp'"):
        steps_of(inferentia(4).mesh, Collective("all-gather", 1.0, "fsdp"))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["all-gather", "reduce-scatter", "all-reduce"]),
    directions=st.sampled_from([1, 2]),
    chips=st.integers(2, 16),
    size=st.floats(1e3, 1e9),
    latency=st.tuples(*[st.floats(0, 5)] * 4),
)
def test_tpus_and_neuron_chips_have_one_model(kind: str, directions: int, chips: int, size: float, latency: tuple[float, ...]):
    """A ring of chips takes the same time by the occupancy of TPU links and by the steps of Neuron collectives."""
    start_us, completion_us, hop_us, skew_us = latency
    spec = CHIPS["v5e"]
    places = tuple((at,) for at in range(chips))
    tpu = Fabric(spec, Torus((chips,), (True,)), places, hop_us, start_us, completion_us, skew_us)
    instance = instance_of("inf2.48xlarge")
    chip = replace(instance.chip, cores=1, cc_cores=directions, link_gb_per_s=spec.ici_gb_per_s, hbm_gb_per_s=spec.hbm_gb_per_s)
    machine = machine_of(replace(instance, sizes=(chips,), chip=chip), tp=chips)
    name = "ring" if directions == 1 else "bidirectional"
    steps = steps_of(machine.mesh, Collective(kind, size, algorithm=name))  # type: ignore[arg-type]
    expected = tpu.costs.seconds(steps, directions, hbm_bytes_per_s=1e9 * spec.hbm_gb_per_s)
    assert tpu.collective(kind, [range(chips)], size, directions).seconds == pytest.approx(expected)


RANKS = st.sampled_from([2, 4, 8, 16, 24])
SIZES = st.floats(1e2, 1e9)


@given(ranks=RANKS, size=SIZES, algorithm=st.sampled_from(ALGORITHMS), parts=st.integers(2, 8))
def test_a_collective_in_parts_is_never_cheaper(ranks: int, size: float, algorithm: str, parts: int):
    """Nor are a reduce-scatter and an all-gather in the place of an all-reduce, each with a start of its own."""
    machine = inferentia(ranks)
    if algorithm not in algorithms(machine.mesh, "tp"):
        return

    def seconds(kind: str, size: float) -> float:
        return machine.collective_s(Collective(kind, size, algorithm=algorithm))  # type: ignore[arg-type]

    whole = seconds("all-reduce", size)
    assert parts * seconds("all-reduce", size / parts) >= whole
    assert seconds("reduce-scatter", size) + seconds("all-gather", size) >= whole


@given(ranks=RANKS, size=SIZES, directions=st.sampled_from([1, 2]))
def test_hops_of_a_program_s_own_cost_what_the_runtime_s_do_and_their_starts(ranks: int, size: float, directions: int):
    machine = inferentia(ranks)
    chunks = ring_chunks(ranks, directions)
    for kind, reduces in (("reduce-scatter", True), ("all-gather", False)):
        whole = machine.collective_s(Collective(kind, size, algorithm="ring" if directions == 1 else "bidirectional"))  # type: ignore[arg-type]
        hops = sum(
            machine.collective_s(Collective("permute", count * size / ranks, directions=directions, reduces=reduces))
            for count in chunks
        )
        starts = machine.settings.costs.begin_s + machine.settings.costs.end_s
        assert hops >= whole + (len(chunks) - 1) * starts - 1e-12


def in_parts(program: NeuronProgram, parts: int) -> NeuronProgram:
    """The program with each collective cut into parts, one after another."""
    ops: list[QueuedOp] = []
    last: list[int] = []
    for op in program.ops:
        needs = tuple(last[need] for need in op.needs)
        count = 1 if op.collective is None else parts
        for _ in range(count):
            one = op.collective and replace(op.collective, bytes=op.collective.bytes / count)
            ops.append(replace(op, needs=needs, collective=one))
            needs = (len(ops) - 1,)
        last.append(len(ops) - 1)
    return NeuronProgram(program.name, tuple(ops), program.resident_bytes, program.notes)


WORK = st.builds(
    Work, phase=st.sampled_from(["prefill", "decode"]), rows=st.integers(2, 4), positions=st.sampled_from([16, 200])
)


@settings(max_examples=8)
@given(work=WORK, ranks=st.sampled_from([2, 4, 8]), schedule=st.sampled_from(["sync", "sequence"]), parts=st.integers(2, 4))
def test_a_program_whose_collectives_go_in_parts_is_never_faster(work: Work, ranks: int, schedule: str, parts: int):
    machine = inferentia(ranks)
    program = inference_program(SMALL, machine, work, schedule, 1)
    assert simulate(in_parts(program, parts), machine).total_s >= simulate(program, machine).total_s


@settings(max_examples=12)
@given(
    work=WORK,
    ranks=st.sampled_from([2, 4, 8]),
    schedule=st.sampled_from(SCHEDULES),
    cost=st.sampled_from(["signal_us", "hop_us", "pass_us", "skew_us"]),
    more=st.floats(0.1, 20),
)
def test_dearer_collectives_make_no_program_faster(work: Work, ranks: int, schedule: str, cost: str, more: float):
    """But for a trace: what meets differently in the queues of the DMA engines (docs/neuron.md)."""
    plain = Settings()
    dear = replace(plain, **{cost: getattr(plain, cost) + more})  # type: ignore[arg-type]
    took = []
    for chosen_settings in (plain, dear):
        machine = machine_of(instance_of("inf2.48xlarge"), chosen_settings, tp=ranks)
        took.append(simulate(inference_program(SMALL, machine, work, schedule, 1), machine).total_s)
    assert took[1] >= took[0] * (1 - 1e-3)
