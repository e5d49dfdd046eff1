"""What the source documents state of schedules, shifts, streams and packets, where the model agrees; each with its margin.

Nothing in the model was tuned towards these. A statement that does not come out stands in the table of docs/neuron.md, and no
test holds the model to its failing. Figures are those of one more layer in the middle of the model, unless they are of a whole
step.
"""

from dataclasses import replace
from functools import cache

import pytest

from perfmodel.models import LLAMA_8B, LLAMA_70B, inferentia, trainium
from tilewright.perfmodel.builder import BF16
from tilewright.perfmodel.environment import recommended_packets
from tilewright.perfmodel.estimate import ProgramEstimate, estimate
from tilewright.perfmodel.inference import HOPS, Phase, Work, inference_program
from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.plan_inference import tried_algorithms
from tilewright.perfmodel.plan_training import FEW_LAYERS
from tilewright.perfmodel.program import Algorithm, NeuronProgram
from tilewright.perfmodel.results import SimulationResult
from tilewright.perfmodel.simulate import simulate
from tilewright.perfmodel.training import TrainingStep, training_program

WIDTHS = (2, 4, 8, 16, 24)


@cache
def inference(phase: Phase, schedule: str, cores: int, streams: int = 1, algorithm: Algorithm = "auto") -> ProgramEstimate:
    """Llama 3 8B, four rows of 1,024 tokens, 512 out."""
    machine = inferentia(cores, streams=streams)
    work = replace(WORK[phase], algorithm=algorithm)
    return estimate(32, (1, 2), lambda layers: inference_program(LLAMA_8B, machine, work, schedule, layers), machine)


WORK: dict[Phase, Work] = {"prefill": Work("prefill", 4, 1024), "decode": Work("decode", 4, 1280)}


def best_s(phase: Phase, schedule: str, cores: int) -> float:
    """With the algorithm that suits its collectives, and the streams."""
    machine = inferentia(cores)
    tried = tried_algorithms(machine, BF16 * WORK[phase].tokens * LLAMA_8B.hidden_size)
    names: list[Algorithm] = ["auto"] if schedule in HOPS else tried
    streams = (1, 2) if schedule == "domino" else (1,)
    return min(inference(phase, schedule, cores, count, name).total_s for count in streams for name in names)


def gain(phase: Phase, schedule: str, cores: int, over: str = "sync") -> float:
    """By which share a schedule is faster than another one, each at its best."""
    return 1 - best_s(phase, schedule, cores) / best_s(phase, over, cores)


@cache
def training(
    positions: int, streams: int, packets: str, threaded: bool, prefetch_distance: int, scatter_delay: int
) -> tuple[SimulationResult, SimulationResult]:
    """Steps of Llama 3 70B with two and with three layers, on 16 fully sharded by 4 tensor-parallel ranks of Trainium2."""
    machine = trained_on(streams, packets)
    step = TrainingStep(1, positions, threaded, prefetch_distance, scatter_delay)
    few = (training_program(LLAMA_70B, machine, TrainingStep(**{**vars(step), "layers": layers})) for layers in (2, 3))
    low, high = (simulate(program, machine) for program in few)
    return low, high


def trained_on(streams: int, packets: str) -> Machine:
    if packets == "default":
        return trainium(streams=streams)
    dma, cc = recommended_packets(streams)
    return trainium(streams=streams, dma_packet_bytes=dma, cc_packet_bytes=cc)


def layer_ms(*setting: object) -> float:
    low, high = training(*setting)  # type: ignore[arg-type]
    return 1e3 * (high.total_s - low.total_s)


def layer_delay_ms(*setting: object) -> float:
    """How long tensor-parallel collectives of a layer stand ready behind others."""
    low, high = training(*setting)  # type: ignore[arg-type]
    return 1e3 * (high.delay_s("tp") - low.delay_s("tp"))


def test_the_ring_gains_in_prefill_also_over_a_divided_stream():
    gains = [gain("prefill", "ring", cores, "sequence") for cores in (8, 24)]
    assert min(gains) > 0.15


def test_a_ring_s_gain_in_decoding_is_over_a_sum_that_goes_one_way():
    """Against the best algorithm there is for the sum, hardly any of it is left."""
    one_way = 1 - best_s("decode", "ring", 24) / inference("decode", "sync", 24, algorithm="ring").total_s
    assert one_way > 0.2
    assert gain("decode", "ring", 24) < 0.2 * one_way


