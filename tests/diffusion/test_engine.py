"""The diffusion engine gives each request what the model gives it alone, whatever happens beside it; it holds nothing after."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from diffusion.denoising import (
    BY_ITSELF,
    OPTIONS,
    TABLE,
    check_empty,
    check_same,
    engine_like,
    expected,
    model_engine,
    model_of,
    requests,
)
from diffusion.support import build, needs_native
from runtime.support import Heard, drive
from runtime.test_lockstep import Messages
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import Denoising, Mode
from tilewright.diffusion.programs import DiffusionKey
from tilewright.diffusion.state import SPANS
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.engine import Engine
from tilewright.runtime.lockstep import Lockstep
from tilewright.runtime.runner import ProgramRunner

pytestmark = pytest.mark.usefixtures("quick_compiles")

BACKENDS = [
    pytest.param(("llada", "auto"), id="llada-auto", marks=needs_native),
    pytest.param(("dream", "auto"), id="dream-auto", marks=[needs_native, pytest.mark.slow]),
    *(pytest.param((family, "xla"), id=f"{family}-xla", marks=pytest.mark.slow) for family in ("llada", "dream")),
]


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> DiffusionModel:
    return model_of(*request.param)


@pytest.fixture(scope="module")
def warm(model: DiffusionModel) -> Engine:
    positions = (20, 32) if model.config.family == "llada" else (32,)
    engine = model.engine(replace(OPTIONS, table=replace(TABLE, positions=positions), page_size=8))
    engine.warm()
    return engine


@pytest.fixture
def rng() -> np.random.Generator:
    """Says how many steps dispatches have, and when requests come."""
    return np.random.default_rng(0)


@pytest.fixture
def engine(warm: Engine, rng: np.random.Generator) -> Iterator[Engine]:
    engine = engine_like(warm, lambda: int(rng.integers(1, 7)))
    yield engine
    engine.stop()


def test_the_tokens_and_steps_are_those_of_the_model_alone(
    model: DiffusionModel, engine: Engine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    """Requests of every kind come at random between steps, and some are given up on the way; the last come one by one.

    Rows are taken out of pages of 8 positions, and put back.
    """
    asks = requests(0, 54)
    cancelled = [7, 20, 31]
    want = expected(model, asks)
    ran = set()
    run = engine.runner.run

    def noted(key: DiffusionKey, *inputs: Any) -> Any:
        assert key.shape is not None
        ran.add((key.shape.batch, key.shape.positions))
        return run(key, *inputs)

    monkeypatch.setattr(engine.runner, "run", noted)
    engine.accept_requests()
    heard, handles = drive(engine, asks[:45], rng, cancelled)
    for each in asks[45:]:
        (one,), (handle,) = drive(engine, [each], rng)
        heard = [*heard, one]
        handles = [*handles, handle]
    check_empty(engine)
    assert ran == {(shape.batch, shape.positions) for shape in engine.decoding.programs.shapes}
    for n, (each, handle) in enumerate(zip(heard, handles, strict=True)):
        assert handle.result is not None
        assert each.tokens == handle.result.tokens
        if each.end == "cancelled":
            assert n in cancelled
            assert each.tokens == want[n].tokens[: len(each.tokens)]
        else:
            check_same(each, handle, want[n])
    ended = engine.stats().ended
    assert ended["cancelled"] > 0
    assert ended["eos"] > 0


def test_every_set_of_programs_gives_the_tokens_of_the_model_alone(
    model: DiffusionModel, engine: Engine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    """With the largest program alone, and with half of the others."""
    asks = requests(3, 16)
    want = expected(model, asks)
    programs = engine.decoding.programs
    existing = set(engine.decoding.first_keys())
    run = engine.runner.run

    def checked(key: DiffusionKey, *inputs: Any) -> Any:
        assert key in existing
        return run(key, *inputs)

    monkeypatch.setattr(engine.runner, "run", checked)
    engine.accept_requests()
    for begin, added in ((0, 0), (8, len(programs.keys) // 2)):
        existing |= {programs.keys[n] for n in rng.permutation(len(programs.keys))[:added]}
        engine.decoding.use(existing)
        heard, handles = drive(engine, asks[begin : begin + 8], rng)
        for each, handle, wanted in zip(heard, handles, want[begin : begin + 8], strict=True):
            check_same(each, handle, wanted)
        assert engine.runner.missed or added
    check_empty(engine)


def test_every_step_is_counted(model: DiffusionModel, engine: Engine, rng: np.random.Generator):
    asks = requests(1, 9)
    engine.accept_requests()
    heard, handles = drive(engine, asks, rng)
    stats = engine.stats()
    assert stats.row_rounds == sum(handle.steps for handle in handles)
    assert stats.rounds == sum(stats.widths.values())
    assert set(stats.widths) <= set(SPANS)
    assert stats.rounds <= stats.row_rounds <= stats.row_rounds + stats.padding_rows <= 3 * stats.rounds
    assert (stats.prompt_tokens, stats.slots) == (sum(len(ask.prompt) for ask in asks), 3)
    assert stats.generated_tokens == sum(len(each.tokens) for each in heard)
    assert stats.programs == 0, "those of another engine"
    assert model.context == engine.context == 32


def test_one_thread_of_its_own_serves_them_too(model: DiffusionModel, warm: Engine):
    """With as many steps to a dispatch as the clock allows."""
    engine = model_engine(warm, warm.options)
    asks = requests(2, 12)
    engine.runner.reset()
    want = expected(model, asks)
    engine.start()
    heard = [Heard() for _ in asks]
    handles = [engine.submit(ask, each) for ask, each in zip(asks, heard, strict=True)]
    assert engine.stop(drain_s=60.0)
    for each, handle, one in zip(heard, handles, want, strict=True):
        check_same(each, handle, one)
    check_empty(engine)


def test_a_process_that_is_told_each_program_has_the_same_state(
    engine: Engine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    messages = Messages()
    told = Lockstep(engine.runner.programs, engine.decoding.program_keys(), messages)
    monkeypatch.setattr(engine.runner, "lockstep", told)
    engine.runner.reset()
    engine.accept_requests()
    drive(engine, requests(3, 7), rng)
    follower = ProgramRunner(engine.runner.programs)
    told.end()
    ran = []
    for key, inputs in Lockstep(engine.runner.programs, engine.decoding.program_keys(), messages).received():
        ran.append(key.name)
        follower.reset() if key.name == "allocate" else follower.run(key, *inputs)
    assert (ran[0], {*ran}, len(messages.kept)) == ("allocate", {"allocate", "steps"}, 0)
    for own, wanted in zip(jax.tree.leaves(follower.state), jax.tree.leaves(engine.runner.state), strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_an_engine_of_dense_steps_alone_takes_no_caches(rng: np.random.Generator):
    model = build("tiny", table=BY_ITSELF)
    asks = requests(6, 12, ("dense",))
    assert any(ask.denoising.suffix_window is not None for ask in asks)
    want = expected(model, asks)
    engine = model.engine(replace(OPTIONS, modes=("dense",)))
    engine.warm()
    engine.decoding.pace.most = lambda seconds, hurry: int(rng.integers(1, 7))  # type: ignore[method-assign]
    engine.accept_requests()
    heard, handles = drive(engine, asks, rng)
    assert engine.runner.state.target_cache == ()
    check_empty(engine)
    engine.stop()
    for each, handle, alone in zip(heard, handles, want, strict=True):
        check_same(each, handle, alone)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "ring"])
def test_four_devices_give_what_one_does(rng: np.random.Generator, schedule: str):
    """Rows of a divided pool are taken out and put back on each device."""
    modes: tuple[Mode, ...] = ("prefix", "sparse")
    own = replace(BY_ITSELF, buckets=())
    one = build("tiny", "xla", own)
    four = build("tiny", "xla", own, mesh=make_mesh({"tp": 4}), schedule=schedule)
    asks = requests(4, 12, modes)
    want = expected(one, asks)
    table = replace(TABLE, batches=(1, 2), buckets=())
    engine = four.engine(DiffusionEngineOptions(table=table, modes=modes, defaults=Denoising(mode="sparse")))
    engine.warm()
    engine.decoding.pace.most = lambda seconds, hurry: int(rng.integers(1, 7))  # type: ignore[method-assign]
    engine.accept_requests()
    heard, handles = drive(engine, asks, rng)
    keys = engine.runner.state.target_cache[0][0].k
    assert keys.sharding.shard_shape(keys.shape)[2] == keys.shape[2] // 4, "each device holds the keys of its own head"
    check_empty(engine)
    engine.stop()
    for each, handle, alone in zip(heard, handles, want, strict=True):
        check_same(each, handle, alone)
