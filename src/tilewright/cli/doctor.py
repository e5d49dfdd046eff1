"""`tilewright doctor`: what runs here and why, and what is missing for the rest."""

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
from typing import Literal

import jax
from rich.console import Console

from tilewright import __version__
from tilewright.cli.common import DEMO, keep_programs
from tilewright.cli.extras import EXTRAS, installation
from tilewright.cli.options import CompileCache
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.ledger import Ledger
from tilewright.compiled.machine import chip_name, cores, cpu_facts
from tilewright.kernels import native
from tilewright.kernels.build import PREBUILT, cache_folder, find_compiler, unwanted
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
"""Instruction sets that the kernels know to use, by the names that Linux gives them."""


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report.

    Attributes:
        status: "ok"; "missing" for what generation can do without; "failed" for what it cannot.
        advice: what to do about it; empty if there is nothing to do.
    """

    name: str
    status: Literal["ok", "missing", "failed"]
    found: str
    advice: str = ""


def check_jax() -> DoctorFinding:
    found = f"{jax.__version__}, jaxlib {version('jaxlib')}"
    if ".".join(jax.__version__.split(".")[:2]) in TESTED_JAX:
        return DoctorFinding("JAX", "ok", found)
    why = f"{found}: not a version that was tested ({', '.join(TESTED_JAX)})"
    return DoctorFinding("JAX", "missing", why, "pip install 'jax>=0.10,<0.13'")


def check_devices() -> DoctorFinding:
    try:
        return DoctorFinding("devices", "ok", f"{jax.device_count()} ({jax.default_backend()}): {chip_name()}")
    except (RuntimeError, AssertionError) as error:  # the latter of CUDA without its plugin
        advice = "reinstall jax and jaxlib"
        if platforms := os.environ.get("JAX_PLATFORMS"):
            advice = f"JAX_PLATFORMS is {platforms}: unset it, or install what that needs"
        return DoctorFinding("devices", "failed", one_line(error), advice)


def check_threads() -> DoctorFinding:
    """XLA's pool on a CPU: `NPROC`, or as many threads as the process may use cores."""
    named = os.environ.get("NPROC")
    return DoctorFinding("threads", "ok", f"{named} (NPROC), on {cores()} cores" if named else str(cores()))


def check_instructions() -> DoctorFinding:
    listed = cpu_facts("flags")
    if listed is None:
        return DoctorFinding("instructions", "missing", "only Linux on x86 lists them")
    here = [name for flag, name in INSTRUCTIONS.items() if flag in listed.split()]
    absent = [name for name in INSTRUCTIONS.values() if name not in here]
    without = f"; without {', '.join(absent)}" if absent else ""
    return DoctorFinding("instructions", "ok", (", ".join(here) or "no vector instructions beyond SSE") + without)


def check_kernels() -> DoctorFinding:
    """Checks which path the linear layers and attention take."""
    found = native.kernels()
    if found.isa is None:
        return DoctorFinding("linear layers", "missing", f"XLA, without CPU kernels: {found.reason}", kernel_advice())
    asked = os.environ.get("TILEWRIGHT_CPU_ISA")
    chosen = f" (TILEWRIGHT_CPU_ISA is {asked})" if asked else ""
    came = "built at installation" if found.folder == PREBUILT else f"built into {found.folder}"
    return DoctorFinding("linear layers", "ok", f"CPU kernels, {found.isa}{chosen}, {came}")


def check_operations(model: str) -> Iterator[DoctorFinding]:
    """Checks which implementation computes each operation of a model, and why not a faster one."""
    folder = hub.resolve(model)
    denoises = diffusion.is_diffusion(folder)
    sizes = diffusion.config_from_hf(read_config(folder)).decoder if denoises else decoder_config(folder)
    for each, other in zip(implementations(sizes, "bfloat16"), implementations(sizes, "float32"), strict=True):
        same = each._replace(lost="") == other._replace(lost="")
        said = described(each) if same else f"in bfloat16 {described(each)}. In float32 {described(other)}"
        yield DoctorFinding(each.operation, "missing" if each.lost or other.lost else "ok", said)
    if denoises:
        return
    (held,) = implementations(sizes, "bfloat16", operations=("paged attention",), kv_dtype="int8")
    yield DoctorFinding("--kv-dtype int8", "missing" if held.lost else "ok", f"paged attention: {described(held)}")


def described(choice: Selection) -> str:
    """Implementations that run, and those that do not."""
    return choice.runs + "".join(f"; not {name}: {why}" for name, why in choice.refused)


def kernel_advice() -> str:
    """Advice for where there are no CPU kernels."""
    if jax.default_backend() != "cpu":
        return ""
    if unwanted():
        return "unset TILEWRIGHT_NO_NATIVE"
    if find_compiler() is None:
        return "install a C++17 compiler (g++ or clang++); they are then built at first use"
    return "CXX names another compiler, TILEWRIGHT_CACHE another folder to build in"


