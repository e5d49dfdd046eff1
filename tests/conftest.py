"""Settings of every test: eight CPU devices, strict dtypes, shape annotations checked, programs made quickly.

`--optimised` compiles them as users' programs are compiled, with optimisations that take XLA five times as long as all the rest
and that programs run for a millisecond do not pay back. `.ci/run` asks for it where the same answer is at stake.
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
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest
from hypothesis import settings

import times
import typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Programs hold no lines and paths of the source, so that one that is kept is known again in any checkout.
jax.config.update("jax_traceback_in_locations_limit", 0)

# A tenth or two of the tests' time goes there, so that `make test` leaves it to `.ci/run` and to whoever runs pytest.
if "TILEWRIGHT_UNCHECKED" not in os.environ:
    typecheck.install("tilewright")

# The same examples on every run and every machine; the first example of a property compiles, so no deadline.
settings.register_profile("tilewright", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("quick", settings.get_profile("tilewright"), max_examples=8)  # `make test`
settings.load_profile("tilewright")

KEPT = Path(__file__).parent.parent / "build" / "tests"
KEPT_BYTES = 4 << 30
"""How much of what was compiled is kept: what was written first goes first."""
HELD_BYTES = 3 << 30
"""How much memory a process may hold after a module, before it lets go of what was traced and compiled."""
QUICK_FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""XLA's MLIR emitters take most of the time of a compilation. JAX 0.10 can do without, 0.12 has no such flag. Code in one part
rather than in parts for 32 threads takes a tenth less. Tried without gain: XLA's FAST_COMPILE preset, and leaving out the
passes that move code out of loops and simplify them (rounds compile faster, prefills slower)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimised", action="store_true", help="compile programs with all of XLA's optimisations, as users do")
    parser.addoption("--schedules", action="store_true", help="keep programs for TPUs that are not kept yet")
    parser.addoption("--times", action="store_true", help="measure tests, and list anew those that `make test` leaves out")
    parser.addoption("--shard", type=times.shard, metavar="K/N", help="run the slow tests of part K of N only, and all others")
    parser.addoption("--products", action="store_true", help="run the cases of products that slow tests leave out, too")


def pytest_configure(config: pytest.Config) -> None:
    # Tracing makes objects by the million and hardly a cycle: Python's default looks for cycles a hundred times as often.
    gc.set_threshold(100_000, 20, 100)
    if config.getoption("times"):
        config.pluginmanager.register(times.Times(writes=not hasattr(config, "workerinput")))
    if not config.getoption("optimised"):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that tests start
        if not hasattr(config, "workerinput"):  # xdist's workers have them from the process that starts them
            os.environ["XLA_FLAGS"] += quick_flags(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before tests are chosen by their marks, and then again after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    listed = {} if config.getoption("times") else times.listed()
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
        pytest.skip("left out without --products: every two values that it has are together in another case")


def quick_flags(config: pytest.Config) -> str:
    """XLA's flags that make compiling quicker, of those that the installed XLA knows: it aborts the process at any other.

    So a process of its own is asked, once for each version of jaxlib: pytest's cache keeps the answer.
    """
    key = f"tilewright/xla_flags_{version('jaxlib')}{''.join(QUICK_FLAGS)}"
    cache = getattr(config, "cache", None)  # missing under `-p no:cacheprovider`
    known = None if cache is None else cache.get(key, None)
    if known is None:
        known = [flag for flag in QUICK_FLAGS if jax_starts_with(flag)]
        if cache is not None:
            cache.set(key, known)
    return "".join(f" {flag}" for flag in known)


def jax_starts_with(flag: str) -> bool:
    """Whether a process in which JAX is given a flag of XLA's gets as far as its devices."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    env = os.environ | {"XLA_FLAGS": flag}
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


def resident_bytes() -> float:
    """Memory that this process holds; infinity where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return float("inf")


def give_back_memory() -> None:
    """Returns freed memory to the system. glibc keeps most of it, and other C libraries have no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    """Programs are kept on disk, so that a test that needs one again, in any worker and any later session, reads it.

    JAX tells them apart by what they compute, its version and their options; the folder's name does so by the processor.
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
    """What libtpu takes long for is read from the folder where it is kept."""
    import tpu_programs  # not before the import hook

    tpu_programs.install(write=bool(pytestconfig.getoption("schedules")))


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """For tests of rules and not of numbers: as without `--optimised`."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
    """Programs of a whole worker's modules together would take several gigabytes; what fits spares others a second trace."""
    yield
    if resident_bytes() > HELD_BYTES:
        jax.clear_caches()
        give_back_memory()  # else the process would look as large as before, and every later module would trace all anew
