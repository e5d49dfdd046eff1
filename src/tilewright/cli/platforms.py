"""Which platforms JAX shall look for. It reads that when it is imported, so nothing here imports it."""

import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""Google's number as a maker of PCI devices."""
NO_TPU = ("0x01", "0x02")
"""PCI classes of the other devices that Google's virtual machines have: disks and network cards."""


def tpu_is_here() -> bool:
    """True if there is a TPU on the PCI bus, or the environment speaks of one."""
    if any(name.startswith("TPU_") or name == "JAX_FORCE_TPU_INIT" for name in os.environ):
        return True
    google = (path.parent for path in PCI_DEVICES.glob("*/vendor") if path.read_text().strip() == GOOGLE)
    return any(not (device / "class").read_text().startswith(NO_TPU) for device in google)


def leave_tpus_out() -> None:
    """Has JAX look for CPUs alone where libtpu is installed and there is no TPU: libtpu complains, and takes seconds.

    The user's own `JAX_PLATFORMS` stays, and so does everything where JAX has a plugin for another accelerator.
    """
    if "JAX_PLATFORMS" in os.environ or find_spec("libtpu") is None or tpu_is_here():
        return
    if find_spec("jax_plugins") is None and not entry_points(group="jax_plugins"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def platforms_not_here() -> str | None:
    """The user's own `JAX_PLATFORMS`, where JAX was imported and finds no device of theirs; None else."""
    platforms = os.environ.get("JAX_PLATFORMS")
    jax = sys.modules.get("jax")
    if not platforms or jax is None:
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError):  # the latter of CUDA without its plugin
        return platforms
    return None
