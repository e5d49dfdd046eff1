"""Tests of the ledger with real compiles. Every test makes its own functions, since a new function is never in memory."""

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.compilation_cache import compilation_cache

from tilewright.compiled.ledger import (
    Argument,
    CompileError,
    CompileWarning,
    Ledger,
    ProgramRecord,
    difference,
    no_compile_guard,
)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """Disables the disk cache, which could supply programs of an earlier run."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def fresh(name: str) -> Callable[[np.ndarray], Array]:
    """Makes a jitted function with a unique name that no other test has compiled."""

    def double(x: Array) -> Array:
        return x * 2

    double.__name__ = double.__qualname__ = name
    return jax.jit(double)


def row(length: int) -> np.ndarray:
    return np.ones(length, np.float32)


def names(ledger: Ledger) -> list[str]:
    return [program.name for program in ledger.programs]


def test_each_shape_is_one_program_with_its_name():
    f = fresh("f")
    g = fresh("g")
    with Ledger() as ledger:
        f(row(3))
        f(row(4))
        g(row(3))
    assert names(ledger) == ["jit(f)", "jit(f)", "jit(g)"]
    assert ledger.compilations == 3
    assert all(program.seconds > 0 and not program.from_disk for program in ledger.programs)
    assert ledger.seconds == sum(program.seconds for program in ledger.programs)


def test_reuse_counts_nothing():
    f = fresh("f")
    f(row(3))
    with Ledger() as ledger:
        for _ in range(3):
            f(row(3))
    assert ledger.programs == []


def test_compiling_ahead_of_time_counts_and_running_it_does_not():
    f = jax.jit(lambda x: x + 1)
    with Ledger() as ahead:
        program = f.lower(row(3)).compile()
    with Ledger() as serving:
        program(row(3))
    assert (ahead.compilations, serving.compilations) == (1, 0)


def test_an_eager_operation_of_a_new_shape_counts():
    x = jax.device_put(row(4099))
    with Ledger() as ledger:
        _ = x - x
    assert ledger.compilations == 1


def test_nothing_is_recorded_outside():
    f = fresh("f")
    ledger = Ledger()
    f(row(3))
    with ledger:
        f(row(4))
    f(row(5))
    assert ledger.compilations == 1
    with ledger:
        f(row(6))
    assert ledger.compilations == 2


def test_ledgers_nest_and_overlap():
    f = fresh("f")
    first = Ledger()
    second = Ledger()
    with Ledger() as outer:
        first.__enter__()
        f(row(3))
        second.__enter__()
        f(row(4))
        first.__exit__(None, None, None)
        f(row(5))
        second.__exit__(None, None, None)
    assert (outer.compilations, first.compilations, second.compilations) == (3, 2, 2)


def test_one_ledger_cannot_be_opened_twice():
    with Ledger() as ledger, pytest.raises(ValueError, match="active already"):
        ledger.__enter__()
    with Ledger() as again:
        fresh("f")(row(3))
    assert again.compilations == 1


def test_a_ledger_closes_when_the_block_fails():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger:
        raise KeyError("x")
    fresh("f")(row(3))
    assert ledger.programs == []


def test_compiles_in_other_threads_are_recorded():
    functions = [fresh(f"thread_{n}") for n in range(4)]
    with Ledger() as ledger:
        threads = [threading.Thread(target=f, args=(row(3),)) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(names(ledger)) == [f"jit(thread_{n})" for n in range(4)]


@pytest.fixture
def _disk_cache(tmp_path: Path) -> Iterator[None]:
    """Points JAX's compilation cache at a folder of this test."""
    settings = {
        "jax_enable_compilation_cache": True,
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
def test_a_program_from_the_disk_cache_counts_and_says_so():
    with Ledger() as ledger:
        fresh("stored")(row(3))
        jax.clear_caches()
        fresh("stored")(row(3))
        fresh("other")(row(5))
    with pytest.raises(CompileError, match=r"jit\(stored\) \([0-9.]+ s, from disk: "), no_compile_guard("fail"):
        jax.clear_caches()
        fresh("stored")(row(3))
    assert (ledger.compilations, ledger.loaded) == (3, 1)
    assert [(program.name, program.from_disk) for program in ledger.programs] == [
        ("jit(stored)", False),
        ("jit(stored)", True),
        ("jit(other)", False),
    ]


def test_guard_fails_and_names_the_programs():
    f = fresh("decode_round")
    g = fresh("prefill")
    message = r"2 program\(s\) compiled during serving.*jit\(decode_round\).*jit\(prefill\)"
    with pytest.raises(CompileError, match=message), no_compile_guard("fail", "serving"):
        f(row(3))
        g(row(3))
    assert f(row(3)).tolist() == [2.0, 2.0, 2.0]


def test_guard_warns_once():
    f = fresh("f")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with no_compile_guard("warn"):
            f(row(3))
            f(row(4))
    assert [w.category for w in caught] == [CompileWarning]
    assert "2 program(s)" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_guard_off_only_counts():
    f = fresh("f")
    with no_compile_guard("off") as ledger:
        f(row(3))
    assert names(ledger) == ["jit(f)"]


@pytest.mark.parametrize("mode", ["off", "warn", "fail"])
def test_guard_is_silent_when_all_is_ready(mode: str):
    f = fresh("f")
    f(row(3))
    with no_compile_guard(mode) as ledger:
        f(row(3))
    assert ledger.programs == []


def test_guard_leaves_another_error_alone():
    f = fresh("f")
    with pytest.raises(KeyError), no_compile_guard("fail"):
        f(row(3))
        raise KeyError("x")


def test_guard_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="guard of off, warn, fail, found 'strict'"), no_compile_guard("strict"):
        pass


