"""How long simulations take here, in seconds of this process: others on the machine do not count."""

import time

import pytest

from perfmodel.models import LLAMA_8B, inferentia, trainium
from tilewright.perfmodel.inference import Work, inference_program
from tilewright.perfmodel.simulate import simulate
from tilewright.perfmodel.training import TrainingStep, training_program


def process_s(run) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def test_a_decode_step_over_24_cores_takes_less_than_five_seconds():
    machine = inferentia(24)
    program = inference_program(LLAMA_8B, machine, Work("decode", 4, 1280), "sync")
    assert process_s(lambda: simulate(program, machine)) < 5


@pytest.mark.parametrize("layers", [2, pytest.param(32, marks=pytest.mark.slow)])
def test_a_training_step_of_32_layers_takes_less_than_a_minute(layers: int):
    machine = trainium(streams=2)
    program = training_program(LLAMA_8B, machine, TrainingStep(layers=layers))
    assert process_s(lambda: simulate(program, machine)) < 60 * layers / 32
