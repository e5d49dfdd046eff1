"""Response bodies. The bodies of errors are in `errors.py`."""

from typing import Literal

from tilewright.server.fields import Documented

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(Documented):
    """Response body. Fields that were not set are left out of the JSON."""

    @property
    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class PromptDetails(Answer):
    """Details of the prompt tokens.

    Attributes:
        cached_tokens: number of prompt tokens found in the prefix cache.
    """

    cached_tokens: int


class Usage(Answer):
    """Token counts. A prompt counts once, for any number of choices.

    Attributes:
        denoising_passes: number of passes that denoised all choices; left out while they run, and for models that decode token
            by token.
        tokens_per_pass: `completion_tokens` over `denoising_passes`; left out likewise.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    denoising_passes: int | None = None
    tokens_per_pass: float | None = None


class SpeculativeDecoding(Answer):
    """Speculative decoding metrics, with vLLM's definitions; see docs/metrics.md."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class DenoisingMetrics(Answer):
    """Denoising steps of a response of a diffusion model."""

    steps: int
    tokens_per_step: float


class StructuredOutputMetrics(Answer):
    """Source of the token masks of structured output.

    Attributes:
        masks: "host" (masks made by the host for each round), "device" (masks made by the device in its loop), "both", or
            "none" if no round ran.
    """

    masks: Literal["host", "device", "both", "none"]


class Metrics(Answer):
    """Metrics of a response.

    Attributes:
        speculative_decoding: null without a drafter, and for several choices.
        denoising: left out unless the model is a diffusion model.
        structured_outputs: left out of responses without structured output.
    """

    speculative_decoding: SpeculativeDecoding | None
    denoising: DenoisingMetrics | None = None
    structured_outputs: StructuredOutputMetrics | None = None


class RoundToken(Answer):
    """Token of a decoding round.

    Attributes:
        drafted: true for an accepted draft token.
    """

    text: str
    drafted: bool


class RoundDetails(Answer):
    """Decoding round of a choice (`stream_options.include_rounds`).

    Attributes:
        tokens: tokens that the round committed.
        drafted: number of draft tokens.
        accepted: number of draft tokens that the model accepted.
        choice: drafter and block size of the round.
    """

    tokens: list[RoundToken]
    drafted: int
    accepted: int
    choice: str


class CommonFields(Answer):
    """Fields of all completions and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(Answer):
    """Log-probabilities of tokens, with `echo` also of the prompt. The first prompt token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Answer):
    """Log-probability of a token at one position of the prompt.

    Attributes:
        rank: rank of the token; null if the token is not among the alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


class ChoiceFields(Answer):
    """Fields of the choices of all responses.

    Attributes:
        stop_reason: stop string or token of `stop_token_ids` that ended the choice; left out for other finish reasons.
        token_ids: ids of the generated tokens, with `return_token_ids`.
    """

    index: int
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(ChoiceFields):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(CommonFields):
    """Response of `/v1/completions`, or a chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    rounds: list[RoundDetails] | None = None


class TopLogprob(Answer):
    """Log-probability of a token.

    Attributes:
        bytes: UTF-8 bytes of the token, which may be part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Answer):
    """Function of a tool call; in a stream, the delta of a chunk.

    Attributes:
        arguments: arguments as JSON text.
    """

    name: str | None = None
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(Answer):
    """Delta of a tool call. The first delta of a call has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Answer):
    """Assistant message.

    Attributes:
        content: text of the message; null if the message consists of tool calls only.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ChoiceFields):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Chat(CommonFields):
    """Response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Answer):
    """Delta of a chat message. The first delta has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceFields):
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(CommonFields):
    """Chunk of the stream of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
    metrics: Metrics | None = None
    rounds: list[RoundDetails] | None = None


class DefaultSamplingParams(Answer):
    """Sampling parameters that apply if a request does not set them."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int | None


class ModelCard(Answer):
    """Model or low-rank adapter.

    Attributes:
        max_model_len: context length in tokens.
        sampling_defaults: left out for a diffusion model.
        parent: name of the base model, for an adapter.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    sampling_defaults: DefaultSamplingParams | None = None
    parent: str | None = None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class TokenizerInfo(Answer):
    """Texts of the special tokens; null if the model has no such token."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None


class Health(Answer):
    """State of the engine.

    Attributes:
        step_age_s: seconds since the engine's last step; null before warm-up has ended.
        programs_ready, programs_declared: number of programs that are compiled, and of all that requests may use.
    """

    status: Literal["ok"]
    step_age_s: float | None
    programs_ready: int
    programs_declared: int


class Load(Answer):
    """Requests in the engine.

    Attributes:
        server_load: running and waiting requests (vLLM's name).
    """

    server_load: int
    num_requests_running: int
    num_requests_waiting: int


class Ready(Answer):
    status: Literal["ready", "warming", "stopping"]


class Version(Answer):
    version: str
