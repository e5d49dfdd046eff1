"""Small models and requests for tests of denoising, and the comparison of generations with the reference."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.diffusion_cases import MASK
from reference.diffusion_folder import write_model
from reference.diffusion_model_numpy import Model, random_model, softmax
from reference.diffusion_numpy import CachedMode, Dense, Generation, Mode, Request, SparseMode, Step, generate
from reference.sampling_numpy import gumbel_of
from tilewright.diffusion.options import ALWAYS, Denoising, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.kernels import native
from tilewright.llm.diffusion_model import DenoisingStream, DiffusionModel, load

VOCAB = 40
MARGIN = 1e-4
COSINE_MARGIN = 2e-5
"""Minimum margin of choices, and of cosines (shorter sums) from their threshold, for float32 to decide alike."""
MODELS: dict[str, Model] = {
    "llada": random_model(5, "llada", VOCAB, hidden=64, layers=2),
    "dream": random_model(6, "dream", VOCAB, hidden=64, layers=2),
    "tiny": random_model(7, "llada", VOCAB, hidden=64, layers=1),
}
EOS = {"llada": 12, "dream": 30, "tiny": 12}
EOT = {"llada": 22, "dream": 7, "tiny": 22}
TABLE = DiffusionTable(batches=(8,), positions=(32,), responses=(16,), blocks=(16,), buckets=(12,))
PLAIN = Saliency(tau=0.99, full_steps=2, every=3, first_layer=False, keep_changed=False, keep_prompt=False, boundary=False)
"""Published settings."""
REPAIRED = Saliency(tau=0.9, full_steps=2, every=3, first_layer=False)
EXACT = Saliency(tau=ALWAYS, full_steps=1, every=1, first_layer=True)

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
BACKENDS = [
    pytest.param((family, kernels), id=f"{family}-{kernels}", marks=needs_native if kernels == "auto" else ())
    for family in ("llada", "dream")
    for kernels in ("auto", "xla")
]


def build(family: str, kernels: Any = "auto", table: DiffusionTable = TABLE, **settings: Any) -> DiffusionModel:
    with tempfile.TemporaryDirectory() as folder:
        written = write_model(Path(folder), MODELS[family], MASK, EOS[family], eot_token_id=EOT[family])
        return load(written, kernels=kernels, table=table, **settings)


def asking(**changes: Any) -> Denoising:
    """A request of 12 tokens in blocks of 4."""
    return Denoising(**{"new_tokens": 12, "block_length": 4, "ignore_eos": True, "seed": 7} | changes)


def together(
    model: DiffusionModel, prompts: Sequence[Sequence[int]], requests: Sequence[Denoising], filler: bool = True
) -> DenoisingStream:
    """Denoises a batch to its end. A filler row in mode "dual" makes every batch run the same program."""
    others = [asking(mode="dual", new_tokens=16)] if filler else []
    session = model.start([*prompts, *([[1, 2, 3]] * len(others))], [*requests, *others])
    while not session.finished:
        session.advance()
    return session


# Requests of the reference.


def request_of(denoising: Denoising, family: str) -> Request:
    return Request(
        mask=MASK,
        gen_length=denoising.new_tokens,
        block_length=denoising.block_length or denoising.new_tokens,
        steps=denoising.steps or denoising.new_tokens,
        remasking=denoising.remasking,
        temperature=denoising.temperature,
        top_p=denoising.top_p,
        cfg_scale=denoising.guidance,
        threshold=denoising.threshold,
        suffix_window=denoising.suffix_window,
        eos=() if denoising.ignore_eos else (EOS[family],),
        forbid=(EOS[family],) if denoising.logits_eos_inf else (),
        unranked=unranked(denoising, family) if denoising.confidence_eos_eot_inf else (),
        first_alone=denoising.first_alone,
        top_k=denoising.top_k,
        min_p=denoising.min_p,
        penalties=(denoising.repetition_penalty, denoising.presence_penalty, denoising.frequency_penalty),
        biases=dict(denoising.logit_bias),
        min_tokens=denoising.min_tokens,
        ends=(EOS[family], *denoising.stop_token_ids),
    )


def unranked(denoising: Denoising, family: str) -> tuple[int, ...]:
    """Tokens that the published `confidence_eos_eot_inf` ranks last."""
    return (EOT[family],) if denoising.temperature else (EOT[family], EOS[family])


def mode_of(denoising: Denoising) -> Mode:
    saliency = denoising.saliency
    if denoising.mode == "dense":
        return Dense
    if denoising.mode != "sparse":
        return CachedMode(denoising.mode, not denoising.first_alone)
    return SparseMode(
        saliency.tau,
        saliency.full_steps,
        saliency.every,
        max(saliency.full_steps, saliency.whole_until),
        saliency.first_layer,
        saliency.keep_prompt,
        saliency.keep_changed,
        saliency.boundary,
    )


@functools.cache
def randomness(seed: int, positions: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Gumbel noise `[steps, positions, V]` and uniform numbers, a function of seed, position and step alone."""

    def of_one(step: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), step)
        return jax.random.bits(key, (VOCAB,), jnp.uint32), jax.random.uniform(jax.random.fold_in(key, 1))

    bits, uniform = jax.jit(jax.vmap(jax.vmap(of_one, (None, 0)), (0, None)))(jnp.arange(40), jnp.arange(positions))
    return gumbel_of(np.asarray(bits)), np.asarray(uniform, np.float64)