def test_decode_gains_of_domino_grow_with_width():
    gains = [gain("decode", "domino", cores) for cores in WIDTHS]
    assert gains == sorted(gains)


def test_prefill_gains_of_domino_grow_with_width_as_long_as_rings_do_not_close():
    gains = dict(zip(WIDTHS, [gain("prefill", "domino", cores) for cores in WIDTHS], strict=True))
    assert gains[2] < gains[4] < gains[8] < gains[16]
    assert gains[16] > 0.3
    # All 24 cores are a ring of chips that closes, which makes the sums themselves faster: less is left to hide.
    assert 0.25 < gains[24] < gains[16]


def test_hoisting_all_weight_gathers_delays_tensor_parallel_sums_and_threading_repairs_it():
    compiler = (4096, 1, "default", False, 0, 0)
    threaded = (4096, 1, "default", True, 1, 1)
    assert layer_delay_ms(*compiler) > 5
    assert layer_delay_ms(*threaded) < 1
    assert layer_ms(*threaded) < 0.9 * layer_ms(*compiler)


def test_a_second_stream_removes_the_delay_behind_large_gathers():
    """Also where nothing else does: without a scatter delay."""
    one, two = ((2048, streams, "default", True, 1, 0) for streams in (1, 2))
    assert layer_delay_ms(*one) > 5
    assert layer_delay_ms(*two) < 0.1 * layer_delay_ms(*one)
    assert layer_ms(*two) < 0.97 * layer_ms(*one)


@pytest.mark.parametrize(("positions", "streams"), [(4096, 1), (2048, 2)])
def test_recommended_packets_let_compute_load_sooner(positions: int, streams: int):
    loads = [
        training(positions, streams, packets, True, 1, 1)[1].moments_s["loading"] for packets in ("default", "recommended")
    ]
    assert loads[1] < 0.95 * loads[0]


def test_recommended_packets_shorten_a_step_that_hides_its_communication():
    default, other = (layer_ms(4096, 1, packets, True, 1, 1) for packets in ("default", "recommended"))
    assert other < 0.998 * default


def test_attention_is_too_short_for_an_mlp_s_gather_and_scatter_and_a_shift_of_two_helps():
    """At 2,048 positions; an odd shift puts the large ones beside the short half again, and the step is as long as with one."""
    one, two, three = (layer_ms(2048, 1, "default", True, 1, scatter_delay) for scatter_delay in (1, 2, 3))
    assert two < 0.95 * one
    assert three == pytest.approx(one, rel=0.01)
    # At 4,096 the halves are twice as long and hide everything.
    assert layer_ms(4096, 1, "default", True, 1, 2) == pytest.approx(layer_ms(4096, 1, "default", True, 1, 1), rel=0.01)


def test_gathering_ahead_costs_memory():
    held = [training(2048, 1, "default", True, prefetch_distance, 1)[1].peak_bytes["hbm"] for prefetch_distance in (0, 1, 2)]
    assert held == sorted(held)
    assert held[0] < held[2] < training(2048, 1, "default", False, 0, 0)[1].peak_bytes["hbm"]


@pytest.mark.parametrize(("threaded", "prefetch_distance", "scatter_delay"), [(True, 1, 1), (True, 2, 3), (False, 0, 0)])
def test_few_layers_tell_what_all_of_a_training_step_takes(threaded: bool, prefetch_distance: int, scatter_delay: int):
    machine = trainium()
    model = replace(LLAMA_8B, num_layers=10)

    def build(layers: int) -> NeuronProgram:
        return training_program(model, machine, TrainingStep(1, 1024, threaded, prefetch_distance, scatter_delay, layers))

    whole = simulate(build(10), machine)
    few = estimate(10, FEW_LAYERS, build, machine)
    assert few.total_s == pytest.approx(whole.total_s, rel=0.01)
    assert few.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "phase"),
    [
        ("sync", "decode"),
        pytest.param("domino", "prefill", marks=pytest.mark.slow),
        pytest.param("ring", "decode", marks=pytest.mark.slow),
    ],
)
def test_few_layers_tell_what_all_of_them_take(schedule: str, phase: Phase):
    machine = inferentia(24)
    work = Work(phase, 4, 1024)
    whole = simulate(inference_program(LLAMA_8B, machine, work, schedule), machine)
    few = estimate(32, (1, 3), lambda layers: inference_program(LLAMA_8B, machine, work, schedule, layers), machine)
    assert few.total_s == pytest.approx(whole.total_s, rel=0.01)
    assert few.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.01)
