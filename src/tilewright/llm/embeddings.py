"""Embeddings on the caller's thread: an engine of just the size that they need, until it is idle."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tilewright.runtime.engine import Engine
from tilewright.runtime.request import GenerateRequest, RequestOutput


def embeddings(engine: Engine, requests: Sequence[GenerateRequest]) -> Float[np.ndarray, "N H"]:
    """The embeddings that requests ask for, by an engine that serves them alone.

    Raises:
        ValueError: a request can never be served.
        RuntimeError: one failed; the log says how.
    """
    found: dict[int, RequestOutput] = {}
    for number, request in enumerate(requests):
        engine.check(request)
        sequence = engine.sequence(request, lambda update, number=number: found.update({number: update}))
        engine.enter(sequence)
        engine.scheduler.wait(sequence)
    engine.choose_rounds()
    while engine.busy:
        engine.fill(everything=True)
        engine.read_all_but(0)
    engine.runner.free()
    vectors = [found[number].embedding for number in range(len(requests))]
    failed = next((found[number].error for number, vector in enumerate(vectors) if vector is None), None)
    if failed is not None:
        raise RuntimeError(f"a request failed: {failed}")
    return np.stack([vector for vector in vectors if vector is not None])
