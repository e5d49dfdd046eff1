"""Reference of block diffusion behind a causal context in NumPy float64, which tests compare with the engine.

Blocks begin right behind the prompt. The prompt and finished blocks are causal; a block's first token follows from the logits
of the token before it, as in decoding, and masks of the block see the whole block. There are no caches: every pass starts again
from the tokens. Written from the published loop of Nemotron-Labs-Diffusion (arXiv 2607.05722,
`modeling_nemotron_labs_diffusion.py`, `generate` with `causal_context`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import Array
from reference.diffusion_numpy import Noise, Request, choose
from reference.self_speculation_numpy import Model


@dataclass(frozen=True)
class Options:
    """Options of the published loop, named as there, and `top_p`, which it lacks.

    Attributes:
        threshold: None for one token in each pass, or where there are `steps`, an even share of the block's masks.
    """

    threshold: float | None = None
    temperature: float = 0.0
    steps: int | None = None
    top_p: float = 1.0


def causal(size: int) -> NDArray[np.bool_]:
    return np.tril(np.ones((size, size), bool))


def transferred(confidence: Array, masked: NDArray[np.bool_], options: Options, quota: int) -> list[int]:
    """The positions of a block that a pass commits: the best ones, of which a threshold leaves out all but the first."""
    count = int(masked.sum()) if options.threshold is not None else min(quota, int(masked.sum()))
    best = np.argsort(-np.where(masked, confidence, -np.inf), kind="stable")[:count].tolist()
    if options.threshold is None:
        return best
    return [best[0], *[n for n in best[1:] if confidence[n] >= options.threshold]]


def generate(
    model: Model,
    prompt: Sequence[int],
    new_tokens: int,
    block: int,
    options: Options,
    noise: Noise | None = None,
    room: int = 1 << 20,
) -> tuple[list[int], list[int]]:
    """The new tokens, up to an end-of-sequence token, and the number of passes that denoise each block.

    The published loop generates whole blocks; here the last one is cut.

    Args:
        noise: see `diffusion_numpy.choose`. First tokens of blocks are drawn with that of step 0.
        room: positions in all, at which the last block ends. The published loop has no such end.
    """
    mask = model.config["mask_token_id"]
    eos = model.config["eos_token_id"]
    shifted = model.config["dlm_type"] == "dream"
    steps = options.steps or block - 1
    quotas = [(block - 1) // steps + (n < (block - 1) % steps) for n in range(steps)]
    rule = Request(mask, block, block, block, "low_confidence", temperature=options.temperature, top_p=options.top_p)
    tokens = list(prompt)
    passes = []
    while len(tokens) < len(prompt) + new_tokens:
        start = len(tokens)
        last = model.logits(tokens, causal(start))[-1]
        size = min(block, room - start)
        tokens += [choose(last, rule, 0, start, noise, None).token, *[mask] * (size - 1)]
        visible = causal(start + size)
        visible[start:, start:] = True
        count = 0
        while mask in tokens[start:]:
            logits = model.logits(tokens, visible)[start:]
            logits = logits[[0, *range(size - 1)]] if shifted else logits
            masked = np.asarray(tokens[start:]) == mask
            found = [choose(row, rule, count, start + n, noise, None) for n, row in enumerate(logits)]
            confidence = np.asarray([each.probability for each in found])
            for n in transferred(confidence, masked, options, quotas[min(count, steps - 1)]):
                tokens[start + n] = found[n].token
            count += 1
            now = tokens[start:]
            if eos in now and mask not in now[: now.index(eos)]:
                break
        passes.append(count)
        if eos in tokens[len(prompt) :]:
            break
    response = tokens[len(prompt) : len(prompt) + new_tokens]
    return response[: response.index(eos) + 1] if eos in response else response, passes
