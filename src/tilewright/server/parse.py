"""Conversion of request bodies to engine requests."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from tilewright.diffusion.request import DenoisingRequest
from tilewright.grammar.matcher import Matcher
from tilewright.grammar.thinking import thinking_end_token
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode, without_unfinished
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling, later_seed
from tilewright.server.defaults import SamplingDefaults
from tilewright.server.denoising import BlockBody, CanvasBody, DenoisingBody, make_requests
from tilewright.server.errors import ApiError
from tilewright.server.fields import UNSUPPORTED
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, Message, Templated
from tilewright.server.structured import Constrain, RequestedGrammar, format_grammar, refused
from tilewright.server.tokens import Offsets
from tilewright.server.tools import ToolUse, inline_tool_fields, tool_use

log = logging.getLogger("tilewright.server")

COMPLETION_TOKENS = 16
"""Default number of new tokens of a completion, as at OpenAI. A chat defaults to the rest of the context."""
CHARACTERS_A_TOKEN = 4
"""Estimated number of characters per token, to count requests before they are tokenised."""
NOT_INSTALLED = "it was started without the grammar extra, or with --compile structured_output=false"
CHARACTERS_A_POSITION = 16
"""Characters per context position that are tokenised to judge a long text. If they have more than twice as many tokens as the
context has positions, the whole text does not fit."""


@dataclass(frozen=True)
class TokenizedPrompt:
    """Tokenised prompt.

    Attributes:
        tokens: token ids.
        text: text of the prompt, for `echo`; empty for chats.
        offsets: character offsets of the tokens in the text; empty unless `echo` and `logprobs` are set.
    """

    tokens: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParsedRequest:
    """Engine requests of a body, and the options of its response.

    Attributes:
        prompts: prompts; each has `choices` requests.
        choices: number of choices per prompt.
        requests: requests of all choices, prompt by prompt.
        echo: return the prompts.
        generates: return the generated tokens; False with `max_tokens` 0.
        logprobs: number of alternatives per generated token; None for no log-probabilities.
        prompt_logprobs: number of alternatives per prompt token; None for no log-probabilities.
        token_ids: return the token ids of prompts and outputs.
        constrained: the output follows a grammar.
        tools: tools that the output may call; None for none.
    """

    prompts: list[TokenizedPrompt]
    choices: int
    requests: list[GenerateRequest] | list[DenoisingRequest]
    echo: bool = False
    generates: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    constrained: bool = False
    tools: ToolUse | None = None

    def prompt_for(self, index: int) -> TokenizedPrompt:
        return self.prompts[index // self.choices]


def value_or(value: Any, default: Any) -> Any:
    return default if value is None else value


def invalid_value(param: str, expected: str, found: object) -> ApiError:
    return ApiError(400, f"'{param}': expected {expected}, found {found}", "invalid_value", param)


def rough_tokens(prompt: str | Sequence[int]) -> int:
    """Estimates the number of tokens of a prompt without tokenising it."""
    return -(-len(prompt) // CHARACTERS_A_TOKEN) if isinstance(prompt, str) else len(prompt)


def message_text(messages: Sequence[Message]) -> str:
    return "".join(message.text for message in messages)


def rough_size(body: GenerationBody, context: int) -> tuple[int, int]:
    """Returns the number of requests of a body and their estimated number of prompt tokens.

    Each prompt counts at most the context length, because longer prompts are refused.
    """
    prompts: Sequence[str | list[int]]
    if isinstance(body, ChatBody):
        prompts = [message_text(body.messages)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = as_list(body.prompt)
    tokens = sum(min(rough_tokens(one), context) for one in prompts)
    choices = value_or(body.n, 1)
    return len(prompts) * choices, tokens * choices


def as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """Returns one or several prompts (texts or lists of token ids) as a list."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def check_together(body: GenerationBody) -> None:
    """Raises an `ApiError` (400) for inconsistent fields."""
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_value("prompt_logprobs", "null with stream", body.prompt_logprobs)
    penalised = body.presence_penalty or body.frequency_penalty or body.repetition_penalty not in (None, 1)
    if body.repeat_last_n not in (None, -1) and penalised:
        raise invalid_value("repeat_last_n", "-1, because penalties apply to all tokens", body.repeat_last_n)
    if isinstance(body, ChatBody):
        if body.continue_final_message and body.add_generation_prompt:
            raise invalid_value("add_generation_prompt", "false or null with continue_final_message", True)
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid_value("top_logprobs", "null without logprobs", body.top_logprobs)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise invalid_value("max_tokens", f"{body.max_completion_tokens}, as in max_completion_tokens", body.max_tokens)
    if isinstance(body, CompletionBody):
        if body.best_of not in (None, value_or(body.n, 1)):
            raise invalid_value("best_of", f"{value_or(body.n, 1)}, as in n", body.best_of)
        if body.max_tokens == 0 and not body.echo:
            raise invalid_value("max_tokens", "at least 1 without echo", 0)


