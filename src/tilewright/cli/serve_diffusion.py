"""Options of `tilewright serve` that only diffusion language models have."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

from rich.console import Console

from tilewright.cli.common import DeviceOptions, ModelOptions, given
from tilewright.cli.diffusion_options import DiffusionModelOptions
from tilewright.cli.options import WORDS, Numbers, option_class, told
from tilewright.diffusion.engine import DiffusionEngine
from tilewright.diffusion.engine_options import DENOISING, ROWS, DiffusionEngineOptions
from tilewright.diffusion.options import MODES, Denoising, Mode, Remasking
from tilewright.diffusion.programs import DiffusionTable
from tilewright.models import diffusion
from tilewright.runtime.options import batches_for


@option_class
class DenoisingOptions:
    """Options of serving a diffusion language model; with any other model these are errors.

    Attributes:
        mode: how requests are denoised that do not say: "dense", "prefix", "dual" or "sparse".
        modes: those that requests may ask for; all by default. Fewer make smaller programs.
        threshold: of requests that name neither steps nor a threshold: each step commits all tokens at least this likely.
        tau: sparse: the threshold of saliency, of requests that do not say.
        suffix_window: positions behind the block that a step knows of, of requests that do not say; all by default.
        remasking: what ranks masked positions, of requests that do not say.
        new_tokens: the length of responses, of requests that do not say.
        block_length: tokens that are denoised together, of requests that do not say.
        positions: lengths of prompt and response together that programs are compiled for.
        responses, blocks: of responses and of blocks likewise; by default blocks of 32, and any up to the whole response.
    """

    mode: Mode | None = None
    modes: Annotated[tuple[Mode, ...] | None, WORDS] = None
    threshold: float | None = None
    tau: float | None = None
    suffix_window: int | None = None
    remasking: Remasking | None = None
    new_tokens: int | None = None
    block_length: int | None = None
    positions: Numbers | None = None
    responses: Numbers | None = None
    blocks: Numbers | None = None

    def refuse(self) -> None:
        """Raises a `ValueError` for anything that was said of a model that does not denoise."""
        if wrong := told(self):
            raise ValueError(f"{wrong[0]} is for diffusion models; this one decodes token by token")

    @property
    def defaults(self) -> Denoising:
        """Denoising of a request that says nothing."""
        said = {
            name: value
            for name in ("mode", "threshold", "suffix_window", "remasking", "new_tokens", "block_length")
            if (value := getattr(self, name)) is not None
        }
        if self.mode is None and self.modes is not None:
            said["mode"] = self.modes[0]
        saliency = DENOISING.saliency if self.tau is None else replace(DENOISING.saliency, tau=self.tau)
        return replace(DENOISING, saliency=saliency, **said)

    def engine_options(self, slots: int | None, shared: Mapping[str, Any], context: int) -> DiffusionEngineOptions:
        """Engine options that these arguments stand for, for a model of this context.

        Args:
            shared: what every engine takes.

        Raises:
            ValueError: what does not go together.
        """
        if slots is not None and slots < 1:
            raise ValueError(f"expected --slots of at least 1, found {slots}")
        options = DiffusionEngineOptions(modes=given(self.modes, MODES), defaults=self.defaults, **shared)
        table = options.shapes(context if self.positions is None else min(context, self.positions[-1]))
        said = {name: value for name in ("positions", "responses", "blocks") if (value := getattr(self, name)) is not None}
        if slots is not None:
            said["batches"] = batches_for(slots, ROWS, factor=4)
        table = DiffusionTable(**(asdict(table) | said))
        try:
            table.shape(1, [1], [options.defaults])
        except ValueError as error:
            raise ValueError(f"--new-tokens, --block-length: {error}") from error
        return replace(options, table=table)


def is_diffusion(models: ModelOptions, console: Console) -> bool:
    """True if a model denoises. Raises a `ValueError` for what such a model cannot take."""
    if not diffusion.is_diffusion(models.folder(console)):
        return False
    taken = vars(DiffusionModelOptions())
    if wrong := told(models, *(name for name in vars(models) if name not in taken)):
        raise ValueError(f"{wrong[0]} is for models that decode token by token; {models.model} denoises")
    return True


def diffusion_engine(
    models: ModelOptions,
    devices: DeviceOptions,
    denoising: DenoisingOptions,
    slots: int | None,
    shared: Mapping[str, Any],
    console: Console,
) -> DiffusionEngine:
    """The engine of a diffusion model. What is wrong with the options is said before its weights are read."""
    sizes = diffusion.read_diffusion(models.folder(console)).decoder
    options = denoising.engine_options(slots, shared, sizes.max_position_embeddings)
    own = {name: getattr(models, name) for name in vars(DiffusionModelOptions())}
    return DiffusionEngine(DiffusionModelOptions(**own).load_model(console, devices=devices), options)
