"""Answers that clients get, field by field; the errors are in `errors.py`."""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """Any answer; a stream leaves out fields that nobody set."""

    @property
    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class PromptDetails(Answer):
    """Number of the prompt's tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SpeculativeDecoding(Answer):
    """Figures of drafts, by vLLM's definitions; see docs/metrics.md."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class DenoisingSteps(Answer):
    """Number of steps of a diffusion model that a response took."""

    steps: int
    tokens_per_step: float


class Masks(Answer):
    """The way in which an answer was kept to its grammar: by masks that the host made, for each round anew, by masks that the
    device made in its loop, or by both, one after the other; "none" where no round of it ran."""

    masks: Literal["host", "device", "both", "none"]


class Metrics(Answer):
    """Null where nothing drafts, and where there are several choices; of a diffusion model its steps.

    Attributes:
        structured_outputs: left out of answers that followed no grammar.
    """

    speculative_decoding: SpeculativeDecoding | None
    denoising: DenoisingSteps | None = None
    structured_outputs: Masks | None = None


class ShownToken(Answer):
    text: str
    drafted: bool


class ShownRound(Answer):
    """A round of a choice: its tokens, how many drafts it ran and how many of them the target agreed with, and what it did."""

    tokens: list[ShownToken]
    drafted: int
    accepted: int
    choice: str


class Root(Answer):
    """Fields that bodies and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(Answer):
    """An entry for each token; those of an echoed prompt come first, and its first token has null for both figures."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Answer):
    """Of a token at a place of the prompt, under its id; its rank is null where it is not among the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


class AnswerChoice(Answer):
    """Fields that the choices of every answer may have.

    Attributes:
        stop_reason: the stop string, or the token of `stop_token_ids`, at which it ended; left out at any other end.
        token_ids: where they were asked for.
    """

    index: int
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(AnswerChoice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Root):
    """Of `/v1/completions`: the whole, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    rounds: list[ShownRound] | None = None


class TopLogprob(Answer):
    """`bytes` are those of the token, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CallPart(Answer):
    """A function and its arguments, as JSON, of a call; in a stream what a chunk adds to them."""

    name: str | None = None
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CallPart


class ToolCallDelta(Answer):
    """A chunk's addition to a call; id, type and name are there once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallPart


class AnswerMessage(Answer):
    """`content` is null where an answer is nothing but calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(AnswerChoice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Chat(Root):
    """Of `/v1/chat/completions`, as a whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Answer):
    """Fields that a chunk adds; `role` is there once, with the first token."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(AnswerChoice):
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Root):
    """Of `/v1/chat/completions`, a chunk of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
    metrics: Metrics | None = None
    rounds: list[ShownRound] | None = None


class DefaultSamplingParams(Answer):
    """Sampling defaults of requests that do not say."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int | None


class ModelCard(Answer):
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
    """Texts of the special tokens; null for those that the model lacks."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None


class Health(Answer):
    """State of the engine: whether it steps; `step_age_s` is null before it is warm."""

    status: Literal["ok"]
    step_age_s: float | None


class Load(Answer):
    """Requests in the engine; `server_load`, which vLLM has, is all of them."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int


class Ready(Answer):
    status: Literal["ready", "warming", "stopping"]


class Version(Answer):
    version: str
