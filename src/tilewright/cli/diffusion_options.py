"""Options that the commands for diffusion language models share: which model, and how it denoises."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from rich.console import Console

from tilewright.cli.common import DeviceOptions, LoadOptions, say_fallbacks, say_schedules
from tilewright.cli.options import flag, option_class
from tilewright.diffusion.model import DiffusionModel, load
from tilewright.diffusion.options import Denoising, Remasking, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.kernels.select import DENOISING, implementations
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode
from tilewright.train.arithmetic import Problem, problems

DEMO = "demo-diffusion"
"""The packaged diffusion model, which writes arithmetic out in steps."""


@option_class
class DiffusionModelOptions(LoadOptions):
    """Options that name the model to load, and say how it multiplies.

    Attributes:
        model: a folder, a Hugging Face id, or "demo-diffusion", the small model that comes with the package.
    """

    model: str = DEMO

    def load_model(
        self, console: Console, table: DiffusionTable | None = None, devices: DeviceOptions = DeviceOptions()
    ) -> DiffusionModel:
        model = load(self.model, table=table, **self.loading(devices, console))
        say_fallbacks(implementations(model.config.decoder, model.programs.dtype, kernels=self.kernels, operations=DENOISING))
        say_schedules(model.placement, (model.table.positions[0], model.context), console)
        return model


@option_class
class StepOptions:
    """Options of denoising.

    Attributes:
        block_length: tokens that are denoised together, one block after the other; it divides the response's length.
        steps: denoising steps in all, which the number of blocks divides; by default one a token.
        remasking: what ranks masked positions: "low_confidence" or "random" (LLaDA), "origin", "maskgit_plus", "topk_margin" or
            "entropy" (Dream).
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens with this much probability.
        guidance: classifier-free guidance; 0 for none. Each step then looks at two sequences.
        full_steps: sparse: so many steps at the beginning compute everything.
        every: sparse: each step whose number this divides computes the whole sequence, the others the response alone.
        first_layer: sparse: every position is salient in the first layer.
        keep_changed: sparse: tokens committed in the step before are salient in every layer.
        keep_prompt: sparse: prompts catch up on what changed while the response alone was computed.
        boundary: sparse, of models with shifted logits: the response's window includes the position that predicts its first.
    """

    block_length: int = 32
    steps: int | None = None
    remasking: Remasking = "low_confidence"
    temperature: float = 0.0
    top_p: float = 1.0
    guidance: float = 0.0
    full_steps: int = Saliency.full_steps
    every: int = Saliency.every
    first_layer: bool = Saliency.first_layer
    keep_changed: bool = Saliency.keep_changed
    keep_prompt: bool = Saliency.keep_prompt
    boundary: bool = Saliency.boundary

    def saliency(self, tau: float) -> Saliency:
        return Saliency(tau, self.full_steps, self.every, self.first_layer, self.keep_changed, self.keep_prompt, self.boundary)

    def request(self, new_tokens: int, seed: int | None, tau: float = Saliency.tau) -> Denoising:
        """Dense steps with a quota. Raises a `ValueError` for what is out of its range."""
        return Denoising(
            new_tokens,
            self.steps,
            self.block_length,
            self.remasking,
            self.temperature,
            self.top_p,
            seed,
            saliency=self.saliency(tau),
            guidance=self.guidance,
        )

    @staticmethod
    def require_sparse(saliency: Saliency, option: str, found: str) -> None:
        """Raises a `ValueError` where something is said of sparse steps, but `option` asks for those that `found` names."""
        usual = vars(Saliency())
        if of_sparse := [flag(name, value) for name, value in vars(saliency).items() if value != usual[name]]:
            raise ValueError(f"expected {option} sparse with {', '.join(of_sparse)}, found {found}")


def held_out_problems(count: int) -> list[Problem]:
    """Problems that the packaged model was never trained on, the same ones each time."""
    return list(islice(problems(np.random.default_rng(0), held_out=True), count))


def encoded_prompts(model: DiffusionModel, texts: Sequence[str], template: ChatTemplate | None) -> list[list[int]]:
    """The tokens of prompts. What a chat template made holds its special tokens already."""
    return [
        model.encode(text if template is None else encode(model.tokenizer, text, add_special_tokens=False)) for text in texts
    ]
