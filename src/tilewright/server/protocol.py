"""Request bodies of completions, chats and tokenisation, with a range for every number.

A field is supported; or known but unsupported, and refused by name because it would change the output; or ignored because it
has no effect (`user`, `metadata`, options of disabled features); or unknown, and refused. Null equals a missing field, except
for required fields.
"""

from typing import Annotated, Any, Literal, LiteralString, cast

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tilewright.models.chat import check_values
from tilewright.runtime.logprobs import MOST_ALTERNATIVES
from tilewright.runtime.sampling import BIASES, MOST_BIASED, MOST_STOP_TOKENS, REPETITION_PENALTIES, SEEDS, TEMPERATURES
from tilewright.server.defaults import cold
from tilewright.server.fields import (
    IGNORED,
    LONGEST_NAME,
    WHOLE,
    Body,
    IgnoredText,
    IgnoredValue,
    OnlyFalse,
    OnlyOne,
    OnlyTrue,
    OnlyZero,
    Unsupported,
    UnsupportedText,
    UnsupportedValue,
    expect,
    unsupported,
)
from tilewright.server.structured import ResponseFormat, StructuredOutputs
from tilewright.server.tools import MOST_TOOLS, Call, Tool, ToolChoice

MOST_CHOICES = 16
"""Largest `n`."""
MOST_PROMPTS = 128
"""Largest number of prompts in one request."""
MOST_MESSAGES = 4096
MOST_STOPS = 1024
MOST_VALUES = 64
"""Largest number of values for the chat template."""
LONGEST_STOP = 128
"""Largest number of characters of a stop string. The engine searches stop strings after each token."""


TOKEN_ID = "TokenId"
"""Title of token ids in the OpenAPI schema, by which `openapi.narrow` sets the bound of the vocabulary."""
TokenId = Annotated[int, Field(ge=0, lt=2**31, title=TOKEN_ID), WHOLE]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    expect(f"expected a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either, none empty"),
]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None,
    expect(f"expected a text of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS}"),
]
Temperature = Annotated[float, Field(ge=0, le=TEMPERATURES[1]), AfterValidator(cold)] | None
Penalty = Annotated[float, Field(ge=-2, le=2)] | None
Length = Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None
Seed = Annotated[
    Annotated[int, Field(ge=SEEDS[0], le=SEEDS[1]), WHOLE] | None, AfterValidator(lambda seed: None if seed == -1 else seed)
]
"""Seed; -1 for none, as in vLLM."""
LogitBias = Annotated[
    Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=BIASES[0], le=BIASES[1])]],
        Field(max_length=MOST_BIASED),
    ]
    | None,
    expect(f"expected at most {MOST_BIASED} token ids, as texts, each with a number from {BIASES[0]:g} to {BIASES[1]:g}"),
]
PromptLogprobs = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), WHOLE] | None


