"""Bodies that clients may send to all routes, with a range for every number.

A field is offered, or it is known and refused by name (`NotOffered`: it would change the output and cannot be given here), or
it is unknown, which is an error too. Values that change nothing (`user`, `metadata`, what belongs to something that is off) are
taken and not read. Every field but those that a route cannot do without may be null, which is as if it were not there.
"""

from typing import Annotated, Any, Literal, LiteralString, cast

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tilewright.models.chat import check_values
from tilewright.runtime.logprobs import MOST_ALTERNATIVES
from tilewright.runtime.sampling import BIASES, MOST_BIASED, MOST_STOP_TOKENS, REPETITION_PENALTIES, SEEDS, TEMPERATURES
from tilewright.server.defaults import cold
from tilewright.server.fields import (
    LONGEST_NAME,
    WHOLE,
    Body,
    Ignored,
    NoText,
    NothingAsked,
    NotOffered,
    OnlyFalse,
    OnlyOne,
    OnlyTrue,
    OnlyZero,
    Unread,
    expect,
)
from tilewright.server.structured import ResponseFormat, StructuredOutputs
from tilewright.server.tools import MOST_TOOLS, Call, Tool, ToolChoice

MOST_CHOICES = 16
"""The most that `n` may be."""
MOST_PROMPTS = 128
"""The most prompts in one request."""
MOST_MESSAGES = 4096
MOST_STOPS = 1024
MOST_VALUES = 64
"""Of a chat template."""
LONGEST_STOP = 128
"""In characters. The engine looks for stop strings in its own thread, after each token."""


TOKEN_ID = "TokenId"
"""The title of token ids in the schema, whose bound depends on the model."""
TokenId = Annotated[int, Field(ge=0, lt=2**31, title=TOKEN_ID), WHOLE]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    expect(f"expected a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either, none of them empty"),
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
"""-1 is as if there were none, as in vLLM."""
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
"""Values that a request may tell the chat template: anything."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates have no word for."""


class Thinking(Body):
    """Anthropic's words; `adaptive` leaves it to the template. A budget bounds nothing here: `max_tokens` does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Unread = None
    display: Unread = None


class Reasoning(Body):
    """Words of OpenAI's Responses API and of routers."""

    effort: Effort = None
    enabled: bool | None = None
    exclude: OnlyFalse = None
    max_tokens: NotOffered = None
    summary: Unread = None
    generate_summary: Unread = None


