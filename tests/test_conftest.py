"""The suite's own settings: flags of XLA's are asked for before they are used, and once; freed memory is given back."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


class Kept(dict[str, Any]):
    """Stands for pytest's cache."""

    set = dict.__setitem__


def test_only_flags_under_which_jax_starts_are_used_and_the_answer_is_kept(conftest: Any, monkeypatch: pytest.MonkeyPatch):
    """XLA's library still names flags that it does not take: it aborts the process at them."""
    known = "--xla_force_host_platform_device_count=2"
    unknown = "--xla_cpu_no_such_flag=true"
    monkeypatch.setattr(conftest, "QUICK_FLAGS", (known, unknown))
    config: Any = type("Config", (), {"cache": Kept()})()
    assert conftest.quick_flags(config) == f" {known}"
    monkeypatch.setattr(conftest, "jax_starts_with", lambda _: pytest.fail("asked again"))
    assert conftest.quick_flags(config) == f" {known}"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_memory_that_is_free_is_given_back(conftest: Any):
    """Also where what was allocated last is still in use, which keeps all before it in the process."""
    blocks = [np.ones(8000) for _ in range(3000)]
    full = conftest.resident_bytes()
    last = blocks.pop()
    blocks.clear()
    conftest.give_back_memory()
    assert conftest.resident_bytes() < full - 100e6
    assert last.all()