def wanted(family: str, prompt: Sequence[int], denoising: Denoising) -> Generation:
    noise, uniform = randomness(denoising.seed or 0, max(40, len(prompt) + denoising.new_tokens))
    return generate(
        MODELS[family],
        prompt,
        request_of(denoising, family),
        mode_of(denoising),
        lambda step, position, _: noise[step, position],
        lambda step, position: float(uniform[step, position]),
    )


def filter_margin(step: Step, request: Request) -> float:
    """Returns the smallest distance of a token from the edge of a filter."""
    logits = step.logits.copy()
    logits[:, [MASK, *request.forbid]] = -np.inf
    logits /= request.temperature or 1.0
    gaps = [np.inf]
    if request.top_k:
        ranked = np.sort(logits, axis=1)[:, ::-1]
        gaps.append(float(np.min(ranked[:, request.top_k - 1] - ranked[:, request.top_k])))
        logits = np.where(logits >= ranked[:, request.top_k - 1 : request.top_k], logits, -np.inf)
    if request.top_p < 1:
        p = softmax(logits)
        before = np.array([[row[row > p_token].sum() for p_token in row] for row in p])
        gaps.append(float(np.abs(before - request.top_p).min()))
    if request.min_p:
        gaps.append(float(np.abs(logits - logits.max(axis=1, keepdims=True) - np.log(request.min_p)).min()))
    return min(gaps)


def decided(step: Step, denoising: Denoising, request: Request) -> bool:
    """Returns True if rounding cannot change the committed and the salient positions of the step."""
    cosines = [np.abs(layer.cosine - denoising.saliency.tau).min() for layer in step.layers]
    enough = min(step.margin(request), filter_margin(step, request)) > MARGIN
    return enough and min(cosines, default=1.0) > COSINE_MARGIN


@dataclass(frozen=True)
class Compared:
    """How many steps of one generation were compared, of how many; and what the reference made."""

    compared: int
    steps: int
    want: Generation

    @property
    def all(self) -> bool:
        return self.compared == self.steps


def compare(session: DenoisingStream, row: int, family: str) -> Compared:
    """Checks a row against the reference, up to the first step in which rounding might decide."""
    prompt = session.prompts[row]
    denoising = session.requests[row]
    want = wanted(family, prompt, denoising)
    request = request_of(denoising, family)
    sure = [decided(step, denoising, request) for step in want.steps]
    until = sure.index(False) if False in sure else len(sure)
    reports = [report for report in session.reports if report.committed[row] >= 0]
    assert [int(report.committed[row]) for report in reports][:until] == [len(step.committed) for step in want.steps][:until]
    for number, (report, step) in enumerate(zip(reports[:until], want.steps[:until], strict=True)):
        if step.layers:
            salient = [len(layer.salient) for layer in step.layers]
            assert report.salient[row].tolist() == salient, f"{denoising}: step {number}, {step.kind}"
    if until == len(sure):
        assert session.tokens()[row] == want.tokens[len(prompt) :]
        assert len(reports) == len(want.steps)
    return Compared(until, len(sure), want)


def compare_all(session: DenoisingStream, family: str, share: float = 0.75) -> list[Compared]:
    """Compares all rows except fillers. At least `share` of them must be comparable to the end."""
    found = [compare(session, row, family) for row in range(len(session.prompts)) if session.requests[row].new_tokens != 16]
    assert sum(each.all for each in found) >= share * len(found), [(each.compared, each.steps) for each in found]
    return found


def changed(denoising: Denoising, **saliency: Any) -> Denoising:
    return replace(denoising, saliency=replace(denoising.saliency, **saliency))
