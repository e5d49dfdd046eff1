"""Docstrings of the package begin with a verb or a noun, and the generated reference pages are current."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tilewright"
OPENINGS = re.compile(r"(?:of|by|as|what|how|who|whether|the same|it)\b", re.IGNORECASE)
"""Words that begin a riddle: the reader has to find the noun elsewhere."""


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of every docstring, those of attributes and constants included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


@pytest.mark.parametrize(
    "folder", sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()), ids=lambda p: p.name
)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: Path):
    found = []
    for path in sorted(folder.rglob("*.py")):
        for line, text in docstrings(path.read_text(encoding="utf-8")):
            if OPENINGS.match(text):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "count"),
    [('"""Of a row."""', 1), ('"""Offset of a row."""', 0), ('class A:\n    x = 1\n    """The same."""', 1), ('x = "Of"', 0)],
)
def test_a_bad_opening_is_found(code: str, count: int):
    assert sum(OPENINGS.match(text) is not None for _, text in docstrings(code)) == count


@pytest.mark.parametrize("page", ["options.md", "http.md"])
def test_a_reference_page_is_current(page: str):
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"][page]()
    assert (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8") == generated, "run python docs/generate.py"
