"""Links inside the documents lead somewhere: to a file of the repository, and to a heading of it where they name one.

Extras that documents, jobs and messages name exist.
"""

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def without_code(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of links and pictures that lead to no other site; brackets in code are no links."""
    return re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(text)))


def anchors(text: str) -> set[str]:
    """Names of a document's headings in links, as GitHub makes them: in lower case, with hyphens for spaces."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(text), flags=re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(1)))
        found.add(next(one for one in names if one not in found))
    return found


def broken(document: Path, root: Path) -> Iterator[str]:
    """Links of a document that lead to nothing below the root."""
    for link in links(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.is_relative_to(root) or not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name if path.parent == ROOT else f"docs/{path.name}")
def test_every_link_leads_somewhere(document: Path):
    assert not list(broken(document, ROOT))


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    (tmp_path / "b.md").write_text("# One two\n\n## What's `x-y` for?\n\n```\n# no heading\n```\n\n## One two\n")
    document = tmp_path / "a.md"
    good = "[1](b.md) [2](b.md#one-two) [3](b.md#whats-x-y-for) [4](b.md#one-two-1) [5](https://x.org) `[6](none)`\n"
    document.write_text(f"# A\n\n{good}[7](#a) [8](none.md) [9](b.md#no-heading) [10](#b) [11](../out.md)\n")
    assert list(broken(document, tmp_path)) == [
        "none.md: no such file",
        "b.md#no-heading: no such heading",
        "#b: no such heading",
        "../out.md: no such file",
    ]


def test_the_index_of_pages_has_each_of_them():
    listed = links((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    missing = {page.name for page in PAGES} - {"README.md"} - set(listed)
    assert not missing, f"docs/README.md has no line for {sorted(missing)}"
    assert len(listed) == len(set(listed))


def test_every_named_extra_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    files = [path for folder in ("src", "docs", "deploy", "examples") for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".md", ".yaml", ".sh", ".sbatch", ".toml", "")]
    named = {
        (path.name, extra)
        for path in [*files, *DOCUMENTS, ROOT / "pyproject.toml", ROOT / "Makefile"]
        if path.is_file()
        for listed in re.findall(r"tilewright\[([a-z0-9,-]+)\]", path.read_text(encoding="utf-8"))
        for extra in listed.split(",")
    }
    assert len(named) > 20
    assert not {(name, extra) for name, extra in named if extra not in extras}
