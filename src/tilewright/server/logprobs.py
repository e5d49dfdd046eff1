"""Log-probabilities in the two forms that OpenAI's routes have."""

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
"""Stands for a probability of 0, as OpenAI has it: JSON has no infinity."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def chat_logprobs(texts: TokenTexts, tokens: Sequence[tuple[int, TokenLogprobs]]) -> ChatLogprobs:
    """Of tokens with theirs, in the form of `/v1/chat/completions`."""

    def one(token: int, logprob: float) -> dict[str, object]:
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.bytes(token))}

    content = [
        TokenLogprob.model_validate(
            {**one(token, found.logprob), "top_logprobs": [TopLogprob.model_validate(one(*each)) for each in found.top]}
        )
        for token, found in tokens
    ]
    return ChatLogprobs(content=content, refusal=None)


def named(texts: TokenTexts, token: int, found: TokenLogprobs) -> dict[str, float]:
    """The alternatives by their texts, with the token itself, which need not be among them.

    Several tokens may have one text. It names the likeliest of them; the others are named `token_id:NNN`.
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
    """Of tokens with theirs (None for a prompt's first token) and where they begin, in the form of `/v1/completions`."""
    return CompletionLogprobs(
        tokens=[texts.text(token) for token, _ in tokens],
        token_logprobs=[None if found is None else finite(found.logprob) for _, found in tokens],
        top_logprobs=[None if found is None else named(texts, token, found) for token, found in tokens],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[TokenLogprobs], alternatives: int
) -> PromptLogprobs:
    """Of a prompt's tokens in vLLM's form: of each place its token and the alternatives, by their ids; the first has none."""

    def of(token: int, place: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranks = {each: rank for rank, (each, _) in enumerate(place.top, 1)}
        shown = {token: place.logprob} | dict(place.top[:alternatives])
        return {
            each: PromptLogprob(logprob=finite(logprob), rank=ranks.get(each), decoded_token=texts.text(each))
            for each, logprob in shown.items()
        }

    return [None, *(of(token, place) for token, place in zip(tokens[1:], found, strict=True))]


def fewer(found: TokenLogprobs, alternatives: int) -> TokenLogprobs:
    """A token's log-probabilities with only so many alternatives."""
    return found._replace(top=found.top[:alternatives])
