"""The Python blocks of docs/graph.md run, one after the other, and print what they promise."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_every_block_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """PyG's `Data` holds the arrays that it is given, as the stand-in does; `make oracle` reads PyG's own."""
    for name in ("torch_geometric", "torch_geometric.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torch_geometric.data"], "Data", SimpleNamespace, raising=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):  # JAX's default, which the other tests restrict
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert float(re.findall(r"test accuracy: (\S+)", printed)[0]) > 0.85
    assert float(re.findall(r"test AUC: (\S+)", printed)[0]) > 0.7
    assert re.search(r"4 batches of (one shape|2 shapes): 32 roots with fan-outs \[10, 10\]", printed)
    assert (names["classes"] == names["y"]).mean() > 0.85
    assert float(names["value"]) < 1.0
