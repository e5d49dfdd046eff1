"""The name of the machine that a figure was measured on."""

import os
from pathlib import Path

import jax


def chip_name() -> str:
    """The device as JAX names it; for a CPU its model and the number of cores that this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{models[0] if models else 'CPU'}, {cores} cores"
