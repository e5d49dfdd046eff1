"""Sampling defaults: those of the model's `generation_config.json`, or OpenAI's."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tilewright.models.checkpoint import CONFIG, GENERATION_CONFIG, read_config, read_generation_config
from tilewright.runtime.sampling import REPETITION_PENALTIES, TEMPERATURES

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, TEMPERATURES[1]),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": REPETITION_PENALTIES,
    "max_new_tokens": (1, 2**31 - 1),
}
"""Range of each number in the file."""
WHOLE_NUMBERS = ("top_k", "max_new_tokens")


def cold(temperature: float) -> float:
    """A temperature; 0, the limit, for one that is too low to divide by."""
    return temperature if temperature >= TEMPERATURES[0] else 0.0


def embedding_dimensions(folder: Path) -> tuple[int, ...]:
    """Numbers of dimensions that a model's embeddings may be cut to, as its `config.json` declares them.

    The field is `matryoshka_dimensions`, as vLLM reads it (arXiv 2205.13147); without it there are none.

    Raises:
        ValueError: it is no list of numbers of at least 1.
    """
    found = read_config(folder).get("matryoshka_dimensions") or []
    if not isinstance(found, list) or not all(type(each) is int and each >= 1 for each in found):
        raise ValueError(f"{folder / CONFIG}: expected matryoshka_dimensions of whole numbers from 1 on, found {found!r}")
    return tuple(found)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values that hold where a request says nothing.

    Attributes:
        max_new_tokens: at most so many, if the request does not say how many; None for no such limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @staticmethod
    def of_model(folder: Path) -> "SamplingDefaults":
        """Defaults of a model's folder. See `model_defaults`, also for errors."""
        return SamplingDefaults(**model_defaults(folder))

    @property
    def said(self) -> dict[str, Any]:
        """Those that are not OpenAI's."""
        usual = SamplingDefaults()
        return {each.name: own for each in fields(self) if (own := getattr(self, each.name)) != getattr(usual, each.name)}


def model_defaults(folder: Path) -> dict[str, Any]:
    """Sampling values that a model's folder or file gives, as the fields of `SamplingDefaults`.

    As in vLLM, `do_sample` is not read.

    Raises:
        ValueError: the file is no JSON object, or a value is out of range.
    """
    path = folder / GENERATION_CONFIG
    given = read_generation_config(folder)
    found = {each.name: given[each.name] for each in fields(SamplingDefaults) if given.get(each.name) is not None}
    for name, value in found.items():
        low, high = RANGES[name]
        kinds = int if name in WHOLE_NUMBERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise ValueError(f"{path}: expected {name} from {low:g} to {high:g}, found {value!r}")
    if "temperature" in found:
        found["temperature"] = cold(found["temperature"])
    return found
