"""`tilewright doctor`: reports the installed features, and how to install missing ones."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shlex import split
from typing import Annotated, Literal

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright import __version__
from tilewright.cli.common import DEMO, keep_programs
from tilewright.cli.extras import EXTRAS, installation
from tilewright.cli.options import Flag
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.ledger import Ledger
from tilewright.compiled.machine import chip_name, cores, cpu_facts
from tilewright.kernels import native
from tilewright.kernels.build import PREBUILT, cache_folder, find_compiler, native_disabled
from tilewright.kernels.select import Selection, implementations
from tilewright.llm.language_model import load
from tilewright.models import diffusion, hub
from tilewright.models.checkpoint import decoder_config, read_config
from tilewright.models.hub import PACKAGED, PUBLISHED
from tilewright.runtime.sampling import Sampling

TESTED_JAX = ("0.10", "0.11", "0.12")
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512F",
    "avx512_vnni": "AVX-512-VNNI",
    "avx512_bf16": "AVX-512-BF16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
}
"""Instruction sets of the CPU kernels, by their names in /proc/cpuinfo."""


@dataclass(frozen=True)
class DoctorFinding:
    """Line of the report.

    Attributes:
        status: "ok", "missing" (generation works without it) or "failed" (generation does not work).
        advice: how to fix it; empty if nothing is to be fixed.
    """

    name: str
    status: Literal["ok", "missing", "failed"]
    found: str
    advice: str = ""


def check_jax() -> DoctorFinding:
    found = f"{jax.__version__}, jaxlib {version('jaxlib')}"
    if ".".join(jax.__version__.split(".")[:2]) in TESTED_JAX:
        return DoctorFinding("JAX", "ok", found)
    reason = f"{found}: tested versions are {', '.join(TESTED_JAX)}"
    return DoctorFinding("JAX", "missing", reason, "pip install 'jax>=0.10,<0.13'")


def check_devices() -> DoctorFinding:
    try:
        return DoctorFinding("devices", "ok", f"{jax.device_count()} ({jax.default_backend()}): {chip_name()}")
    except (RuntimeError, AssertionError) as error:  # CUDA without its plugin raises an AssertionError
        advice = "reinstall jax and jaxlib"
        if platforms := os.environ.get("JAX_PLATFORMS"):
            advice = f"JAX_PLATFORMS is {platforms}: unset it, or install its plugin"
        return DoctorFinding("devices", "failed", one_line(error), advice)


def check_threads() -> DoctorFinding:
    """Reports the size of XLA's thread pool: `NPROC`, or the number of cores of this process."""
    named = os.environ.get("NPROC")
    return DoctorFinding("threads", "ok", f"{named} (NPROC), on {cores()} cores" if named else str(cores()))


def check_instructions() -> DoctorFinding:
    listed = cpu_facts("flags")
    if listed is None:
        return DoctorFinding("instructions", "missing", "known on Linux and x86 only")
    present = [name for flag, name in INSTRUCTIONS.items() if flag in listed.split()]
    absent = [name for name in INSTRUCTIONS.values() if name not in present]
    without = f"; without {', '.join(absent)}" if absent else ""
    return DoctorFinding("instructions", "ok", (", ".join(present) or "no vector instructions beyond SSE") + without)


def check_kernels() -> DoctorFinding:
    """Reports the implementation of linear layers and attention."""
    found = native.kernels()
    if found.isa is None:
        return DoctorFinding("linear layers", "missing", f"XLA, without CPU kernels: {found.reason}", kernel_advice())
    named = os.environ.get("TILEWRIGHT_CPU_ISA")
    chosen = f" (TILEWRIGHT_CPU_ISA is {named})" if named else ""
    place = "built at installation" if found.folder == PREBUILT else f"built into {found.folder}"
    return DoctorFinding("linear layers", "ok", f"CPU kernels, {found.isa}{chosen}, {place}")


def check_operations(model: str) -> Iterator[DoctorFinding]:
    """Reports the implementation of each operation of a model, and why a faster one does not run."""
    folder = hub.resolve(model)
    denoises = diffusion.is_diffusion(folder)
    sizes = diffusion.config_from_hf(read_config(folder)).decoder if denoises else decoder_config(folder)
    for each, other in zip(implementations(sizes, "bfloat16"), implementations(sizes, "float32"), strict=True):
        same = each._replace(unavailable="") == other._replace(unavailable="")
        found = described(each) if same else f"in bfloat16 {described(each)}. In float32 {described(other)}"
        yield DoctorFinding(each.operation, "missing" if each.unavailable or other.unavailable else "ok", found)
    if denoises:
        return
    (cached,) = implementations(sizes, "bfloat16", operations=("paged attention",), kv_dtype="int8")
    yield DoctorFinding("--kv-dtype int8", "missing" if cached.unavailable else "ok", f"paged attention: {described(cached)}")


def described(choice: Selection) -> str:
    """Describes the implementation that runs, and why others do not."""
    return choice.runs + "".join(f"; not {name}: {why}" for name, why in choice.refused)


def kernel_advice() -> str:
    """Returns how to get the CPU kernels; empty on another device."""
    if jax.default_backend() != "cpu":
        return ""
    if native_disabled():
        return "unset TILEWRIGHT_NO_NATIVE"
    if find_compiler() is None:
        return "install a C++17 compiler (g++ or clang++); the kernels are built at first use"
    return "set CXX to another compiler, or TILEWRIGHT_CACHE to another folder"


