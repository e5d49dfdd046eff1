"""Import directions between packages, forbidden modules, swallowed errors, and a test folder for each package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tilewright"
TESTS = ROOT / "tests"

IMPORTS: dict[str, set[str]] = {
    "hardware": set(),
    "metrics": set(),
    "report": {"metrics"},
    "compiled": {"hardware", "metrics"},
    "kernels": {"compiled"},
    "parallel": {"kernels"},
    "models": {"kernels"},
    "runtime": {"models", "parallel"},
    "graph": {"models", "parallel"},
    "speculation": {"runtime"},
    "diffusion": {"runtime"},
    "grammar": {"runtime"},
    "llm": {"speculation", "diffusion", "grammar"},
    "train": {"llm", "graph"},
    "server": {"llm", "metrics"},
    "perfmodel": {"hardware", "compiled"},
    "__init__": {"llm"},
}
"""What each package may import, and through it whatever those may import. `__init__` is the package's own file."""

EVERYTHING = set(IMPORTS) | {"bench", "server", "cli", "__main__"}
IMPORTS["bench"] = EVERYTHING - {"server", "cli", "__main__"}
IMPORTS["cli"] = EVERYTHING
IMPORTS["__main__"] = {"cli"}

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch", "transformers", "__future__"}
"""Checkpoints are never code, the base install has no torch, and postponed annotations would escape the shape checks."""

IMPLEMENTATIONS = {"cpu", "xla", "pallas_tpu", "nki", "reference"}
"""Files of an operation's folder that compute it: `kernels/registry.py` picks one, `kernels/select.py` hands it out."""

IMPORTERS = {}
"""Files that import an implementation all the same, and why."""


@cache
def parsed(text: str) -> ast.Module:
    """A file's tree. Several tests look at every file, and parsing takes longer than the checks."""
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_let_go() -> Iterator[None]:
    yield
    parsed.cache_clear()


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def reachable(name: str) -> set[str]:
    """All that a package may import: its row, and the rows of what stands in it."""
    seen: set[str] = set()
    waiting = {name}
    while waiting:
        new = waiting.pop()
        seen.add(new)
        waiting |= IMPORTS[new] - seen
    return seen


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import, anywhere: `a.b` for `from a import b`, a leading dot for a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_problems(package: str, text: str) -> list[str]:
    """What a file of `package` imports and may not."""
    allowed = reachable(package)
    problems = []
    for line, name in imported(parsed(text)):
        parts = name.split(".")
        if name.startswith("."):
            problems.append(f"{line}: relative import {name}")
        elif parts[0] in FORBIDDEN_MODULES:
            problems.append(f"{line}: imports {parts[0]}")
        elif parts[0] == "tilewright":
            inner = parts[1] if len(parts) > 1 and parts[1] in EVERYTHING else "__init__"
            if inner not in allowed:
                problems.append(f"{line}: {package} imports {inner}")
    return problems


