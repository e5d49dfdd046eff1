"""The threads that help with a kernel's work, under the thread sanitizer where the compiler has it."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tilewright.kernels import build

HERE = Path(__file__).parent


@pytest.mark.parametrize("options", [["-O2"], ["-O1", "-g1", "-fsanitize=thread"]], ids=["plain", "thread sanitizer"])
def test_each_piece_runs_once_whoever_calls(options: list[str], tmp_path: Path):
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    empty = tmp_path / "empty.cc"
    output = tmp_path / "helpers"
    empty.write_text("int main() { return 0; }\n")
    command = [*shlex.split(compiler), "-std=c++17", "-pthread", *options]
    probe = subprocess.run([*command, empty, "-o", output], capture_output=True, text=True, check=False)
    if probe.returncode != 0 or subprocess.run([output], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} cannot build with {' '.join(options)}")
    subprocess.run([*command, HERE / "helpers.cc", "-o", output], check=True)
    done = subprocess.run([output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 0
