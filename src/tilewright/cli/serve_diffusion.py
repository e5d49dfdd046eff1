"""Options of `tilewright serve` for diffusion language models."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from tilewright.cli.common import DeviceOptions, ModelOptions, given
from tilewright.cli.diffusion_options import DenoisingSettings, diffusion_model_options
from tilewright.diffusion.engine_options import DENOISING, ROWS, DiffusionEngineOptions
from tilewright.diffusion.options import MODES, Denoising, Mode
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.models import diffusion
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import batches_for


@dataclass(frozen=True)
class ServedDenoising(DenoisingSettings):
    """Settings of denoising, named as the fields of the HTTP API: defaults of requests, and the shapes to compile.

    Attributes:
        max_tokens: length of a response. By default 128.
        modes: modes that requests may choose; fewer modes need smaller programs. By default all.
        positions: lengths of prompt and response together to compile programs for.
        responses: lengths of responses to compile programs for.
        blocks: block lengths to compile programs for. By default 32 and the whole response.
    """

    max_tokens: int | None = None
    modes: tuple[Mode, ...] | None = None
    positions: tuple[int, ...] | None = None
    responses: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None

    @property
    def defaults(self) -> Denoising:
        """Denoising of a request that sets none of the fields."""
        changes: dict[str, Any] = {} if self.max_tokens is None else {"new_tokens": self.max_tokens}
        if self.mode is None and self.modes is not None:
            changes["mode"] = self.modes[0]
        return self.applied(DENOISING, **changes)

    def engine_options(self, slots: int | None, shared: Mapping[str, Any], context: int) -> DiffusionEngineOptions:
        """Makes the options of an engine.

        Args:
            slots: maximum number of concurrent requests.
            shared: options that every engine has.
            context: positions of the model's context.

        Raises:
            ValueError: a value is out of its range, or values exclude each other.
        """
        if slots is not None and slots < 1:
            raise ValueError(f"expected --slots of at least 1, found {slots}")
        if self.guidance:
            raise ValueError(f"--denoising: expected no guidance, which the server does not offer, found {self.guidance:g}")
        options = DiffusionEngineOptions(modes=given(self.modes, MODES), defaults=self.defaults, **shared)
        table = options.shapes(context if self.positions is None else min(context, self.positions[-1]))
        sizes: dict[str, Any] = self.set_values("positions", "responses", "blocks")
        if slots is not None:
            sizes["batches"] = batches_for(slots, ROWS, factor=4)
        table = DiffusionTable(**(asdict(table) | sizes))
        try:
            table.shape(1, [1], [options.defaults])
        except ValueError as error:
            raise ValueError(f"--denoising max_tokens, block_length: {error}") from error
        return replace(options, table=table)


def diffusion_engine(
    models: ModelOptions,
    devices: DeviceOptions,
    denoising: ServedDenoising,
    slots: int | None,
    shared: Mapping[str, Any],
    console: Console,
) -> tuple[Engine, DiffusionModel]:
    """Makes the engine of a diffusion model, and loads the model. Options are checked before the weights are read."""
    sizes = diffusion.read_diffusion(models.folder(console)).decoder
    options = denoising.engine_options(slots, shared, sizes.max_position_embeddings)
    model = diffusion_model_options(models).load_model(console, devices=devices)
    return model.engine(options), model
