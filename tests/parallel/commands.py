"""Runs a `tilewright` command in several local processes, as docs/overlap.md describes it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from parallel.processes import SECONDS, TESTS, free_port
from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES


def environments(count: int, devices: int) -> list[dict[str, str]]:
    """The environment of each process, with `devices` CPU devices and quick compilation."""
    address = f"127.0.0.1:{free_port()}"
    common = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # XLA uses the last of several values.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "PYTHONPATH": str(TESTS.parent / "src"),
        COORDINATOR: address,
        PROCESSES: str(count),
    }
    return [{**common, INDEX: str(index)} for index in range(count)]


@contextmanager
def started(*words: object, count: int = 2, devices: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the command in each process; the first process has pipes. All processes have ended at the exit."""
    command = [sys.executable, "-m", "tilewright", *map(str, words)]
    with TemporaryFile("w") as discarded:
        processes = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if index == 0 else discarded,
                stderr=subprocess.PIPE if index == 0 else discarded,
                text=True,
            )
            for index, environment in enumerate(environments(count, devices))
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def run_together(*words: object, count: int = 2, devices: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs the command in each process until all have ended. Returns the output of the first process.

    The status is that of the first process, or of the first other one that failed.
    """
    with started(*words, count=count, devices=devices) as processes:
        out, err = processes[0].communicate(timeout=SECONDS)
        statuses = [process.wait(SECONDS) for process in processes]
    return subprocess.CompletedProcess(list(map(str, words)), next(filter(None, statuses), 0), out, err)
