"""Options of an engine for diffusion language models, and their defaults."""

from dataclasses import dataclass, field

from tilewright.diffusion.options import FAR, MODES, Denoising, Mode
from tilewright.diffusion.programs import DiffusionTable
from tilewright.runtime.options import ServiceOptions

ROWS = (1, 4)
POSITIONS = (256, 1024, 4096)
RESPONSES = (128, 512, 1024)
BLOCKS = (32, FAR)
"""Of the table of a diffusion language model, as far as its context goes: fewer than `generate` has, for all programs are
compiled before serving. A block is of up to 32 tokens, or up to the whole response."""


DENOISING = Denoising(block_length=32)


@dataclass(frozen=True)
class DiffusionEngineOptions(ServiceOptions):
    """Options of an engine for a diffusion language model: shapes and memory.

    Attributes:
        table: the declared shapes: the largest of its batches is the number of slots. None for 4 slots of the model's context,
            and blocks of up to the whole response.
        modes: those that requests may ask for; fewer of them make smaller programs.
        defaults: what a request asks for that says nothing else.
    """

    table: DiffusionTable | None = None
    modes: tuple[Mode, ...] = MODES
    defaults: Denoising = DENOISING
    dispatch_s: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.modes or set(self.modes) - set(MODES):
            raise ValueError(f"expected modes among {', '.join(MODES)}, found {', '.join(self.modes) or 'none'}")
        if self.defaults.mode not in self.modes:
            raise ValueError(f"expected a default mode among {', '.join(self.modes)}, found {self.defaults.mode}")

    def shapes(self, context: int) -> DiffusionTable:
        """The table, for a model of this context."""
        if self.table is not None:
            return self.table
        most = min(context, POSITIONS[-1])
        positions = (*(size for size in POSITIONS if size < most), most)
        responses = tuple(sorted({min(size, most - 1) for size in RESPONSES}))
        return DiffusionTable(ROWS, positions, responses, BLOCKS)
