"""Schedules over two processes of two devices each, with Gloo between them: logits and gradients of a whole pass."""

from pathlib import Path

import pytest

from parallel.processes import run_two


@pytest.mark.parametrize("what", ["forward", pytest.param("gradient", marks=pytest.mark.slow)])
def test_two_processes_give_what_one_device_does(monkeypatch: pytest.MonkeyPatch, what: str):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    said = run_two(Path(__file__).with_name("strategies_process.py"), what)
    for name in ("sync", "sequence", "ring", "domino"):
        assert all(f"{name} equal to one device" in text for text in said), "\n".join(said)
