"""Commands that run in several processes: how a process finds the others, and how it ends.

A shell or a cluster's scheduler starts the same command once for each process (docs/overlap.md). JAX is imported late, because
its import takes a second.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

COORDINATOR = "TILEWRIGHT_COORDINATOR"
PROCESSES = "TILEWRIGHT_PROCESSES"
INDEX = "TILEWRIGHT_PROCESS"
"""Environment variables: host:port where the first process listens, the number of processes, and the index of this process."""

CLUSTER = "cluster"
"""Value of `COORDINATOR` that makes JAX find all three in the cluster (Slurm, Open MPI, Cloud TPU, Kubernetes)."""

SERVE = "serve"
"""Command that receives requests in the first process only, which sends every dispatch to the others."""

TOGETHER = ("generate", SERVE, "bench overlap", "train lm", "train lora", "train diffusion")
"""Commands that can run in several processes, which compute the same from the same arguments."""


def check_command(arguments: Sequence[str]) -> None:
    """Raises a `ValueError` for a command that cannot run in several processes."""
    expected = f"expected a command that processes can run together, {', '.join(map(repr, TOGETHER[:-1]))} or {TOGETHER[-1]!r}"
    if not arguments:
        raise ValueError(f"{expected}; found none")
    name = next((name for name in TOGETHER if list(arguments[: len(name.split())]) == name.split()), None)
    if name is not None:
        return
    found = " ".join(arguments[:2]) if arguments[0] in ("bench", "train") else arguments[0]
    near = get_close_matches(found, TOGETHER, 1)
    raise ValueError(f"{expected}; found {found!r}" + (f". Did you mean {near[0]!r}?" if near else ""))


def join(arguments: Sequence[str]) -> None:
    """Joins this process to the others of the same command, before JAX is used.

    Raises:
        ValueError: the command cannot run in several processes, or an environment variable is missing.
    """
    check_command(arguments)
    coordinator = os.environ[COORDINATOR]
    named: dict[str, Any] = {}
    if coordinator != CLUSTER:
        named = {"coordinator": coordinator, "processes": number(PROCESSES), "index": number(INDEX)}
    from tilewright.parallel.mesh import initialise_processes  # JAX takes a second to import

    keep_standard_output()
    initialise_processes(**named)


def number(name: str) -> int:
    """Reads a whole number from the environment. Raises a `ValueError` for other text."""
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"expected a whole number in {name} beside {COORDINATOR}, found {value!r}")
    return int(value)


def keep_standard_output() -> None:
    """Reserves standard output for Python: Gloo's messages about connections would stand among the figures."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    buffering = 1 if os.isatty(descriptor) else -1
    sys.stdout = open(descriptor, "w", buffering, sys.stdout.encoding, sys.stdout.errors)  # noqa: SIM115 (open until the process ends)


def end_together(run: Callable[[], None]) -> None:
    """Runs a command and, if it fails, ends this process at once: JAX would wait for the other processes at exit."""
    try:
        run()
        return
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
