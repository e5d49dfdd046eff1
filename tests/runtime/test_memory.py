"""What memory is free, as Linux and its control groups say it; and weights that there is no memory for."""

from pathlib import Path

import pytest

from reference.dflash_numpy import as_folders, random_pair
from tilewright.llm.language_model import load
from tilewright.models import checkpoint
from tilewright.runtime import memory
from tilewright.runtime.memory import check_fit, host_free

MIB = 2**20


def linux(root: Path, available_mib: int, cgroup: str = "0::/a/b") -> tuple[Path, Path]:
    """Folders as the kernel's: `/proc` and `/sys/fs/cgroup`."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:   {available_mib * 1024} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup + "\n")
    (root / "cgroup").mkdir()
    return root / "proc", root / "cgroup"


def group(folder: Path, limit: str, used: int, files: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]}inactive_file {files}\n{names[2]}active_file 0\n")


SECOND = ("memory.max", "memory.current", "")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def test_without_limits_it_is_what_the_kernel_calls_available(tmp_path: Path):
    assert host_free(*linux(tmp_path, 100)) == 100 * MIB


def test_the_closest_limit_counts_and_files_in_memory_do_not(tmp_path: Path):
    proc, cgroups = linux(tmp_path, 100)
    group(cgroups / "a" / "b", "max", 5 * MIB, 0, SECOND)
    group(cgroups / "a", str(60 * MIB), 30 * MIB, 10 * MIB, SECOND)
    assert host_free(proc, cgroups) == 40 * MIB
    group(cgroups / "a" / "b", str(8 * MIB), 9 * MIB, 0, SECOND)
    assert host_free(proc, cgroups) == 0


def test_limits_of_the_first_version_count_too(tmp_path: Path):
    proc, cgroups = linux(tmp_path, 100, "5:cpu:/x\n4:memory:/inner")
    group(cgroups / "memory", str(50 * MIB), 20 * MIB, 0, FIRST)
    assert host_free(proc, cgroups) == 30 * MIB


def test_without_linux_it_is_all_that_the_machine_has(tmp_path: Path):
    assert host_free(tmp_path, tmp_path) > 0


def test_what_fits_is_not_refused_and_what_would_fit_is_said():
    check_fit("m", {"in float32": 10, "in bfloat16": 5}, 10)
    with pytest.raises(ValueError, match=r"8.0 GB in float32, and 5.0 GB are free: they would take 4.0 GB in bfl"):
        check_fit("m", {"in float32": 8 * 10**9, "in bfloat16": 4 * 10**9, "in 8 bits": 6 * 10**9}, 5 * 10**9)
    with pytest.raises(ValueError, match="no smaller format of them fits"):
        check_fit("m", {"in bfloat16": 8 * 10**9}, 5 * 10**9)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, _ = as_folders(tmp_path, random_pair(0, vocab_size=24, target_layers=1, drafter_layers=1, taps=[0]))
    monkeypatch.setattr(memory, "free_bytes", lambda devices: 1000)
    monkeypatch.setattr(checkpoint, "read_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"target: its weights take .* MB in bfloat16, and 0.0 MB are free"):
        load(target, dtype="bfloat16")
