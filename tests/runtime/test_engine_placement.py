"""The engine over several devices: the tokens of one, from pages whose heads are divided."""

from pathlib import Path

import numpy as np
import pytest

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
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
    engine.open()
    heard, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in heard] == wanted
    assert engine.runner.state is not None
    pool = engine.runner.state.target_cache[0].pool.k  # type: ignore[attr-defined]
    assert pool.addressable_shards[0].data.shape[1] == 1, "each device holds the keys of one head"
    check_empty(engine)
    engine.stop()
