"""The build hook: compiles the CPU kernels while the package is being built, where a C++ compiler is found.

A wheel with kernels is for this kind of machine (`py3-none-linux_x86_64` and the like: it holds no CPython extension); without,
it stays `py3-none-any`. A failure never fails the installation: the kernels are then compiled at first use, or XLA serves.
An editable installation gets them in the user's cache, where the package looks for them.
"""

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags


def load_build(root: str) -> ModuleType:
    """`kernels/build.py` by its path: importing the package would need JAX and the rest."""
    path = Path(root) / "src" / "tilewright" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("tilewright_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def xla_headers() -> Path | None:
    """XLA's headers in jaxlib: that of the build environment, or else that of the environment that is being installed into."""
    spec = importlib.util.find_spec("jaxlib")
    folders = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    folders.append(Path(sysconfig.get_path("platlib")) / "jaxlib")
    return next((f / "include" for f in folders if (f / "include" / "xla" / "ffi" / "api" / "ffi.h").is_file()), None)


class KernelHook(BuildHookInterface):
    scratch: Path | None = None

    def dependencies(self) -> list[str]:
        """jaxlib, for its headers: only if they are of use, and not in the environment that is being installed into."""
        kernels = load_build(self.root)
        needed = not kernels.unwanted() and kernels.find_compiler() is not None and xla_headers() is None
        return ["jaxlib>=0.10.0,<0.13"] if needed else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and adds what came of it to the wheel."""
        kernels = load_build(self.root)
        compiler = kernels.find_compiler()
        include = xla_headers()
        if kernels.unwanted() or compiler is None or include is None:
            missing = (
                "TILEWRIGHT_NO_NATIVE is set" if kernels.unwanted() else "no C++ compiler" if compiler is None else "no jaxlib"
            )
            self.app.display_info(f"without CPU kernels: {missing}")
            return
        editable = version == "editable"
        folder = kernels.cache_folder() if editable else Path(tempfile.mkdtemp())
        self.scratch = None if editable else folder
        try:
            built = kernels.build_all(include, compiler, folder)
        except (OSError, RuntimeError) as error:
            self.app.display_warning(f"without CPU kernels: {error}")
            return
        if editable:
            return
        files = [*built, *map(kernels.digest_file, built)]
        build_data["force_include"] |= {str(path): f"tilewright/kernels/prebuilt/{path.name}" for path in files}
        build_data["pure_python"] = False
        platform = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what the wheel has now."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch)
