"""Kinds of models that a folder may hold, told by its configuration before anything else is read."""

from pathlib import Path
from typing import Literal

from tilewright.models.checkpoint import CONFIG, read_config
from tilewright.models.diffusion import is_diffusion
from tilewright.models.drafter_layouts import is_drafter

ModelKind = Literal["target", "diffusion", "drafter"]

KINDS: dict[ModelKind, tuple[str, str]] = {
    "target": ("an autoregressive language model", "`tilewright generate`, `chat` and `serve` take it"),
    "diffusion": ("a diffusion language model", "`tilewright diffuse`, `bench diffusion` and `serve` take it"),
    "drafter": ("a drafter", "--drafter takes it, beside its target"),
}
"""Name of each kind, and the commands that take it."""


def kind_of(folder: Path) -> ModelKind:
    """Kind of the model in a folder. Raises a `ValueError` if it holds no configuration."""
    if is_diffusion(folder):
        return "diffusion"
    return "drafter" if is_drafter(read_config(folder), str(folder / CONFIG)) else "target"


def check_kind(model: str, folder: Path, wanted: ModelKind) -> None:
    """Raises a `ValueError` that names the commands for a model of another kind."""
    found = kind_of(folder)
    if found != wanted:
        name, takers = KINDS[found]
        raise ValueError(f"expected {KINDS[wanted][0]}; {model} is {name}: {takers}")
