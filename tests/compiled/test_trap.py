"""Tests that the trap stops requests for real programs at once and leaves JAX intact."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.compilation_cache import compilation_cache

from tilewright.compiled import ledger as ledger_module
from tilewright.compiled.ledger import CompileError, CompileTrap, CompileWarning, Ledger, no_compile_guard


def fresh(name: str) -> Callable[[np.ndarray | Array], Array]:
    """Makes a jitted function with a unique name that no other test has compiled."""

    def triple(x: Array) -> Array:
        return x * 3

    triple.__name__ = triple.__qualname__ = name
    return jax.jit(triple)


def row(length: int) -> np.ndarray:
    return np.ones(length, np.float32)


def recorded(trap: CompileTrap) -> list[tuple[str, bool]]:
    return [(program.name, program.refused) for program in trap.ledger.programs]


@pytest.fixture(autouse=True)
def _none_stays_open() -> Iterator[None]:
    yield
    assert ledger_module._announcements.traps == ()


def test_a_request_fails_at_once_with_the_cause():
    f = fresh("decode_round")
    f(row(3))
    with CompileTrap("fail", "serving") as trap:
        assert f(row(3)).tolist() == [3, 3, 3]
        message = r"^jit\(decode_round\) had to be compiled during serving.*: x is float32\[4\], was float32\[3\](\n|$)"
        with pytest.raises(CompileError, match=message):
            f(row(4))
        assert f(row(3)).tolist() == [3, 3, 3]
    assert recorded(trap) == [("jit(decode_round)", True)]
    assert f(row(4)).tolist() == [3, 3, 3, 3]
    assert recorded(trap) == [("jit(decode_round)", True)]


def test_xla_compiles_nothing_that_is_refused(monkeypatch: pytest.MonkeyPatch):
    """JAX announces the end of every compile, even a failed one; here no announcement follows."""
    ends: list[float] = []
    monkeypatch.setattr(ledger_module._announcements, "record", lambda name, seconds: ends.append(seconds))
    f = fresh("f")
    with CompileTrap("fail"), pytest.raises(CompileError):
        f(row(3))
    assert ends == []
    f(row(3))
    assert len(ends) == 1


def test_a_refused_program_compiles_later_and_the_cause_compares_it_with_compiled_ones():
    f = fresh("later")
    with Ledger() as whole:
        trap = CompileTrap("fail")
        for _ in range(2):
            with trap, pytest.raises(CompileError, match="the first program of this name"):
                f(row(3))
        assert f(row(3)).tolist() == [3, 3, 3]
        f(row(4))
    assert [(program.refused, program.seconds > 0) for program in whole.programs] == [(True, False)] * 2 + [(False, True)] * 2
    assert [program.arguments[0].type for program in whole.programs] == ["float32[3]"] * 3 + ["float32[4]"]
    assert [program.cause for program in whole.programs][2:] == [
        "the first program of this name",
        "x is float32[4], was float32[3]",
    ]
    assert trap.ledger.compilations == 2


def test_donated_arrays_live_on():
    f = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(row(3))
    with CompileTrap("fail"), pytest.raises(CompileError):
        f(x)
    assert not x.is_deleted()
    assert f(x).tolist() == [2, 2, 2]


def test_a_program_lowered_earlier_is_trapped_when_it_compiles():
    lowered = jax.jit(lambda x: x * 5).lower(row(3))
    with CompileTrap("fail") as trap:
        jax.jit(lambda x: x * 7).lower(row(3))  # asks the compiler for nothing
        for _ in range(2):
            with pytest.raises(CompileError):
                lowered.compile()
    assert [(program.refused, program.arguments[0].type) for program in trap.ledger.programs] == [(True, "float32[3]")] * 2
    compiled = lowered.compile()
    with CompileTrap("fail"):
        assert compiled(row(3)).tolist() == [5, 5, 5]


def test_eager_operations_count():
    x = jax.device_put(row(4111))
    with CompileTrap("fail"):
        with pytest.raises(CompileError, match="cumsum"):
            jnp.cumsum(x)
        with pytest.raises(CompileError, match="sub"):
            _ = x - x
    assert float(jnp.cumsum(x)[-1]) == 4111


@pytest.fixture
def _disk_cache(tmp_path: Path) -> Iterator[None]:
    """Points JAX's compilation cache at a folder of this test."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("_disk_cache")
