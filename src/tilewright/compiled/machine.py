"""The machine that a figure was measured on, or that a program was compiled for."""

import os
from pathlib import Path

import jax


def cpu_facts(*names: str) -> str | None:
    """Linux's fact on the first processor under the first of these names that it knows; None where it says nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in facts if name.strip() in names), None)


NO_LOOPS = frozenset({"neuron"})
"""Platforms whose compiler takes no loop whose length is data."""


def takes_loops() -> bool:
    """True if the default device's compiler takes loops whose length is data."""
    return jax.default_backend() not in NO_LOOPS


def cores() -> int:
    """Number of cores that this process may use, which is also the size of XLA's thread pool."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chip_name() -> str:
    """The device as JAX names it; for a CPU its model and the number of cores that this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    return f"{cpu_facts('model name') or 'CPU'}, {cores()} cores"
