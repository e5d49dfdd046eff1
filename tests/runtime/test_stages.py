"""Serving with some of the declared programs gives the tokens of plain decoding, and only declared programs compile."""

import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
from runtime.dance import EOS, VOCAB, Dance
from runtime.support import Heard, drive, expected, samplings
from runtime.test_constraints import plain
from tilewright.compiled import background
from tilewright.compiled.background import BackgroundCompile
from tilewright.compiled.ledger import CompileError
from tilewright.compiled.store import Store
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 4), capacities=(64, 128), chunks=(16, 32), widths=(2,))
OPTIONS = EngineOptions(table=TABLE, page_size=16, constraints=True)
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=4, eos_token_id=EOS[0])
WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return build(tmp_path_factory.mktemp("pair"), PAIR, table=TABLE)


@pytest.fixture(scope="module")
def warm(lm: LanguageModel) -> Engine:
    engine = lm.engine(OPTIONS)
    engine.warm()
    return engine


def requests(count: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    inputs = prompts(0, [int(n) for n in rng.integers(1, 60, count)], vocab=VOCAB)
    return [GenerateRequest(*each) for each in zip(inputs, samplings(rng, count, 40), strict=True)]


REQUESTS = requests(18)
BOUND = replace(REQUESTS[0], sampling=replace(REQUESTS[0].sampling, ignore_eos=False), constraint=Dance(least=20))


@pytest.fixture(scope="module")
def wanted(lm: LanguageModel) -> list[list[int]]:
    """Tokens of plain decoding: of each request, and of the one with a constraint."""
    return [*expected(lm, REQUESTS), plain(lm, BOUND)]


@pytest.fixture
def engine(lm: LanguageModel, warm: Engine, wanted: list[list[int]]) -> Iterator[Engine]:
    """An engine with all programs; a test limits them with `use`."""
    engine = lm.engine(OPTIONS)
    engine.decoding.programs.compiled = warm.decoding.programs.compiled
    engine.runner.reset()
    engine.accept_requests()
    yield engine
    engine.stop()


def test_every_set_of_programs_gives_the_tokens_of_plain_decoding(
    engine: Engine, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """The set grows while requests of all lengths run together, from the first programs to all of them."""
    rng = np.random.default_rng(1)
    first = set(engine.decoding.first_keys())
    missing = [key for key in engine.decoding.program_keys() if key not in first]
    missing = [missing[n] for n in rng.permutation(len(missing))]
    existing = set(first)
    ran: list[ProgramKey] = []
    run = engine.runner.run

    def checked(key: ProgramKey, *inputs: Any) -> Any:
        assert key in existing
        ran.append(key)
        return run(key, *inputs)

    monkeypatch.setattr(engine.runner, "run", checked)
    for begin in (0, 6, 12):
        engine.decoding.use(existing)
        listeners, _ = drive(engine, REQUESTS[begin : begin + 6], rng)
        assert [each.tokens for each in listeners] == wanted[begin : begin + 6]
        existing |= {missing.pop() for _ in range(len(missing) // 2)}
    assert set(ran[:4]) <= first
    assert len(set(ran)) > len(first)


def test_the_first_programs_serve_rows_of_every_number_and_name_what_they_replace(engine: Engine):
    first = engine.decoding.first_keys()
    engine.decoding.use(first)
    rounds = first[-1]
    assert (rounds.rows, rounds.positions, rounds.masked) == (4, 128, False)
    drive(engine, REQUESTS[:2], np.random.default_rng(0))
    assert all(key.name == "rounds" and key not in first for key in engine.runner.missed)
    assert engine.runner.missed
    assert (engine.scheduler.chunks, engine.scheduler.together[0]) == ((16,), 1)


def test_a_request_with_a_constraint_waits_for_its_program_and_others_pass_it(engine: Engine, wanted: list[list[int]]):
    engine.decoding.use(engine.decoding.first_keys())
    listeners = [Heard(), Heard()]
    engine.submit(BOUND, listeners[0])
    engine.submit(REQUESTS[1], listeners[1])
    while not listeners[1].ended:
        engine.step()
    assert listeners[1].tokens == wanted[1]
    assert not listeners[0].updates
    assert engine.stats().waiting == 1
    choice = engine.decoding.programs.constrained_choice
    masked = engine.decoding.programs.round_key(choice, 4, 128, engine.runner.sampling, masked=True)
    assert masked in engine.runner.missed
    engine.decoding.use({*engine.decoding.first_keys(), masked})
    while not listeners[0].ended:
        engine.step()
    assert listeners[0].tokens == wanted[-1]


class Gate:
    """Holds compilations until they are let through."""

    def __init__(self, engine: Engine, compiled: dict[Any, Any]):
        self.open = threading.Event()
        self.entered = threading.Event()
        self.order: list[Any] = []
        self.first = set(engine.decoding.first_keys())
        self.compiled = compiled

    def compile(self, key: Any) -> Any:
        if key not in self.first:
            self.order.append(key)
            self.entered.set()
            assert self.open.wait(WAIT_S)
            # A program of its own, so that the guard sees a compilation.
            jax.jit(lambda x: x + len(self.order)).lower(jnp.ones(len(self.order) + 2)).compile()
        return self.compiled[key]


def test_an_engine_serves_while_programs_compile_and_the_guard_traps_all_others(
    lm: LanguageModel, warm: Engine, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = lm.engine(OPTIONS)
    gate = Gate(engine, warm.decoding.programs.compiled)
    monkeypatch.setattr(engine.decoding.programs, "compile", gate.compile)
    engine.warm(wait_for_programs=False)
    declared = len(engine.decoding.program_keys())
    assert (engine.stats().programs, engine.stats().programs_declared) == (3, declared)
    engine.accept_requests()
    compiling = engine.compiling
    assert compiling is not None
    assert gate.entered.wait(WAIT_S)
    listeners, _ = drive(engine, REQUESTS[:6], np.random.default_rng(2))
    assert [each.tokens for each in listeners] == wanted[:6]
    assert (engine.stats().programs, engine.stats().compilations) == (3, 0)
    with pytest.raises(CompileError, match="serving"):
        jax.jit(lambda x: x * 3)(np.ones(5, np.float32))
    assert engine.stats().compilations == 1
    # What the requests missed comes next.
    following = [*engine.runner.missed, *compiling.missing]
    gate.open.set()
    compiling.thread.join(WAIT_S)
    assert not engine.compiles
    assert gate.order[1] == next(key for key in following if key != gate.order[0])
    listeners, _ = drive(engine, REQUESTS[:6], np.random.default_rng(2))
    assert [each.tokens for each in listeners] == wanted[:6]
    assert (engine.stats().programs, engine.stats().compilations) == (declared, 1)
    assert engine.compiling is None
    engine.stop()


def test_an_engine_ends_where_a_declared_program_does_not_compile(
    lm: LanguageModel, warm: Engine, monkeypatch: pytest.MonkeyPatch
):
    engine = lm.engine(OPTIONS)
    first = engine.decoding.first_keys()

    def compile(key: ProgramKey) -> Any:
        if key not in first:
            raise ValueError("no such instruction")
        return warm.decoding.programs.compiled[key]

    monkeypatch.setattr(engine.decoding.programs, "compile", compile)
    engine.warm(wait_for_programs=False)
    ended = threading.Event()
    engine.on_failure = lambda error: ended.set()
    engine.start()
    assert ended.wait(WAIT_S)
    assert isinstance(engine.failure, RuntimeError)
    assert isinstance(engine.failure.__cause__, ValueError)
    engine.stop()


def test_programs_compile_in_their_order_and_preferred_ones_first():
    program = jax.jit(lambda x: x).lower(1.0).compile()
    held = threading.Semaphore(0)
    entered = threading.Semaphore(0)
    order: list[int] = []

    class Numbers(Store[int]):
        def compile(self, key: int) -> Any:
            order.append(key)
            entered.release()
            assert held.acquire(timeout=WAIT_S)
            return program

    compiling = BackgroundCompile(Numbers(), range(6))
    compiling.start()
    assert entered.acquire(timeout=WAIT_S)
    compiling.prefer([4, 3, 9])
    held.release(2)
    assert entered.acquire(timeout=WAIT_S)
    assert entered.acquire(timeout=WAIT_S)
    assert order == [0, 4, 3]
    assert compiling.collect() == [0, 4]
    compiling.stop()
    held.release()
    compiling.thread.join(WAIT_S)
    assert compiling.collect() == [3]
    assert not compiling.running


def test_tracing_pauses_while_requests_run_and_only_then():
    """A pause follows a slice of computing; another thread then has Python's lock."""
    busy: list[bool] = []

    def compute() -> float:
        began = time.perf_counter()
        with background.pausing(lambda: busy.append(True) or busy[0]):
            until = time.thread_time() + 10 * background.SLICE_S
            while time.thread_time() < until:
                math.sqrt(2.0)
        return time.perf_counter() - began

    assert compute() >= 5 * background.SLICE_S * background.PAUSES
    assert sys.getprofile() is None


def test_threads_that_work_are_found_by_their_processor_time():
    def compute() -> None:
        until = time.thread_time() + 3 * background.LEAST_S
        while time.thread_time() < until:
            continue

    with background.working_threads() as found:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((7, 7))).compile()
    assert threading.get_native_id() not in found
    assert found <= set(background.processor_seconds())
    assert bool(background.processor_seconds()) == sys.platform.startswith("linux")


def test_without_stages_all_programs_exist_before_requests(lm: LanguageModel, warm: Engine):
    stats = warm.stats()
    assert stats.programs == stats.programs_declared == len(warm.decoding.program_keys())
    assert warm.compiling is None
    assert warm.runner.existing is None


def test_sampling_settings_do_not_decide_which_programs_serve(engine: Engine):
    engine.decoding.use(engine.decoding.first_keys())
    assert engine.decoding.servable(engine.decoding.sequence(GenerateRequest((1, 2), Sampling(3, 1.0)), Heard()))