class StreamOptions(Body):
    """`include_rounds` is this server's own: each chunk tells which of its tokens were drafted, round by round."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_rounds: bool | None = None


class ModelBody(Body):
    model: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None


class GenerationBody(ModelBody):
    """Fields that both ways of generating take."""

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
    # What vLLM's servers take besides.
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: PromptLogprobs = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    # What changes nothing here.
    user: Ignored = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    request_id: Ignored = None
    session_id: Ignored = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Unread = None
    truncation_side: Unread = None
    length_penalty: Unread = None
    early_stopping: Unread = None
    mm_processor_kwargs: Unread = None
    media_io_kwargs: Unread = None
    routed_experts_prompt_start: Unread = None
    return_token_offsets: Unread = None
    return_mm_kwargs: Unread = None
    # The same of llama.cpp's servers: where keys and values are kept, and settings of what is off.
    cache_prompt: Unread = None
    id_slot: Unread = None
    n_keep: Unread = None
    n_discard: Unread = None
    dynatemp_exponent: Unread = None
    xtc_threshold: Unread = None
    mirostat_tau: Unread = None
    mirostat_eta: Unread = None
    dry_base: Unread = None
    dry_allowed_length: Unread = None
    dry_penalty_last_n: Unread = None
    dry_sequence_breakers: Unread = None

    # What would change the answer.
    store: OnlyFalse = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, expect("is not offered by this server but as auto or default", "not_offered")
    ] = None
    bad_words: NothingAsked = None
    allowed_token_ids: NotOffered = None
    logprob_token_ids: NotOffered = None
    return_tokens_as_token_ids: OnlyFalse = None
    include_reasoning: OnlyTrue = None
    thinking_token_budget: NotOffered = None
    repetition_detection: NotOffered = None
    watermarking: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    truncate_prompt_tokens: NotOffered = None
    guided_json: NotOffered = None
    guided_regex: NotOffered = None
    guided_choice: NotOffered = None
    guided_grammar: NotOffered = None
    logits_processors: NotOffered = None
    cache_salt: NotOffered = None
    kv_transfer_params: NothingAsked = None
    ec_transfer_params: NothingAsked = None
    vllm_xargs: NothingAsked = None
    priority: OnlyZero = None
    grammar: NoText = None
    json_schema: NothingAsked = None
    lora: NothingAsked = None
    samplers: NothingAsked = None
    image_data: NothingAsked = None
    response_fields: NothingAsked = None
    n_predict: NotOffered = None
    n_probs: OnlyZero = None
    n_indent: OnlyZero = None
    min_keep: OnlyZero = None
    t_max_predict_ms: OnlyZero = None
    typical_p: OnlyOne = None
    dynatemp_range: OnlyZero = None
    xtc_probability: OnlyZero = None
    top_n_sigma: Annotated[
        Annotated[float, Field(le=0)] | None, expect("is not offered by this server; it may be -1", "not_offered")
    ] = None
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
        """The stop strings."""
        stop = () if self.stop is None else self.stop
        return (stop,) if isinstance(stop, str) else tuple(stop)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`; with `echo`, `max_tokens` may be 0."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    add_special_tokens: bool | None = None
    suffix: NotOffered = None
    prompt_embeds: NotOffered = None


class TextPart(Body):
    """A part of a content; what else stands in it (`cache_control`, `annotations`) changes nothing here."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. What assistants' messages have in answers may be sent back with them."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        expect("expected system, developer, user, assistant or tool"),
    ]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)] | None,
        expect("expected a text, or a list of parts of type text; images, audio and files are not offered by this server"),
    ] = None
    name: Ignored = None
    id: Ignored = None
    refusal: NotOffered = None
    annotations: NothingAsked = None
    audio: NotOffered = None
    function_call: NotOffered = None
    tool_calls: Annotated[list[Call], Field(max_length=MOST_MESSAGES)] | None = None
    tool_call_id: Ignored = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What changes nothing here, or says again what stands above.
    reasoning_details: Unread = None
    thinking_blocks: Unread = None
    provider_specific_fields: Unread = None
    extra_content: Unread = None
    cache_control: Unread = None

    @property
    def text(self) -> str:
        """Its content; parts are put together with line breaks, and of none there is no text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    @property
    def shown(self) -> dict[str, Any]:
        """The message as chat templates see it; a call whose arguments are no JSON object is part of its content."""
        role = "system" if self.role == "developer" else self.role
        others: dict[str, Any] = {
            "name": self.name,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
            "tool_call_id": self.tool_call_id,
        }
        calls = [call.shown for call in self.tool_calls or ()]
        others["tool_calls"] = [call for call in calls if isinstance(call, dict)] or None
        content = "\n".join(filter(None, [self.text, *(call for call in calls if isinstance(call, str))]))
        return {"role": role, "content": content} | {name: value for name, value in others.items() if value is not None}


Verbosity = Annotated[Literal["medium"] | None, expect("is not offered by this server but as medium", "not_offered")]


class Templated(ModelBody):
    """Fields that a chat template may be told.

    Attributes:
        continue_final_message: the answer goes on with the last message, and no new one begins.
    """

    chat_template_kwargs: TemplateValues = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Values that the template is told."""
        return self.chat_template_kwargs or {}


class ChatBody(GenerationBody, Templated):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Length = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), WHOLE] | None = None

    parallel_tool_calls: bool | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1)] | None,
        expect('is not offered by this server but as ["text"]', "not_offered"),
    ] = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    functions: NothingAsked = None
    function_call: NotOffered = None
    audio: NotOffered = None
    moderation: NotOffered = None
    prediction: NotOffered = None
    prompt_cache_options: NotOffered = None
    # How much the model is to think: what the template knows of it is told.
    reasoning_effort: Effort = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity = None
    web_search_options: NotOffered = None
    # What other servers take besides.
    parse_tool_calls: Unread = None
    echo: OnlyFalse = None
    add_special_tokens: OnlyFalse = None
    return_prompt_text: OnlyFalse = None
    chat_template: NotOffered = None
    documents: NothingAsked = None
    reasoning_format: Annotated[Literal["none"] | None, expect("is not offered by this server but as none", "not_offered")] = (
        None
    )
    thinking_forced_open: OnlyFalse = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Values that the template is told: those by name, and how much it is to think."""
        asked = self.reasoning or Reasoning()
        effort = self.reasoning_effort if self.reasoning_effort is not None else asked.effort
        thinks = {"enabled": True, "disabled": False}.get(self.thinking.type) if self.thinking is not None else None
        for said in (self.enable_thinking, thinks, asked.enabled, False if effort == "none" else None):
            if said is not None:
                found: dict[str, Any] = {"enable_thinking": said}
                break
        else:
            found = {}
        if effort not in (None, "none"):
            found["reasoning_effort"] = EFFORTS.get(effort, effort)
        return found | super().template_values


class TokenizeBody(Templated):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