def parse_sampling(body: GenerationBody, new_tokens: int, defaults: SamplingDefaults) -> Sampling:
    """Returns the sampling parameters of a body. A `top_k` of -1 means all tokens, as 0 does."""
    return Sampling(
        max_new_tokens=new_tokens,
        temperature=value_or(body.temperature, defaults.temperature),
        top_p=value_or(body.top_p, defaults.top_p),
        top_k=max(value_or(body.top_k, defaults.top_k), 0),
        min_p=value_or(body.min_p, defaults.min_p),
        repetition_penalty=value_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=value_or(body.presence_penalty, 0.0),
        frequency_penalty=value_or(body.frequency_penalty, 0.0),
        seed=body.seed,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=tuple((int(token), bias) for token, bias in value_or(body.logit_bias, {}).items()),
        min_tokens=value_or(body.min_tokens, 0),
        stop_token_ids=tuple(value_or(body.stop_token_ids, ())),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """Derives the seed of a choice from the request's seed and the number of the choice."""
    return sampling if sampling.seed is None else replace(sampling, seed=later_seed(sampling.seed, choice))


def parse_new_tokens(
    body: GenerationBody, prompt: Sequence[int], context: int, otherwise: int | None = None, most: int | None = None
) -> int:
    """Returns the number of new tokens for a prompt: at least 1, also for `max_tokens` 0.

    A chat's `max_tokens` is limited to the rest of the context, because agents always send a large value. A diffusion model has
    a fixed response length, so that its `max_tokens` has to fit.

    Args:
        otherwise: default number of new tokens; None for OpenAI's default.
        most: limit on the default.

    Raises:
        ApiError: the new tokens do not fit in the context (400).
    """
    room = context - len(prompt)
    requested = value_or(body.max_completion_tokens, body.max_tokens) if isinstance(body, ChatBody) else body.max_tokens
    default = otherwise if otherwise is not None else room if isinstance(body, ChatBody) else min(room, COMPLETION_TOKENS)
    default = default if most is None else min(default, most)
    if requested is not None and isinstance(body, DenoisingBody):
        requested = max(requested, 1)
    elif requested is not None and isinstance(body, ChatBody):
        requested = max(min(requested, room), 1)
    least = value_or(requested, value_or(otherwise, 1))
    if room < least:
        raise ApiError(
            400,
            f"this model's context has {context} positions; the prompt has {len(prompt)} tokens, and at least {least} new "
            "tokens are required",
            "context_length_exceeded",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    return max(value_or(requested, default), 1)


def check_not_too_long(text: str, engine: Engine, param: str) -> None:
    """Refuses a long text that cannot fit by tokenising its beginning only, because tokenising megabytes takes seconds.

    Raises:
        ApiError: the text has more tokens than the context has positions (400).
    """
    beginning = text[: CHARACTERS_A_POSITION * engine.context]
    if len(text) > len(beginning) and len(encode(engine.tokenizer, beginning)) > 2 * engine.context:
        message = (
            f"this model's context has {engine.context} positions, and the prompt's {len(text)} characters are more tokens"
        )
        raise ApiError(400, message, "context_length_exceeded", param)


def parse_request(
    body: GenerationBody,
    engine: Engine,
    template: ChatTemplate | None,
    deadline_s: float | None,
    sampling: SamplingDefaults,
    constrain: Constrain | None = None,
) -> ParsedRequest:
    """Tokenises prompts, compiles grammars and makes the engine requests. Slow for long prompts and new grammars.

    Args:
        constrain: compiles grammars; None disables structured output.

    Raises:
        ApiError: the fields are inconsistent, a prompt does not fit, or a grammar cannot be used (400).
    """
    check_together(body)
    tools = requested_tools(body, template)
    constraint = compile_constraint(body, tools, constrain)
    if isinstance(body, ChatBody):
        prompts = [chat_prompt(body, engine, template, tools)]
        echo = False
        logprobs = value_or(body.top_logprobs, 0) if body.logprobs else None
    else:
        assert isinstance(body, CompletionBody)
        echo = bool(body.echo)
        logprobs = body.logprobs
        prompts = [tokenized_prompt(one, body, engine) for one in as_list(body.prompt)]
    choices = value_or(body.n, 1)
    requests = list[Any]()
    scores_prompt = body.prompt_logprobs is not None or (echo and logprobs is not None)
    alternatives = max((each for each in (logprobs, body.prompt_logprobs) if each is not None), default=None)
    rest = (alternatives, scores_prompt, deadline_s)
    if isinstance(body, CanvasBody):  # its temperatures are options of their own
        sampling = replace(sampling, temperature=0.0)
    try:
        for prompt in prompts:
            if isinstance(body, DenoisingBody):
                defaults = engine.decoding.denoising
                new_tokens = parse_new_tokens(body, prompt.tokens, engine.context, defaults.new_tokens)
                if scores_prompt:
                    raise ValueError("'echo' with 'logprobs' is not supported for a diffusion model")
                answer = None if constraint is None else after_thinking(constraint, body, engine, template, prompt.tokens)
                more = {"constraint": answer, "has_tools": tools is not None}
                requests += make_requests(body, prompt.tokens, new_tokens, defaults, choices, deadline_s, logprobs, **more)
            else:
                new_tokens = parse_new_tokens(body, prompt.tokens, engine.context, most=sampling.max_new_tokens)
                params = parse_sampling(body, new_tokens, sampling)
                # The tags of tool calls may be special tokens.
                params = replace(params, skip_special_tokens=params.skip_special_tokens and tools is None)
                lora = body.model if body.model in engine.decoding.adapters else None
                answer = None if constraint is None else after_thinking(constraint, body, engine, template, prompt.tokens)
                each = [seeded(params, choice) for choice in range(choices)]
                if body.max_tokens == 0:  # only the prompt is computed
                    rest = (alternatives if scores_prompt else None, scores_prompt, deadline_s)
                    requests += [GenerateRequest(prompt.tokens, one, *rest, lora=lora, pooling="last") for one in each]
                    continue
                denoises = isinstance(body, BlockBody | CanvasBody)
                blocks = body.options(engine.decoding.blocks) if denoises else None
                more = {"constraint": answer, "lora": lora, "denoising": blocks}
                requests += [GenerateRequest(prompt.tokens, one, *rest, **more) for one in each]
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


def after_thinking(
    constraint: Matcher, body: GenerationBody, engine: Engine, template: ChatTemplate | None, prompt: Sequence[int]
) -> Constraint:
    """Delays a constraint until the end of the thinking block, if the prompt or the request makes the model think first."""
    enabled = False
    if isinstance(body, ChatBody) and body.template_values.get("enable_thinking") is True:
        enabled = "enable_thinking" in (body.chat_template_kwargs or {}) or (template is not None and template.can_think)
    end_token = thinking_end_token(engine.tokenizer, prompt, enabled)
    return constraint if end_token is None else constraint.after_thinking(end_token)


def requested_tools(body: GenerationBody, template: ChatTemplate | None) -> ToolUse | None:
    """Returns the tools that the response to a body may call; None for none."""
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, template) if isinstance(body, ChatBody) else None


def has_new_grammar(body: GenerationBody, template: ChatTemplate | None, constrain: Constrain | None) -> bool:
    """True if `parse_request` has to compile a grammar for a body, which takes time. Errors are left to `parse_request`."""
    try:
        requested = requested_grammar(body, requested_tools(body, template))
    except ApiError:
        return False
    except ValueError:
        return constrain is not None  # `check_parameters` compiles the grammar's parts to find the invalid one
    return constrain is not None and requested is not None and not constrain.is_cached(requested.grammar)


def requested_grammar(body: GenerationBody, tools: ToolUse | None) -> RequestedGrammar | None:
    """Returns the grammar of the response: forced tool calls, the response format, or a choice of both; None for any text.

    Raises:
        ApiError: the grammar is invalid, or the fields are inconsistent (400).
        ValueError: calls of these tools cannot be forced.
    """
    requested = format_grammar(body.response_format, body.structured_outputs)
    if tools is None:
        return requested
    if tools.forced:  # the response consists of tool calls only
        return RequestedGrammar(tools.grammar(), "tools")
    if requested is not None and requested.grammar.kind != "json_schema":
        field = requested.param.partition(".")[0]
        raise ApiError(400, f"'{field}': expected a JSON format together with tools", "invalid_value", field)
    return None if requested is None else RequestedGrammar(tools.grammar(json.loads(requested.grammar.text)), requested.param)


def compile_constraint(body: GenerationBody, tools: ToolUse | None, constrain: Constrain | None) -> Matcher | None:
    """Compiles the grammar of a response; None for any text.

    Raises:
        ApiError: the server has no structured output, or the grammar cannot be used (400).
    """
    try:
        requested = requested_grammar(body, tools)
    except ValueError as error:
        assert tools is not None, "only tools raise a ValueError"
        check_parameters(tools, constrain)
        raise refused("tools", error) from error
    if requested is None:
        return None
    if constrain is None:
        field = requested.param.partition(".")[0]
        raise ApiError(400, f"'{field}' {UNSUPPORTED}: {NOT_INSTALLED}", "unsupported_parameter", field)
    try:
        return constrain(requested.grammar)
    except ValueError as error:
        if tools is not None:
            check_parameters(tools, constrain)
        raise refused(requested.param, error) from error


def check_parameters(tools: ToolUse, constrain: Constrain | None) -> None:
    """Raises an `ApiError` (400) for the first function whose parameters cannot be used."""
    for number, tool in enumerate(tools.tools):
        if tool in tools.callable:
            try:
                for part in tools.form.parts(tools.schemas[tool.function.name]):
                    if constrain is not None:
                        constrain(part)
            except ValueError as error:
                raise refused(f"tools[{number}].function.parameters", error) from error


def tokenized_prompt(prompt: str | list[int], body: CompletionBody, engine: Engine) -> TokenizedPrompt:
    """Tokenises a prompt of `/v1/completions`."""
    tokenizer = engine.tokenizer
    echo = body.echo
    special = body.add_special_tokens is not False
    offsets = body.logprobs is not None
    try:
        if isinstance(prompt, list):
            tokens = engine.encode(prompt)
            if not echo:
                return TokenizedPrompt(tokens)
            found = Offsets(tokenizer, skip_special_tokens=False).push(tokens) if offsets else ()
            text = without_unfinished(tokenizer, tokens, tokenizer.decode(tokens, skip_special_tokens=False))
            return TokenizedPrompt(tokens, text, tuple(found))
        check_not_too_long(prompt, engine, "prompt")
        if not (echo and offsets):
            return TokenizedPrompt(engine.encode(encode(tokenizer, prompt, special)), prompt)
        (encoding,) = tokenizer.encode_batch([prompt], add_special_tokens=special)
        return TokenizedPrompt(engine.encode(encoding.ids), prompt, tuple(begin for begin, _ in encoding.offsets))
    except ValueError as error:
        raise ApiError(400, f"'prompt': {error}", "invalid_value", "prompt") from error


def chat_prompt(body: ChatBody, engine: Engine, template: ChatTemplate | None, tools: ToolUse | None = None) -> TokenizedPrompt:
    """Renders a conversation with the chat template and tokenises the result."""
    text = render_chat(body.messages, body, template, tools)
    check_not_too_long(text, engine, "messages")
    try:
        return TokenizedPrompt(engine.encode(conversation_tokens(text, engine)))
    except ValueError as error:
        raise ApiError(400, f"'messages': {error}", "invalid_value", "messages") from error


def conversation_tokens(text: str, engine: Engine) -> list[int]:
    """Tokenises a rendered conversation, in which the template has placed the special tokens.

    Raises:
        ApiError: the tokenizer cannot encode the text (400).
    """
    try:
        return encode(engine.tokenizer, text, add_special_tokens=False)
    except ValueError as error:
        raise ApiError(400, f"'messages': {error}", "invalid_value", "messages") from error


def render_chat(
    messages: Sequence[Message], body: Templated, template: ChatTemplate | None, tools: ToolUse | None = None
) -> str:
    """Renders a conversation with the chat template. For a template without tools, the tools are described in the messages.

    Raises:
        ApiError: the model has no template, or the template refuses the conversation (400).
    """
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", "no_chat_template")
    continues = bool(body.continue_final_message)
    begins = value_or(body.add_generation_prompt, not continues)
    try:
        converted = [one.for_template for one in messages]
        described = None if tools is None else tools.for_template
        if not template.takes_tools:
            converted = inline_tool_fields(converted, tools)
            described = None
        return template.render(converted, begins, continues, body.template_values, described)
    except ValueError as error:
        log.info("the chat template failed", exc_info=error)
        # Messages of the template are for clients. Other exceptions may contain internals of the server.
        reason = f": {error.__cause__}"[:300] if isinstance(error.__cause__, jinja2.TemplateError) else ""
        message = f"the model's chat template refuses this conversation{reason}"
        raise ApiError(400, message, "invalid_value", "messages") from error
