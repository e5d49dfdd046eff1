"""The build hook, on a copy of the sources without the assets: which wheel comes of it, and what it asks for."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import jax
import pytest
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tilewright.kernels import build

ROOT = Path(__file__).parent.parent
COMPILER = '#!/bin/sh\nfor last; do :; done\n: > "$last"\n'
FAILING = "#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's copy, with an empty cache and no compiler."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    kernels = Path("src", "tilewright", "kernels")
    shutil.copytree(ROOT / kernels, root / kernels, ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for name in ("CXX", "TILEWRIGHT_NO_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    return root


def put_compiler(project: Path, script: str = COMPILER) -> None:
    """A C++ compiler on the path."""
    compiler = project.parent / "c++"
    compiler.write_text(script)
    compiler.chmod(0o755)


def wheel(project: Path) -> Path:
    (made,) = WheelBuilder(str(project)).build(directory=str(project.parent / "dist"), versions=["standard"])
    return Path(made)


def hook_of(project: Path) -> BuildHookInterface:
    return WheelBuilder(str(project)).get_build_hooks(str(project / "dist"))["custom"]


def libraries(made: Path) -> list[str]:
    with ZipFile(made) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


def test_a_wheel_with_kernels_is_for_this_kind_of_machine(project: Path):
    put_compiler(project)
    made = wheel(project)
    include = Path(jax.ffi.include_dir())
    expected = [f"tilewright/kernels/prebuilt/{build.library_name(operation, include)}" for operation in build.OPERATIONS]
    assert sorted(libraries(made)) == sorted(expected), "under the names that the package looks for"
    tag = made.stem.split("-", 2)[2]
    assert tag.startswith("py3-none-")
    assert sys.platform in tag.replace("macosx", "darwin")
    assert "manylinux" not in tag
    with ZipFile(made) as archive:
        archive.extractall(project.parent / "installed")
        (meta,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL")]
    assert all(build.intact(project.parent / "installed" / name) for name in expected)
    assert "Root-Is-Purelib: false" in meta
    assert f"Tag: {tag}" in meta
    assert not list((project.parent / "scratch").iterdir()), "nothing is left behind"


@pytest.mark.parametrize("why", ["no compiler", "unwanted", "the compiler fails", "the compiler is not there"])
def test_otherwise_the_wheel_is_for_all_machines(project: Path, monkeypatch: pytest.MonkeyPatch, why: str):
    if why == "unwanted":
        put_compiler(project)
        monkeypatch.setenv("TILEWRIGHT_NO_NATIVE", "1")
    elif why == "the compiler fails":
        put_compiler(project, FAILING)
    elif why == "the compiler is not there":
        monkeypatch.setenv("CXX", "no-such-compiler")
    made = wheel(project)
    assert made.name.endswith("-py3-none-any.whl")
    assert libraries(made) == []


def test_an_editable_installation_gets_them_in_the_cache(project: Path):
    put_compiler(project)
    build_data: dict[str, Any] = {"force_include": {}}
    hook_of(project).initialize("editable", build_data)
    assert build_data == {"force_include": {}}
    include = Path(jax.ffi.include_dir())
    expected = sorted(build.library_name(operation, include) for operation in build.OPERATIONS)
    assert sorted(path.name for path in build.cache_folder().glob("*.so")) == expected
    assert all(build.intact(build.cache_folder() / name) for name in expected)
    assert not list(project.rglob("*.so"))


def test_jaxlib_is_asked_for_only_where_it_is_of_use(project: Path, monkeypatch: pytest.MonkeyPatch):
    hook = hook_of(project)
    put_compiler(project)
    assert hook.dependencies() == [], "its headers are in this environment"
    monkeypatch.setitem(type(hook).dependencies.__globals__, "xla_headers", lambda: None)
    assert hook.dependencies() == ["jaxlib>=0.10.0,<0.13"]
    monkeypatch.setenv("TILEWRIGHT_NO_NATIVE", "1")
    assert hook.dependencies() == []
    monkeypatch.delenv("TILEWRIGHT_NO_NATIVE")
    (project.parent / "c++").unlink()
    assert hook.dependencies() == []


def test_a_source_distribution_can_build_them(project: Path):
    (made,) = SdistBuilder(str(project)).build(directory=str(project.parent / "dist"), versions=["standard"])
    shutil.unpack_archive(made, project.parent / "unpacked", filter="data")
    (unpacked,) = (project.parent / "unpacked").iterdir()
    put_compiler(project)
    assert len(libraries(wheel(unpacked))) == len(build.OPERATIONS)
