"""`benchmarks/demo_text.py`: training sources, held-out sources, and licences."""

import importlib
import sysconfig
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.models import hub
from tilewright.models.tokenizer import load_tokenizer

demo_text: Any = importlib.import_module("demo_text")
Dependency = demo_text.Dependency

MODULES = {
    "keep.py": "kept = 1\n",
    "json/__init__.py": "json_package = 2\n",
    "json/inner/deep.py": "json_deep = 3\n",
    "csv.py": "csv_module = 4\n",
    "other/json.py": "not_the_package = 5\n",
    "other/test/test_x.py": "a_test = 6\n",
    "site-packages/installed.py": "installed = 7\n",
    "encodings/cp1.py": "table = 8\n",
}
METADATA = {
    "asks": "Name: asks\nVersion: 1.0\nLicense-Expression: MIT\nRequires-Dist: Asked_For>=1\nRequires-Dist: absent-one\n"
    'Requires-Dist: never; extra == "x"\n',
    "asked-for": "Name: asked-for\nVersion: 2.0\nClassifier: License :: OSI Approved :: BSD License\nRequires-Dist: asks\n",
    "never": "Name: never\nVersion: 3.0\nLicense: MIT\n",
    "copyleft": "Name: copyleft\nVersion: 4.0\nLicense-Expression: MIT AND MPL-2.0\n",
    "top": "Name: top\nVersion: 5.0\nRequires-Dist: asks\nRequires-Dist: copyleft; extra == 'more'\n"
    "Requires-Dist: never; extra == 'test'\nRequires-Dist: never; sys_platform == 'no such'\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few modules, and nothing installed."""
    root = tmp_path / "lib"
    for name, text in MODULES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(demo_text.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    monkeypatch.setattr(demo_text, "dependencies", list[Dependency])
    return root


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few distributions that no index has; the fourth has two licences."""
    root = tmp_path / "installed"
    for name, metadata in METADATA.items():
        package = root / name.replace("-", "_")
        info = root / f"{name.replace('-', '_')}-1.dist-info"
        for folder in (package / "sub", package / "tests", info):
            folder.mkdir(parents=True)
        files = ["__init__.py", "sub/code.py", "sub/code_test.py", "tests/check.py", "data.txt"]
        for file in files:
            (package / file).write_text(f"{package.name} = {file!r}\n")
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\n{metadata}")
        (info / "RECORD").write_text("".join(f"{package.name}/{file},,\n" for file in [*files, "gone.py"]))
    monkeypatch.syspath_prepend(root)
    return root


def test_named_modules_are_held_out_and_no_others(library: Path):
    trained, held_out = ([p.relative_to(library).as_posix() for p in paths] for paths in demo_text.library_sources())
    assert held_out == ["csv.py", "json/__init__.py", "json/inner/deep.py"]
    assert trained == ["keep.py", "other/json.py"]


def test_the_library_of_this_machine_is_split_by_module():
    root = Path(sysconfig.get_paths()["stdlib"])
    trained, held_out = demo_text.library_sources()
    tops = [{path.relative_to(root).parts[0].removesuffix(".py") for path in paths} for paths in (trained, held_out)]
    assert tops[1] == demo_text.HELD_OUT_MODULES, "each held-out name is a module of the library"
    assert not tops[0] & tops[1]
    assert len(trained) > 10 * len(held_out) > 100
    assert not [path for path in trained + held_out if demo_text.NOT_CODE & set(path.relative_to(root).parts)]


def test_dependencies_are_followed_as_far_as_they_are_installed(installed: Path):
    found = {one.name: one for one in demo_text.dependencies("top", ("more",))}
    assert found.keys() == {"asks", "asked-for", "copyleft"}, "extras count where they are named, other systems never"
    assert {one.name for one in demo_text.dependencies("top", ())} == {"asks", "asked-for"}
    assert {name: one.permissive for name, one in found.items()} == {"asks": True, "asked-for": True, "copyleft": False}
    assert (found["asked-for"].version, found["asked-for"].licence) == ("2.0", "BSD License")
    package = installed / "asked_for"
    assert found["asked-for"].sources == (
        ("asked_for", package / "__init__.py"),
        ("asked_for.sub.code", package / "sub" / "code.py"),
    ), "no tests, no data, nothing that is not there"
    assert demo_text.licence_of(distribution("never")) == "MIT"


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("(MIT)", True),
        ("MIT License", True),
        ("Apache Software License; MIT License", True),
        ("PSF-2.0", True),
        ("MPL-2.0 AND MIT", False),
        ("GPL-3.0-or-later OR MIT", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("GNU Lesser General Public License", False),
        ("BSD-4-Clause", False),
        ("", False),
    ],
)
def test_licences(licence: str, permissive: bool):
    assert Dependency("name", "1", licence, ()).permissive is permissive


def test_a_tenth_of_the_modules_is_held_out_always_the_same():
    names = [f"package.module_{n}" for n in range(2000)]
    held_out = [name for name in names if demo_text.is_held_out(name)]
    assert 150 < len(held_out) < 250
    assert held_out[:3] == ["package.module_0", "package.module_4", "package.module_12"]


def gsm8k(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"question": "q{i}?", "answer": "a{i}"}}\n' for i in range(count)))
    return path


def test_documents(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sources = tuple((f"pack.m{n}", tmp_path / f"m{n}.py") for n in range(20))
    for name, path in sources:
        path.write_text(f"{name.replace('.', '_')} = 1\n")
    (tmp_path / "m0.py").write_bytes(b"\xff\xfe")
    needed = [Dependency("pack", "1.2", "MIT", sources), Dependency("closed", "3", "Proprietary", sources)]
    monkeypatch.setattr(demo_text, "dependencies", lambda: needed)
    found = demo_text.demo_documents(gsm8k(tmp_path / "gsm8k.jsonl", 40))
    texts = [document.full_text for part in found.trained.values() for document in part]
    held_modules = [name for name, _ in sources if demo_text.is_held_out(name)]
    held = {kind: [document.full_text for document in part] for kind, part in found.held_out.items()}
    assert held["library"] == ["csv_module = 4\n", "json_package = 2\n", "json_deep = 3\n"]
    assert held["dependencies"] == [f"{name.replace('.', '_')} = 1\n" for name in held_modules]
    assert 0 < len(held_modules) < 10
    assert held["questions"] == [f"Question: q{i}?\nAnswer: a{i}" for i in range(2)]
    assert [document.full_text for document in found.trained["library"]] == ["kept = 1\n", "not_the_package = 5\n"]
    assert len(found.trained["questions"]) == 38
    assert not set(texts) & {text for part in held.values() for text in part}
    assert len({text for text in texts if text.startswith("pack")}) == 20 - 1 - len(held_modules)
    metadata = found.metadata()
    assert metadata["left_out"]["file, not UTF-8"] == 1
    assert metadata["dependencies"] == ["pack 1.2 (MIT)"]
    assert metadata["dependencies_left_out"] == ["closed 3 (Proprietary)"]
    alone = demo_text.demo_documents(tmp_path / "gsm8k.jsonl", held_out_only=True)
    assert (alone.trained, alone.held_out) == ({}, found.held_out)


def test_held_out_source_is_cut_from_what_is_trained_on(library: Path, tmp_path: Path):
    stretch = "".join(f"shared_{n} = {n}\n" for n in range(9))
    (library / "csv.py").write_text(stretch)
    (library / "keep.py").write_text("before = 1\n" + stretch + "after = 2\n")
    found = demo_text.demo_documents(gsm8k(tmp_path / "gsm8k.jsonl", 20))
    assert "before = 1\nafter = 2\n" in [document.text for document in found.trained["library"]]
    assert stretch in [document.text for document in found.held_out["library"]]


def test_the_text_is_tokenised_by_kind(library: Path, tmp_path: Path):
    text = demo_text.prepare_text(gsm8k(tmp_path / "gsm8k.jsonl", 40), load_tokenizer(hub.resolve("demo")))
    assert text.held_out.keys() == {"library", "questions", "dependencies"}
    ends = [int((stream.tokens == text.end).sum()) for stream in (text.trained, *text.held_out.values())]
    assert ends == [2 * demo_text.WEIGHTS["library"] + 38 * demo_text.WEIGHTS["questions"], 3, 0, 2]
    kinds = [
        part.startswith("Question")
        for part in text.tokenizer.decode(text.trained.tokens.tolist(), False).split("<|endoftext|>")
    ]
    assert kinds != sorted(kinds), "code and questions are mixed"
    again = demo_text.prepare_text(tmp_path / "gsm8k.jsonl", text.tokenizer)
    np.testing.assert_array_equal(again.trained.tokens, text.trained.tokens)
    assert "closed" not in text.summary()
    assert f"{len(text.trained.tokens):,} training tokens" in text.summary()
