"""Embeddings of prompts on the caller's thread, with an engine of the size that they need."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tilewright.runtime.engine import Engine
from tilewright.runtime.request import GenerateRequest, RequestOutput


def embeddings(engine: Engine, requests: Sequence[GenerateRequest]) -> Float[np.ndarray, "N H"]:
    """Returns the embeddings of requests, with an engine that serves only these.

    Raises:
        ValueError: a request can never be served.
        RuntimeError: a request failed; the log has the cause.
    """
    found: dict[int, RequestOutput] = {}
    for number, request in enumerate(requests):
        engine.add(request, lambda update, number=number: found.update({number: update}))
    engine.decoding.measure(None)
    engine.runner.reset()
    while engine.busy:
        engine.step(wait=True)
    engine.runner.free()
    vectors = [found[number].embedding for number in range(len(requests))]
    failed = next((found[number].error for number, vector in enumerate(vectors) if vector is None), None)
    if failed is not None:
        raise RuntimeError(f"a request failed: {failed}")
    return np.stack([vector for vector in vectors if vector is not None])