def documented_imports(text: str) -> dict[str, set[str]]:
    """The table of imports in `docs/structure.md`, by package."""
    rows = re.search(r"\| package \| imports \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text)
    assert rows, "docs/structure.md has no table with the columns package and imports"
    table: dict[str, set[str]] = {}
    for row in rows[1].splitlines():
        packages, imports = (set(re.findall(r"`(\w+)`", cell)) for cell in row.strip("|").split("|"))
        if "any" in row.split("|")[2]:
            imports = EVERYTHING - imports - ({"__main__"} if imports else set())
        table |= dict.fromkeys(packages, imports)
    return table


def imported_implementations(text: str) -> list[str]:
    """The implementations of operations that a file imports, as `linear.cpu`, and bundles of them, as `bundles.tpu`."""
    modules = [re.match(r"tilewright\.kernels\.((\w+)\.(\w+))", name) for _, name in imported(parsed(text))]
    return sorted({match[1] for match in modules if match and (match[2] == "bundles" or match[3] in IMPLEMENTATIONS)})


def construct_problems(text: str) -> list[str]:
    """Constructs that hide errors, read code from data, or promise work instead of doing it."""
    problems = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                problems.append(f"{node.lineno}: bare except")
            if all(isinstance(inner, ast.Pass) or is_ellipsis(inner) for inner in node.body):
                problems.append(f"{node.lineno}: an exception is swallowed")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_false(node.value):
            problems.append(f"{node.value.lineno}: allow_pickle")
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            problems.append(f"{number}: unfinished work")
    return problems


def is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_imports_run_one_way():
    problems = []
    for path in sources(PACKAGE):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package not in IMPORTS:
            problems.append(f"{shown(path)}: {package} has no row in the table of imports")
            continue
        problems += [f"{shown(path)}:{problem}" for problem in import_problems(package, path.read_text(encoding="utf-8"))]
    assert not problems, "\n".join(problems)


def test_the_table_has_no_cycle():
    for package, row in IMPORTS.items():
        for inner in row - {package}:
            assert package in ("cli", "__main__") or package not in reachable(inner), f"{package} and {inner} import each other"


def test_the_documented_table_is_the_enforced_one():
    assert documented_imports((ROOT / "docs" / "structure.md").read_text(encoding="utf-8")) == IMPORTS


def test_only_the_dispatcher_imports_implementations():
    found = {}
    for path in sources(PACKAGE):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("kernels/"):
            found[name] = imported_implementations(path.read_text(encoding="utf-8"))
    problems = [f"{name} imports {', '.join(modules)}" for name, modules in found.items() if modules and name not in IMPORTERS]
    problems += [f"{name}: the exception is not needed" for name in IMPORTERS if not found.get(name)]
    assert not problems, "\n".join(problems)


def test_no_swallowed_errors_and_no_promises():
    files = sources(PACKAGE)
    assert files
    problems = [
        f"{shown(path)}:{problem}" for path in files for problem in construct_problems(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


def test_test_folders_mirror_packages():
    packages = {path.relative_to(PACKAGE).parts[0] for path in sources(PACKAGE) if path.parent != PACKAGE}
    untested = [p for p in sorted(packages) if not any((TESTS / p).rglob("test_*.py"))]
    assert not untested, f"packages without a test in tests/<package>/: {', '.join(untested)}"


@pytest.mark.parametrize(
    ("package", "text", "problem"),
    [
        ("models", "from tilewright.runtime.state import State", "models imports runtime"),
        ("models", "def f():\n    import tilewright.train.loop", "models imports train"),
        ("models", "from tilewright import bench", "models imports bench"),
        ("runtime", "import tilewright as tw", "runtime imports __init__"),
        ("bench", "from tilewright.cli import main", "bench imports cli"),
        ("report", "from tilewright.compiled.ledger import Ledger", "report imports compiled"),
        ("models", "from .layers import linear", "relative import"),
        ("train", "import torch.nn as nn", "imports torch"),
        ("train", "from pickle import loads", "imports pickle"),
        ("train", "from __future__ import annotations", "imports __future__"),
    ],
)
def test_a_forbidden_import_is_seen(package: str, text: str, problem: str):
    (found,) = import_problems(package, text)
    assert problem in found


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("models", "import jax\nfrom tilewright.models import layers\nfrom tilewright.hardware.spec import Chip"),
        ("train", "from tilewright.runtime.state import State\nfrom tilewright.kernels.select import pick"),
        ("cli", "import tilewright as tw\nfrom tilewright.server.app import app"),
        ("__init__", "from tilewright.llm import stream\nfrom tilewright.models.decoder import Layer"),
    ],
)
def test_an_import_that_the_table_allows_passes(package: str, text: str):
    assert import_problems(package, text) == []


def test_documented_imports_are_read():
    text = "| package | imports |\n|---|---|\n| `a`, `b` | nothing |\n| `c` | `a`, `b` |\n| `cli` | any |\n"
    assert documented_imports(text) == {"a": set(), "b": set(), "c": {"a", "b"}, "cli": EVERYTHING}
    assert documented_imports(text.replace("any", "any but `cli`"))["cli"] == EVERYTHING - {"cli", "__main__"}


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("from tilewright.kernels.linear.cpu import pack", ["linear.cpu"]),
        ("from tilewright.kernels.linear import cases, xla", ["linear.xla"]),
        ("def f():\n    import tilewright.kernels.attention.pallas_tpu", ["attention.pallas_tpu"]),
        ("from tilewright.kernels.bundles import training", ["bundles.training"]),
        ("from tilewright.kernels.select import linear\nfrom tilewright.kernels.linear import cases", []),
    ],
)
def test_an_imported_implementation_is_seen(text: str, modules: list[str]):
    assert imported_implementations(text) == modules


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("try:\n    f()\nexcept:\n    raise", "bare except"),
        ("try:\n    f()\nexcept OSError:\n    pass", "swallowed"),
        ("try:\n    f()\nexcept OSError:\n    ...", "swallowed"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("np.load(path, allow_pickle=flag)", "allow_pickle"),
        ("x = 1  # " + "TO" + "DO: more", "unfinished"),
    ],
)
def test_a_forbidden_construct_is_seen(text: str, problem: str):
    (found,) = construct_problems(text)
    assert problem in found
