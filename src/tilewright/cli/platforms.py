"""Choice of JAX's platforms. JAX reads the choice at its import, so this module does not import JAX."""

import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""PCI vendor id of Google."""
NO_TPU = ("0x01", "0x02")
"""PCI classes of Google's other devices in virtual machines: disks and network cards."""


def tpu_is_here() -> bool:
    """True if the PCI bus has a TPU, or an environment variable announces one."""
    if any(name.startswith("TPU_") or name == "JAX_FORCE_TPU_INIT" for name in os.environ):
        return True
    google = (path.parent for path in PCI_DEVICES.glob("*/vendor") if path.read_text().strip() == GOOGLE)
    return any(not (device / "class").read_text().startswith(NO_TPU) for device in google)


def leave_tpus_out() -> None:
    """Restricts JAX to CPUs if libtpu is installed and there is no TPU, because libtpu would take seconds to fail.

    `JAX_PLATFORMS` of the user takes precedence. Nothing changes if JAX has a plugin for another accelerator.
    """
    if "JAX_PLATFORMS" in os.environ or find_spec("libtpu") is None or tpu_is_here():
        return
    if find_spec("jax_plugins") is None and not entry_points(group="jax_plugins"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def platforms_not_here() -> str | None:
    """Returns the user's `JAX_PLATFORMS` if JAX was imported and finds no device of them, otherwise None."""
    platforms = os.environ.get("JAX_PLATFORMS")
    jax = sys.modules.get("jax")
    if not platforms or jax is None:
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError):  # CUDA without its plugin raises an AssertionError
        return platforms
    return None
