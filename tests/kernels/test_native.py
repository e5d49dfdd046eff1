"""Building and finding the CPU kernels, and reasons for missing ones."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tilewright.kernels import build, native

INCLUDE = Path(jax.ffi.include_dir())


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """Makes a fake compiler that logs a line per call and writes an empty library."""
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nfor last; do :; done\n: > "$last"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernels built at installation, an empty cache and no compiler; the folder that would hold the former."""
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    monkeypatch.setattr(native, "isa_of", lambda library: "plain")  # what the stand-in compiles cannot be asked
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "prebuilt"


def made(library: Path, text: str = "") -> None:
    """A library as one that was built, whatever is in it."""
    library.write_text(text)
    build.seal(library)


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
    assert sorted(path.name for path in folder.iterdir()) == [first.name, f"{first.name}.sha256"], "nothing half-built is left"


def test_first_use_compiles_for_the_instruction_set_that_runs_here(bare: Path, compiler: str, monkeypatch: pytest.MonkeyPatch):
    """Another instruction set is compiled when requested; libraries of both stay in the cache."""
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    calls = bare.parent / "calls"
    found = {}
    for isa in ("plain", "avx2", "plain"):
        monkeypatch.setattr(native, "isa_of", lambda library, isa=isa: isa)
        paths = native.libraries()
        expected = {name: build.cache_folder() / build.library_name(name, INCLUDE, isa) for name in native.TARGETS}
        assert paths == found.setdefault(isa, paths) == expected
    assert not {*found["plain"].values()} & {*found["avx2"].values()}
    once = len(native.TARGETS)
    assert calls.read_text().count("called") == 1 + 2 * once, "one library tells the instruction set, and each is compiled once"


def test_libraries_of_all_instruction_sets_serve_where_there_are_any(bare: Path):
    folder = build.cache_folder()  # an editable installation puts them there
    folder.mkdir()
    for operation in native.TARGETS:
        made(folder / build.library_name(operation, INCLUDE))
    assert {path.name for path in native.libraries().values()} == set(native.library_names().values())