def test_a_program_is_plain_data():
    assert ProgramRecord("jit(f)", 0.5) == ProgramRecord("jit(f)", 0.5, from_disk=False)


def model(name: str) -> Callable[..., Array]:
    """A jitted function of a matrix and a pytree, one part of which it does not use."""

    def apply(tokens: Array, params: dict[str, Array]) -> Array:
        return tokens @ params["w"]

    apply.__name__ = apply.__qualname__ = name
    return jax.jit(apply)


def params(inner: int = 3, outer: int = 5, dtype: type = np.float32) -> dict[str, np.ndarray]:
    return {"w": np.ones((inner, outer), dtype), "unused": np.ones(2, dtype)}


def test_a_program_has_the_arguments_that_it_reads():
    with Ledger() as ledger:
        model("reads")(np.ones((2, 3), np.float32), params())
    assert ledger.programs[0].arguments == (Argument("tokens", "float32[2,3]"), Argument("params['w']", "float32[3,5]"))


def causes(name: str, *calls: tuple[np.ndarray | Array, dict[str, np.ndarray]]) -> list[str]:
    f = model(name)
    with Ledger() as ledger:
        for tokens, weights in calls:
            f(tokens, weights)
    return [program.cause for program in ledger.programs if program.name == f"jit({name})"]


def test_the_cause_is_the_argument_that_differs():
    two = np.ones((2, 3), np.float32)
    four = np.ones((4, 3), np.float32)
    assert causes("cause", (two, params()), (four, params()), (four, params(outer=7))) == [
        "the first program of this name",
        "tokens is float32[4,3], was float32[2,3]",
        "params['w'] is float32[3,7], was float32[3,5]",
    ]
    halves = np.ones((2, 3), jnp.bfloat16), params(dtype=jnp.bfloat16)
    assert causes("dtype", (two, params()), halves)[1] == (
        "tokens is bfloat16[2,3], was float32[2,3]; params['w'] is bfloat16[3,5], was float32[3,5]"
    )


def test_the_closest_earlier_program_is_compared_and_not_the_last():
    rows = [np.ones((n, 3), np.float32) for n in (2, 4, 6)]
    reasons = causes(
        "closest", (rows[0], params()), (rows[1], params(outer=7)), (rows[0], params(outer=7)), (rows[2], params())
    )
    assert reasons[2:] == ["tokens is float32[2,3], was float32[4,3]", "tokens is float32[6,3], was float32[2,3]"]


def test_a_placement_that_differs_is_named():
    x = np.ones((2, 3), np.float32)
    (_, cause) = causes("placed", (x, params()), (jax.device_put(x, jax.devices()[1]), params()))
    assert cause == f"tokens is float32[2,3] on {jax.devices()[1]}, was float32[2,3]"


def test_equal_arguments_are_reported_as_the_cause():
    with Ledger() as ledger:
        for _ in range(2):
            fresh("again")(row(3))
    assert ledger.programs[1].cause.startswith("the same arguments as before, so a static argument, the function")


def test_a_program_that_is_lowered_in_one_thread_and_compiled_in_another():
    f = jax.jit(lambda x: x * 3)
    lowered = [f.lower(row(n)) for n in (3, 4, 5)]
    with Ledger() as ledger:
        threads = [threading.Thread(target=one.compile) for one in reversed(lowered)]
        for thread in threads:
            thread.start()
            thread.join()
    assert [program.arguments[0].type for program in ledger.programs] == ["float32[5]", "float32[4]", "float32[3]"]


def test_the_guard_names_the_argument_and_knows_what_ran_before_it():
    f = model("serve")
    f(np.ones((2, 3), np.float32), params())
    message = r"1 program\(s\) compiled during serving.*jit\(serve\) \(.* s: tokens is float32\[9,3\], was float32\[2,3\]\)"
    with pytest.raises(CompileError, match=message), no_compile_guard("fail", "serving"):
        f(np.ones((9, 3), np.float32), params())


def arguments(**types: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, kind) for name, kind in types.items())


@pytest.mark.parametrize(
    "now, earlier, message",
    [
        (arguments(x="a"), [], "the first program of this name"),
        (arguments(x="a", y="b"), [arguments(x="a")], "y is new, b"),
        (arguments(x="a"), [arguments(x="a", y="b")], "y is missing, was b"),
        (arguments(x="a"), [arguments(x="b"), arguments(x="c")], "x is a, was c"),  # as close: the later
        (
            arguments(v="a", w="a", x="a", y="a", z="a"),
            [arguments(v="b", w="b", x="b", y="b", z="b")],
            "v is a, was b; w is a, was b; x is a, was b; and 2 more",
        ),
    ],
)
def test_differences(now: tuple[Argument, ...], earlier: list[tuple[Argument, ...]], message: str):
    assert difference(now, earlier) == message
