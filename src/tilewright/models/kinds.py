"""Kinds of models, determined from the configuration in a folder."""

from pathlib import Path
from typing import Literal

from tilewright.models.checkpoint import CONFIG, read_config
from tilewright.models.diffusion import is_diffusion
from tilewright.models.drafter_layouts import is_drafter

ModelKind = Literal["target", "diffusion", "drafter"]

KINDS: dict[ModelKind, tuple[str, str]] = {
    "target": (
        "an autoregressive language model",
        "run it with `tilewright generate`, `chat` or `serve`, with --denoising for blocks",
    ),
    "diffusion": ("a diffusion language model", "run it with `tilewright generate`, `chat`, `serve` or `bench diffusion`"),
    "drafter": ("a drafter", "pass it to --drafter, with its target"),
}
"""Name of each kind, and the commands that run such models."""


def kind_of(folder: Path) -> ModelKind:
    """Returns the kind of the model in a folder. Raises a `ValueError` if the folder has no configuration."""
    if is_diffusion(folder):
        return "diffusion"
    return "drafter" if is_drafter(read_config(folder), str(folder / CONFIG)) else "target"


def check_kind(model: str, folder: Path, expected: ModelKind) -> None:
    """Raises a `ValueError` for a model of another kind, with the commands that run such models."""
    found = kind_of(folder)
    if found != expected:
        name, commands = KINDS[found]
        raise ValueError(f"expected {KINDS[expected][0]}; {model} is {name}: {commands}")
