"""Where libtpu is installed without a TPU, JAX is not to look for one; elsewhere it is left alone."""

import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tilewright.cli import platforms


def add_device(bus: Path, vendor: str, kind: str) -> None:
    device = bus / f"0000:00:{len(list(bus.iterdir())):02}.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PCI bus of a virtual machine at Google, with libtpu installed: a disk, a network card, a bridge of another maker."""
    monkeypatch.setattr(platforms, "PCI_DEVICES", tmp_path)
    for vendor, kind in ((platforms.GOOGLE, "0x010802"), (platforms.GOOGLE, "0x020000"), ("0x8086", "0x060000")):
        add_device(tmp_path, vendor, kind)
    for name in [name for name in os.environ if name.startswith(("TPU_", "JAX_"))]:
        monkeypatch.delenv(name)
    install("libtpu", monkeypatch)
    monkeypatch.setattr(platforms, "entry_points", lambda group: [])
    monkeypatch.setenv("JAX_PLATFORMS", "as it was")  # so that it is put back
    monkeypatch.delenv("JAX_PLATFORMS")
    return tmp_path


def install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "find_spec", lambda name: ModuleSpec(name, None) if name == module else None)


def chosen() -> str | None:
    platforms.leave_tpus_out()
    return os.environ.get("JAX_PLATFORMS")


def test_without_a_tpu_only_cpus_are_looked_for(bus: Path):
    assert chosen() == "cpu"


def test_a_tpu_on_the_bus_is_found(bus: Path):
    add_device(bus, platforms.GOOGLE, "0x088000")
    assert chosen() is None


@pytest.mark.parametrize("variable", ["TPU_WORKER_ID", "TPU_LIBRARY_PATH", "JAX_FORCE_TPU_INIT"])
def test_an_environment_that_speaks_of_a_tpu_is_believed(bus: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.setenv(variable, "0")
    assert chosen() is None


def test_the_users_platforms_stay(bus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert chosen() == "tpu,cpu"


def test_other_accelerators_stay(bus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platforms, "entry_points", lambda group: ["cuda"])
    assert chosen() is None


def test_without_libtpu_nothing_is_set(bus: Path, monkeypatch: pytest.MonkeyPatch):
    install("nothing", monkeypatch)
    assert chosen() is None