def test_the_compiler_is_told_of_one_instruction_set(tmp_path: Path):
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nfor last; do :; done\n: > "$last"\n')
    script.chmod(0o755)
    for isa in (None, "avx2"):
        build.build("scatter_rows", INCLUDE, str(script), tmp_path / "kept", isa)
    every, one = (tmp_path / "said").read_text().splitlines()
    assert '-DTILEWRIGHT_ISA="avx2"' in one
    assert "TILEWRIGHT_ISA" not in every


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


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("TILEWRIGHT_CPU_ISA", "avx513", "to be one of plain, avx2, avx512, avx512vnni, avx512bf16, amx, found 'avx513'"),
        ("TILEWRIGHT_CPU_ISA", "AVX2", "to be one of plain, .*, found 'AVX2'"),
        ("TILEWRIGHT_NO_NATIVE", "maybe", "to be 1 or 0, found 'maybe'"),
        ("TILEWRIGHT_CACHE", f"{__file__}/below", "to name a folder, found .*test_native.py is a file"),
    ],
)
def test_a_variable_with_a_value_that_it_cannot_have_is_an_error(
    bare: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
):
    """An invalid value must not fall back to XLA silently."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"expected {name} {problem}"):
        native.kernels.__wrapped__()


def test_an_instruction_set_that_the_machine_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch):
    class Library:
        def TilewrightIsa(self) -> bytes: ...

    library = Library()
    library.TilewrightIsa = lambda: b"avx2"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: library)
    assert native.isa_of(Path("isa.so")) == "avx2"
    monkeypatch.setenv("TILEWRIGHT_CPU_ISA", "amx")
    with pytest.raises(ValueError, match="to name an instruction set of this machine, plain, avx2; found 'amx'"):
        native.isa_of(Path("isa.so"))


def test_instruction_sets_are_those_of_the_sources():
    (names,) = re.findall(r"isa_names\[\] = \{(.*?)\}", (build.HERE / "isa.h").read_text())
    assert tuple(name.strip('" ') for name in names.split(",")) == build.ISAS


@pytest.mark.parametrize(("value", "said"), [("1", True), ("True", True), ("0", False), ("false", False), ("", False)])
def test_a_switch_reads_as_the_command_line_has_it(monkeypatch: pytest.MonkeyPatch, value: str, said: bool):
    monkeypatch.setenv("TILEWRIGHT_NO_NATIVE", value)
    assert build.native_disabled() == said


def test_kernels_of_the_installation_need_no_compiler(bare: Path):
    bare.mkdir()
    for operation in native.TARGETS:
        made(bare / build.library_name(operation, INCLUDE))
    assert {path.parent for path in native.libraries().values()} == {bare}


def test_kernels_of_another_installation_are_refused_or_rebuilt(bare: Path, compiler: str, monkeypatch: pytest.MonkeyPatch):
    bare.mkdir()
    for operation in native.TARGETS:
        (bare / f"{operation}-0123456789abcdef.so").touch()
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert found.reason.startswith("the installed libraries do not fit")
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    paths = native.libraries()
    assert {path.parent for path in paths.values()} == {build.cache_folder()}
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert native.libraries() == paths, "what was built once needs no compiler"


def test_a_library_that_cannot_be_loaded_is_told(bare: Path):
    bare.mkdir()
    for operation in native.TARGETS:
        made(bare / build.library_name(operation, INCLUDE), "no library")
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert str(bare) in found.reason


def truncated(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def garbled(library: Path) -> None:
    library.write_bytes(b"no library " * 1000)


@pytest.fixture
def own_cache(tmp_path: Path) -> Path:
    """A cache with libraries for this machine's instruction set alone, wherever those that are used here came from."""
    isa = native.kernels().isa
    if isa is None:
        pytest.skip("there are no CPU kernels here")
    folder = tmp_path / "own"
    used = native.libraries()
    folder.mkdir()
    names = native.library_names(isa) | {build.ISA: build.library_name(build.ISA, INCLUDE)}
    for operation, name in names.items():
        shutil.copy(used.get(operation, used["gather_rows"]), folder / name)  # any of them says what runs here
        build.seal(folder / name)
    return folder


def loaded(cache: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """Returns the output of another process that loads all kernels."""
    code = "from tilewright.kernels import native; print(native.kernels())"
    settings = {"TILEWRIGHT_CACHE": str(cache), "CXX": compiler, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("damage", [truncated, garbled])
def test_a_damaged_library_in_the_cache_is_built_anew(own_cache: Path, tmp_path: Path, damage: Callable[..., None]):
    """Otherwise damage would crash the process or leave it without kernels for ever."""
    library = next(own_cache.glob("gather_rows-*.so"))
    whole = shutil.copy(library, tmp_path / "whole.so")
    compiler = tmp_path / "cc"  # compiling takes a minute
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {whole} "$last"\n')
    compiler.chmod(0o755)
    damage(library)
    first, second = (loaded(own_cache, str(compiler)) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, f"{replace(native.kernels(), folder=own_cache)}\n"), first.stderr
    (line,) = first.stderr.splitlines()
    assert line == f"{library} is damaged: its digest differs from the one recorded when it was built; rebuilding the kernels"
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert library.read_bytes() == Path(whole).read_bytes()


def test_a_damaged_library_without_a_compiler_leaves_the_work_to_xla(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, bare: Path
):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(own_cache))
    here = native.kernels().isa
    monkeypatch.setattr(native, "isa_of", lambda library: here)
    library = next(own_cache.glob("linear-*.so"))
    build.digest_file(library).unlink()
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert found.reason.startswith(f"{library} is damaged")
    assert found.reason.endswith("and there is no C++ compiler")


def test_a_damaged_library_of_the_installation_is_not_loaded(bare: Path, compiler: str, monkeypatch: pytest.MonkeyPatch):
    bare.mkdir()
    for operation in native.TARGETS:
        made(bare / build.library_name(operation, INCLUDE), "a library")
    garbled(bare / build.library_name("linear", INCLUDE))
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    assert {path.parent for path in native.libraries().values()} == {build.cache_folder()}


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
