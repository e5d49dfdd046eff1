"""Embeddings and scores: bodies, the engine's requests for them, and the form of answers.

`/v1/embeddings` is OpenAI's. `/v1/score` is vLLM's: of a model that is no cross-encoder, the cosine of two texts' embeddings.
"""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tilewright.models.tokenizer import encode
from tilewright.runtime.pooling import Pooling, unit
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.service import Service
from tilewright.server.answers import Answer
from tilewright.server.errors import ApiError
from tilewright.server.fields import WHOLE, Ignored, NotOffered, OnlyTrue, OnlyZero, expect
from tilewright.server.parse import check_beginning, listed, rough_tokens, wrong
from tilewright.server.protocol import ModelBody, Text, TokenIds

MOST_INPUTS = 2048
"""The most texts of one request, as at OpenAI."""

Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    expect(f"expected a text, a list of token ids, or a list of at most {MOST_INPUTS} of either, none of them empty"),
]
Texts = Annotated[
    Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)],
    expect(f"expected a text, or a list of at most {MOST_INPUTS}, none of them empty"),
]


class PooledBody(ModelBody):
    """Fields of every body that asks for embeddings."""

    add_special_tokens: bool | None = None

    user: Ignored = None
    request_id: Ignored = None
    priority: OnlyZero = None
    truncate_prompt_tokens: NotOffered = None


class EmbeddingsBody(PooledBody):
    """`POST /v1/embeddings`."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None

    messages: NotOffered = None
    normalize: OnlyTrue = None


class ScoreBody(PooledBody):
    """`POST /v1/score`: one text beside one or several, or as many beside as many."""

    text_1: Texts
    text_2: Texts

    @property
    def texts(self) -> list[str]:
        """All texts, as often as they were sent."""
        return [*listed(self.text_1), *listed(self.text_2)]

    def pairs(self) -> list[tuple[str, str]]:
        """The texts of each score. Raises an `ApiError` where they are not as many."""
        first = listed(self.text_1)
        second = listed(self.text_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise wrong("text_2", f"as many texts as text_1 has, {len(first)}", len(second))
        return list(zip(first, second, strict=True))


class EmbeddingEntry(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """A vector of length 1 for each text, in order: numbers, or their bytes as little-endian float32 in base64."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: PooledUsage


class ScoreEntry(Answer):
    object: Literal["score"]
    index: int
    score: float


class ScoresAnswer(Answer):
    """A number from -1 to 1 for each pair of texts, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PooledUsage


@dataclass(frozen=True)
class ParsedInputs:
    """Requests for the embeddings of some texts.

    Attributes:
        times: how often each text was sent, where equal ones have one request; empty for once each.
    """

    requests: list[GenerateRequest]
    times: Sequence[int] = ()

    @property
    def usage(self) -> PooledUsage:
        """Tokens of all texts, as often as they were sent."""
        times = self.times or [1] * len(self.requests)
        tokens = sum(len(request.prompt) * count for request, count in zip(self.requests, times, strict=True))
        return PooledUsage(prompt_tokens=tokens, total_tokens=tokens)


def rough_size(inputs: Sequence[str | list[int]], context: int) -> tuple[int, int]:
    """Number of requests, and about how many tokens they have; none counts for more than the context."""
    return len(inputs), sum(min(rough_tokens(one), context) for one in inputs)


def parse_inputs(
    inputs: Sequence[str | list[int]],
    body: PooledBody,
    engine: Service,
    pooling: Pooling,
    deadline_s: float | None,
    params: Sequence[str],
) -> ParsedInputs:
    """Tokenises texts, and makes the requests. This may take a while.

    Args:
        params: the field that has it, for each text.

    Raises:
        ApiError: one of them is no prompt for the model.
    """
    requests = list[GenerateRequest]()
    special = body.add_special_tokens is not False
    lora = body.model if body.model in engine.adapters else None
    for one, param in zip(inputs, params, strict=True):
        try:
            if isinstance(one, str):
                check_beginning(one, engine, param)
                one = encode(engine.tokenizer, one, special)
            tokens = engine.encode(one)
            if len(tokens) > engine.context:
                found = f"this model's context has {engine.context} positions; a text has {len(tokens)} tokens"
                raise ApiError(400, found, "context_length_exceeded", param)
            request = GenerateRequest(tokens, deadline_s=deadline_s, lora=lora, pooling=pooling)
            engine.check(request)
        except ValueError as error:
            raise ApiError(400, f"'{param}': {error}", "invalid_value", param) from error
        requests.append(request)
    return ParsedInputs(requests)


def shortened(vectors: Sequence[np.ndarray], dimensions: int | None, declared: Sequence[int]) -> list[np.ndarray]:
    """Embeddings of so many dimensions, the first ones, of length 1 again.

    Args:
        declared: numbers of dimensions that the model was trained to be cut to (Matryoshka), its whole length apart.

    Raises:
        ApiError: it was not trained for these.
    """
    if dimensions is None or dimensions == len(vectors[0]):
        return list(vectors)
    if dimensions not in declared:
        known = ", ".join(map(str, sorted({*declared, len(vectors[0])})))
        raise wrong("dimensions", f"one that this model has, {known}", dimensions)
    return [unit(vector[:dimensions].astype(np.float64)) for vector in vectors]


def embeddings_of(
    body: EmbeddingsBody, parsed: ParsedInputs, vectors: Sequence[np.ndarray], name: str, declared: Sequence[int]
) -> EmbeddingsAnswer:
    """The answer of `/v1/embeddings`."""
    data = []
    for index, vector in enumerate(shortened(vectors, body.dimensions, declared)):
        raw = vector.astype("<f4").tobytes()
        shown = base64.b64encode(raw).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append(EmbeddingEntry(object="embedding", index=index, embedding=shown))
    return EmbeddingsAnswer(object="list", data=data, model=name, usage=parsed.usage)


def scores_of(
    pairs: Sequence[tuple[str, str]], parsed: ParsedInputs, of_text: dict[str, np.ndarray], name: str, request_id: str
) -> ScoresAnswer:
    """The answer of `/v1/score`: cosines of embeddings, which are of length 1."""
    found = [float(np.clip(np.dot(of_text[first].astype(np.float64), of_text[second]), -1, 1)) for first, second in pairs]
    data = [ScoreEntry(object="score", index=index, score=score) for index, score in enumerate(found)]
    created = int(time.time())
    return ScoresAnswer(id=f"score-{request_id}", object="list", created=created, model=name, data=data, usage=parsed.usage)
