"""`tilewright launch`: a command in several processes on this machine, which work on it together."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from cyclopts import Parameter

from tilewright.cli.processes import COORDINATOR, INDEX, PROCESSES, SERVE, check_command

FORCED_DEVICES = "--xla_force_host_platform_device_count"

GRACE_S = 5.0
"""Seconds that the others may go on after one has failed: they may be about to say the same."""

STOP_S = 1.0
"""Seconds that a process has to end when it is asked to."""

LINES = 40
"""The last lines on standard error that are kept of each process but the first."""


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    processes: Annotated[int, Parameter(name=("--processes", "-n"))] = 2,
    devices_per_process: int = 1,
) -> None:
    """Runs a command in several processes on this machine, which divide its work, to try that out without a cluster.

    The first process prints, writes files and serves. Exit status: that of the first to fail, and all others are stopped then.
    They compute on CPUs, unless JAX_PLATFORMS says otherwise.

    Args:
        command: what to run, behind "--": launch -n 2 --devices-per-process 2 -- generate --tensor-parallel 4 "def f".
        processes: how many.
        devices_per_process: so many CPU devices for each.
    """
    for option, value in (("--processes", processes), ("--devices-per-process", devices_per_process)):
        if value < 1:
            raise ValueError(f"expected {option} from 1, found {value}")
    if COORDINATOR in os.environ:
        raise ValueError(f"expected to start the processes, found {COORDINATOR} set: this is one of some already")
    check_command(command)
    port = free_port()
    environments = [environment(port, processes, index, devices_per_process) for index in range(processes)]
    stdin = None if sys.stdin.isatty() else sys.stdin.fileno()
    status = run_all([sys.executable, "-m", "tilewright", *command], environments, stdin, serving=command[0] == SERVE)
    if status:
        sys.exit(status)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(port: int, processes: int, index: int, devices: int) -> dict[str, str]:
    """Of one process."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(FORCED_DEVICES)]
    return {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        "XLA_FLAGS": " ".join([*flags, f"{FORCED_DEVICES}={devices}"]),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",  # JAX's own default listens to the network
        COORDINATOR: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        INDEX: str(index),
    }


def run_all(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], stdin: int | None = None, serving: bool = False
) -> int:
    """Runs a command once in each environment and returns 0, or the status of the first process that failed.

    None of them is left running, whatever happens.

    Args:
        stdin: a file whose content all get as their standard input.
        serving: the first signal goes to the first process, which lets requests end; once that one has ended, so have all.
    """
    group = ProcessGroup(stdin)
    try:
        with stopped_by_signals(group if serving else None):
            for each in environments:
                group.start(command, each)
            group.feed()
            return group.wait(first_ends=serving)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        group.stop()


@contextmanager
def stopped_by_signals(serving: "ProcessGroup | None" = None) -> Iterator[None]:
    """Within, a signal that ends this process raises `SystemExit` first, so that the others are ended too.

    Args:
        serving: processes of which the first one is told instead, by the first signal.
    """
    told: list[int] = []

    def end(number: int, _: Any) -> None:
        if serving is None or told or not serving.running:
            raise SystemExit(128 + number)
        told.append(number)
        serving.running[0].terminate()

    names = [signal.SIGTERM, signal.SIGHUP, *([] if serving is None else [signal.SIGINT])]
    if threading.current_thread() is not threading.main_thread():
        names = []
    before = {name: signal.signal(name, end) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class ProcessGroup:
    """Processes that run together.

    Attributes:
        running: all of them, in their order, ended or not.
        ended: the index of each, as it ends.
        said: the last lines that each said on standard error; the first one's go where this process's do.
        stdin: what all get as their standard input; None for nothing.
    """

    def __init__(self, stdin: int | None) -> None:
        self.stdin = stdin
        self.running: list[subprocess.Popen[bytes]] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.said: list[deque[bytes]] = []
        self.threads: list[threading.Thread] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the next one, in a session of its own: what a terminal sends on Ctrl-C comes to this process alone."""
        index = len(self.running)
        first = not self.running
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL if self.stdin is None else subprocess.PIPE,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            start_new_session=True,
        )
        self.running.append(process)
        self.said.append(deque(maxlen=LINES))
        self.threads.append(threading.Thread(target=self.watch, args=(index,), daemon=True))
        self.threads[-1].start()

    def watch(self, index: int) -> None:
        """Waits for a process, and keeps what it says."""
        process = self.running[index]
        if process.stderr is not None:
            with process.stderr:
                self.said[index].extend(process.stderr)
        process.wait()
        self.ended.put(index)

    def feed(self) -> None:
        """Begins to give all what they get as their standard input; one that reads nothing may keep it from the others."""
        if self.stdin is not None:
            threading.Thread(target=self.copy, args=(self.stdin,), daemon=True).start()

    def copy(self, source: int) -> None:
        inputs = [process.stdin for process in self.running if process.stdin is not None]
        while text := os.read(source, 1 << 16):
            for each in tuple(inputs):
                try:
                    each.write(text)
                    each.flush()
                except (BrokenPipeError, ValueError):  # it has ended
                    inputs.remove(each)
        for each in inputs:
            each.close()

    def wait(self, first_ends: bool = False) -> int:
        """Waits until all have ended, or one has failed; says which. Returns the status as a shell has it.

        Args:
            first_ends: the first one's end is that of all; the others have `GRACE_S` for theirs.
        """
        for _ in self.running:
            index = self.ended.get()
            if self.running[index].returncode:
                return self.failed(index)
            if first_ends and index == 0:
                self.let_end()
                return 0
        return 0

    def let_end(self) -> None:
        """Waits for those that run, but not for long."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(process.poll() is None for process in self.running):
            time.sleep(0.02)

    def failed(self, index: int) -> int:
        """Says what a process said that failed, unless the first one says the same; what that one says is read already.

        JAX ends the others of a first process that has failed, whatever they were about to say.
        """
        status = self.status(index)
        self.let_end()
        told = index == 0 and self.running[index].returncode > 0
        if not told and any(process.returncode is None or self.status(n) != status for n, process in enumerate(self.running)):
            for line in self.said[index]:
                print(f"[{index}] {line.decode(errors='replace').rstrip()}", file=sys.stderr)
            print(f"process {index} ended with status {status}, and the others are stopped", file=sys.stderr)
        return status

    def status(self, index: int) -> int:
        """Exit status in a shell's terms: of a process that a signal has ended, 128 and its number."""
        code = self.running[index].returncode
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Ends whatever runs."""
        for process in self.running:
            process.terminate()
        until = time.monotonic() + STOP_S
        for process in self.running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self.threads:
            thread.join()
        for process in self.running:
            if process.stdin is not None:
                process.stdin.close()
