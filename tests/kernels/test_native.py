"""Building the CPU kernels, finding them, and saying why there are none."""

import shutil
from pathlib import Path

import jax
import pytest

from tilewright.kernels import build, native

INCLUDE = Path(jax.ffi.include_dir())


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """Stands in for a compiler: writes a line for each call, and an empty library."""
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nfor last; do :; done\n: > "$last"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernels built at installation, an empty cache and no compiler; the folder that would hold the former."""
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "prebuilt"


def altered_headers(folder: Path, old: str, new: str) -> Path:
    """A copy of XLA's headers in which one text stands for another."""
    shutil.copytree(INCLUDE / "xla" / "ffi", folder / "xla" / "ffi")
    header = folder / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    assert old in text
    header.write_text(text.replace(old, new))
    return folder


def test_a_library_is_built_once(tmp_path: Path, compiler: str):
    folder = tmp_path / "kept"
    first = build.build("attention", INCLUDE, compiler, folder)
    assert build.build("attention", INCLUDE, compiler, folder) == first
    assert (tmp_path / "calls").read_text() == "called\n"
    assert [path.name for path in folder.iterdir()] == [first.name], "nothing half-built is left"


def test_compiler_may_have_arguments(tmp_path: Path, compiler: str):
    assert build.build("attention", INCLUDE, f"sh {compiler}", tmp_path / "kept").exists()


def test_a_name_tells_contents_and_not_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = build.library_name("attention", INCLUDE)
    assert name.startswith("attention-")
    assert build.library_name("attention", altered_headers(tmp_path / "0", "#define", "#define")) == name
    assert build.library_name("attention", altered_headers(tmp_path / "1", "#define", "#define ")) != name
    sources = tmp_path / "a" / "kernels"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    assert build.library_name("attention", INCLUDE) == name
    for source in ("native.h", "attention/tile.inc", "attention/cpu.cc"):
        (sources / source).write_text((sources / source).read_text() + "\n")
        changed = build.library_name("attention", INCLUDE)
        assert changed != name, source
        name = changed
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library_name("attention", INCLUDE) != name


def test_every_operation_with_a_kernel_has_its_handlers():
    assert sorted(native.TARGETS) == build.OPERATIONS


def test_a_compiler_that_fails_is_told(tmp_path: Path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cpu.cc:1: error: no such standard' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="error: no such standard"):
        build.build("linear", INCLUDE, str(broken), tmp_path / "kept")


def test_a_compiler_that_is_not_there_is_told(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "find_compiler", lambda: "no-such-compiler")
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert "no-such-compiler" in found.reason


def test_without_a_compiler_xla_serves(bare: Path):
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert found.reason == "there is no C++ compiler"


def test_kernels_may_be_unwanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEWRIGHT_NO_NATIVE", "1")
    assert native.kernels.__wrapped__() == native.Native(None, "TILEWRIGHT_NO_NATIVE is 1")


def test_kernels_of_the_installation_need_no_compiler(bare: Path):
    bare.mkdir()
    for operation in native.TARGETS:
        (bare / build.library_name(operation, INCLUDE)).touch()
    assert {path.parent for path in native.libraries().values()} == {bare}


def test_kernels_of_another_installation_are_refused_or_rebuilt(bare: Path, compiler: str, monkeypatch: pytest.MonkeyPatch):
    bare.mkdir()
    for operation in native.TARGETS:
        (bare / f"{operation}-0123456789abcdef.so").touch()
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert found.reason.startswith("those built at installation do not fit")
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    paths = native.libraries()
    assert {path.parent for path in paths.values()} == {build.cache_folder()}
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert native.libraries() == paths, "what was built once needs no compiler"


def test_a_library_that_cannot_be_loaded_is_told(bare: Path):
    bare.mkdir()
    for operation in native.TARGETS:
        (bare / build.library_name(operation, INCLUDE)).write_text("no library")
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert str(bare) in found.reason


def test_a_library_that_xla_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    newer = altered_headers(tmp_path / "newer", "#define XLA_FFI_API_MINOR ", "#define XLA_FFI_API_MINOR 9")
    path = build.build("attention", newer, compiler, tmp_path)
    monkeypatch.setattr(native, "libraries", lambda: {"attention": path})
    monkeypatch.setattr(native, "TARGETS", {"attention": {"tilewright_refused": "TilewrightAttention"}})
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert "API version" in found.reason


def test_another_backend_keeps_to_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert native.kernels.__wrapped__().isa is None
