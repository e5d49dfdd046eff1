"""The engine over several devices: the tokens of one, from pages whose heads are divided."""

from pathlib import Path

import numpy as np
import pytest

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
from runtime.dance import EOS, VOCAB, with_automaton
from runtime.support import check_empty, drive, expected
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(2,), capacities=(48,), chunks=(16,))
PAIR = random_pair(0, target_layers=1, drafter_layers=1, taps=[0], block_size=4)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    "schedule, devices, sampling",
    [
        ("sequence", 4, Sampling(8)),
        pytest.param("ring", 2, Sampling(8, temperature=1.0, seed=3), marks=pytest.mark.slow),
        pytest.param("sync", 2, Sampling(8, temperature=1.0, seed=3), marks=pytest.mark.slow),
    ],
)
def test_requests_get_what_one_device_gives_them(schedule: str, devices: int, sampling: Sampling, tmp_path: Path):
    """Three requests in two slots, with a drafter."""
    asks = [GenerateRequest(tokens, sampling) for tokens in prompts(0, [20, 5, 30])]
    wanted = expected(build(tmp_path, PAIR, table=TABLE), asks)
    lm = build(tmp_path, PAIR, table=TABLE, mesh=make_mesh({"tp": devices}), schedule=schedule)
    engine = lm.engine(EngineOptions(table=TABLE, page_size=16))
    engine.warm()
    engine.accept_requests()
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == wanted
    assert engine.runner.state is not None
    pool = engine.runner.state.target_cache[0].pool.k  # type: ignore[attr-defined]
    assert pool.addressable_shards[0].data.shape[1] == 1, "each device holds the keys of one head"
    check_empty(engine)
    engine.stop()


@pytest.mark.slow
def test_masks_of_the_device_are_those_of_one_device(tmp_path: Path):
    """Every device has the table of automata, and follows them by itself."""
    pair = random_pair(0, vocab_size=VOCAB, target_layers=1, drafter_layers=1, taps=[0], block_size=4, eos_token_id=EOS[0])
    asks = [GenerateRequest([3, n], Sampling(20, float(n), seed=3), constraint=with_automaton(10)) for n in range(2)]
    found = []
    for mesh in (None, make_mesh({"tp": 2})):
        lm = build(tmp_path / str(mesh is None), pair, table=TABLE, mesh=mesh)
        engine = lm.engine(EngineOptions(table=TABLE, page_size=16, constraints=True))
        engine.warm()
        engine.accept_requests()
        listeners, handles = drive(engine, asks, np.random.default_rng(0))
        assert [handle.masks for handle in handles] == [{"device"}] * 2
        found.append([each.tokens for each in listeners])
        check_empty(engine)
        engine.stop()
    assert found[0] == found[1]