def check_compiler() -> DoctorFinding:
    compiler = find_compiler()
    if compiler is None:
        return DoctorFinding(
            "C++ compiler", "missing", "none: the CPU kernels cannot be built, unless the installation brought them"
        )
    try:
        reply = subprocess.run([*split(compiler), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        advice = "correct or unset CXX" if "CXX" in os.environ else ""
        return DoctorFinding("C++ compiler", "missing", one_line(error), advice)
    lines = reply.stdout.splitlines() or ["no version"]
    return DoctorFinding("C++ compiler", "ok", f"{compiler}: {lines[0]}")


def check_kernel_cache() -> DoctorFinding:
    return DoctorFinding("kernel cache", "ok", f"{cache_folder()}: {holdings(cache_folder(), '*.so', 'libraries')}")


def check_compile_cache() -> DoctorFinding:
    """Reports JAX's compilation cache, which `keep_programs` enables."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder and jax.config.values["jax_enable_compilation_cache"]:
        return DoctorFinding("compile cache", "ok", f"{folder}: {holdings(Path(folder), '*-cache', 'programs')}")
    return DoctorFinding("compile cache", "missing", "off: every process compiles its programs again")


def holdings(folder: Path, pattern: str, noun: str) -> str:
    """Describes the number of files in a folder that match a pattern, and their total size."""
    sizes = [path.stat().st_size for path in folder.glob(pattern)]
    return f"{len(sizes)} {noun}, {sum(sizes) / 1e6:.1f} MB" if sizes else "empty"


def check_extras() -> Iterator[DoctorFinding]:
    for extra, (modules, use) in EXTRAS.items():
        if absent := " and no ".join(module for module in modules if not is_there(module)):
            yield DoctorFinding(f"extra {extra}", "missing", f"no {absent}: needed for {use}", installation(extra))
        else:
            yield DoctorFinding(f"extra {extra}", "ok", ", ".join(modules))


def is_there(module: str) -> bool:
    """True if a module is installed, together with its parent packages."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_published() -> Iterator[DoctorFinding]:
    """Reports the published models and whether they are installed."""
    for name in PUBLISHED:
        try:
            yield DoctorFinding(name, "ok", str(hub.resolve(name)))
        except ValueError as error:
            yield DoctorFinding(name, "missing", str(error), "`tilewright demo` installs it")


def check_generation() -> DoctorFinding:
    """Generates a few tokens with the demo's target, through the kernels."""
    if not PACKAGED[DEMO].is_dir():
        return DoctorFinding("demo pair", "failed", f"not at {PACKAGED[DEMO].parent}", "reinstall tilewright")
    started = time.perf_counter()
    try:
        with Ledger() as ledger:
            (result,) = load(DEMO).generate(["def f(x):"], Sampling(max_new_tokens=4, ignore_eos=True))
    except (ValueError, OSError, RuntimeError) as error:
        return DoctorFinding("demo pair", "failed", one_line(error), "try --kernels xla, and report the problem")
    seconds = time.perf_counter() - started
    programs = f"{ledger.compilations - ledger.loaded} programs compiled and {ledger.loaded} loaded"
    return DoctorFinding("demo pair", "ok", f"generated {len(result.tokens)} tokens in {seconds:.1f} s, {programs}")


def one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def examine(console: Console, model: str) -> list[DoctorFinding]:
    """Collects all findings, those on operations for a model. Checks that need a device are skipped without one."""
    findings = [
        DoctorFinding("tilewright", "ok", f"{__version__}, Python {sys.version.split()[0]}"),
        check_jax(),
        check_devices(),
    ]
    works = findings[-1].status == "ok"
    with console.status("building the kernels if needed, and generating"):
        findings += [check_threads(), check_instructions(), check_compiler()]
        findings += [check_kernels()] if works else []
        findings += [check_kernel_cache(), check_compile_cache()]
        findings += [check_generation()] if works else []
        if all(finding.status != "failed" for finding in findings):
            findings += check_operations(model)
        return [*findings, *check_published(), *check_extras()]


def clear_caches(console: Console) -> None:
    """Removes the stored kernel libraries and compiled programs, which are built again when needed."""
    folder = cache_folder()
    libraries = list(folder.glob("*.so"))
    programs = list(folder.glob("xla/*/*-cache"))
    for path in (*libraries, *folder.glob("*.so.sha256")):
        path.unlink(missing_ok=True)
    if (folder / "xla").exists():
        shutil.rmtree(folder / "xla")
    console.print(
        f"removed {len(libraries)} libraries and {len(programs)} programs from {folder}", markup=False, soft_wrap=True
    )


def doctor(*, model: Annotated[str, Parameter(alias="-m")] = DEMO, repair: Flag = False, json_file: JsonFile = None) -> None:
    """Reports the installed features, and how to install missing ones. Exit status 1 if generation does not work.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" or "demo", to list the implementation of each operation.
        repair: first clear the kernel cache and the compile cache, then build the kernels again.
    """
    console = human_console(json_file)
    if repair:
        clear_caches(console)
    keep_programs()
    findings = examine(console, model)
    styles = {"ok": "green", "missing": "yellow", "failed": "red"}
    for finding in findings:
        console.print(f"{finding.status:8}", style=styles[finding.status], end="")
        console.print(f"{finding.name:16}  {finding.found}", markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':26}→ {finding.advice}", style="dim", markup=False, soft_wrap=True)
    works = all(finding.status != "failed" for finding in findings)
    console.print("Generation works." if works else "Generation does not work: see the failed lines.", style="bold")
    isa = native.kernels().isa if works else None
    kernels = f"cpu {isa}" if isa else "xla" if works else None
    write_json(json_file, {"works": works, "kernels": kernels, "findings": [asdict(finding) for finding in findings]})
    if not works:
        sys.exit(1)
