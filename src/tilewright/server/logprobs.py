"""Log-probabilities in the formats of completions, chats and prompts."""

import math
from collections.abc import Sequence

from tilewright.runtime.request import TokenLogprobs
from tilewright.server.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from tilewright.server.tokens import TokenTexts

LEAST = -9999.0
"""Log-probability of a probability of 0, as at OpenAI: JSON has no infinity."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def chat_logprobs(texts: TokenTexts, tokens: Sequence[tuple[int, TokenLogprobs]]) -> ChatLogprobs:
    """Formats the log-probabilities of tokens for `/v1/chat/completions`."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.bytes(token))}

    content = [
        TokenLogprob.model_validate(
            {**entry(token, found.logprob), "top_logprobs": [TopLogprob.model_validate(entry(*each)) for each in found.top]}
        )
        for token, found in tokens
    ]
    return ChatLogprobs(content=content, refusal=None)


def logprobs_by_text(texts: TokenTexts, token: int, found: TokenLogprobs) -> dict[str, float]:
    """Returns the log-probabilities of the alternatives and of the token itself, by token text.

    If several tokens have the same text, the likeliest one has the text, and the others are named `token_id:NNN`.
    """
    names: dict[str, float] = {}
    chosen = () if any(each == token for each, _ in found.top) else ((token, found.logprob),)
    for each, logprob in (*found.top, *chosen):
        text = texts.text(each)
        names[f"token_id:{each}" if text in names else text] = finite(logprob)
    return names


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[tuple[int, TokenLogprobs | None]], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Formats the log-probabilities of tokens (None for a prompt's first token) for `/v1/completions`."""
    return CompletionLogprobs(
        tokens=[texts.text(token) for token, _ in tokens],
        token_logprobs=[None if found is None else finite(found.logprob) for _, found in tokens],
        top_logprobs=[None if found is None else logprobs_by_text(texts, token, found) for token, found in tokens],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[TokenLogprobs], alternatives: int
) -> PromptLogprobs:
    """Formats a prompt's log-probabilities in vLLM's format: per position, the token and the alternatives, by token id.

    The first position has None.
    """

    def at_position(token: int, position: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranks = {each: rank for rank, (each, _) in enumerate(position.top, 1)}
        by_token = {token: position.logprob} | dict(position.top[:alternatives])
        return {
            each: PromptLogprob(logprob=finite(logprob), rank=ranks.get(each), decoded_token=texts.text(each))
            for each, logprob in by_token.items()
        }

    return [None, *(at_position(token, position) for token, position in zip(tokens[1:], found, strict=True))]


def truncated(found: TokenLogprobs, alternatives: int) -> TokenLogprobs:
    """Limits the number of alternatives."""
    return found._replace(top=found.top[:alternatives])
