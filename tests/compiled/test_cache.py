"""Compiled programs on disk: access rights of the folder, its name, and loading by the next process."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tilewright.compiled import cache
from tilewright.compiled.ledger import Ledger

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_enable_compilation_cache",
)


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Disables the cache before the test and restores it afterwards."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_once() -> Ledger:
    """Compiles or loads the same program each time."""

    def kept_on_disk(x):
        return x * 3

    jax.clear_caches()
    with Ledger() as ledger:
        jax.jit(kept_on_disk)(np.ones(5, np.float32))
    return ledger


def test_what_was_compiled_is_loaded(tmp_path: Path):
    compile_once()  # whatever was decided before `enable`, it counts from there on
    folder = cache.enable(tmp_path / "new")
    assert folder is not None
    assert folder.parent == tmp_path / "new" / "xla"
    first = compile_once()
    second = compile_once()
    assert [(ledger.compilations, ledger.loaded) for ledger in (first, second)] == [(1, 0), (1, 1)]
    assert [path.name.split("-")[0] for path in folder.iterdir()] == ["jit_kept_on_disk"]
    assert [each.stat().st_mode & 0o777 for each in (tmp_path / "new", folder.parent, folder)] == [0o700] * 3


@pytest.mark.parametrize("damage", ["cut", "emptied", "garbled", "one bit"])
def test_a_damaged_entry_is_recompiled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str):
    folder = cache.enable(tmp_path)
    assert folder is not None
    compile_once()
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    entry.write_bytes({"cut": whole[:middle], "emptied": b"", "garbled": b"x" * 5000, "one bit": flipped}[damage])
    caplog.clear()
    cache.enable(tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    cache.enable(tmp_path)  # as another process does
    assert [compile_once().loaded for _ in range(3)] == [0, 1, 1]
    assert [record.getMessage() for record in caplog.records if record.name == "tilewright.compiled"] == [
        f"compiled programs in {folder} are damaged; they are recompiled"
    ]
    assert list(folder.iterdir()) == [entry], "nothing half-written is left"


def test_what_cannot_be_loaded_though_undamaged_is_recompiled_once(tmp_path: Path):
    """Simulates an entry of another version of XLA, which JAX by itself would never replace."""
    folder = cache.enable(tmp_path)
    assert folder is not None
    compile_once()
    (entry,) = folder.iterdir()
    cache.SealedEntries(folder).put(entry.name.removesuffix("-cache"), b"another version's")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert compile_once().loaded == 0
    assert compile_once().loaded == 1


def test_a_changed_kernel_library_loads_nothing(tmp_path: Path):
    cache.enable(tmp_path, "linear-1.so")
    compile_once()
    jax.config.update("jax_compilation_cache_dir", None)
    assert cache.enable(tmp_path, "linear-2.so") != cache.enable(tmp_path, "linear-1.so")
    assert compile_once().loaded == 0


def test_machines_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch):
    names = {cache.digest(), cache.digest("linear-1.so")}
    monkeypatch.setattr(cache, "cpu_facts", lambda *_: "sse avx")
    names.add(cache.digest())
    monkeypatch.setattr(cache, "cores", lambda: 1000)
    names.add(cache.digest())
    monkeypatch.setenv("NPROC", "7")
    names.add(cache.digest())
    assert len(names) == 5
    assert cache.digest() == cache.digest()


@pytest.mark.parametrize("place", ["", "xla"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, place: str, mode: int):
    (tmp_path / "xla").mkdir(mode=0o700)
    (tmp_path / place).chmod(mode)
    with pytest.raises(ValueError, match=rf"others may write to {tmp_path / place} \(its mode is {mode:o}\)"):
        cache.enable(tmp_path)
    assert not jax.config.values["jax_compilation_cache_dir"]


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=rf"{tmp_path} belongs to another user \(number {owner}\)"):
        cache.enable(tmp_path)
    assert not jax.config.values["jax_compilation_cache_dir"]


@pytest.mark.parametrize(("name", "value"), [("jax_compilation_cache_dir", "/own"), ("jax_enable_compilation_cache", False)])
def test_the_users_own_setting_stays(tmp_path: Path, name: str, value: object):
    jax.config.update(name, value)
    before = {each: jax.config.values[each] for each in SETTINGS}
    assert cache.enable(tmp_path) is None
    assert {each: jax.config.values[each] for each in SETTINGS} == before
    assert not list(tmp_path.iterdir())


def test_the_oldest_go_where_there_are_too_many(tmp_path: Path):
    for age, name in enumerate(["here/new", "there/middle", "here/old"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    cache.prune(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["middle", "new"]
    cache.prune(tmp_path, 20)
    assert len(list(tmp_path.glob("*/*"))) == 2
