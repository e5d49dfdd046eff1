"""What the tests of denoising share: small models, requests as the reference takes them, and when generations are the same."""

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
from tilewright.diffusion.model import DiffusionModel, DiffusionSession, load
from tilewright.diffusion.options import ALWAYS, Denoising, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.kernels import native

VOCAB = 40
MARGIN = 1e-4
COSINE_MARGIN = 2e-5
"""By how much choices must stand apart to be decided in float32, and cosines from their threshold, which take fewer sums."""
MODELS: dict[str, Model] = {
    "llada": random_model(5, "llada", VOCAB, hidden=64, layers=2),
    "dream": random_model(6, "dream", VOCAB, hidden=64, layers=2),
    "tiny": random_model(7, "llada", VOCAB, hidden=64, layers=1),
}
EOS = {"llada": 12, "dream": 30, "tiny": 12}
TABLE = DiffusionTable(batches=(8,), positions=(32,), responses=(16,), blocks=(16,), buckets=(12,))
PLAIN = Saliency(tau=0.99, full_steps=2, every=3, first_layer=False, keep_changed=False, keep_prompt=False, boundary=False)
"""As published."""
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
        return load(write_model(Path(folder), MODELS[family], MASK, EOS[family]), kernels=kernels, table=table, **settings)


def asking(**changes: Any) -> Denoising:
    """A request of 12 tokens in blocks of 4."""
    return Denoising(**{"new_tokens": 12, "block_length": 4, "ignore_eos": True, "seed": 7} | changes)


def together(
    model: DiffusionModel, prompts: Sequence[Sequence[int]], requests: Sequence[Denoising], filler: bool = True
) -> DiffusionSession:
    """A batch to its end; with a row more that looks at its blocks alone, so that every batch runs in the same program."""
    others = [asking(mode="dual", new_tokens=16)] if filler else []
    session = model.start([*prompts, *([[1, 2, 3]] * len(others))], [*requests, *others])
    while not session.finished:
        session.advance()
    return session


# What the reference is asked for.


def request_of(asked: Denoising, family: str) -> Request:
    return Request(
        mask=MASK,
        gen_length=asked.new_tokens,
        block_length=asked.block_length or asked.new_tokens,
        steps=asked.steps or asked.new_tokens,
        remasking=asked.remasking,
        temperature=asked.temperature,
        top_p=asked.top_p,
        cfg_scale=asked.guidance,
        threshold=asked.threshold,
        suffix_window=asked.suffix_window,
        eos=() if asked.ignore_eos else (EOS[family],),
    )


def mode_of(asked: Denoising) -> Mode:
    how = asked.saliency
    if asked.mode == "dense":
        return Dense
    if asked.mode != "sparse":
        return CachedMode(asked.mode)
    return SparseMode(
        how.tau, how.full_steps, how.every, how.full_steps, how.first_layer, how.keep_prompt, how.keep_changed, how.boundary
    )


@functools.cache
def randomness(seed: int, positions: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Gumbel noise `[steps, positions, V]` and uniform numbers, a function of seed, position and step alone."""

    def of_one(step: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), step)
        return jax.random.bits(key, (VOCAB,), jnp.uint32), jax.random.uniform(jax.random.fold_in(key, 1))

    bits, uniform = jax.jit(jax.vmap(jax.vmap(of_one, (None, 0)), (0, None)))(jnp.arange(40), jnp.arange(positions))
    return gumbel_of(np.asarray(bits)), np.asarray(uniform, np.float64)


def wanted(family: str, prompt: Sequence[int], asked: Denoising) -> Generation:
    noise, uniform = randomness(asked.seed or 0, max(40, len(prompt) + asked.new_tokens))
    return generate(
        MODELS[family],
        prompt,
        request_of(asked, family),
        mode_of(asked),
        lambda step, position, _: noise[step, position],
        lambda step, position: float(uniform[step, position]),
    )


def nucleus_margin(step: Step, request: Request) -> float:
    """How far the probabilities before each token are from the nucleus."""
    if request.top_p >= 1:
        return float("inf")
    logits = step.logits.copy()
    logits[:, MASK] = -np.inf
    p = softmax(logits / (request.temperature or 1.0))
    before = np.array([[row[row > own].sum() for own in row] for row in p])
    return float(np.abs(before - request.top_p).min())


def decided(step: Step, asked: Denoising, request: Request) -> bool:
    """Whether rounding cannot change what the step commits, nor which positions it finds salient."""
    cosines = [np.abs(layer.cosine - asked.saliency.tau).min() for layer in step.layers]
    enough = min(step.margin(request), nucleus_margin(step, request)) > MARGIN
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


def compare(session: DiffusionSession, row: int, family: str) -> Compared:
    """Checks a row against the reference, up to the first step in which rounding might decide."""
    prompt = session.prompts[row]
    asked = session.requests[row]
    want = wanted(family, prompt, asked)
    request = request_of(asked, family)
    sure = [decided(step, asked, request) for step in want.steps]
    until = sure.index(False) if False in sure else len(sure)
    reports = [report for report in session.reports if report.committed[row] >= 0]
    assert [int(report.committed[row]) for report in reports][:until] == [len(step.committed) for step in want.steps][:until]
    for number, (report, step) in enumerate(zip(reports[:until], want.steps[:until], strict=True)):
        if step.layers:
            salient = [len(layer.salient) for layer in step.layers]
            assert report.salient[row].tolist() == salient, f"{asked}: step {number}, {step.kind}"
    if until == len(sure):
        assert session.tokens()[row] == want.tokens[len(prompt) :]
        assert len(reports) == len(want.steps)
    return Compared(until, len(sure), want)


def compare_all(session: DiffusionSession, family: str, share: float = 0.75) -> list[Compared]:
    """Every row but fillers; at least such a share of them to the end."""
    found = [compare(session, row, family) for row in range(len(session.prompts)) if session.requests[row].new_tokens != 16]
    assert sum(each.all for each in found) >= share * len(found), [(each.compared, each.steps) for each in found]
    return found


def changed(asked: Denoising, **saliency: Any) -> Denoising:
    return replace(asked, saliency=replace(asked.saliency, **saliency))
