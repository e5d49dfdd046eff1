"""Options of denoising requests, and their arrays for a batch.

Sources: LLaDA (arXiv 2502.09992, Algorithms 4 and 5), Dream (arXiv 2508.15487), Fast-dLLM (arXiv 2505.22618), DyLLM
(arXiv 2603.08026); masks far behind the block are left out as in DPad (arXiv 2508.14148).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import jax
import numpy as np

from tilewright.runtime.sampling import RowSampling, Sampling, row_sampling

Remasking = Literal["low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy"]
"""Score that ranks masked positions.

LLaDA's rules: the probability of the chosen token ("low_confidence"), or a random number ("random"). Dream's rules: a random
choice of positions ("origin"), the probability of the chosen token after temperature and filters ("maskgit_plus"), the gap
between the two best probabilities ("topk_margin"), or the negative entropy ("entropy").
"""
REMASKING: tuple[Remasking, ...] = get_args(Remasking)
LLADA_RULES: tuple[Remasking, ...] = ("low_confidence", "random")
"""LLaDA's rules. Their probabilities are those before temperature and filters, as in LLaDA's code."""
BY_CHANCE: tuple[Remasking, ...] = ("random", "origin")

Mode = Literal["dense", "prefix", "dual", "sparse"]
"""Positions that a step computes: all; from the block on, or the block only, with cached keys and values for the others; or the
salient ones."""
MODES: tuple[Mode, ...] = get_args(Mode)

SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
)
"""Options of `Sampling` that are options of `Denoising`, with the same names."""

TIME_EPSILON = 1e-3
"""End of Dream's schedule of times."""
FAR = 2**30
"""Position behind all others."""
MOST_STEPS = 2**31 - 1
"""The most steps, which are int32 on the device."""
ALWAYS = 2.0
"""Saliency threshold above every cosine."""


@dataclass(frozen=True)
class Saliency:
    """Options of sparse steps. The switches repair deviations of the published code (see `window.py`).

    Attributes:
        tau: a position is recomputed if the cosine between its contexts of two steps is below; above 1, all are.
        full_steps: number of first steps that compute everything.
        every: each step whose number (from 1) is a multiple of this computes the whole sequence; others compute the response
            only.
        first_layer: all positions are salient in the first layer, so that with tau above 1 and `every` 1 steps are dense.
        keep_changed: tokens committed in the step before are salient in every layer.
        keep_prompt: prompts catch up on the changes of steps that computed the response only.
        boundary: with shifted logits, the window of a response includes the position before it, which predicts its first token.
        whole_until: steps up to this number compute the whole sequence; 4 in the published code, whatever `full_steps` is.
    """

    tau: float = 0.99
    full_steps: int = 4
    every: int = 4
    first_layer: bool = True
    keep_changed: bool = True
    keep_prompt: bool = True
    boundary: bool = True
    whole_until: int = 0

    def __post_init__(self) -> None:
        for good, expected, found in (
            (0 < self.tau <= ALWAYS, f"a saliency threshold above 0, up to {ALWAYS:g}", self.tau),
            (self.full_steps >= 1, "at least 1 full step, which fills the caches", self.full_steps),
            (self.full_steps <= MOST_STEPS, f"at most {MOST_STEPS} full steps", self.full_steps),
            (self.every >= 1, "whole-sequence steps every 1 step or more", self.every),
            (self.every <= MOST_STEPS, f"whole-sequence steps every {MOST_STEPS} steps or less", self.every),
            (0 <= self.whole_until <= MOST_STEPS, f"whole_until from 0 to {MOST_STEPS}", self.whole_until),
        ):
            if not good:
                raise ValueError(f"expected {expected}, found {found}")


