"""Build hook that compiles the CPU kernels if there is a C++ compiler.

A wheel with kernels is tagged for its platform (such as `py3-none-linux_x86_64`; it has no CPython extension), a wheel without
kernels `py3-none-any`. A failure does not fail the installation: the package then compiles the kernels at first use, or uses
XLA alone. Kernels of an editable installation go to the user's cache.
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
    """Loads `kernels/build.py` by path, because importing the package needs JAX."""
    path = Path(root) / "src" / "tilewright" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("tilewright_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def xla_headers() -> Path | None:
    """Returns the folder of XLA's headers in jaxlib, of the build environment or else of the target environment."""
    spec = importlib.util.find_spec("jaxlib")
    folders = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    folders.append(Path(sysconfig.get_path("platlib")) / "jaxlib")
    return next((f / "include" for f in folders if (f / "include" / "xla" / "ffi" / "api" / "ffi.h").is_file()), None)


class KernelHook(BuildHookInterface):
    """Compiles the CPU kernels into a wheel, or into the cache for an editable installation."""

    scratch: Path | None = None

    def dependencies(self) -> list[str]:
        """Returns jaxlib if the kernels need its headers and the target environment has none."""
        kernels = load_build(self.root)
        needed = not kernels.native_disabled() and kernels.find_compiler() is not None and xla_headers() is None
        return ["jaxlib>=0.10.0,<0.13"] if needed else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the kernels and adds them to the wheel."""
        kernels = load_build(self.root)
        compiler = kernels.find_compiler()
        include = xla_headers()
        if kernels.native_disabled() or compiler is None or include is None:
            missing = (
                "TILEWRIGHT_NO_NATIVE is set"
                if kernels.native_disabled()
                else "no C++ compiler"
                if compiler is None
                else "no jaxlib"
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
        """Removes the temporary folder with the kernels, which are in the wheel now."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch)
