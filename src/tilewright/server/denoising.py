"""Request bodies for diffusion language models.

Fields that need autoregressive decoding are refused by name. The log-probability of a token comes from the denoising step that
committed the token, in which the model sees masks and tokens on both sides; it is not conditional on the previous tokens only.
Prompts have no log-probabilities.
"""

from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import Field

from tilewright.diffusion.blocks import MOST_POST_STEPS, BlockDenoising, Strategy, check_read
from tilewright.diffusion.canvas import MOST_STEPS, CanvasDenoising
from tilewright.diffusion.options import ALWAYS, Denoising, Mode, Remasking
from tilewright.diffusion.request import DenoisingRequest
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.sampling import later_seed
from tilewright.server.fields import WHOLE, unsupported
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, Length

COMMITS_MANY = "is not supported for a diffusion model, which commits several tokens at once"
NO_CANVAS = "is not supported for a model that refines canvases, whose temperatures are t_max and t_min"
NotForCanvas = Annotated[None, unsupported(reason=NO_CANVAS)]
"""Field that a canvas has no meaning for."""
OPTIONS = (
    "block_length",
    "suffix_window",
    "mode",
    "remasking",
    "first_alone",
    "logits_eos_inf",
    "confidence_eos_eot_inf",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
    "ignore_eos",
)
"""Fields that are options of `Denoising`, with the same names."""


class DenoisingBody(GenerationBody):
    """Fields of completions and chats of a diffusion model. Missing fields take the server's defaults (`--denoising`).

    Attributes:
        max_tokens: length of the response. The model generates whole blocks, and the last one is truncated.
        steps: total number of denoising steps, a multiple of the number of blocks.
        block_length: number of tokens per block.
        threshold: commit all tokens of at least this probability, instead of a fixed number of steps.
        suffix_window: number of positions after the block that a denoising step attends to.
        mode: "dense" recomputes all positions in each step; "prefix", "dual" and "sparse" cache parts of the sequence.
        remasking: rule that selects the tokens to commit in a step.
        tau: saliency threshold of the mode "sparse".
        first_alone: commit the first position of a block alone in its first step, as Fast-dLLM does for Dream.
        logits_eos_inf: never choose an end-of-sequence token.
        confidence_eos_eot_inf: rank positions as if end-of-sequence and end-of-turn tokens had no probability; with a
            temperature, end-of-turn tokens only.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt, and of committed tokens
            before the position; 1 for none.
        presence_penalty: subtracted from the logits of the output's committed tokens before the position.
        frequency_penalty: subtracted for each occurrence of a token among the output's committed tokens before the position.
        prompt_logprobs: not supported for a diffusion model.
    """

    steps: Length = None
    block_length: Length = None
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    suffix_window: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    mode: Mode | None = None
    remasking: Remasking | None = None
    tau: Annotated[float, Field(gt=0, le=ALWAYS)] | None = None
    first_alone: bool | None = None
    logits_eos_inf: bool | None = None
    confidence_eos_eot_inf: bool | None = None

    prompt_logprobs: Annotated[None, unsupported(reason=COMMITS_MANY)] = None  # type: ignore[assignment]


class DenoisingCompletionBody(DenoisingBody, CompletionBody):  # type: ignore[misc]
    """Body of `POST /v1/completions` for a diffusion model."""

    max_tokens: Length = None


class DenoisingChatBody(DenoisingBody, ChatBody):  # type: ignore[misc]
    """Body of `POST /v1/chat/completions` for a diffusion model."""


class BlockBody(GenerationBody):
    """Fields of completions and chats of a model whose blocks are denoised. Missing fields take the server's defaults.

    Attributes:
        strategy: rule that selects the tokens to commit in a step.
        threshold: probability above which "low_confidence_dynamic" and "joint_threshold" commit a token.
        steps: maximum number of passes of a block.
        small_block_size: number of tokens of the parts of a block that are denoised one after the other.
        edit_threshold: probability above which "joint_threshold" replaces a token of the block by another.
        max_post_steps: maximum number of passes of "joint_threshold" over a block without masks.
        prompt_logprobs: not supported for a diffusion model.
    """

    strategy: Strategy | None = None
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    steps: Length = None
    small_block_size: Length = None
    edit_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    max_post_steps: Annotated[int, Field(ge=0, le=MOST_POST_STEPS), WHOLE] | None = None

    prompt_logprobs: Annotated[None, unsupported(reason=COMMITS_MANY)] = None  # type: ignore[assignment]

    def options(self, defaults: BlockDenoising) -> BlockDenoising:
        """Returns the denoising options of a request. Raises a `ValueError` for options that its strategy does not read."""
        names = ("strategy", "threshold", "steps", "small_block_size", "edit_threshold", "max_post_steps")
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        check_read(self.strategy or defaults.strategy, named)
        return replace(defaults, **named)


class BlockCompletionBody(BlockBody, CompletionBody):  # type: ignore[misc]
    """Body of `POST /v1/completions` for a model whose blocks are denoised."""


class BlockChatBody(BlockBody, ChatBody):  # type: ignore[misc]
    """Body of `POST /v1/chat/completions` for a model whose blocks are denoised."""


