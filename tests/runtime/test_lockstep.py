"""An engine whose device does what another one's does: by messages alone, to the last bit."""

from collections import deque
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
from runtime.support import drive
from tilewright.parallel import mesh
from tilewright.parallel.host_broadcast import HostBroadcast, ProcessLost
from tilewright.runtime.engine import Engine
from tilewright.runtime.lockstep import Lockstep
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 2), capacities=(48,), chunks=(16,))
PAIR = random_pair(0, target_layers=1, drafter_layers=1, taps=[0], block_size=4)

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Messages(HostBroadcast):
    """The way to other processes, which all are here."""

    def __init__(self) -> None:
        self.kept = deque[bytes]()

    def send(self, message: bytes) -> None:
        self.kept.append(message)

    def receive(self) -> bytes:
        return self.kept.popleft()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = EngineOptions(table=TABLE, page_size=16, guard="off")
    made = build(tmp_path_factory.mktemp("pair"), PAIR, table=TABLE).engine(options)
    made.warm()
    made.accept_requests()
    yield made
    made.stop()


def lockstep(engine: Engine, messages: Messages) -> Lockstep:
    return Lockstep(engine.decoding.programs, engine.decoding.programs.declared(engine.runner.sampling), messages)


def test_a_runner_that_is_told_all_has_the_state_of_the_one_that_tells(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Requests of several kinds, more than there are slots, and a state that is made anew."""
    messages = Messages()
    lockstep_runner = lockstep(engine, messages)
    monkeypatch.setattr(engine.runner, "lockstep", lockstep_runner)
    engine.runner.reset()
    kinds = [Sampling(9), Sampling(7, temperature=1.0, seed=3), Sampling(20, temperature=0.7, seed=1, repetition_penalty=1.2)]
    asks = [GenerateRequest(tokens, kind, logprobs=2) for tokens, kind in zip(prompts(0, [20, 5, 13]), kinds, strict=True)]
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert sum(len(each.tokens) for each in listeners) > 6
    follower = ModelRunner(engine.decoding.programs, engine.runner.sampling)
    lockstep_runner.end()
    ran: list[str] = []
    for key, inputs in lockstep(engine, messages).received():
        ran.append(key.name)
        follower.reset() if key.name == "allocate" else follower.run(key, *inputs)
    assert (ran[0], {*ran}, len(messages.kept)) == ("allocate", {"allocate", "prefill", "rounds"}, 0)
    for found, wanted in zip(jax.tree.leaves(follower.state), jax.tree.leaves(engine.runner.state), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_failure_that_may_not_be_everybodys_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.runner, "lockstep", lockstep(engine, Messages()))
    with pytest.raises(ProcessLost, match="in one of several processes"):
        engine.recover(OSError("connection reset"))


def test_what_is_free_is_the_least_of_all_processes(monkeypatch: pytest.MonkeyPatch):
    here = mesh.make_mesh({"here": 2})
    assert (mesh.min_over_processes(None, 12345), mesh.min_over_processes(here, 12345)) == (12345, 12345)
    monkeypatch.setattr(Mesh, "is_multi_process", True)
    both = mesh.make_mesh({"both": 2})  # a mesh remembers what it was asked
    monkeypatch.setattr(mesh.multihost_utils, "process_allgather", lambda size: np.asarray([size, size - 1, size + 7]))
    assert mesh.min_over_processes(both, 10 << 40) == (10 << 40) - (1 << 20)
