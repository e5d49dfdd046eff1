"""Several processes that run one command together: how a process finds the others, and how it ends.

`tilewright launch` starts such processes on one machine; on a cluster whatever it has starts them, with `COORDINATOR` set to
`CLUSTER`. Nothing here imports JAX before it is needed.
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
"""Variables that tell a process of the others: where the first one listens, as host:port, their number, and its own."""

CLUSTER = "cluster"
"""Value of the coordinator by which JAX asks the cluster (Slurm, Open MPI, Cloud TPU, Kubernetes) for all three."""

SERVE = "serve"
"""The command of which the first process alone is asked; it tells the others what to run."""

TOGETHER = ("generate", SERVE, "bench overlap", "train lm", "train diffusion")
"""The commands whose work several processes can divide. They compute the same from the same arguments, and all the time."""


def check_command(arguments: Sequence[str]) -> None:
    """Raises a `ValueError` for a command that several processes cannot run together."""
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
    """Joins this process to the others that run the same command, before JAX is used.

    Raises:
        ValueError: they cannot run it together, or the environment does not say who they are.
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
    """A whole number of the environment. Raises a `ValueError` where it is none."""
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"expected a whole number in {name} beside {COORDINATOR}, found {value!r}")
    return int(value)


def keep_standard_output() -> None:
    """Leaves standard output to what Python prints: Gloo tells there who has connected, in the midst of the figures."""
    sys.stdout.flush()
    own = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    buffering = 1 if os.isatty(own) else -1
    sys.stdout = open(own, "w", buffering, sys.stdout.encoding, sys.stdout.errors)  # noqa: SIM115 (until the process ends)


def end_together(run: Callable[[], None]) -> None:
    """Runs a command and, if it fails, ends this process at once: JAX would wait for the others, which wait for it."""
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
