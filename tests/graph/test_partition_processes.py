"""Two processes of two devices each, with Gloo between them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("partition_process.py")
SECONDS = 240


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_reach_what_one_device_does():
    coordinator = f"127.0.0.1:{free_port()}"
    source = str(Path(__file__).parents[2] / "src")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [sys.executable, str(SCRIPT), coordinator]
    processes = [
        subprocess.Popen([*command, str(n)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for n in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert all("equal to one device" in text for text in said), "\n".join(said)
