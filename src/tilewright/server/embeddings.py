"""Embeddings and scores: request bodies, engine requests and responses.

`/v1/embeddings` is OpenAI's. `/v1/score` is vLLM's: the cosine similarity of two texts' embeddings.
"""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tilewright.models.tokenizer import encode
from tilewright.runtime.engine import Engine
from tilewright.runtime.pooling import Pooling, unit
from tilewright.runtime.request import GenerateRequest
from tilewright.server.answers import Answer
from tilewright.server.errors import ApiError
from tilewright.server.fields import WHOLE, IgnoredText, OnlyTrue, OnlyZero, Unsupported, expect
from tilewright.server.parse import as_list, check_not_too_long, invalid_value, rough_tokens
from tilewright.server.protocol import ModelBody, Text, TokenIds

MOST_INPUTS = 2048
"""Largest number of texts of one request, as at OpenAI."""

Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    expect(f"expected a text, a list of token ids, or a list of at most {MOST_INPUTS} of either, none empty"),
]
Texts = Annotated[
    Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)],
    expect(f"expected a text, or a list of at most {MOST_INPUTS}, none empty"),
]


class PooledBody(ModelBody):
    """Fields of the bodies of embeddings and scores.

    Attributes:
        add_special_tokens: add the tokenizer's special tokens to texts (default true).
    """

    add_special_tokens: bool | None = None

    user: IgnoredText = None
    request_id: IgnoredText = None
    priority: OnlyZero = None
    truncate_prompt_tokens: Unsupported = None


class EmbeddingsBody(PooledBody):
    """Body of `POST /v1/embeddings`.

    Attributes:
        input: one text or a list of texts, each as text or token ids.
        encoding_format: "float" (default) for numbers, "base64" for little-endian float32.
        dimensions: number of dimensions of embeddings, one of `matryoshka_dimensions` in the model's `config.json`.
    """

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None

    messages: Unsupported = None
    normalize: OnlyTrue = None


class ScoreBody(PooledBody):
    """Body of `POST /v1/score`: one text against one or several texts, or pairs of two lists of equal length.

    Attributes:
        text_1: one text, or a list of texts.
        text_2: one text, or a list of texts.
    """

    text_1: Texts
    text_2: Texts

    @property
    def texts(self) -> list[str]:
        """All texts, including repeated ones."""
        return [*as_list(self.text_1), *as_list(self.text_2)]

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pair of texts of each score. Raises an `ApiError` (400) for lists of different lengths."""
        first = as_list(self.text_1)
        second = as_list(self.text_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise invalid_value("text_2", f"{len(first)} texts, as in text_1", len(second))
        return list(zip(first, second, strict=True))


class EmbeddingEntry(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """Unit-length embedding of each text, in order: a list of numbers, or base64 of little-endian float32."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: PooledUsage


class ScoreEntry(Answer):
    object: Literal["score"]
    index: int
    score: float


class ScoresAnswer(Answer):
    """Score from -1 to 1 of each pair of texts, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PooledUsage


@dataclass(frozen=True)
class ParsedInputs:
    """Engine requests for embeddings.

    Attributes:
        requests: one request per distinct text.
        times: number of occurrences of each text, for the usage; empty if each text occurs once.
    """

    requests: list[GenerateRequest]
    times: Sequence[int] = ()

    @property
    def usage(self) -> PooledUsage:
        """Token counts of all texts, including repeated ones."""
        times = self.times or [1] * len(self.requests)
        tokens = sum(len(request.prompt) * count for request, count in zip(self.requests, times, strict=True))
        return PooledUsage(prompt_tokens=tokens, total_tokens=tokens)


def rough_size(inputs: Sequence[str | list[int]], context: int) -> tuple[int, int]:
    """Returns the number of requests and their estimated number of tokens, at most the context length per request."""
    return len(inputs), sum(min(rough_tokens(one), context) for one in inputs)


def parse_inputs(
    inputs: Sequence[str | list[int]],
    body: PooledBody,
    engine: Engine,
    pooling: Pooling,
    deadline_s: float | None,
    params: Sequence[str],
) -> ParsedInputs:
    """Tokenises texts and makes the engine requests. Slow for long texts.

    Args:
        params: field of each text, for error messages.

    Raises:
        ApiError: a text is too long or invalid for the model (400).
    """
    requests = list[GenerateRequest]()
    special = body.add_special_tokens is not False
    lora = body.model if body.model in engine.decoding.adapters else None
    for one, param in zip(inputs, params, strict=True):
        try:
            if isinstance(one, str):
                check_not_too_long(one, engine, param)
                one = encode(engine.tokenizer, one, special)
            tokens = engine.encode(one)
            if len(tokens) > engine.context:
                message = f"expected texts of at most {engine.context} tokens (the model's context), found {len(tokens)}"
                raise ApiError(400, message, "context_length_exceeded", param)
            request = GenerateRequest(tokens, deadline_s=deadline_s, lora=lora, pooling=pooling)
            engine.check(request)
        except ValueError as error:
            raise ApiError(400, f"'{param}': {error}", "invalid_value", param) from error
        requests.append(request)
    return ParsedInputs(requests)


def truncated_vectors(vectors: Sequence[np.ndarray], dimensions: int | None, declared: Sequence[int]) -> list[np.ndarray]:
    """Truncates embeddings to their first dimensions and normalises them again.

    Args:
        declared: numbers of dimensions to which the model was trained to truncate, besides the full number (Matryoshka).

    Raises:
        ApiError: the model does not support the number of dimensions (400).
    """
    if dimensions is None or dimensions == len(vectors[0]):
        return list(vectors)
    if dimensions not in declared:
        supported = ", ".join(map(str, sorted({*declared, len(vectors[0])})))
        raise invalid_value("dimensions", f"one of {supported}", dimensions)
    return [unit(vector[:dimensions].astype(np.float64)) for vector in vectors]


def embeddings_response(
    body: EmbeddingsBody, parsed: ParsedInputs, vectors: Sequence[np.ndarray], name: str, declared: Sequence[int]
) -> EmbeddingsAnswer:
    """Makes the response of `/v1/embeddings`."""
    data = []
    for index, vector in enumerate(truncated_vectors(vectors, body.dimensions, declared)):
        raw = vector.astype("<f4").tobytes()
        encoded = base64.b64encode(raw).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append(EmbeddingEntry(object="embedding", index=index, embedding=encoded))
    return EmbeddingsAnswer(object="list", data=data, model=name, usage=parsed.usage)


def scores_response(
    pairs: Sequence[tuple[str, str]], parsed: ParsedInputs, vectors: dict[str, np.ndarray], name: str, request_id: str
) -> ScoresAnswer:
    """Makes the response of `/v1/score`: dot products of unit-length embeddings.

    Args:
        vectors: embedding of each text.
    """
    scores = [float(np.clip(np.dot(vectors[first].astype(np.float64), vectors[second]), -1, 1)) for first, second in pairs]
    data = [ScoreEntry(object="score", index=index, score=score) for index, score in enumerate(scores)]
    created = int(time.time())
    return ScoresAnswer(id=f"score-{request_id}", object="list", created=created, model=name, data=data, usage=parsed.usage)
