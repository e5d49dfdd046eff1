"""Settings of every test: eight CPU devices, strict dtypes, checked shape annotations, quick compilation.

`--optimised` compiles as users do. XLA's optimisations take five times as long as the rest of compiling, which programs of a
millisecond do not pay back. `make test-all` uses the option for tests of exactness.
"""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set its platform and its device count")
os.environ["JAX_PLATFORMS"] = "cpu"
# On busy cores, eight devices wait long for each other; after 40 s, XLA would abort the process.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
).strip()

import jax
import pytest
from hypothesis import settings

import times
import typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Programs have no lines and paths of the source, so that stored programs are found from any checkout.
jax.config.update("jax_traceback_in_locations_limit", 0)

# The checks take a tenth or two of the tests' time, so `make test` leaves them out.
if "TILEWRIGHT_UNCHECKED" not in os.environ:
    typecheck.install("tilewright")

# The same examples on every run and every machine; the first example of a property compiles, so no deadline.
settings.register_profile("tilewright", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("quick", settings.get_profile("tilewright"), max_examples=8)  # `make test`
settings.load_profile("tilewright")

KEPT = Path(__file__).parent.parent / "build" / "tests"
KEPT_BYTES = 4 << 30
"""Maximum bytes of stored programs; the oldest are deleted first."""
HELD_BYTES = 3 << 30
"""Bytes of memory of a process after a module above which traced and compiled programs are dropped."""
QUICK_FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""Flags for quick compilation.

XLA's MLIR emitters take most of the time; JAX 0.10 can turn them off, 0.12 has no such flag. Generating code in one part
instead of 32 saves a tenth. No gain: XLA's FAST_COMPILE preset, and no loop passes (rounds compile faster, prefills slower)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimised", action="store_true", help="compile programs with all of XLA's optimisations, as users do")
    parser.addoption("--schedules", action="store_true", help="store TPU programs that are not stored yet")
    parser.addoption("--times", action="store_true", help="measure tests and extend the list of slow tests")
    parser.addoption("--shard", type=times.shard, metavar="K/N", help="run the quick tests, and part K of N of the slow tests")
    parser.addoption("--products", action="store_true", help="also run the cases of products that slow tests leave out")


def pytest_configure(config: pytest.Config) -> None:
    # Tracing creates millions of objects and few cycles, so the garbage collector runs a hundredth as often.
    gc.set_threshold(100_000, 20, 100)
    if config.getoption("times"):
        config.pluginmanager.register(times.Times(writes=not hasattr(config, "workerinput")))
    if not config.getoption("optimised"):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that tests start
        if not hasattr(config, "workerinput"):  # xdist workers inherit them
            os.environ["XLA_FLAGS"] += quick_flags(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # runs before and after tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    listed = times.listed()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow(seconds=listed[item.nodeid]))
    yield
    if shard := config.getoption("shard"):
        elsewhere = [times.in_other_shard(item, *shard) for item in items]
        config.hook.pytest_deselected(items=[item for item, left in zip(items, elsewhere, strict=True) if left])
        items[:] = [item for item, left in zip(items, elsewhere, strict=True) if not left]
    times.longest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tpu") and find_spec("libtpu") is None:
        pytest.skip("needs the tpu extra: libtpu")
    if times.left_out(item):
        pytest.skip("runs only with --products: other cases cover every pair of its values")


def quick_flags(config: pytest.Config) -> str:
    """Returns the flags for quick compilation that the installed XLA knows.

    XLA aborts the process at an unknown flag, so another process tries them, once per version of jaxlib. pytest's cache keeps
    the result.
    """
    key = f"tilewright/xla_flags_{version('jaxlib')}{''.join(QUICK_FLAGS)}"
    cache = getattr(config, "cache", None)  # missing under `-p no:cacheprovider`
    flags = None if cache is None else cache.get(key, None)
    if flags is None:
        flags = [flag for flag in QUICK_FLAGS if jax_starts_with(flag)]
        if cache is not None:
            cache.set(key, flags)
    return "".join(f" {flag}" for flag in flags)


def jax_starts_with(flag: str) -> bool:
    """Returns True if JAX starts in a process with this flag of XLA."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    env = os.environ | {"XLA_FLAGS": flag}
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


def resident_bytes() -> float:
    """Returns the resident memory of this process, infinity if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return float("inf")


def give_back_memory() -> None:
    """Returns freed memory to the system, which glibc otherwise keeps. No effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    """Stores compiled programs on disk for all workers and later sessions.

    JAX's keys have the program, its version and options; the name of the folder has the processor.
    """
    from tilewright.compiled.cache import digest, prune  # not before the import hook

    folder = KEPT / digest(os.environ["XLA_FLAGS"])
    if "PYTEST_XDIST_WORKER" not in os.environ or os.environ["PYTEST_XDIST_WORKER"] == "gw0":
        folder.mkdir(parents=True, exist_ok=True)
        prune(KEPT, KEPT_BYTES)
    values = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in values.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for processes that tests start


@pytest.fixture(scope="session", autouse=True)
def _programs_for_tpus(pytestconfig: pytest.Config) -> None:
    """Reads stored TPU programs instead of compiling them."""
    import tpu_programs  # not before the import hook

    tpu_programs.install(write=bool(pytestconfig.getoption("schedules")))


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Compiles as without `--optimised`, for tests whose results do not depend on optimisations."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
    """Drops programs after a module if the process is large: a worker's modules together would take several gigabytes."""
    yield
    if resident_bytes() > HELD_BYTES:
        jax.clear_caches()
        give_back_memory()  # else the process stays large, and every later module drops its programs too