@dataclass(frozen=True)
class Denoising:
    """Options of a denoising request.

    Attributes:
        new_tokens: length of the response, a multiple of `block_length`.
        steps: number of denoising steps, a multiple of the number of blocks. None for one step a token. With a `threshold` the
            number depends on the response.
        block_length: length of the blocks, which are denoised one after the other; None for a single block.
        remasking: score that ranks masked positions.
        temperature, top_p, seed: sampling options; temperature 0 takes the most likely token.
        threshold: each step commits all tokens at least this likely, and always the best one; None commits a quota.
        mode: positions that a step computes.
        saliency: options of sparse steps.
        suffix_window: number of positions behind the block that a step attends to, as if the response ended there. None for
            all.
        guidance: scale of classifier-free guidance, `un + (guidance + 1) * (with the prompt - un)`; 0 for none.
        ignore_eos: continues past the end-of-sequence token.
        logits_eos_inf: never chooses an end-of-sequence token (LLaDA, appendix B.4).
        confidence_eos_eot_inf: ranks positions by probabilities in which end-of-turn and end-of-sequence tokens have none, so
            that they are committed late ("low_confidence" only). With a temperature this holds for end-of-turn tokens alone, as
            in the published `generate.py`, which then changes a copy of the logits.
        first_alone: with shifted logits and a cache, the first step of a block commits the block's first position alone, and
            later steps compute nothing before the block, as in the published Fast-dLLM for Dream. By default the first step
            commits by the rule, and later steps also compute the position before the block, which predicts its first token.
        top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, min_tokens, stop_token_ids: as in
            `runtime.sampling.Sampling`. The history of a position is the prompt, and the tokens before it that were committed
            before the step.
        left_to_right: each step commits the block's first mask alone, whatever the rule, and the token is delivered at once.
            Requests with a constraint are denoised so, since only the text before a token tells which tokens it may be.
    """

    new_tokens: int = 128
    steps: int | None = None
    block_length: int | None = None
    remasking: Remasking = "low_confidence"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    threshold: float | None = None
    mode: Mode = "dense"
    saliency: Saliency = Saliency()
    suffix_window: int | None = None
    guidance: float = 0.0
    ignore_eos: bool = False
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    first_alone: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    left_to_right: bool = False

    def __post_init__(self) -> None:
        for name, value, values in (("remasking", self.remasking, REMASKING), ("mode", self.mode, MODES)):
            if value not in values:
                raise ValueError(f"expected {name} to be one of {', '.join(values)}, found {value!r}")
        self.sampling()  # validates the sampling options
        block = self.block
        blocks = self.new_tokens // max(self.block, 1)
        for good, expected, found in (
            (self.new_tokens >= 1, "new_tokens of at least 1", self.new_tokens),
            (block >= 1, "a block_length of at least 1", block),
            (
                self.new_tokens % max(block, 1) == 0,
                f"new_tokens that are a multiple of the block_length {block}",
                self.new_tokens,
            ),
            (self.threshold is None or 0 < self.threshold <= 1, "a threshold above 0, up to 1", self.threshold),
            (
                self.threshold is None or self.remasking not in BY_CHANCE,
                f"no threshold with {self.remasking}, which ranks by chance",
                self.threshold,
            ),
            (self.threshold is None or self.steps is None, "steps or a threshold, not both", self.steps),
            (
                self.steps is None or (self.steps >= 1 and self.steps % max(blocks, 1) == 0),
                f"steps that are a multiple of the {blocks} blocks",
                self.steps,
            ),
            (
                self.steps is None or self.steps <= self.new_tokens,
                f"steps of at most one a token, {self.new_tokens}",
                self.steps,
            ),
            (
                self.suffix_window is None or self.suffix_window >= 0,
                "a suffix_window of at least 0 positions",
                self.suffix_window,
            ),
            (0 <= self.guidance < float("inf"), "guidance of at least 0", self.guidance),
            (
                not self.confidence_eos_eot_inf or self.remasking == "low_confidence",
                "remasking low_confidence with confidence_eos_eot_inf",
                self.remasking,
            ),
            (not self.first_alone or self.mode in ("prefix", "dual"), "the mode prefix or dual with first_alone", self.mode),
        ):
            if not good:
                raise ValueError(f"expected {expected}, found {found}")
        if self.first_alone and self.block_steps == 1 and block > 1:
            raise ValueError(f"expected at least 2 steps a block with first_alone, found {self.steps}")

    @property
    def computes_all(self) -> bool:
        """True if every step computes every position, without caches."""
        return self.mode == "dense" and self.suffix_window is None

    @property
    def block(self) -> int:
        return self.new_tokens if self.block_length is None else self.block_length

    @property
    def block_steps(self) -> int:
        """The most steps of a block."""
        steps = self.new_tokens if self.steps is None else self.steps
        return self.block if self.threshold is not None else steps * self.block // self.new_tokens

    def seeded(self) -> "Denoising":
        """Returns a copy with a fresh seed if it draws and has none."""
        draws = self.temperature > 0 or self.remasking in BY_CHANCE
        if self.seed is not None or not draws:
            return self
        return replace(self, seed=Sampling(temperature=1.0).seeded().seed)

    def sampling(self) -> Sampling:
        same = {name: getattr(self, name) for name in SAMPLED}
        return Sampling(max(self.new_tokens, 1), **same)

    def shares(self) -> np.ndarray:
        """Returns the share of the remaining masks that each step of a block unmasks (Dream), float64 `[block_steps]`."""
        times = np.linspace(1, TIME_EPSILON, self.block_steps + 1)
        return np.append((1 - times[1:] / times[:-1])[:-1], 1.0)

    def quotas(self) -> np.ndarray:
        """Returns the number of tokens that each step of a block commits, int32 `[block_steps]`.

        LLaDA's rules have even shares, with the remainder in the first steps. Dream's rules round its shares of the remaining
        masks down to whole tokens. With `first_alone` the first step commits one token, and the others share the rest.
        """
        counts = [1] if self.first_alone else []
        left = self.block - len(counts)
        steps = self.block_steps - len(counts)
        if self.remasking in LLADA_RULES:
            base, remainder = divmod(left, max(steps, 1))
            return np.asarray(counts + [base + (n < remainder) for n in range(steps)], np.int32)
        for share in self.shares()[len(counts) :]:
            counts.append(int(left * share))
            left -= counts[-1]
        return np.asarray(counts, np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowOptions:
    """Requests as arrays, one entry a row, named as in `Denoising` and `Saliency`.

    Attributes:
        quotas, shares: `[B, K]`, K being the longest block of the program.
        rule: index of `remasking` in `REMASKING`; `mode` is an index in `MODES`.
        threshold: above 1 for rows that commit a quota.
        sampling: its prompt lengths are 0; those of the rows are in the state.
        suffix_window: `FAR` for all positions.
    """

    block: Any
    quotas: Any
    shares: Any
    rule: Any
    threshold: Any
    mode: Any
    tau: Any
    full_steps: Any
    every: Any
    first_layer: Any
    keep_changed: Any
    keep_prompt: Any
    boundary: Any
    whole_until: Any
    suffix_window: Any
    guidance: Any
    ignore_eos: Any
    logits_eos_inf: Any
    confidence_eos_eot_inf: Any
    first_alone: Any
    left_to_right: Any
    sampling: RowSampling


def row_options(requests: Sequence[Denoising], longest: int, eos: tuple[int, ...] = ()) -> RowOptions:
    """Gathers requests into arrays, on the host.

    Args:
        longest: K.
        eos: the model's end-of-sequence tokens, for requests with `min_tokens`.
    """

    def each(values: Sequence[Any], dtype: Any) -> np.ndarray:
        return np.asarray(values, dtype)

    def padded(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        return np.stack([np.pad(row, (0, longest - len(row))).astype(dtype) for row in rows])

    sparse = [r.saliency for r in requests]
    return RowOptions(
        block=each([r.block for r in requests], np.int32),
        quotas=padded([r.quotas() for r in requests], np.int32),
        shares=padded([r.shares() for r in requests], np.float32),
        rule=each([REMASKING.index(r.remasking) for r in requests], np.int32),
        threshold=each([ALWAYS if r.threshold is None else r.threshold for r in requests], np.float32),
        mode=each([MODES.index(r.mode) for r in requests], np.int32),
        tau=each([s.tau for s in sparse], np.float32),
        full_steps=each([s.full_steps for s in sparse], np.int32),
        every=each([s.every for s in sparse], np.int32),
        first_layer=each([s.first_layer for s in sparse], bool),
        keep_changed=each([s.keep_changed for s in sparse], bool),
        keep_prompt=each([s.keep_prompt for s in sparse], bool),
        boundary=each([s.boundary for s in sparse], bool),
        whole_until=each([s.whole_until for s in sparse], np.int32),
        suffix_window=each([FAR if r.suffix_window is None else min(r.suffix_window, FAR) for r in requests], np.int32),
        guidance=each([r.guidance for r in requests], np.float32),
        ignore_eos=each([r.ignore_eos for r in requests], bool),
        logits_eos_inf=each([r.logits_eos_inf for r in requests], bool),
        confidence_eos_eot_inf=each([r.confidence_eos_eot_inf for r in requests], bool),
        first_alone=each([r.first_alone for r in requests], bool),
        left_to_right=each([r.left_to_right for r in requests], bool),
        sampling=row_sampling([r.sampling() for r in requests], [0] * len(requests), eos=eos),
    )


@lru_cache(maxsize=256)
def one_row(request: Denoising, longest: int, eos: tuple[int, ...]) -> RowOptions:
    """Returns the row of `row_options` for a request. The dispatches of an engine share it; do not write to it."""
    return row_options([request], longest, eos)
