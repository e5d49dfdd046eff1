"""Facts about the machine: CPU, number of cores, accelerator."""

import os
from pathlib import Path

import jax


def cpu_facts(*names: str) -> str | None:
    """Returns the first processor's entry in /proc/cpuinfo under one of these names; None if it has none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in facts if name.strip() in names), None)


NO_LOOPS = frozenset({"neuron"})
"""Platforms whose compiler rejects loops with a data-dependent trip count."""


def takes_loops() -> bool:
    """Returns True if the default device's compiler accepts loops with a data-dependent trip count."""
    return jax.default_backend() not in NO_LOOPS


def cores() -> int:
    """Returns the number of cores available to this process, which is also the size of XLA's thread pool."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chip_name() -> str:
    """Returns JAX's name of the device; for a CPU its model and the number of cores available to this process."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    return f"{cpu_facts('model name') or 'CPU'}, {cores()} cores"