def template_values(values: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        check_values(values or {})
    except ValueError as error:
        raise PydanticCustomError("expected", cast(LiteralString, str(error))) from None
    return values


TemplateValues = Annotated[dict[str, Any] | None, Field(max_length=MOST_VALUES), AfterValidator(template_values)]
"""Values for the chat template, of any JSON type."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Reasoning efforts that templates do not know, and their substitutes."""


class Thinking(Body):
    """Thinking options of Anthropic's API.

    Attributes:
        type: "adaptive" leaves the choice to the chat template.
        budget_tokens: ignored; `max_tokens` limits thinking, too.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: IgnoredValue = None
    display: IgnoredValue = None


class Reasoning(Body):
    """Reasoning options of OpenAI's Responses API and of routers.

    Attributes:
        effort: reasoning effort for the chat template; "none" disables thinking.
        enabled: enables or disables thinking.
    """

    effort: Effort = None
    enabled: bool | None = None
    exclude: OnlyFalse = None
    max_tokens: Unsupported = None
    summary: IgnoredValue = None
    generate_summary: IgnoredValue = None


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: send a last chunk with the usage.
        continuous_usage_stats: include the usage so far in every chunk, with `include_usage`.
        include_obfuscation: accepted and ignored.
        include_rounds: include the decoding rounds in every chunk, with the drafted tokens (extension).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_rounds: bool | None = None


class ModelBody(Body):
    """Body with a model name.

    Attributes:
        model: name of the model or of an adapter; defaults to the model.
    """

    model: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None


class GenerationBody(ModelBody):
    """Fields of completions and chats.

    Attributes:
        max_tokens: largest number of new tokens.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold; 0 keeps the most likely token alone.
        top_k: number of most likely tokens to sample from; 0 or -1 for all.
        min_p: threshold relative to the probability of the most likely token.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt and the output; 1 for none.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from the logits of tokens in the output, per occurrence.
        n: number of choices per prompt.
        seed: seed of the sampling; the same seed gives the same output. Choice i has `seed` + i. -1 equals no seed.
        stop: texts that end the output; excluded from the output by default.
        ignore_eos: generate beyond end-of-sequence tokens, up to `max_tokens`.
        stream: respond with server-sent events.
        stream_options: options of the stream.
        logit_bias: up to 300 values from -100 to 100 that are added to logits before the penalties, by token id as text.
        min_tokens: number of new tokens before the output can end by an end-of-sequence token, a stop token or a stop string.
        stop_token_ids: token ids that end the output, also with `ignore_eos`.
        include_stop_str_in_output: include the stop string in the output.
        skip_special_tokens: leave special tokens out of the text (default true).
        prompt_logprobs: number of alternatives per prompt token for which to return log-probabilities; not with `stream`.
        return_token_ids: return the token ids of the prompt and the output.
        structured_outputs: grammar of the output, in vLLM's format.
        response_format: format of the output, in OpenAI's format.
        metadata: accepted and ignored.
        spaces_between_special_tokens: accepted and ignored.
        service_tier: "auto" and "default" are accepted and ignored.
        top_n_sigma: only -1 (disabled) is supported.
        repeat_last_n: only -1 is supported with penalties, which apply to all tokens.
    """

    max_tokens: Length = None
    temperature: Temperature = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    seed: Seed = None
    stop: Stop = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    logit_bias: LogitBias = None
    # vLLM's extensions.
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: PromptLogprobs = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    # Ignored fields of OpenAI and vLLM.
    user: IgnoredText = None
    metadata: Annotated[Annotated[dict[str, Any], Field(max_length=16)] | None, IGNORED] = None
    request_id: IgnoredText = None
    session_id: IgnoredText = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: IgnoredValue = None
    truncation_side: IgnoredValue = None
    length_penalty: IgnoredValue = None
    early_stopping: IgnoredValue = None
    mm_processor_kwargs: IgnoredValue = None
    media_io_kwargs: IgnoredValue = None
    routed_experts_prompt_start: IgnoredValue = None
    return_token_offsets: IgnoredValue = None
    return_mm_kwargs: IgnoredValue = None
    # Ignored fields of llama.cpp: placement of the KV cache, and options of disabled samplers.
    cache_prompt: IgnoredValue = None
    id_slot: IgnoredValue = None
    n_keep: IgnoredValue = None
    n_discard: IgnoredValue = None
    dynatemp_exponent: IgnoredValue = None
    xtc_threshold: IgnoredValue = None
    mirostat_tau: IgnoredValue = None
    mirostat_eta: IgnoredValue = None
    dry_base: IgnoredValue = None
    dry_allowed_length: IgnoredValue = None
    dry_penalty_last_n: IgnoredValue = None
    dry_sequence_breakers: IgnoredValue = None

    # Unsupported fields.
    store: OnlyFalse = None
    service_tier: Annotated[Literal["auto", "default"] | None, unsupported("auto and default")] = None
    bad_words: UnsupportedValue = None
    allowed_token_ids: Unsupported = None
    logprob_token_ids: Unsupported = None
    return_tokens_as_token_ids: OnlyFalse = None
    include_reasoning: OnlyTrue = None
    thinking_token_budget: Unsupported = None
    repetition_detection: Unsupported = None
    watermarking: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    truncate_prompt_tokens: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    logits_processors: Unsupported = None
    cache_salt: Unsupported = None
    kv_transfer_params: UnsupportedValue = None
    ec_transfer_params: UnsupportedValue = None
    vllm_xargs: UnsupportedValue = None
    priority: OnlyZero = None
    grammar: UnsupportedText = None
    json_schema: UnsupportedValue = None
    lora: UnsupportedValue = None
    samplers: UnsupportedValue = None
    image_data: UnsupportedValue = None
    response_fields: UnsupportedValue = None
    n_predict: Unsupported = None
    n_probs: OnlyZero = None
    n_indent: OnlyZero = None
    min_keep: OnlyZero = None
    t_max_predict_ms: OnlyZero = None
    typical_p: OnlyOne = None
    dynatemp_range: OnlyZero = None
    xtc_probability: OnlyZero = None
    top_n_sigma: Annotated[Annotated[float, Field(le=0)] | None, unsupported("-1")] = None
    mirostat: OnlyZero = None
    dry_multiplier: OnlyZero = None
    repeat_penalty: OnlyOne = None
    repeat_last_n: Annotated[int, WHOLE] | None = None
    post_sampling_probs: OnlyFalse = None
    timings_per_token: OnlyFalse = None
    return_progress: OnlyFalse = None
    return_tokens: OnlyFalse = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        stop = () if self.stop is None else self.stop
        return (stop,) if isinstance(stop, str) else tuple(stop)


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: one prompt or a list of prompts, each as text or token ids.
        max_tokens: largest number of new tokens (default 16); may be 0 with `echo`.
        logprobs: number of alternatives per token for which to return log-probabilities.
        echo: return the prompt before the output.
        best_of: must equal `n`.
        add_special_tokens: add the tokenizer's special tokens to the prompt (default true).
    """

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    add_special_tokens: bool | None = None
    suffix: Unsupported = None
    prompt_embeds: Unsupported = None


class TextPart(Body):
    """Text part of a message. Other fields (`cache_control`, `annotations`) are ignored.

    Attributes:
        type: only "text" is supported.
        text: text of the part.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a conversation. Assistant messages of earlier responses may be sent back unchanged.

    Attributes:
        role: author of the message; "developer" equals "system".
        content: text, or list of text parts, which are joined by line breaks.
        tool_calls: tool calls of an assistant message.
        tool_call_id: id of the tool call whose result the message is.
        reasoning_content: thinking of an assistant message, for the chat template.
        reasoning: other name of `reasoning_content`.
        name: name of the author, for the chat template.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        expect("expected system, developer, user, assistant or tool"),
    ]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)] | None,
        expect("expected a text, or a list of parts of type text; images, audio and files are not supported by this server"),
    ] = None
    name: IgnoredText = None
    id: IgnoredText = None
    refusal: Unsupported = None
    annotations: UnsupportedValue = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[list[Call], Field(max_length=MOST_MESSAGES)] | None = None
    tool_call_id: IgnoredText = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Ignored fields, and repetitions of the fields above.
    reasoning_details: IgnoredValue = None
    thinking_blocks: IgnoredValue = None
    provider_specific_fields: IgnoredValue = None
    extra_content: IgnoredValue = None
    cache_control: IgnoredValue = None

    @property
    def text(self) -> str:
        """Text of the content, with parts joined by line breaks; empty without content."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    @property
    def for_template(self) -> dict[str, Any]:
        """Message for chat templates. A tool call whose arguments are not a JSON object becomes part of the content."""
        role = "system" if self.role == "developer" else self.role
        fields: dict[str, Any] = {
            "name": self.name,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
            "tool_call_id": self.tool_call_id,
        }
        calls = [call.for_template for call in self.tool_calls or ()]
        fields["tool_calls"] = [call for call in calls if isinstance(call, dict)] or None
        content = "\n".join(filter(None, [self.text, *(call for call in calls if isinstance(call, str))]))
        return {"role": role, "content": content} | {name: value for name, value in fields.items() if value is not None}


Verbosity = Annotated[Literal["medium"] | None, unsupported("medium")]


class Templated(ModelBody):
    """Fields for the chat template.

    Attributes:
        chat_template_kwargs: values for the chat template.
        add_generation_prompt: append the beginning of an assistant message (default true).
        continue_final_message: continue the last message instead of starting a new one.
    """

    chat_template_kwargs: TemplateValues = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the chat template."""
        return self.chat_template_kwargs or {}


class ChatBody(GenerationBody, Templated):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        messages: messages of the conversation.
        max_tokens: largest number of new tokens (default: the model's `max_new_tokens`, else the rest of the context).
        max_completion_tokens: other name of `max_tokens`.
        logprobs: return the log-probabilities of the output tokens.
        top_logprobs: number of alternatives per token, with `logprobs`.
        tools: functions that the model may call.
        tool_choice: "auto" (default) leaves the choice to the model, "required" forces a call, "none" forbids calls, and an
            object forces a call of the named function.
        parallel_tool_calls: allow several tool calls (default true).
        reasoning_effort: reasoning effort, if the chat template supports it; "none" disables thinking.
        reasoning: reasoning options, if the chat template supports them.
        thinking: thinking options in Anthropic's format.
        enable_thinking: enables or disables thinking, if the chat template supports it.
        modalities: only ["text"] is supported.
        verbosity: only "medium" is supported.
        reasoning_format: only "none" is supported; thinking is part of the text.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Length = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), WHOLE] | None = None

    parallel_tool_calls: bool | None = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_retention: IgnoredText = None
    safety_identifier: IgnoredText = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1)] | None,
        unsupported('["text"]'),
    ] = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    functions: UnsupportedValue = None
    function_call: Unsupported = None
    audio: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    # Reasoning options, which are passed to the chat template.
    reasoning_effort: Effort = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity = None
    web_search_options: Unsupported = None
    # Fields of other servers.
    parse_tool_calls: IgnoredValue = None
    echo: OnlyFalse = None
    add_special_tokens: OnlyFalse = None
    return_prompt_text: OnlyFalse = None
    chat_template: Unsupported = None
    documents: UnsupportedValue = None
    reasoning_format: Annotated[Literal["none"] | None, unsupported("none")] = None
    thinking_forced_open: OnlyFalse = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the chat template, with the reasoning options."""
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort if self.reasoning_effort is not None else reasoning.effort
        thinks = {"enabled": True, "disabled": False}.get(self.thinking.type) if self.thinking is not None else None
        flags = (self.enable_thinking, thinks, reasoning.enabled, False if effort == "none" else None)
        enabled = next((each for each in flags if each is not None), None)
        found: dict[str, Any] = {} if enabled is None else {"enable_thinking": enabled}
        if effort not in (None, "none"):
            found["reasoning_effort"] = EFFORTS.get(effort, effort)
        return found | super().template_values


class TokenizeBody(Templated):
    """Body of `POST /tokenize`: a text or a conversation.

    Attributes:
        prompt: text to tokenise.
        messages: conversation to render with the chat template and to tokenise.
        add_special_tokens: add the tokenizer's special tokens (default true for a text, false for a conversation).
        return_token_strs: return the text of each token.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    """Body of `POST /detokenize`.

    Attributes:
        tokens: token ids to decode.
    """

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
