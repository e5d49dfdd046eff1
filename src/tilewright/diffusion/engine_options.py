"""Options of an engine for diffusion language models, with their defaults."""

from dataclasses import dataclass, field

from tilewright.diffusion.options import FAR, MODES, Denoising, Mode
from tilewright.diffusion.programs import DiffusionTable
from tilewright.runtime.layout import LARGEST_PAGE
from tilewright.runtime.options import ServiceOptions

ROWS = (1, 4)
POSITIONS = (256, 1024, 4096)
RESPONSES = (128, 512, 1024)
BLOCKS = (32, FAR)
"""Default shapes of an engine, up to the model's context.

They are fewer than those of `generate`, since serving compiles all programs beforehand. A block has up to 32 tokens, or is as
long as the response.
"""


DENOISING = Denoising(block_length=32)


@dataclass(frozen=True)
class DiffusionEngineOptions(ServiceOptions):
    """Options of an engine for a diffusion language model: shapes and memory.

    Attributes:
        table: declared shapes; the largest batch is the number of slots. None for 4 slots of the model's context, and blocks up
            to the whole response.
        modes: modes that requests may use; fewer modes make smaller programs.
        defaults: default options of requests.
        page_size: positions of a page.
        pages: size of the pool; None for as many pages as all slots can fill. A request reserves pages for its prompt and its
            whole response.
    """

    table: DiffusionTable | None = None
    modes: tuple[Mode, ...] = MODES
    defaults: Denoising = DENOISING
    page_size: int = LARGEST_PAGE
    pages: int | None = None
    dispatch_s: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("page_size", "pages"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, found {value}")
        if not self.modes or set(self.modes) - set(MODES):
            raise ValueError(f"expected modes among {', '.join(MODES)}, found {', '.join(self.modes) or 'none'}")
        if self.defaults.mode not in self.modes:
            raise ValueError(f"expected a default mode among {', '.join(self.modes)}, found {self.defaults.mode}")

    def shapes(self, context: int) -> DiffusionTable:
        """Returns the table for a model with this context."""
        if self.table is not None:
            return self.table
        most = min(context, POSITIONS[-1])
        positions = (*(size for size in POSITIONS if size < most), most)
        responses = tuple(sorted({min(size, most - 1) for size in RESPONSES}))
        return DiffusionTable(ROWS, positions, responses, BLOCKS)
