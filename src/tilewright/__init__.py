"""Tilewright: irregular models on machines that want fixed shapes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.compiled.compare import compare
    from tilewright.grammar.grammar import Grammar
    from tilewright.llm.language_model import LanguageModel, load
    from tilewright.llm.stream import Stream
    from tilewright.runtime.output import Generation, Piece, Result
    from tilewright.runtime.sampling import Sampling
    from tilewright.runtime.shapes import ShapeTable

__version__ = "0.1.0"

__all__ = [
    "Generation",
    "Grammar",
    "LanguageModel",
    "Piece",
    "Result",
    "Sampling",
    "ShapeTable",
    "Stream",
    "__version__",
    "compare",
    "load",
]

_MODULES = {
    "compiled.compare": ("compare",),
    "grammar.grammar": ("Grammar",),
    "llm.language_model": ("LanguageModel", "load"),
    "runtime.output": ("Generation", "Piece", "Result"),
    "runtime.sampling": ("Sampling",),
    "llm.stream": ("Stream",),
    "runtime.shapes": ("ShapeTable",),
}
"""Where the public names live. They are imported when first asked for: JAX takes a second, which `--version` need not wait."""


def __getattr__(name: str) -> object:
    """A public name at its first use (PEP 562); from then on it is an ordinary attribute."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
