"""From a body to requests of the engine: the one way, for every route that generates or tokenises."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from tilewright.diffusion.engine import DiffusionEngine
from tilewright.diffusion.request import DenoisingRequest
from tilewright.grammar.matcher import Matcher
from tilewright.grammar.thinking import end_of_thought
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode, without_unfinished
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling, later_seed
from tilewright.runtime.service import Service
from tilewright.server.defaults import SamplingDefaults
from tilewright.server.denoising import DenoisingBody, requests_of
from tilewright.server.errors import ApiError
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, Message, Templated
from tilewright.server.structured import Asked, Constrain, grammar_of, refused
from tilewright.server.tokens import Offsets
from tilewright.server.tools import ToolUse, told, tool_use

log = logging.getLogger("tilewright.server")

COMPLETION_TOKENS = 16
"""Tokens of a completion if the request does not say, as at OpenAI; a chat takes what is left of the context."""
CHARACTERS_A_TOKEN = 4
"""About; for counting requests that are not tokenised yet."""
NOT_INSTALLED = "it was started without the grammar extra, or with --no-structured-output"
CERTAINLY = 16
"""Characters for each position of the context. A longer text is judged by so much of it: if this has twice as many tokens as
there are positions, then the whole does not fit, whatever comes."""


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
class ParsedRequest:
    """Requests that a body asks for, and what is told of them.

    Attributes:
        prompts: each has `choices` requests.
        requests: of all choices, those of one prompt after another.
        echo: prompts are given back.
        generates: what is generated is told; of prompts that are only given back it is not.
        logprobs, prompt_logprobs: alternatives that are told with each generated token, and with each of the prompt; None for
            no log-probabilities.
        token_ids: those of prompts and answers are told, too.
        constrained: answers follow a grammar.
        tools: which answers may call; None for none.
    """

    prompts: list[Prompted]
    choices: int
    requests: list[GenerateRequest] | list[DenoisingRequest]
    echo: bool = False
    generates: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    constrained: bool = False
    tools: ToolUse | None = None

    def prompt_of(self, index: int) -> Prompted:
        return self.prompts[index // self.choices]


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def wrong(param: str, expected: str, found: object) -> ApiError:
    return ApiError(400, f"'{param}': expected {expected}, found {found}", "invalid_value", param)


def rough_tokens(prompt: str | Sequence[int]) -> int:
    """Rough number of tokens of a prompt; nothing is tokenised for it."""
    return -(-len(prompt) // CHARACTERS_A_TOKEN) if isinstance(prompt, str) else len(prompt)


def contents(messages: Sequence[Message]) -> str:
    return "".join(message.text for message in messages)


def rough_size(body: GenerationBody, context: int) -> tuple[int, int]:
    """Number of requests that a body makes, and about how many prompt tokens they have.

    No prompt counts for more than the context: those that have more are refused before all of it is tokenised.
    """
    prompts: Sequence[str | list[int]]
    if isinstance(body, ChatBody):
        prompts = [contents(body.messages)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = listed(body.prompt)
    tokens = sum(min(rough_tokens(one), context) for one in prompts)
    choices = given(body.n, 1)
    return len(prompts) * choices, tokens * choices


def listed(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """One prompt or several, each a text or a list of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def check_together(body: GenerationBody) -> None:
    """Raises an `ApiError` for fields that do not go together."""
    if body.prompt_logprobs is not None and body.stream:
        raise wrong("prompt_logprobs", "null with stream", body.prompt_logprobs)
    penalised = body.presence_penalty or body.frequency_penalty or body.repetition_penalty not in (None, 1)
    if body.repeat_last_n not in (None, -1) and penalised:
        raise wrong("repeat_last_n", "-1, for penalties are of all tokens", body.repeat_last_n)
    if isinstance(body, ChatBody):
        if body.continue_final_message and body.add_generation_prompt:
            raise wrong("add_generation_prompt", "false or null with continue_final_message", True)
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "null without logprobs", body.top_logprobs)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise wrong("max_tokens", f"the same as max_completion_tokens, {body.max_completion_tokens}", body.max_tokens)
    if isinstance(body, CompletionBody):
        if body.best_of not in (None, given(body.n, 1)):
            raise wrong("best_of", f"the same as n, {given(body.n, 1)}", body.best_of)
        if body.max_tokens == 0 and not body.echo:
            raise wrong("max_tokens", "at least 1 without echo", 0)


