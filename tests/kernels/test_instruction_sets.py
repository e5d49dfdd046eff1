"""Every instruction set passes the same checks, and gives the same bits where sums are exact."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tilewright.kernels import build, native

HERE = Path(__file__).parent
ORDER = build.ISAS
"""Instruction sets in the order of `isa.h`: a machine has those up to its best."""
BEST = native.kernels().isa
NEED = pytest.mark.skipif(BEST is None, reason=native.kernels().reason or "no kernels")
EMULATED = "amx, emulated"


def here(isa: str) -> bool:
    """Returns True if this machine runs an instruction set; the emulation replaces only the tile unit."""
    least = "avx512bf16" if isa == EMULATED else isa
    return BEST is not None and ORDER.index(least) <= ORDER.index(BEST)


def environment(isa: str) -> dict[str, str]:
    paths = os.pathsep.join([str(Path(native.__file__).parents[2]), str(HERE.parent)])
    one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"  # the last one counts
    return {**os.environ, "TILEWRIGHT_CPU_ISA": isa, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_device, "PYTHONPATH": paths}


@pytest.fixture(scope="module")
def every_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with libraries for all instruction sets, as an installation has; first use compiles this machine's best alone."""
    compiler = build.find_compiler()
    folder = tmp_path_factory.mktemp("every")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    build.build_all(Path(jax.ffi.include_dir()), compiler, folder)
    return folder


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, every_set: Path):
    """Runs the checks on an instruction set, once; the digest of its products in 8 bits."""

    @functools.cache
    def run(isa: str) -> str:
        env = environment(isa.split(",")[0]) | {"TILEWRIGHT_CACHE": str(every_set)}
        arguments = [isa.split(",")[0]]
        if isa == EMULATED:
            env["TILEWRIGHT_CACHE"] = str(tmp_path_factory.mktemp("emulated"))
            arguments.append(str(HERE / "amx_tiles.h"))
        command = [sys.executable, str(HERE / "linear_checks.py"), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    return run


@NEED
@pytest.mark.slow(seconds=32)  # this machine's best set is under test everywhere; who changes C++ asks for these
@pytest.mark.parametrize("isa", [*ORDER, EMULATED])
def test_every_instruction_set_passes_the_same_checks(isa: str, checked):
    if not here(isa):
        pytest.skip(f"this machine has {BEST}")
    assert checked(isa) == checked("plain"), "products in 8 bits are the same bit for bit"


@pytest.fixture(scope="module")
def graphs_checked(every_set: Path):
    """Runs the checks of the graphs' kernels on an instruction set, once: digests of what has no products, and of all."""

    @functools.cache
    def run(isa: str, **settings: str) -> list[str]:
        env = environment(isa) | {"TILEWRIGHT_CACHE": str(every_set)} | settings
        command = [sys.executable, str(HERE / "test_gather_reduce_cpu.py"), isa]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    return run


@NEED
@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set_passes_the_checks_of_graphs(isa: str, graphs_checked):
    if not here(isa):
        pytest.skip(f"this machine has {BEST}")
    assert graphs_checked(isa)[0] == graphs_checked(ORDER[0])[0], "without products, results are the same bit for bit"


@NEED
@pytest.mark.slow(seconds=15)
def test_results_for_graphs_do_not_depend_on_the_number_of_threads(graphs_checked):
    # What XLA compiles depends on the number, and what is kept of it is not told apart by that.
    one, five = (graphs_checked(BEST, NPROC=threads, JAX_ENABLE_COMPILATION_CACHE="0") for threads in ("1", "5"))
    assert one == five


@NEED
@pytest.mark.parametrize("isa", ["avx1024", *ORDER[ORDER.index(BEST) + 1 :]])
def test_an_instruction_set_that_is_not_there_is_not_replaced(isa: str):
    program = "from tilewright.kernels import native; native.kernels()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(isa), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = "to name an instruction set of this machine" if isa in ORDER else "to be one of"
    assert f"ValueError: expected TILEWRIGHT_CPU_ISA {expected}" in done.stderr
    assert repr(isa) in done.stderr


def test_the_order_is_that_of_the_kernels():
    names = ", ".join(f'"{name}"' for name in ORDER)
    assert f"isa_names[] = {{{names}}};" in (build.HERE / "isa.h").read_text()
