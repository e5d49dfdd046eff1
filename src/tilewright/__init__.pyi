from . import graph as graph
from .compiled.compare import compare as compare
from .diffusion.blocks import BlockDenoising as BlockDenoising
from .diffusion.options import Denoising as Denoising
from .grammar.grammar import Grammar as Grammar
from .llm.diffusion_model import DiffusionModel as DiffusionModel
from .llm.language_model import LanguageModel as LanguageModel
from .llm.load import load as load
from .llm.stream import Stream as Stream
from .runtime.output import Generation as Generation
from .runtime.output import Piece as Piece
from .runtime.output import Result as Result
from .runtime.sampling import Sampling as Sampling
from .runtime.shapes import ShapeTable as ShapeTable

__version__: str
__all__: list[str]
