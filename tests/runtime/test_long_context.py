"""Short requests in a long context cost what they are long, where XLA computes attention over pages."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
from runtime.support import check_empty, drive, expected
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(3,), capacities=(2048,), chunks=(64,))

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"target_layers": 2, "drafter_layers": 1, "taps": [0], "block_size": 4, "max_position_embeddings": 8192}
    pair = random_pair(0, vocab_size=24, **sizes)
    return build(tmp_path_factory.mktemp("pair"), pair, table=TABLE, kernels="xla")


def test_the_tokens_are_those_of_plain_decoding(lm: LanguageModel):
    """Prompts that end in the first block of pages, in the second and in the third, and one that grows into the next."""
    engine = lm.engine(EngineOptions(table=TABLE, guard="off", prefix_cache=False))
    asks = [
        GenerateRequest(tokens, Sampling(24, ignore_eos=True, temperature=n % 2, seed=n))
        for n, tokens in enumerate(prompts(0, [20, 700, 505, 1100], vocab=24))
    ]
    engine.runner.reset()
    engine.accept_requests()
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == expected(lm, asks)
    check_empty(engine)
    engine.stop()


@pytest.mark.parametrize("name", ["prefill", "rounds"])
def test_a_program_has_room_for_a_block_and_not_for_the_whole_context(lm: LanguageModel, name: Any):
    def temp_bytes(context: int) -> int:
        engine = lm.engine(EngineOptions(table=replace(TABLE, capacities=(context,)), pages=16))
        key = ProgramKey(name, 1, chunk=64) if name == "prefill" else ProgramKey(name, rows=3, positions=context)
        memory: Any = engine.decoding.programs.get(key).memory_analysis()
        return memory.temp_size_in_bytes

    assert temp_bytes(8192) < 1.5 * temp_bytes(1024)
