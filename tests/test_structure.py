"""The house rules that a machine can hold: import direction, sizes, forbidden modules and constructs, mirrored test folders."""

import ast
import re
from collections import Counter
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

IMPORTERS = {
    "bench/bandwidth.py": "measures what reading alone can do, and calls the kernel for it",
    "bench/linear.py": "measures the implementations against each other",
}
"""Who imports an implementation all the same, and why."""

UNUSED = {
    "contains_shape": "what tests of compiled programs ask, defined beside the arrays that it looks through",
    **dict.fromkeys(("capture_signals", "startup", "on_response_complete", "send_400_response"), "uvicorn calls it"),
    **dict.fromkeys(("connection_made", "connection_lost", "data_received", "eof_received"), "asyncio calls it"),
    **dict.fromkeys(("pause_writing", "resume_writing"), "asyncio calls it"),
}
"""Functions and classes of the package that nothing in it names, and why they stay."""

SHARED_NAMES: dict[str, str] = {}
"""Names of classes that two files define, and why that confuses nobody. An entry that is not needed any more is an error."""

LONG_FILES: dict[str, int] = {}
"""Files above the cap, with the number of lines granted to each. An entry that is not needed any more is an error."""

LONG_FUNCTIONS: dict[str, int] = {}
"""Functions of the package above the cap, with the lines granted to each (docstring and inner functions included)."""


@cache
def parsed(text: str) -> ast.Module:
    """A file's tree. Six tests look at every file, and parsing takes longer than what they look for."""
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_let_go() -> Iterator[None]:
    yield
    parsed.cache_clear()


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def caps(name: str) -> tuple[int, int]:
    """Largest number of lines of a file and of a function."""
    return (800, 120) if name.startswith("src/tilewright/kernels/") else (500, 50)


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
    allowed, problems = reachable(package), []
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


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that code mentions: variables, attributes, imports, keywords, and words in short strings (`getattr`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            yield from re.findall(r"\w+", node.value)


def unnamed(trees: list[ast.Module], elsewhere: set[str]) -> set[str]:
    """Functions, methods and classes of `trees` that neither these, outside of their own definition, nor `elsewhere` name."""
    named = Counter(name for tree in trees for name in names_in(tree))
    own: Counter[str] = Counter()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("__"):
                own[node.name] += list(names_in(node)).count(node.name)
    return {name for name in own if named[name] <= own[name]} - elsewhere


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


def public_classes(tree: ast.Module) -> list[str]:
    """Names of the classes that a file defines, as others may import them."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def function_lengths(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines of every function, inner ones and methods included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, (node.end_lineno or node.lineno) - node.lineno + 1
            yield from function_lengths(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from function_lengths(node, f"{prefix}{node.name}.")
        else:
            yield from function_lengths(node, prefix)


def size_problems(sizes: dict[str, int], cap: dict[str, int], granted: dict[str, int]) -> list[str]:
    """What is longer than it may be, and exceptions that are not needed."""
    problems = [
        f"{name}: {size} lines, the cap is {cap[name]}" for name, size in sizes.items() if size > granted.get(name, cap[name])
    ]
    stale = [f"{name}: the exception is not needed" for name in granted if sizes.get(name, 0) <= cap.get(name, 0)]
    return problems + stale


def touches(tree: ast.AST, attribute: str) -> list[int]:
    """Lines that read or write an attribute of this name."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == attribute]


PLUG_INS = re.compile(r"n-?grams? draft|dflash|\beagle\b|\bteams?\b|\bpolic(y|ies)\b|\bpacer\b|denois", re.IGNORECASE)
"""Words of what plugs into the runtime, which the runtime does not use."""


def test_the_runtime_knows_no_plug_in():
    for path in sources(PACKAGE / "runtime"):
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if PLUG_INS.search(line)]
        assert not found, f"{shown(path)}: {found[0]}"


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


def test_nothing_is_there_for_tests_alone():
    trees = [parsed(path.read_text(encoding="utf-8")) for path in sources(PACKAGE)]
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.md")]
    others = documents + sources(ROOT / "benchmarks") + [ROOT / "hatch_build.py"]
    elsewhere = {word for path in others for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    found = unnamed(trees, elsewhere)
    problems = [f"{name} is named by tests at most" for name in found - set(UNUSED)]
    problems += [f"{name}: the exception is not needed" for name in set(UNUSED) - found]
    assert not problems, "\n".join(sorted(problems))


def test_no_swallowed_errors_and_no_promises():
    files = sources(PACKAGE)
    assert files
    problems = [
        f"{shown(path)}:{problem}" for path in files for problem in construct_problems(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


def test_one_name_is_one_class():
    defined: dict[str, list[str]] = {}
    for path in sources(PACKAGE):
        for name in public_classes(parsed(path.read_text(encoding="utf-8"))):
            defined.setdefault(name, []).append(shown(path))
    shared = {name: paths for name, paths in defined.items() if len(paths) > 1}
    problems = [f"{name} is a class in {' and in '.join(shared[name])}" for name in shared if name not in SHARED_NAMES]
    problems += [f"{name}: the exception is not needed" for name in SHARED_NAMES if name not in shared]
    assert not problems, "\n".join(problems)


def test_files_stay_short():
    sizes = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(PACKAGE) + sources(TESTS)}
    problems = size_problems(sizes, {name: caps(name)[0] for name in sizes}, LONG_FILES)
    assert not problems, "\n".join(problems)


def test_functions_stay_short():
    sizes: dict[str, int] = {}
    for path in sources(PACKAGE):
        for name, size in function_lengths(parsed(path.read_text(encoding="utf-8"))):
            key = f"{shown(path)}:{name}"
            sizes[key] = max(size, sizes.get(key, 0))
    problems = size_problems(sizes, {name: caps(name)[1] for name in sizes}, LONG_FUNCTIONS)
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


def test_what_nothing_names_is_seen():
    tree = ast.parse(
        "def f():\n    f()\nclass A:\n    def g(self):\n        return h()\n    def __eq__(self): ...\ndef h(): ..."
    )
    assert unnamed([tree], {"A"}) == {"f", "g"}
    assert unnamed([tree, ast.parse("from m import f\nx.g()")], {"A"}) == set()


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


def test_public_classes_are_those_of_the_file_itself():
    inner = "class B:\n    class C: ...\ndef f():\n    class D: ...\n"
    tree = ast.parse(f"from m import A\n{inner}class E(NamedTuple): ...\nclass _F: ...")
    assert public_classes(tree) == ["B", "E"]


def test_sizes_are_measured_and_exceptions_exact():
    tree = ast.parse("class A:\n    def f(self):\n        def g():\n            return 1\n        return g\n")
    assert dict(function_lengths(tree)) == {"A.f": 4, "A.f.g": 2}
    cap = {"a": 50, "b": 50}
    assert size_problems({"a": 50, "b": 60}, cap, {"b": 60}) == []
    assert size_problems({"a": 51, "b": 61}, cap, {"b": 60}) == ["a: 51 lines, the cap is 50", "b: 61 lines, the cap is 50"]
    assert size_problems({"a": 50, "b": 50}, cap, {"b": 60, "c": 70}) == [
        "b: the exception is not needed",
        "c: the exception is not needed",
    ]
