"""Bodies for diffusion language models, with the fields of their steps, and the requests that they make.

Fields that only decoding token by token can honour are refused by name, log-probabilities among them: no token of a response
has a probability given just those before it.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from tilewright.diffusion.options import ALWAYS, Denoising, Mode, Remasking
from tilewright.diffusion.request import DenoisingRequest
from tilewright.runtime.sampling import later_seed
from tilewright.server.fields import FLAG, WHOLE, expect
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, Length
from tilewright.server.structured import ResponseFormat

NOT_OF_DIFFUSION = "is not offered for a diffusion model"
COMMITS_MANY = f"{NOT_OF_DIFFUSION}, which commits many tokens at once"


class PlainTextFormat(ResponseFormat):
    """The one form that a diffusion model offers."""

    type: Literal["text"]  # type: ignore[assignment]
    json_schema: None = None  # type: ignore[assignment]


def only(value: int | str) -> Any:
    """A value that is taken where it changes nothing."""
    return expect(f"{NOT_OF_DIFFUSION}; it may be {value}", "not_offered")


class DenoisingBody(GenerationBody):
    """Fields that both ways of generating take from a diffusion model; those that are not there are as the server was started.

    Attributes:
        max_tokens: the response's length. It comes about in whole blocks, and what is too much of the last one is cut off.
        steps: in all; the number of blocks divides them.
        threshold: commits all tokens at least this likely, in place of a number of steps.
        suffix_window: positions behind the block that a step knows of.
        tau: sparse: the threshold of saliency.
    """

    steps: Length = None
    block_length: Length = None
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    suffix_window: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    mode: Mode | None = None
    remasking: Remasking | None = None
    tau: Annotated[float, Field(gt=0, le=ALWAYS)] | None = None

    top_k: Annotated[Annotated[int, Field(ge=-1, le=0), WHOLE] | None, only(0)] = None
    min_p: Annotated[Annotated[float, Field(ge=0, le=0)] | None, only(0)] = None
    repetition_penalty: Annotated[Annotated[float, Field(ge=1, le=1)] | None, only(1)] = None
    presence_penalty: Annotated[Annotated[float, Field(ge=0, le=0)] | None, only(0)] = None
    frequency_penalty: Annotated[Annotated[float, Field(ge=0, le=0)] | None, only(0)] = None
    logit_bias: Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, only("empty")] = None  # type: ignore[assignment]
    min_tokens: Annotated[Annotated[int, Field(ge=0, le=0), WHOLE] | None, only(0)] = None
    stop_token_ids: Annotated[Annotated[list[Any], Field(max_length=0)] | None, only("empty")] = None  # type: ignore[assignment]
    include_stop_str_in_output: Annotated[Literal[False] | None, FLAG, only("false")] = None  # type: ignore[assignment]
    skip_special_tokens: Annotated[Literal[True] | None, FLAG, only("true")] = None  # type: ignore[assignment]
    structured_outputs: Annotated[None, expect(NOT_OF_DIFFUSION, "not_offered")] = None  # type: ignore[assignment]
    response_format: Annotated[PlainTextFormat | None, only('{"type": "text"}')] = None  # type: ignore[assignment]
    prompt_logprobs: Annotated[None, expect(COMMITS_MANY, "not_offered")] = None  # type: ignore[assignment]


class DenoisingCompletionBody(DenoisingBody, CompletionBody):  # type: ignore[misc]
    """`POST /v1/completions`."""

    max_tokens: Length = None
    logprobs: Annotated[None, expect(COMMITS_MANY, "not_offered")] = None  # type: ignore[assignment]


class DenoisingChatBody(DenoisingBody, ChatBody):  # type: ignore[misc]
    """`POST /v1/chat/completions`."""

    tools: Annotated[Annotated[list[Any], Field(max_length=0)] | None, only("empty")] = None  # type: ignore[assignment]
    tool_choice: Annotated[Literal["none", "auto"] | None, only("none")] = None  # type: ignore[assignment]
    logprobs: Annotated[Literal[False] | None, FLAG, expect(COMMITS_MANY, "not_offered")] = None  # type: ignore[assignment]
    top_logprobs: Annotated[None, expect(COMMITS_MANY, "not_offered")] = None  # type: ignore[assignment]


def denoising_of(body: DenoisingBody, defaults: Denoising, new_tokens: int) -> Denoising:
    """Denoising options of a body: whole blocks, of which the last may have more tokens than are asked for.

    Raises:
        ValueError: what does not go together.
    """
    asked: dict[str, Any] = {
        name: value
        for name in ("block_length", "suffix_window", "mode", "remasking", "temperature", "top_p", "seed", "ignore_eos")
        if (value := getattr(body, name)) is not None
    }
    if body.steps is not None or body.threshold is not None:  # either takes the place of what the server was told
        asked |= {"steps": body.steps, "threshold": body.threshold}
    if body.tau is not None:
        asked["saliency"] = replace(defaults.saliency, tau=body.tau)
    block = asked.get("block_length", defaults.block_length)
    whole = new_tokens if block is None else -(-new_tokens // block) * block
    try:
        return replace(defaults, new_tokens=whole, **asked)
    except ValueError as error:  # in the words of the API
        raise ValueError(str(error).replace("new_tokens", "max_tokens")) from error


def requests_of(
    body: DenoisingBody, prompt: list[int], new_tokens: int, defaults: Denoising, choices: int, deadline_s: float | None
) -> list[DenoisingRequest]:
    """The requests of one prompt; the seed of each is the body's and the choice's number.

    Raises:
        ValueError: what does not go together.
    """
    denoising = denoising_of(body, defaults, new_tokens)
    seeds = [None if denoising.seed is None else later_seed(denoising.seed, choice) for choice in range(choices)]
    return [DenoisingRequest(prompt, replace(denoising, seed=seed), body.stops, deadline_s, new_tokens) for seed in seeds]
