"""The suite's own settings: flags of XLA's are asked for before they are used, and asked for once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jax._src.interpreters import mlir


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


def test_ten_programs_of_a_thread_share_a_context(conftest: Any):
    made = iter(range(9))
    lowering: Any = SimpleNamespace(make_ir_context=lambda: next(made))
    conftest.share_contexts(lowering)
    assert [lowering.make_ir_context() for _ in range(21)] == [*[0] * 10, *[1] * 10, 2]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lowering.make_ir_context).result() == 3
    assert lowering.make_ir_context() == 2


def test_jax_shares_contexts():
    """Whichever version; the first may be the last that is lowered with one."""
    contexts = [mlir.make_ir_context() for _ in range(5)]
    assert len({id(context) for context in contexts}) <= 2


class Kept(dict[str, Any]):
    """Stands for pytest's cache."""

    set = dict.__setitem__


def test_only_flags_under_which_jax_starts_are_used_and_the_answer_is_kept(conftest: Any, monkeypatch: pytest.MonkeyPatch):
    """XLA's library still names flags that it does not take: it aborts the process at them."""
    known, unknown = "--xla_force_host_platform_device_count=2", "--xla_cpu_no_such_flag=true"
    monkeypatch.setattr(conftest, "QUICK_FLAGS", (known, unknown))
    config: Any = type("Config", (), {"cache": Kept()})()
    assert conftest.quick_flags(config) == f" {known}"
    monkeypatch.setattr(conftest, "jax_starts_with", lambda _: pytest.fail("asked again"))
    assert conftest.quick_flags(config) == f" {known}"
