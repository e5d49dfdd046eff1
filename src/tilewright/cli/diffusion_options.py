"""Options that the commands for diffusion language models share: the model and settings of denoising."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.console import Console

from tilewright.cli.common import DeviceOptions, LoadOptions, ModelOptions, given, print_fallbacks, print_schedules
from tilewright.cli.options import COMMON, DIFFUSION, MODEL, changed_options, option_class, settings
from tilewright.diffusion.blocks import DEFAULT_STRATEGY, BlockDenoising, Strategy, check_read
from tilewright.diffusion.canvas import CanvasDenoising, published_options
from tilewright.diffusion.engine_options import DENOISING as DEFAULTS
from tilewright.diffusion.options import Denoising, Mode, Remasking, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.kernels.select import DENOISING, implementations
from tilewright.llm.diffusion_model import DiffusionModel, load
from tilewright.models import diffusion
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import GENERATION_CONFIG, decoder_config, read_generation_config
from tilewright.models.tokenizer import encode
from tilewright.train.arithmetic import Problem, problems

DEMO = "demo-diffusion"
"""Name of the packaged diffusion model, which works out sums digit by digit."""
FOR_BLOCKS = ("strategy", "small_block_size", "edit_threshold", "max_post_steps")
"""Settings that only models with blocks have."""
FOR_CANVAS = tuple(field.name for field in fields(CanvasDenoising) if field.name != "steps")
"""Settings that only models with canvases have."""


@option_class(group=MODEL)
class DiffusionModelOptions(LoadOptions):
    """Options that name a diffusion model and its number formats.

    Attributes:
        model: a folder, a Hugging Face id, or "demo-diffusion", the packaged model.
    """

    model: Annotated[str, Parameter(alias="-m", group=COMMON)] = DEMO

    def load_model(
        self, console: Console, table: DiffusionTable | None = None, devices: DeviceOptions = DeviceOptions()
    ) -> DiffusionModel:
        model = load(self.model, table=table, **self.loading(devices, console))
        print_fallbacks(implementations(model.config.decoder, model.dtype, kernels=self.kernels, operations=DENOISING))
        print_schedules(model.placement, (model.table.positions[0], model.context), console)
        return model


@dataclass(frozen=True)
class DenoisingSettings:
    """Settings of denoising, named as the fields of the HTTP API.

    Attributes:
        mode: positions that a step computes: "dense", all; "prefix", the block and all positions after it; "dual", the block
            alone, both with a KV cache; "sparse", the salient positions. By default dense.
        threshold: commit all tokens of at least this probability in each step, instead of a fixed number. For a model whose
            blocks are denoised, by default the published one of its family.
        steps: number of steps in all, a multiple of the number of blocks. By default one for each token. For a model whose
            blocks are denoised: the most passes of a block. For a model that refines canvases (DiffusionGemma): the most passes
            of a canvas. Settings of canvases are by default those of its generation_config.json.
        block_length: tokens that are denoised together, block after block. By default 32.
        strategy: for a model whose blocks are denoised: "low_confidence_dynamic" (the default), all tokens above the threshold;
            "low_confidence_static", the most probable ones; "sequential"; or "joint_threshold", with edits (LLaDA2.1). A
            model that also decodes token by token (Nemotron-Labs-Diffusion, demo-blocks) does so unless a setting has a value.
        small_block_size: for a model whose blocks are denoised: tokens of the parts of a block that are denoised one after the
            other. By default as published: 8 for Fast-dLLM v2, whole blocks for other models.
        edit_threshold: joint_threshold: probability above which a token is replaced by another. By default 0.
        max_post_steps: joint_threshold: the most passes over a block without masks. By default 16.
        entropy_bound: canvases: bound of the summed entropies, in nats, of the tokens that a pass keeps.
        t_max: canvases: temperature of the first pass.
        t_min: canvases: temperature that the passes fall to.
        stability_threshold: canvases: number of passes with the same most likely tokens after which a canvas may be finished.
        confidence_threshold: canvases: mean entropy, in nats, below which a canvas may be finished.
        remasking: ranking of masked positions: "low_confidence" (the default) or "random" from LLaDA; "origin", "maskgit_plus",
            "topk_margin" or "entropy" from Dream.
        suffix_window: positions after the block that a step sees. By default all.
        first_alone: prefix and dual, with shifted logits: the first step of a block commits its first position alone, and later
            steps begin at the block, as Fast-dLLM's for Dream. By default false.
        logits_eos_inf: never choose an end-of-sequence token, as LLaDA's option. By default false.
        confidence_eos_eot_inf: rank positions as if ends of the sequence and of the turn had no probability, as LLaDA's option.
            By default false.
        guidance: scale of classifier-free guidance; each step then computes two sequences. By default 0, none.
        tau: sparse: a position is salient if the cosine similarity of its attention output with the step before is below this.
            By default 0.99; above 1, all positions are salient.
        full_steps: sparse: number of first steps that compute all positions. By default 4.
        every: sparse: interval of steps that compute the whole sequence instead of the response alone. By default 4.
        first_layer: sparse: every position is salient in the first layer. By default true.
        keep_changed: sparse: tokens committed in the step before are salient in every layer. By default true.
        keep_prompt: sparse: steps that compute the whole sequence update the prompt's positions. By default true.
        boundary: sparse, with shifted logits: compute the position before the response, which predicts its first token. By
            default true.
        whole_until: sparse: steps up to this number compute the whole sequence. By default 0; 4 in the published code.
    """

    mode: Mode | None = None
    threshold: float | None = None
    steps: int | None = None
    block_length: int | None = None
    strategy: Strategy | None = None
    small_block_size: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    entropy_bound: float | None = None
    t_max: float | None = None
    t_min: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    remasking: Remasking | None = None
    suffix_window: int | None = None
    first_alone: bool | None = None
    logits_eos_inf: bool | None = None
    confidence_eos_eot_inf: bool | None = None
    guidance: float | None = None
    tau: float | None = None
    full_steps: int | None = None
    every: int | None = None
    first_layer: bool | None = None
    keep_changed: bool | None = None
    keep_prompt: bool | None = None
    boundary: bool | None = None
    whole_until: int | None = None

    def set_values(self, *names: str) -> dict[str, Any]:
        """Returns the settings among the named ones that have a value."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def applied(self, defaults: Denoising = DEFAULTS, **changes: Any) -> Denoising:
        """Returns a request with these settings and with `changes`, which take precedence; other values are the defaults.

        Raises:
            ValueError: a value is out of its range, or values exclude each other.
        """
        if wrong := self.set_values(*FOR_BLOCKS):
            found = ", ".join(wrong)
            raise ValueError(f"--denoising: {found} is for models whose blocks are denoised; this one has remasking")
        if wrong := self.set_values(*FOR_CANVAS):
            raise ValueError(f"--denoising: {', '.join(wrong)} is for models that refine canvases; this one has remasking")
        sparse = vars(Saliency())
        named = self.set_values(
            *(name for name in vars(DenoisingSettings()) if name not in (*sparse, *FOR_BLOCKS, *FOR_CANVAS))
        )
        saliency = replace(defaults.saliency, **self.set_values(*sparse))
        return replace(defaults, saliency=saliency, **(named | changes))

    def for_blocks(self) -> BlockDenoising:
        """Returns these settings for a model whose blocks are denoised.

        Raises:
            ValueError: a value is out of its range, or a setting is for other models.
        """
        used = ("threshold", "steps", *FOR_BLOCKS)
        if wrong := self.set_values(*(name for name in vars(self) if name not in used)):
            hint = "; --block-size sets the block length" if "block_length" in wrong else ""
            raise ValueError(f"--denoising: expected {', '.join(used)} for a model with blocks, found {', '.join(wrong)}{hint}")
        check_read(given(self.strategy, DEFAULT_STRATEGY), self.set_values(*used), "--denoising: ")
        return BlockDenoising(**self.set_values(*used))

    def for_canvas(self, defaults: CanvasDenoising) -> CanvasDenoising:
        """Returns these settings for a model that refines canvases.

        Raises:
            ValueError: a value is out of its range, or a setting is for other models.
        """
        used = ("steps", *FOR_CANVAS)
        if wrong := self.set_values(*(name for name in vars(self) if name not in used)):
            hint = "; --block-size sets the canvas length" if "block_length" in wrong else ""
            raise ValueError(
                f"--denoising: expected {', '.join(used)} for a model that refines canvases, found {', '.join(wrong)}{hint}"
            )
        return replace(defaults, **self.set_values(*used))

    def for_decoder(self, folder: Path) -> BlockDenoising | CanvasDenoising | None:
        """Returns these settings for the decoder in a folder; None for one that is to decode token by token.

        A model that can do both, such as Nemotron-Labs-Diffusion, denoises blocks if any setting has a value.

        Raises:
            ValueError: see `for_blocks` and `for_canvas`; any setting has a value, for a model that only decodes token by
                token.
        """
        config = decoder_config(folder)
        if config.canvas is not None:
            return self.for_canvas(published_options(read_generation_config(folder), str(folder / GENERATION_CONFIG)))
        if config.denoises_blocks or (config.masked_blocks is not None and self != type(self)()):
            return self.for_blocks()
        self.refuse()
        return None

    def check_mode(self) -> None:
        """Raises a `ValueError` for settings of sparse steps in another mode."""
        sparse = self.set_values(*vars(Saliency()))
        if sparse and self.mode != "sparse":
            raise ValueError(f"--denoising: expected mode=sparse with {', '.join(sparse)}, found mode={self.mode or 'dense'}")

    def refuse(self) -> None:
        """Raises a `ValueError` if any setting has a value; for models that decode token by token."""
        if self != type(self)():
            raise ValueError("--denoising is for diffusion models; this one decodes token by token")


