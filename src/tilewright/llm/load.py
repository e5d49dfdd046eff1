"""Loader of autoregressive and diffusion language models."""

from inspect import signature
from pathlib import Path
from typing import Any

from rich.console import Console

from tilewright.llm import diffusion_model, language_model
from tilewright.models import hub
from tilewright.models.kinds import kind_of
from tilewright.models.tokenizer import load_tokenizer


def load(
    model: str | Path,
    drafter: str | Path | list[str | Path] | None = None,
    *,
    revision: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> Any:
    """Loads an autoregressive or a diffusion language model; both have `generate`, `start`, `chat` and `engine`.

    Returns a `LanguageModel` or a `DiffusionModel`.

    Args:
        model, revision, console: see `language_model.load`.
        drafter: drafter of an autoregressive model.
        options: options of `language_model.load`, or of `diffusion_model.load`.

    Raises:
        ValueError: invalid files, or an option that the model's kind does not have.
        TypeError: an option that neither kind has.
    """

    def check(folder: Path) -> None:
        kind_of(folder)
        load_tokenizer(folder)

    folder = hub.resolve(str(model), revision, console, check)
    if kind_of(folder) != "diffusion":
        return language_model.load(model, drafter, revision=revision, console=console, **options)
    options = {**options, **({} if drafter is None else {"drafter": drafter})}
    names, other_names = (set(signature(each.load).parameters) for each in (diffusion_model, language_model))
    if wrong := [name for name in options if name not in names and name in other_names]:
        raise ValueError(f"expected no {wrong[0]}, an option of autoregressive models, for the diffusion model {model}")
    return diffusion_model.load(model, revision=revision, console=console, **options)