def check_compiler() -> DoctorFinding:
    compiler = find_compiler()
    if compiler is None:
        return DoctorFinding("C++ compiler", "missing", "none: kernels that were not built at installation cannot be built")
    try:
        asked = subprocess.run([*split(compiler), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        advice = "CXX names it: correct or unset it" if "CXX" in os.environ else ""
        return DoctorFinding("C++ compiler", "missing", one_line(error), advice)
    told = asked.stdout.splitlines() or ["no version"]
    return DoctorFinding("C++ compiler", "ok", f"{compiler}: {told[0]}")


def check_kernel_cache() -> DoctorFinding:
    return DoctorFinding("kernel cache", "ok", f"{cache_folder()}: {holdings(cache_folder(), '*.so', 'libraries')}")


def check_compile_cache() -> DoctorFinding:
    """JAX's, which `keep_programs` has set if it could."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder and jax.config.values["jax_enable_compilation_cache"]:
        return DoctorFinding("compile cache", "ok", f"{folder}: {holdings(Path(folder), '*-cache', 'programs')}")
    return DoctorFinding("compile cache", "missing", "none: every process compiles its programs again")


def holdings(folder: Path, pattern: str, what: str) -> str:
    """Number of files of a kind in a folder, and their size together."""
    sizes = [path.stat().st_size for path in folder.glob(pattern)]
    return f"{len(sizes)} {what}, {sum(sizes) / 1e6:.1f} MB" if sizes else "empty"


def check_extras() -> Iterator[DoctorFinding]:
    for extra, (modules, use) in EXTRAS.items():
        if absent := " and no ".join(module for module in modules if not is_there(module)):
            yield DoctorFinding(f"extra {extra}", "missing", f"no {absent}: needed for {use}", installation(extra))
        else:
            yield DoctorFinding(f"extra {extra}", "ok", ", ".join(modules))


def is_there(module: str) -> bool:
    """True if a module is installed; what it lies in may not be."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_published() -> Iterator[DoctorFinding]:
    """Checks which published models are installed."""
    for name in PUBLISHED:
        try:
            yield DoctorFinding(name, "ok", str(hub.resolve(name)))
        except ValueError as error:
            yield DoctorFinding(name, "missing", str(error), "make demo, in a checkout, and `tilewright demo` fetch it")


def check_generation() -> DoctorFinding:
    """Generates a few tokens with the demo's target, which also tries the kernels."""
    if not PACKAGED[DEMO].is_dir():
        return DoctorFinding("demo pair", "failed", f"not at {PACKAGED[DEMO].parent}", "reinstall tilewright")
    started = time.perf_counter()
    try:
        with Ledger() as ledger:
            (result,) = load(DEMO).generate(["def f(x):"], Sampling(max_new_tokens=4, ignore_eos=True))
    except (ValueError, OSError, RuntimeError) as error:
        return DoctorFinding("demo pair", "failed", one_line(error), "see whether --kernels xla helps, and report it")
    seconds = time.perf_counter() - started
    programs = f"{ledger.compilations - ledger.loaded} programs compiled and {ledger.loaded} loaded"
    return DoctorFinding("demo pair", "ok", f"generated {len(result.tokens)} tokens in {seconds:.1f} s, {programs}")


def one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def examine(console: Console, model: str) -> list[DoctorFinding]:
    """All findings, those on operations for a model. What needs a device is left out if there is none."""
    findings = [
        DoctorFinding("tilewright", "ok", f"{__version__}, Python {sys.version.split()[0]}"),
        check_jax(),
        check_devices(),
    ]
    works = findings[-1].status == "ok"
    with console.status("building the kernels, if they are not yet, and generating"):
        findings += [check_threads(), check_instructions(), check_compiler()]
        findings += [check_kernels()] if works else []
        findings += [check_kernel_cache(), check_compile_cache()]
        findings += [check_generation()] if works else []
        if all(finding.status != "failed" for finding in findings):
            findings += check_operations(model)
        return [*findings, *check_published(), *check_extras()]


def clear_caches(console: Console) -> None:
    """Removes the kept kernel libraries and compiled programs, damaged or not; what is needed of them is built anew."""
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


def doctor(*, model: str = DEMO, repair: bool = False, compile_cache: CompileCache = True, json_file: JsonFile = None) -> None:
    """Shows what runs here and why, and what is missing for the rest. Exit status 1 if nothing can be generated.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" or "demo", for whose heads and sizes the implementations
            of operations are listed.
        repair: clear the kernel cache and the compile cache first; kernels are built anew.
    """
    console = human_console(json_file)
    if repair:
        clear_caches(console)
    keep_programs(compile_cache)
    findings = examine(console, model)
    styles = {"ok": "green", "missing": "yellow", "failed": "red"}
    for finding in findings:
        console.print(f"{finding.status:8}", style=styles[finding.status], end="")
        console.print(f"{finding.name:16}  {finding.found}", markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':26}→ {finding.advice}", style="dim", markup=False, soft_wrap=True)
    works = all(finding.status != "failed" for finding in findings)
    console.print("Generation works here." if works else "Generation does not work here: see what failed.", style="bold")
    isa = native.kernels().isa if works else None
    kernels = f"cpu {isa}" if isa else "xla" if works else None
    write_json(json_file, {"works": works, "kernels": kernels, "findings": [asdict(finding) for finding in findings]})
    if not works:
        sys.exit(1)
