"""The CPU kernels' own test program, under the address and the undefined-behaviour sanitizer, on every instruction set."""

import os
import shlex
import subprocess
from pathlib import Path

import jax
import pytest

from kernels.test_instruction_sets import BEST, ORDER
from tilewright.kernels import build

pytestmark = pytest.mark.slow(seconds=20)  # compiles every kernel
HERE = Path(__file__).parent
# Without optimisation, which would take the compiler three times as long and leave out accesses that the sanitizers could see.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0", "-g1", "-pthread"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, with the emulated tile unit."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    empty = folder / "empty.cc"
    output = folder / "sanitize"
    empty.write_text("int main() { return 0; }\n")
    command = [*shlex.split(compiler), *SANITIZERS]
    probe = subprocess.run([*command, empty, "-o", output], capture_output=True, text=True, check=False)
    if probe.returncode != 0 or subprocess.run([output], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no such sanitizers")
    options = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC", "-shared")]
    options += ["-isystem", jax.ffi.include_dir(), f'-DTILEWRIGHT_AMX_TILES="{HERE / "amx_tiles.h"}"']
    subprocess.run([*command, *options, HERE / "sanitize.cc", "-o", output], check=True)
    return output


@pytest.mark.parametrize("isa", ORDER)
def test_the_kernels_stay_within_their_buffers(isa: str, program: Path):
    env = {**os.environ, "TILEWRIGHT_CPU_ISA": isa, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    if done.stdout.strip() != isa:
        pytest.skip(f"this machine has {BEST}")
