"""Errors that stop a run: a loss, or a gradient, that is no finite number.

A step tells of each group of parameters whether its gradient is finite, in a few bytes that stay on the device until the loop
reads them, some steps later and before anything is saved.
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
"""Under this name a step's metrics hold a `Finite`, which the loop takes out of them."""

IN_FLIGHT = 8
"""So many steps may be under way, or done, before the loop looks at the first of them."""

LISTED = 8
"""Number of groups that an error names before it only counts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Finite:
    """Flags that say whether a step's loss and gradient are finite numbers.

    Attributes:
        flags: of the loss, then of each group; in front the runs, where several train side by side.
        names: of the groups.
    """

    flags: Bool[Array, "*runs groups"]
    names: tuple[str, ...] = field(metadata={"static": True})


def group_of(path: Any) -> str:
    """The group of an array by its path: of a layer's, what it belongs to (`layers.3.gate_up`); else its own name."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    found = re.match(r".*?\b\d+\.\w+", name)
    return found[0] if found else name or "parameters"


def finite(loss: Array, gradient: Any) -> Finite:
    """Looks at a loss and its gradient, on the device."""
    groups: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        groups.setdefault(group_of(path), []).append(jnp.all(jnp.isfinite(leaf)))
    flags = [jnp.all(jnp.isfinite(loss)), *(jnp.all(jnp.stack(each)) for each in groups.values())]
    return Finite(jnp.stack(flags), tuple(groups))


class NotFiniteTraining(FloatingPointError):
    """A step whose loss or gradient is no finite number; its message names both, and where the run can go on."""


class Watch:
    """Reads the flags of steps when they are there."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Finite]] = deque()

    def note(self, step: int, found: Finite) -> None:
        """Takes the flags of a step, and looks at those of the steps that must be done by now.

        How many may wait is a number and no question of time: of several processes, all stop at the same step.

        Raises:
            NotFinite: one of them was not finite.
        """
        self.waiting.append((step, found))
        found.flags.copy_to_host_async()
        while len(self.waiting) > IN_FLIGHT:
            require_finite(*self.waiting.popleft())

    def settle(self) -> None:
        """Looks at all steps.

        Raises:
            NotFinite: one of them was not finite.
        """
        while self.waiting:
            require_finite(*self.waiting.popleft())


def require_finite(step: int, found: Finite) -> None:
    """Raises a `NotFiniteTraining` that names what is not."""
    flags: np.ndarray = np.asarray(found.flags).reshape(-1, len(found.names) + 1)
    if flags.all():
        return
    runs = "" if len(flags) == 1 else f" of run {', '.join(str(n + 1) for n in np.flatnonzero(~flags.all(1)))}"
    good: np.ndarray = np.all(flags, axis=0)
    bad = [name for name, one in zip(found.names, good[1:], strict=True) if not one]
    named = ", ".join(bad[:LISTED]) + (f" and {len(bad) - LISTED} more groups" if len(bad) > LISTED else "")
    gradients = "every gradient" if len(bad) > 1 and len(bad) == len(found.names) else f"the gradient of {named}"
    what = [*([] if good[0] else ["the loss"]), *([gradients] if bad else [])]
    raise NotFiniteTraining(f"step {step}{runs}: {' and '.join(what)} {'are' if len(what) > 1 else 'is'} not finite")