def sampling_of(body: GenerationBody, new_tokens: int, defaults: SamplingDefaults) -> Sampling:
    """Sampling parameters of a body. A top_k of -1 keeps all, as 0 does."""
    return Sampling(
        max_new_tokens=new_tokens,
        temperature=given(body.temperature, defaults.temperature),
        top_p=given(body.top_p, defaults.top_p),
        top_k=max(given(body.top_k, defaults.top_k), 0),
        min_p=given(body.min_p, defaults.min_p),
        repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        seed=body.seed,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=tuple((int(token), bias) for token, bias in given(body.logit_bias, {}).items()),
        min_tokens=given(body.min_tokens, 0),
        stop_token_ids=tuple(given(body.stop_token_ids, ())),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of one of a prompt's choices: its seed is the request's and the choice's number."""
    return sampling if sampling.seed is None else replace(sampling, seed=later_seed(sampling.seed, choice))


def new_tokens_of(
    body: GenerationBody, prompt: Sequence[int], context: int, otherwise: int | None = None, most: int | None = None
) -> int:
    """Number of tokens to generate after a prompt; one, which nobody sees, where the body wants none.

    A chat's limit may exceed the context, as agents always send a large one: then what is left of the context holds. Not so for
    a diffusion model, whose response has its length from the start.

    Args:
        otherwise: if the body does not say; None for what OpenAI generates then.
        most: of these.

    Raises:
        ApiError: the context has no room for them.
    """
    room = context - len(prompt)
    asked = given(body.max_completion_tokens, body.max_tokens) if isinstance(body, ChatBody) else body.max_tokens
    default = otherwise if otherwise is not None else room if isinstance(body, ChatBody) else min(room, COMPLETION_TOKENS)
    default = default if most is None else min(default, most)
    if asked is not None and isinstance(body, DenoisingBody):
        asked = max(asked, 1)
    elif asked is not None and isinstance(body, ChatBody):
        asked = max(min(asked, room), 1)
    least = given(asked, given(otherwise, 1))
    if room < least:
        raise ApiError(
            400,
            f"this model's context has {context} positions; the prompt has {len(prompt)} tokens, and at least "
            f"{least} are to be generated",
            "context_length_exceeded",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    return max(given(asked, default), 1)


def check_beginning(text: str, engine: Service, param: str) -> None:
    """Refuses a long text that cannot fit by its beginning: tokenising megabytes takes seconds.

    Raises:
        ApiError: it has more tokens than the context has positions.
    """
    beginning = text[: CERTAINLY * engine.context]
    if len(text) > len(beginning) and len(encode(engine.tokenizer, beginning)) > 2 * engine.context:
        size = f"the prompt has {len(text)} characters, which are more tokens than that"
        raise ApiError(400, f"this model's context has {engine.context} positions; {size}", "context_length_exceeded", param)


def parse_request(
    body: GenerationBody,
    engine: Service,
    template: ChatTemplate | None,
    deadline_s: float | None,
    sampling: SamplingDefaults,
    constrain: Constrain | None = None,
) -> ParsedRequest:
    """Tokenises, compiles a grammar, and makes the requests. This may take a while.

    Args:
        constrain: makes a constraint of a grammar; None where that is not offered.

    Raises:
        ApiError: something is wrong with the body that its fields by themselves do not show.
    """
    check_together(body)
    tools = tools_of(body, template)
    constraint = constraint_of(body, tools, constrain)
    if isinstance(body, ChatBody):
        prompts = [conversation(body, engine, template, tools)]
        echo = False
        logprobs = given(body.top_logprobs, 0) if body.logprobs else None
    else:
        assert isinstance(body, CompletionBody)
        echo = bool(body.echo)
        logprobs = body.logprobs
        prompts = [prompted(one, body, engine) for one in listed(body.prompt)]
    choices = given(body.n, 1)
    requests = list[Any]()
    of_prompt = body.prompt_logprobs is not None or (echo and logprobs is not None)
    wanted = [each for each in (logprobs, body.prompt_logprobs) if each is not None]
    how = (max(wanted, default=None), of_prompt, deadline_s)  # as many alternatives as the one wants that wants most
    try:
        for prompt in prompts:
            if isinstance(body, DenoisingBody):
                assert isinstance(engine, DiffusionEngine), "the routes take the bodies of what they serve"
                defaults = engine.options.defaults
                new_tokens = new_tokens_of(body, prompt.tokens, engine.context, defaults.new_tokens)
                requests += requests_of(body, prompt.tokens, new_tokens, defaults, choices, deadline_s)
            else:
                new_tokens = new_tokens_of(body, prompt.tokens, engine.context, most=sampling.max_new_tokens)
                asked = sampling_of(body, new_tokens, sampling)
                # What marks a call may be a special token.
                asked = replace(asked, skip_special_tokens=asked.skip_special_tokens and tools is None)
                lora = body.model if body.model in engine.adapters else None
                own = None if constraint is None else behind_thought(constraint, body, engine, template, prompt.tokens)
                each = [seeded(asked, choice) for choice in range(choices)]
                if body.max_tokens == 0:  # the prompt is computed, and no token behind it
                    shown = (how[0] if of_prompt else None, of_prompt, deadline_s)
                    requests += [GenerateRequest(prompt.tokens, one, *shown, lora=lora, pooling="last") for one in each]
                    continue
                requests += [GenerateRequest(prompt.tokens, one, *how, constraint=own, lora=lora) for one in each]
        for request in requests[::choices]:
            engine.check(request)
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_value") from error
    return ParsedRequest(
        prompts,
        choices,
        requests,
        echo,
        body.max_tokens != 0,
        logprobs,
        body.prompt_logprobs,
        bool(body.return_token_ids),
        constraint is not None,
        tools,
    )


def behind_thought(
    constraint: Matcher, body: GenerationBody, engine: Service, template: ChatTemplate | None, prompt: Sequence[int]
) -> Constraint:
    """The constraint of an answer, which begins behind its thought where the prompt, or who asks, has the model think first."""
    asked = False
    if isinstance(body, ChatBody) and body.template_values.get("enable_thinking") is True:
        asked = "enable_thinking" in (body.chat_template_kwargs or {}) or (template is not None and template.can_think)
    mark = end_of_thought(engine.tokenizer, prompt, asked)
    return constraint if mark is None else constraint.after_thought(mark)


def tools_of(body: GenerationBody, template: ChatTemplate | None) -> ToolUse | None:
    """The tools that answers to a body may call."""
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, template) if isinstance(body, ChatBody) else None


def has_new_grammar(body: GenerationBody, template: ChatTemplate | None, constrain: Constrain | None) -> bool:
    """True if `parse_request` compiles a grammar for a body, which takes time. It says itself what is wrong with one."""
    try:
        asked = asked_grammar(body, tools_of(body, template))
    except ApiError:
        return False
    except ValueError:
        return constrain is not None  # the parts of such a grammar are compiled, to say which is wrong
    return constrain is not None and asked is not None and not constrain.is_kept(asked.grammar)


def asked_grammar(body: GenerationBody, tools: ToolUse | None) -> Asked | None:
    """The grammar of a body's answers: of calls that are wanted, of the form that is asked, or of either; None for any text.

    Raises:
        ApiError: what is asked is no grammar, or does not go together.
        ValueError: calls of these tools cannot be forced.
    """
    asked = grammar_of(body.response_format, body.structured_outputs)
    if tools is None:
        return asked
    if tools.forced:  # there is no text to have a form
        return Asked(tools.grammar(), "tools")
    if asked is not None and asked.grammar.kind != "json_schema":
        field = asked.param.partition(".")[0]
        raise ApiError(400, f"'{field}': expected JSON beside tools that may be called", "invalid_value", field)
    return None if asked is None else Asked(tools.grammar(json.loads(asked.grammar.text)), asked.param)


def constraint_of(body: GenerationBody, tools: ToolUse | None, constrain: Constrain | None) -> Matcher | None:
    """Constraint that a body puts on its answers, over the model's tokens.

    Raises:
        ApiError: it is not offered, or the grammar cannot be used.
    """
    try:
        asked = asked_grammar(body, tools)
    except ValueError as error:
        assert tools is not None, "of tools alone"
        check_parameters(tools, constrain)
        raise refused("tools", error) from error
    if asked is None:
        return None
    if constrain is None:
        field = asked.param.partition(".")[0]
        raise ApiError(400, f"'{field}' is not offered by this server: {NOT_INSTALLED}", "unsupported_parameter", field)
    try:
        return constrain(asked.grammar)
    except ValueError as error:
        if tools is not None:
            check_parameters(tools, constrain)
        raise refused(asked.param, error) from error


def check_parameters(tools: ToolUse, constrain: Constrain | None) -> None:
    """Raises an `ApiError` that names the first function of those that may be called whose parameters cannot be used."""
    for number, tool in enumerate(tools.tools):
        if tool in tools.callable:
            try:
                for part in tools.form.parts(tools.schemas[tool.function.name]):
                    if constrain is not None:
                        constrain(part)
            except ValueError as error:
                raise refused(f"tools[{number}].function.parameters", error) from error


def prompted(prompt: str | list[int], body: CompletionBody, engine: Service) -> Prompted:
    """A prompt of `/v1/completions`."""
    tokenizer = engine.tokenizer
    echo = body.echo
    special = body.add_special_tokens is not False
    offsets = body.logprobs is not None
    try:
        if isinstance(prompt, list):
            tokens = engine.encode(prompt)
            if not echo:
                return Prompted(tokens)
            begins = Offsets(tokenizer, skip_special_tokens=False).of(tokens) if offsets else ()
            text = without_unfinished(tokenizer, tokens, tokenizer.decode(tokens, skip_special_tokens=False))
            return Prompted(tokens, text, tuple(begins))
        check_beginning(prompt, engine, "prompt")
        if not (echo and offsets):
            return Prompted(engine.encode(encode(tokenizer, prompt, special)), prompt)
        (encoding,) = tokenizer.encode_batch([prompt], add_special_tokens=special)
        return Prompted(engine.encode(encoding.ids), prompt, tuple(begin for begin, _ in encoding.offsets))
    except ValueError as error:
        raise ApiError(400, f"'prompt': {error}", "invalid_value", "prompt") from error


def conversation(body: ChatBody, engine: Service, template: ChatTemplate | None, tools: ToolUse | None = None) -> Prompted:
    """The prompt that the chat template makes of a conversation."""
    text = rendered(body.messages, body, template, tools)
    check_beginning(text, engine, "messages")
    try:
        return Prompted(engine.encode(conversation_tokens(text, engine)))
    except ValueError as error:
        raise ApiError(400, f"'messages': {error}", "invalid_value", "messages") from error


def conversation_tokens(text: str, engine: Service) -> list[int]:
    """Tokens of a conversation that a template has rendered, which puts the special tokens where the model wants them.

    Raises:
        ApiError: the tokenizer cannot take a message as text.
    """
    try:
        return encode(engine.tokenizer, text, add_special_tokens=False)
    except ValueError as error:
        raise ApiError(400, f"'messages': {error}", "invalid_value", "messages") from error


def rendered(messages: Sequence[Message], body: Templated, template: ChatTemplate | None, tools: ToolUse | None = None) -> str:
    """A conversation as text; a template that knows no tools is told of them in its messages.

    Raises:
        ApiError: the model has no template, or the template refuses the conversation.
    """
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", "no_chat_template")
    goes_on = bool(body.continue_final_message)
    begins = given(body.add_generation_prompt, not goes_on)
    try:
        shown = [one.shown for one in messages]
        described = None if tools is None else tools.described
        if not template.takes_tools:
            shown = told(shown, tools)
            described = None
        return template.render(shown, begins, goes_on, body.template_values, described)
    except ValueError as error:
        log.info("a chat template failed", exc_info=error)
        # Templates refuse conversations in words of their own; what else they raise may tell of the server's inside.
        why = f": {error.__cause__}"[:300] if isinstance(error.__cause__, jinja2.TemplateError) else ""
        refused = f"the model's chat template refuses this conversation{why}"
        raise ApiError(400, refused, "invalid_value", "messages") from error
