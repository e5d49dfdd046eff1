"""Checks of losses and gradients: a run stops at the first one that is not finite.

Each step computes a flag per group of parameters on the device. The loop reads the flags some steps later, and before it saves
a checkpoint.
"""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

FINITE = "finite"
"""Key of the `Finite` in the metrics of a step; the loop removes it."""

IN_FLIGHT = 8
"""Steps that the loop dispatches before it reads the flags of the first one."""

LISTED = 8
"""Largest number of groups that an error message names."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Finite:
    """Flags of a step: True for a finite loss and for finite gradients.

    Attributes:
        flags: flag of the loss, then of each group; with a leading dimension for several runs.
        names: names of the groups.
    """

    flags: Bool[Array, "*runs groups"]
    names: tuple[str, ...] = field(metadata={"static": True})


def array_group(path: Any) -> str:
    """Returns the group of an array by its path: layer and operation (`layers.3.gate_up`), or the name outside layers."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    found = re.match(r".*?\b\d+\.\w+", name)
    return found[0] if found else name or "parameters"


def finite(loss: Array, gradient: Any) -> Finite:
    """Computes the flags of a loss and its gradient, on the device."""
    groups: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        groups.setdefault(array_group(path), []).append(jnp.all(jnp.isfinite(leaf)))
    flags = [jnp.all(jnp.isfinite(loss)), *(jnp.all(jnp.stack(each)) for each in groups.values())]
    return Finite(jnp.stack(flags), tuple(groups))


class NotFiniteTraining(FloatingPointError):
    """A loss or gradient that is not finite; the message names the arrays and the last checkpoint."""


class Watch:
    """Reads the flags of steps with a delay, so that the loop need not wait for the device."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Finite]] = deque()

    def note(self, step: int, found: Finite) -> None:
        """Adds the flags of a step, and checks the flags of older steps.

        The delay is a number of steps, not a time, so that all processes stop at the same step.

        Raises:
            NotFiniteTraining: a loss or gradient was not finite.
        """
        self.waiting.append((step, found))
        found.flags.copy_to_host_async()
        while len(self.waiting) > IN_FLIGHT:
            require_finite(*self.waiting.popleft())

    def check_all(self) -> None:
        """Checks the flags of all steps.

        Raises:
            NotFiniteTraining: a loss or gradient was not finite.
        """
        while self.waiting:
            require_finite(*self.waiting.popleft())


def require_finite(step: int, found: Finite) -> None:
    """Raises a `NotFiniteTraining` that names all arrays that are not finite."""
    flags: np.ndarray = np.asarray(found.flags).reshape(-1, len(found.names) + 1)
    if flags.all():
        return
    runs = "" if len(flags) == 1 else f" of run {', '.join(str(n + 1) for n in np.flatnonzero(~flags.all(1)))}"
    good: np.ndarray = np.all(flags, axis=0)
    bad = [name for name, one in zip(found.names, good[1:], strict=True) if not one]
    named = ", ".join(bad[:LISTED]) + (f" and {len(bad) - LISTED} more groups" if len(bad) > LISTED else "")
    gradients = "every gradient" if len(bad) > 1 and len(bad) == len(found.names) else f"the gradient of {named}"
    culprits = [*([] if good[0] else ["the loss"]), *([gradients] if bad else [])]
    raise NotFiniteTraining(f"step {step}{runs}: {' and '.join(culprits)} {'are' if len(culprits) > 1 else 'is'} not finite")