def test_a_program_that_is_on_disk_is_trapped_too():
    fresh("stored")(row(3))
    jax.clear_caches()
    with CompileTrap("fail") as trap, pytest.raises(CompileError, match=r"jit\(stored\)"):
        fresh("stored")(row(3))
    with CompileTrap("off") as counting:
        fresh("stored")(row(3))
    assert recorded(trap) == [("jit(stored)", True)]
    assert [program.from_disk for program in counting.ledger.programs] == [True]


def test_opened_in_one_thread_and_trapped_in_others():
    """Threads request ready and missing programs, some of them the same one."""
    ready = fresh("ready")
    others = [fresh(f"other_{n}") for n in range(4)]
    shared = fresh("shared")
    ready(row(3))
    stop = threading.Event()

    def serve() -> int:
        served = 0
        while not stop.is_set():
            assert ready(row(3)).tolist() == [3, 3, 3]
            served += 1
        return served

    def refused(f: Callable[[np.ndarray], Array]) -> str:
        with pytest.raises(CompileError) as caught:
            f(row(5))
        return str(caught.value)

    with ThreadPoolExecutor(10) as pool:
        trap = pool.submit(CompileTrap("fail", "the test").arm).result()
        serving = [pool.submit(serve) for _ in range(2)]
        messages = list(pool.map(refused, [*others, *[shared] * 4]))
        time.sleep(0.01)
        assert all(f(row(3)).tolist() == [3, 3, 3] for f in [ready] * 3)
        stop.set()
        assert all(future.result() > 0 for future in serving)
        pool.submit(trap.disarm).result()
        assert all(f(row(5)).tolist() == [3] * 5 for f in [*others, shared])
    assert [message.split(" had")[0] for message in messages] == [f"jit(other_{n})" for n in range(4)] + ["jit(shared)"] * 4
    assert sorted(recorded(trap)) == [(f"jit(other_{n})", True) for n in range(4)] + [("jit(shared)", True)] * 4


def test_warn_compiles_the_program():
    f = fresh("warned")
    with CompileTrap("warn", "warming") as trap:
        with pytest.warns(
            CompileWarning, match=r"jit\(warned\) had to be compiled during warming.*the first program"
        ) as caught:
            assert f(row(3)).tolist() == [3, 3, 3]
        f(row(3))
        with ThreadPoolExecutor(1) as pool, pytest.warns(CompileWarning, match=r"x is float32\[4\]"):
            pool.submit(f, row(4)).result()
    assert [w.filename for w in caught] == [__file__]
    assert recorded(trap) == [("jit(warned)", False)] * 2
    assert trap.ledger.seconds > 0


def test_off_only_counts():
    f = fresh("f")
    with CompileTrap("off") as trap:
        f(row(3))
        f(row(3))
    assert recorded(trap) == [("jit(f)", False)]


def test_several_at_once():
    """The strictest trap decides, and every ledger records the program."""
    f = fresh("f")
    counting = CompileTrap("off")
    warning = CompileTrap("warn", "w")
    failing = CompileTrap("fail", "x")
    with Ledger() as ledger, counting, warning:
        with pytest.raises(CompileError, match="during x,"), failing:
            f(row(3))
        with pytest.warns(CompileWarning, match="during w,"):
            f(row(3))
        warning.disarm()
        f(row(4))
    assert [len(each.programs) for each in (ledger, counting.ledger, warning.ledger, failing.ledger)] == [3, 3, 2, 1]
    assert recorded(counting) == [("jit(f)", True), ("jit(f)", False), ("jit(f)", False)]


def test_a_reopened_trap_continues_its_ledger():
    f = fresh("f")
    trap = CompileTrap("off")
    for length in (3, 4):
        with trap:
            f(row(length))
        f(row(length + 10))
        trap.disarm()
    assert trap.ledger.compilations == 2
    with trap, pytest.raises(ValueError, match="active already"):
        trap.arm()


def test_beside_the_guard_of_a_block():
    f = fresh("beside")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusal = pytest.raises(CompileWarning, match=r"jit\(beside\) \(refused: the first program of this name\)")
        with refusal, no_compile_guard("warn"), CompileTrap("fail"), pytest.raises(CompileError):
            f(row(3))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="guard of off, warn, fail, found 'strict'"):
        CompileTrap("strict")
