"""Sampling defaults, from the model's `generation_config.json` or OpenAI's."""

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
"""Range of each value in `generation_config.json`."""
WHOLE_NUMBERS = ("top_k", "max_new_tokens")


def cold(temperature: float) -> float:
    """Returns 0 (greedy) for a temperature that is too low to divide by, and any other temperature unchanged."""
    return temperature if temperature >= TEMPERATURES[0] else 0.0


def embedding_dimensions(folder: Path) -> tuple[int, ...]:
    """Reads the numbers of dimensions to which a model's embeddings may be truncated (Matryoshka, arXiv 2205.13147).

    The field of `config.json` is `matryoshka_dimensions`, as in vLLM. Returns () without the field.

    Raises:
        ValueError: the field is not a list of integers of at least 1.
    """
    found = read_config(folder).get("matryoshka_dimensions") or []
    if not isinstance(found, list) or not all(type(each) is int and each >= 1 for each in found):
        raise ValueError(f"{folder / CONFIG}: expected matryoshka_dimensions as a list of integers from 1, found {found!r}")
    return tuple(found)


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling parameters. The defaults of this class are OpenAI's.

    Attributes:
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold.
        top_k: number of most likely tokens to sample from; 0 for all.
        min_p: threshold relative to the most likely token.
        repetition_penalty: penalty of tokens in the prompt and the output; 1 for none.
        max_new_tokens: largest default number of new tokens; None for no limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @staticmethod
    def from_folder(folder: Path) -> "SamplingDefaults":
        """Reads the defaults of a model folder; see `model_defaults` for errors."""
        return SamplingDefaults(**model_defaults(folder))

    @property
    def changed_options(self) -> dict[str, Any]:
        """Values that differ from OpenAI's defaults, by name."""
        openai = SamplingDefaults()
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != getattr(openai, each.name)}


def model_defaults(folder: Path) -> dict[str, Any]:
    """Reads the sampling parameters of a model folder or file, named as in `SamplingDefaults`.

    `do_sample` is ignored, as in vLLM.

    Raises:
        ValueError: the file is not a JSON object, or a value is out of range.
    """
    path = folder / GENERATION_CONFIG
    config = read_generation_config(folder)
    found = {each.name: config[each.name] for each in fields(SamplingDefaults) if config.get(each.name) is not None}
    for name, value in found.items():
        low, high = RANGES[name]
        kinds = int if name in WHOLE_NUMBERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise ValueError(f"{path}: expected {name} from {low:g} to {high:g}, found {value!r}")
    if "temperature" in found:
        found["temperature"] = cold(found["temperature"])
    return found
