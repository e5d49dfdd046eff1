"""Published loops of LLaDA and of Fast-dLLM on Dream in NumPy float64, statement for statement, in other words.

`diffusion_numpy.py` describes what the engine does; these loops hold its switches against the published code:
`generate.py` of LLaDA (github.com/ML-GSAI/LLaDA), and `generation_utils_block.py` for Dream of Fast-dLLM v1
(github.com/NVlabs/Fast-dLLM). One thing differs: the mask's logit is -inf, so that no loop commits a mask.
"""

from collections.abc import Sequence

import numpy as np

from reference.diffusion_model_numpy import Array, Caches, Model, Rows, attend, dense, softmax
from reference.diffusion_numpy import Noise, Uniform, nucleus


def llada(
    model: Model,
    prompt: Sequence[int],
    mask: int,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    eos: int = 0,
    eot: int = 0,
    noise: Noise | None = None,
    uniform: Uniform | None = None,
) -> list[int]:
    """Returns all tokens. EOT gets -inf before the softmax; EOS in the noisy logits, a copy only with a temperature."""
    x = np.array([*prompt, *[mask] * gen_length])
    blocks = gen_length // block_length
    forwards = 0
    for block in range(blocks):
        end = len(prompt) + (block + 1) * block_length
        masks = int((x[end - block_length : end] == mask).sum())
        base, remainder = divmod(masks, steps // blocks)
        for step in range(steps // blocks):
            logits = dense(model, x)[0]
            logits[:, mask] = -np.inf
            if logits_eos_inf:
                logits[:, eos] = -np.inf
            noisy = logits
            if temperature > 0 and noise is not None:
                draws = [noise(forwards, place, logits.shape[1]) for place in range(len(x))]
                noisy = logits + temperature * np.array(draws)  # the logarithm of exp(logits) / (-log u) ** temperature
            best = noisy.argmax(axis=1)
            if confidence_eos_eot_inf:
                noisy[:, eos] = -np.inf
                logits[:, eot] = -np.inf
            if remasking == "low_confidence":
                confidence = softmax(logits)[np.arange(len(x)), best]
            else:
                assert uniform is not None
                confidence = np.array([uniform(forwards, place) for place in range(len(x))])
            confidence[end:] = -np.inf
            confidence[x != mask] = -np.inf
            chosen = np.argsort(-confidence, kind="stable")[: base + (step < remainder)]
            x[chosen] = best[chosen]
            forwards += 1
    return x.tolist()


def cached_logits(model: Model, caches: Sequence[Caches], tokens: Rows, first: int, dual: bool) -> Array:
    """Returns the logits of the positions from `first` on, shifted among themselves.

    Keys and values of the positions are renewed. "Prefix" knows those before `first` besides; "dual" all others, too.
    """
    rows = np.arange(first, first + len(tokens))
    x = model.embed[tokens]
    for layer, cache in zip(model.layers, caches, strict=True):
        k, v = model.keys_values(layer, x, rows)
        if dual:
            cache.k[rows], cache.v[rows] = k, v
            keys, values = cache.k, cache.v
        else:
            keys, values = np.concatenate([cache.k[:first], k]), np.concatenate([cache.v[:first], v])
        x = x + attend(model.queries(layer, x, rows), keys, values) @ layer.o.T
        x = x + model.ffn(layer, x)
    return shifted(model.logits(x))


def shifted(logits: Array) -> Array:
    return np.concatenate([logits[:1], logits[:-1]])


def fast_dllm_dream(
    model: Model,
    prompt: Sequence[int],
    mask: int,
    gen_length: int,
    block_length: int,
    steps: int,
    dual: bool,
    threshold: float | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    noise: Noise | None = None,
) -> tuple[list[int], int]:
    """Returns all tokens and the number of forwards. A threshold stands for `alg="confidence_threshold"`, else "entropy"."""
    x = np.array([*prompt, *[mask] * gen_length])
    blocks = gen_length // block_length
    block_steps = steps // blocks
    times = np.linspace(1, 1e-3, block_steps + 1)
    forwards = 0

    def sample(logits: Array, place: int) -> tuple[int, float, float]:
        """The token of one position, its probability, and the negative entropy."""
        logits = logits.copy()
        logits[mask] = -np.inf
        logits = nucleus(logits / (temperature or 1.0), top_p)
        p = softmax(logits)
        drawn = logits if not temperature or noise is None else logits + noise(forwards, place, len(logits))
        token = int(drawn.argmax())
        return token, float(p[token]), float(np.sum(p * np.log(p + 1e-10)))

    for block in range(blocks):
        start = len(prompt) + block * block_length
        end = start + block_length
        logits, caches = dense(model, x)
        x[start] = sample(shifted(logits)[start], start)[0]
        forwards += 1
        i = 1
        while True:
            places = start + np.flatnonzero(x[start:end] == mask)
            logits = cached_logits(model, caches, x[start : end if dual else len(x)], start, dual)
            found = [sample(logits[place - start], int(place)) for place in places]
            if threshold is not None:
                ranked = sorted(range(len(places)), key=lambda n: (-found[n][1], n))
                chosen = [n for rank, n in enumerate(ranked) if rank == 0 or found[n][1] >= threshold]
            else:
                if i == block_steps:
                    break
                count = int(len(places) * (1 - times[i + 1] / times[i])) if i < block_steps - 1 else len(places)
                chosen = sorted(range(len(places)), key=lambda n: (-found[n][2], n))[:count]
                i += 1
            for n in chosen:
                x[places[n]] = found[n][0]
            forwards += 1
            if not (x[start:end] == mask).any():
                break
    return x.tolist(), forwards
