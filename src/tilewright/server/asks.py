"""From a body to requests of the engine: the one way, for every route that generates or tokenises."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from tilewright.decode.sampling import Sampling
from tilewright.engine.diffusion import DiffusionEngine
from tilewright.engine.request import Ask, DenoisingAsk
from tilewright.engine.service import Service
from tilewright.models.chat import ChatTemplate
from tilewright.server.denoising import DenoisingBody, asks_of
from tilewright.server.errors import ApiError
from tilewright.server.schema import ChatBody, CompletionBody, GenerationBody, Message
from tilewright.server.tokens import Offsets

log = logging.getLogger("tilewright.server")

COMPLETION_TOKENS = 16
"""How many tokens a completion has if the request does not say, as at OpenAI; a chat takes what is left of the context."""
CHARACTERS_A_TOKEN = 4
"""About; for counting requests that are not tokenised yet."""


@dataclass(frozen=True)
class Prompted:
    """A prompt.

    Attributes:
        text: as it was given, or what its token ids say; empty for a conversation, which nobody echoes.
        offsets: where its tokens begin in the text; empty unless that is asked for.
    """

    tokens: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a body asks for.

    Attributes:
        prompts: each has `choices` requests.
        asks: of all choices, those of one prompt after another.
    """

    prompts: list[Prompted]
    choices: int
    asks: list[Ask] | list[DenoisingAsk]

    def prompt_of(self, index: int) -> Prompted:
        return self.prompts[index // self.choices]


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def wrong(param: str, expected: str, found: object) -> ApiError:
    return ApiError(400, f"'{param}': expected {expected}, found {found}", "invalid_value", param)


def rough_size(body: GenerationBody) -> tuple[int, int]:
    """How many requests a body makes, and about how many prompt tokens they have; nothing is tokenised for it."""
    prompts: Sequence[str | list[int]]
    if isinstance(body, ChatBody):
        prompts = ["".join(message.text for message in body.messages)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = listed(body.prompt)
    tokens = sum(-(-len(one) // CHARACTERS_A_TOKEN) if isinstance(one, str) else len(one) for one in prompts)
    choices = given(body.n, 1)
    return len(prompts) * choices, tokens * choices


def listed(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """One prompt or several, each a text or a list of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def check_together(body: GenerationBody) -> None:
    """Raises an `ApiError` for fields that do not go together."""
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "null without stream", "an object")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "null without logprobs", body.top_logprobs)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise wrong("max_tokens", f"the same as max_completion_tokens, {body.max_completion_tokens}", body.max_tokens)
    if isinstance(body, CompletionBody) and body.best_of not in (None, given(body.n, 1)):
        raise wrong("best_of", f"the same as n, {given(body.n, 1)}", body.best_of)


def sampling_of(body: GenerationBody, new_tokens: int) -> Sampling:
    """How to draw. A temperature of 1 is the default, as at OpenAI; a top_k of -1 keeps all, as 0 does."""
    stop = given(body.stop, [])
    return Sampling(
        max_new_tokens=new_tokens,
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=max(given(body.top_k, 0), 0),
        min_p=given(body.min_p, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(body.ignore_eos),
    )


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of one of a prompt's choices: its seed is the request's and the choice's number (modulo 2**32)."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + choice) % 2**32)


def new_tokens_of(body: GenerationBody, prompt: Sequence[int], context: int, otherwise: int | None = None) -> int:
    """How many tokens to generate after a prompt.

    Args:
        otherwise: if the body does not say; None for what OpenAI generates then.

    Raises:
        ApiError: the context has no room for them.
    """
    room = context - len(prompt)
    asked = given(body.max_completion_tokens, body.max_tokens) if isinstance(body, ChatBody) else body.max_tokens
    default = otherwise if otherwise is not None else room if isinstance(body, ChatBody) else min(room, COMPLETION_TOKENS)
    least = given(asked, given(otherwise, 1))
    if room < least:
        raise ApiError(
            400,
            f"this model's context has {context} positions; the prompt has {len(prompt)} tokens, and at least "
            f"{least} are to be generated",
            "context_length_exceeded",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    return given(asked, default)


def plan_of(body: GenerationBody, engine: Service[Any], template: ChatTemplate | None, deadline_s: float | None) -> Plan:
    """Tokenises, and makes the requests. This may take a while.

    Raises:
        ApiError: something is wrong with the body that its fields by themselves do not show.
    """
    check_together(body)
    if isinstance(body, ChatBody):
        prompts, logprobs, echo = [conversation(body, engine, template)], given(body.top_logprobs, 0), False
        logprobs = logprobs if body.logprobs else None
    else:
        assert isinstance(body, CompletionBody)
        echo, logprobs = bool(body.echo), body.logprobs
        prompts = [prompted(one, engine, echo, logprobs is not None) for one in listed(body.prompt)]
    choices, asks = given(body.n, 1), list[Any]()
    try:
        for prompt in prompts:
            if isinstance(body, DenoisingBody):
                assert isinstance(engine, DiffusionEngine), "the routes take the bodies of what they serve"
                defaults = engine.options.defaults
                new_tokens = new_tokens_of(body, prompt.tokens, engine.context, defaults.new_tokens)
                asks += asks_of(body, prompt.tokens, new_tokens, defaults, choices, deadline_s)
            else:
                sampling = sampling_of(body, new_tokens_of(body, prompt.tokens, engine.context))
                how = (logprobs, echo and logprobs is not None, deadline_s)
                asks += [Ask(prompt.tokens, seeded(sampling, choice), *how) for choice in range(choices)]
        for ask in asks[::choices]:
            engine.check(ask)
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_value") from error
    return Plan(prompts, choices, asks)


def prompted(prompt: str | list[int], engine: Service[Any], echo: bool, offsets: bool) -> Prompted:
    """A prompt of `/v1/completions`."""
    tokenizer = engine.tokenizer
    try:
        if isinstance(prompt, list):
            tokens = engine.encode(prompt)
            if not echo:
                return Prompted(tokens)
            begins = Offsets(tokenizer, skip_special_tokens=False).of(tokens) if offsets else ()
            return Prompted(tokens, tokenizer.decode(tokens, skip_special_tokens=False), tuple(begins))
        if not (echo and offsets):
            return Prompted(engine.encode(prompt), prompt)
        encoding = tokenizer.encode(prompt)
        return Prompted(engine.encode(encoding.ids), prompt, tuple(begin for begin, _ in encoding.offsets))
    except ValueError as error:
        raise ApiError(400, f"'prompt': {error}", "invalid_value", "prompt") from error


def conversation(body: ChatBody, engine: Service[Any], template: ChatTemplate | None) -> Prompted:
    """The prompt that the chat template makes of a conversation."""
    thinking = body.chat_template_kwargs is not None and bool(body.chat_template_kwargs.enable_thinking)
    text = rendered(body.messages, template, thinking=thinking)
    try:
        # The template has put the special tokens where the model wants them.
        return Prompted(engine.encode(engine.tokenizer.encode(text, add_special_tokens=False).ids))
    except ValueError as error:
        raise ApiError(400, f"'messages': {error}", "invalid_value", "messages") from error


def rendered(
    messages: Sequence[Message], template: ChatTemplate | None, add_generation_prompt: bool = True, thinking: bool = False
) -> str:
    """A conversation as text.

    Raises:
        ApiError: the model has no template, or the template refuses the conversation.
    """
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", "no_chat_template")
    said = [
        {"role": "system" if one.role == "developer" else one.role, "content": one.text}
        | ({} if one.name is None else {"name": one.name})
        for one in messages
    ]
    try:
        return template.render(said, add_generation_prompt, thinking)
    except ValueError as error:
        log.info("a chat template failed", exc_info=error)
        # Templates refuse conversations in words of their own; what else they raise may tell of the server's inside.
        why = f": {error.__cause__}"[:300] if isinstance(error.__cause__, jinja2.TemplateError) else ""
        refused = f"the model's chat template refuses this conversation{why}"
        raise ApiError(400, refused, "invalid_value", "messages") from error
