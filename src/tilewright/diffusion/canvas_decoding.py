"""Decoding of models that refine canvases of random tokens, on the pages and prefills of autoregressive decoding.

A round is a pass over the current canvas of every row (`canvas.py`). Prompts are prefilled as a whole. Finished canvases are
delivered up to an end-of-sequence token; pages of encoded text serve later requests with the same prefix.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from tilewright.diffusion.block_causal import BlockDecoding, check_supported
from tilewright.diffusion.canvas import CanvasDenoising, canvas_pass, canvas_rows
from tilewright.models.config import Canvas
from tilewright.runtime.autoregressive import ChooserFactory, fixed_rounds
from tilewright.runtime.interfaces import Variant
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey, Programs, RowRequest
from tilewright.runtime.request import GenerateRequest, Listener
from tilewright.runtime.rounds import RowMasks
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling, SamplingMode
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import DecodeState, Step, Target

READ = ("max_new_tokens", "seed", "stop", "ignore_eos", "stop_token_ids", "include_stop", "skip_special_tokens")
"""Fields of `Sampling` that requests may set; a canvas has no definition of the others."""


def canvas_of(target: Target) -> Canvas:
    """Returns the canvas of a model that refines one."""
    canvas = target.canvas
    assert canvas is not None, "only a model with a canvas is decoded canvas by canvas"
    return canvas


class CanvasPrograms(Programs):
    """Programs whose rounds are passes over canvases."""

    def step(self, variant: Variant | None, target: Target, masks: RowMasks | None) -> Step:
        return partial(canvas_pass, target, canvas_of(target))

    def request_rows(self, rows: Sequence[RowRequest], eos: Sequence[int] = ()) -> dict[str, Any]:
        options = [row.denoising or CanvasDenoising() for row in rows]
        return super().request_rows(rows, eos) | {"denoising": canvas_rows(options, 1, 1, jnp.dtype(self.dtype))}

    def empty_state(self, target_cache: Any, draft_cache: Any) -> DecodeState:
        config = self.target.config
        sizes = (canvas_of(self.target).length, config.hidden_size, jnp.dtype(self.dtype))
        empty = canvas_rows([CanvasDenoising()] * self.layout.batch, *sizes)
        return replace(super().empty_state(target_cache, draft_cache), denoising=empty)


class CanvasRunner(ModelRunner):
    """Runner of passes over canvases."""

    def bounds(self, rounds: int, width: int) -> tuple[int, int]:
        return 0, rounds * width


class CanvasDecoding(BlockDecoding):
    """Decoding of a model that refines canvases of random tokens, which are its blocks."""

    programs_type = CanvasPrograms
    runner_type = CanvasRunner

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),
        make_chooser: ChooserFactory = fixed_rounds,
        programs: Programs | None = None,
        sampling: SamplingMode = "logprobs",
        defaults: CanvasDenoising = CanvasDenoising(),
    ):
        """Args: `defaults`: options of requests that name none; for the others see `Autoregressive`."""
        self.block_length = canvas_of(model.target).length
        self.blocks = defaults
        # Passes report no log-probabilities.
        mode: SamplingMode = "any" if sampling == "logprobs" else sampling
        super().__init__(model, options, make_chooser, programs, mode)

    def program_keys(self) -> Sequence[ProgramKey]:
        return list(self.programs.declared(self.runner.sampling))

    def check(self, request: GenerateRequest) -> None:
        check_supported(request)
        options = request.denoising or self.blocks
        if not isinstance(options, CanvasDenoising):
            raise ValueError(f"expected denoising options as CanvasDenoising, found {type(options).__name__}")
        for name, wrong in (
            ("logprobs", request.logprobs is not None),
            ("constraint", request.constraint is not None),
        ):
            if wrong:
                raise ValueError(f"expected no {name}, which is not supported for a model that refines canvases")
        check_sampling(request.sampling)
        super().check(request)

    def sequence(self, request: GenerateRequest, listener: Listener) -> TokenSequence:
        # Every canvas is random.
        seed = replace(request.sampling, temperature=1.0).seeded().seed
        sequence = super().sequence(request, listener)
        sequence.processor.sampling = replace(sequence.processor.sampling, seed=seed)
        sequence.denoising = request.denoising or self.blocks
        return sequence


def check_sampling(sampling: Sampling) -> None:
    """Raises a `ValueError` for sampling options that have no meaning for a canvas."""
    plain = Sampling()
    others = [field.name for field in fields(Sampling) if field.name not in READ]
    if wrong := [name for name in others if getattr(sampling, name) != getattr(plain, name)]:
        found = getattr(sampling, wrong[0])
        hint = " (t_max and t_min are its temperatures)" if wrong[0] == "temperature" else ""
        raise ValueError(f"expected no {wrong[0]} for a model that refines canvases{hint}, found {found}")