ABOUT_DENOISING = "denoising by a diffusion model"
DenoisingOption = Annotated[DenoisingSettings, settings(DenoisingSettings, ABOUT_DENOISING), Parameter(group=DIFFUSION)]
"""The option `--denoising` of commands that take models of either kind."""


def is_diffusion(models: ModelOptions, console: Console) -> bool:
    """True if a model is a diffusion model. Raises a `ValueError` for options that such a model does not have."""
    if not diffusion.is_diffusion(models.folder(console)):
        return False
    names = vars(DiffusionModelOptions())
    if wrong := changed_options(models, *(name for name in vars(models) if name not in names)):
        raise ValueError(f"{wrong[0]} is for models that decode token by token; {models.model} denoises")
    return True


def diffusion_model_options(models: ModelOptions) -> DiffusionModelOptions:
    """Converts options of a model of either kind to those of a diffusion model."""
    return DiffusionModelOptions(**{name: getattr(models, name) for name in vars(DiffusionModelOptions())})


def held_out_problems(count: int) -> list[Problem]:
    """Returns the first problems that are held out from the packaged model's training."""
    return list(islice(problems(np.random.default_rng(0), held_out=True), count))


def encoded_prompts(model: DiffusionModel, texts: Sequence[str], template: ChatTemplate | None) -> list[list[int]]:
    """Encodes prompts. Text from a chat template already has its special tokens."""
    return [
        model.encode(text if template is None else encode(model.tokenizer, text, add_special_tokens=False)) for text in texts
    ]
