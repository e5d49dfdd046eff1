"""Tilewright: irregular models on machines that want fixed shapes."""

from tilewright.compiled.compare import compare
from tilewright.decode.language_model import Generation, LanguageModel, load
from tilewright.decode.sampling import Sampling
from tilewright.decode.session import Piece, Result, Session
from tilewright.decode.shapes import ShapeTable

__version__ = "0.1.0"

__all__ = [
    "Generation", "LanguageModel", "Piece", "Result", "Sampling", "Session", "ShapeTable", "__version__", "compare", "load",
]  # fmt: skip