class CanvasBody(GenerationBody):
    """Fields of completions and chats of a model that refines canvases. Missing fields take the server's defaults.

    Attributes:
        steps: maximum number of passes of a canvas.
        entropy_bound: bound of the summed entropies of the tokens that a pass keeps.
        t_max: temperature of the first pass.
        t_min: temperature that the passes fall to.
        stability_threshold: number of passes with the same most likely tokens after which a canvas may be finished.
        confidence_threshold: mean entropy below which a canvas may be finished.
        temperature: not supported for a model that refines canvases; use `t_max` and `t_min`.
        top_p: not supported for a model that refines canvases.
        top_k: not supported for a model that refines canvases.
        min_p: not supported for a model that refines canvases.
        repetition_penalty: not supported for a model that refines canvases.
        presence_penalty: not supported for a model that refines canvases.
        frequency_penalty: not supported for a model that refines canvases.
        logit_bias: not supported for a model that refines canvases.
        min_tokens: not supported for a model that refines canvases.
        prompt_logprobs: not supported for a model that refines canvases.
    """

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS), WHOLE] | None = None
    entropy_bound: Annotated[float, Field(gt=0)] | None = None
    t_max: Annotated[float, Field(gt=0)] | None = None
    t_min: Annotated[float, Field(ge=0)] | None = None
    stability_threshold: Annotated[int, Field(ge=0, le=MOST_STEPS), WHOLE] | None = None
    confidence_threshold: Annotated[float, Field(gt=0)] | None = None

    temperature: NotForCanvas = None  # type: ignore[assignment]
    top_p: NotForCanvas = None  # type: ignore[assignment]
    top_k: NotForCanvas = None  # type: ignore[assignment]
    min_p: NotForCanvas = None  # type: ignore[assignment]
    repetition_penalty: NotForCanvas = None  # type: ignore[assignment]
    presence_penalty: NotForCanvas = None  # type: ignore[assignment]
    frequency_penalty: NotForCanvas = None  # type: ignore[assignment]
    logit_bias: NotForCanvas = None  # type: ignore[assignment]
    min_tokens: NotForCanvas = None  # type: ignore[assignment]
    prompt_logprobs: NotForCanvas = None  # type: ignore[assignment]

    def options(self, defaults: CanvasDenoising) -> CanvasDenoising:
        """Returns the denoising options of a request. Raises a `ValueError` for options out of their range."""
        names = (field.name for field in fields(CanvasDenoising))
        return replace(defaults, **{name: value for name in names if (value := getattr(self, name)) is not None})


class CanvasCompletionBody(CanvasBody, CompletionBody):  # type: ignore[misc]
    """Body of `POST /v1/completions` for a model that refines canvases."""


class CanvasChatBody(CanvasBody, ChatBody):  # type: ignore[misc]
    """Body of `POST /v1/chat/completions` for a model that refines canvases."""


def parse_denoising(body: DenoisingBody, defaults: Denoising, new_tokens: int) -> Denoising:
    """Returns the denoising options of a body. `new_tokens` is rounded up to whole blocks.

    Raises:
        ValueError: the options are inconsistent.
    """
    options: dict[str, Any] = {name: value for name in OPTIONS if (value := getattr(body, name)) is not None}
    if body.steps is not None or body.threshold is not None:  # either replaces both defaults
        options |= {"steps": body.steps, "threshold": body.threshold}
    if body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)  # -1 means all tokens, too
    if body.logit_bias is not None:
        options["logit_bias"] = tuple((int(token), bias) for token, bias in body.logit_bias.items())
    if body.stop_token_ids is not None:
        options["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.tau is not None:
        options["saliency"] = replace(defaults.saliency, tau=body.tau)
    block = options.get("block_length", defaults.block_length)
    rounded = new_tokens if block is None else -(-new_tokens // block) * block
    try:
        return replace(defaults, new_tokens=rounded, **options)
    except ValueError as error:  # with the API's field name
        raise ValueError(str(error).replace("new_tokens", "max_tokens")) from error


def make_requests(
    body: DenoisingBody,
    prompt: list[int],
    new_tokens: int,
    defaults: Denoising,
    choices: int,
    deadline_s: float | None,
    logprobs: int | None = None,
    constraint: Constraint | None = None,
    has_tools: bool = False,
) -> list[DenoisingRequest]:
    """Makes the requests of one prompt. The seed of each request is derived from the body's seed and the number of the choice.

    Args:
        logprobs: number of alternatives per token; None for no log-probabilities.
        has_tools: whether the text may have tool calls, whose tags may be special tokens.

    Raises:
        ValueError: the options are inconsistent.
    """
    denoising = parse_denoising(body, defaults, new_tokens)
    seeds = [None if denoising.seed is None else later_seed(denoising.seed, choice) for choice in range(choices)]
    skips = body.skip_special_tokens is not False and not has_tools
    rest = body.stops, deadline_s, new_tokens, logprobs, bool(body.include_stop_str_in_output), skips, constraint
    return [DenoisingRequest(prompt, replace(denoising, seed=seed), *rest) for seed in seeds]
