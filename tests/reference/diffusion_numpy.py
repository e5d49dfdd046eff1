"""Reference of denoising by masked-diffusion language models in NumPy float64, which tests compare with the engine.

Dense generation as LLaDA and Dream publish it, Fast-dLLM's prefix and dual cache, and DyLLM's sparse steps, written from the
description of the methods and not from the engine: one sequence at a time, whole arrays, loops. The models are in
`diffusion_model_numpy.py`, with the legend. Besides it: c candidates. *step* counts forwards from 0 over the whole generation
(for the noise too), *block step* from 0 within a block.

Sources: LLaDA (arXiv 2502.09992) and its `generate.py`; Dream (arXiv 2508.15487) and its generation utilities; Fast-dLLM (arXiv
2505.22618); DyLLM (arXiv 2603.08026). Where they leave a choice, or differ from each other, this is what holds here:

**Logits.** Dream's logits for position p are those of row p - 1, but the first row of a forward keeps its own: position 0 of a
whole sequence, and the first position of a window, unless `shift_boundary` puts the row before it into the window.
Classifier-free guidance runs a second stream, with caches of its own, in which the whole prompt is masked:
`un + (scale + 1) (cond - un)`. The mask token, and those in `forbid`, get logit -inf before anything else: nothing commits a
mask (the published loops let it happen).

Biases and penalties change logits next, as in `sampling_numpy.py`: the history of a position are the prompt and the tokens
before it that were committed before the step. The first `min_tokens` positions get no end.

**Tokens.** A choice is the argmax of `logits / T + Gumbel noise`, at T = 0 of the logits; the lowest token id among equals.
top_k keeps so many, top_p a token if the strictly more likely ones hold less than top_p in the softmax of what top_k keeps,
min_p one with this share of the best one's probability; equals stay together.
Probabilities are those of the plain softmax for LLaDA's rules (low_confidence, random), whatever T and top_p, which its loop
doesn't have; for Dream's they are those of the distribution after T and top_p, after top_p at T = 0 too.

**Commits.** Candidates are the masked positions of the current block. The score ranks them, the lower position first among
equals: the probability of the chosen token (low_confidence, maskgit_plus), a uniform number (random), the gap between the two
best probabilities (topk_margin), `sum p log(p + 1e-10)` (entropy).

- By quota, the best so many: "even" as LLaDA's, the remainder on the earliest steps; or "timesteps" as Dream's,
  `int(masks left * (1 - s/t))` over `linspace(1, eps, steps + 1)` in float64, all at the last step. Both count one block with
  its `steps / blocks` steps. DyLLM's `length / steps` is "even" where that divides.
- "origin" has no quota: a candidate is committed where its uniform number is below `1 - s/t`, all at the last step.
- With `allowed`, a step commits the block's first mask alone, whatever the rule, among the tokens that are `allowed` behind the
  output before it.
- With `first_alone`, block step 0 commits the block's first position, whatever the rule. "even" shares the rest over the other
  steps; "timesteps" goes on with the time of block step 1.
- By threshold: the one with the best score, and all whose chosen token has a *probability* at or above it, whichever score
  ranks (an entropy score is negative, no threshold on it could fire). Steps and quotas don't count then. random and origin
  have no confidence and take no threshold.

Probabilities are those without the tokens in `unranked`, which then have none.

A block ends once it has no mask, even if it has steps left; a step with quota 0 before that runs and counts.

**End.** An EOS in the response with no mask before it, seen after a step, stops the generation. (DyLLM looks only at EOS tokens
committed in this very step, and runs on if the gap before an earlier one is filled later.) What stands after that EOS, masks
too, stays in `tokens` as it is and is not part of `output`.

**Fast-dLLM.** Block step 0 computes all rows, commits by the rule, and keeps K and V of every layer and position, which stem
from the tokens before its commit. Later steps compute the rows from the block's start to the end of the sequence ("prefix") or
of the block ("dual"). They see their own fresh K and V, and the kept ones of all other positions. For Dream `shift_boundary`
adds the row before the block, its K and V fresh too. The published loop for Dream instead commits the block's first position,
alone, at block step 0, and so never needs it: `first_alone` with `shift_boundary` off.

**Suffix.** With `suffix_window` a forward gets the tokens up to so many positions behind the block, and knows no others; what
the next block shows more of is in no cache, so DyLLM's first step of a block is full.

**DyLLM.** With t = step + 1, a step is full for t <= num_full_steps; else response-only for t > whole_until and t % every != 0;
else whole-sequence. The rows of a response-only step, its *window*, are those of the response, masked later blocks too, and
row P - 1 for Dream with `shift_boundary`. A sparse step (whole-sequence or response-only) takes the embeddings x of its rows,
and the salient rows S, through each layer:

    h = norm(x); q of all rows; k, v of S, put into the caches; dV = V - V before this step
    C' = C + softmax(q K^T) dV;  C'[S] = softmax(q[S] K^T) V          over all positions, with the new K and V
    S  = rows where cosine(C, C') < tau                               all heads together; all rows if tau > 1; 0 for zeros
    C  = C';  x += o C;  F[S] = ffn(x[S]);  x += F                    for all rows

S enters layer 0 as the rows committed in the previous step, if any. A layer's S, replaced as above, is that of its FFN and of
the next layer's k and v. The switches, all off in the published code:

- first_layer_full: S enters layer 0 as all rows. With tau > 1 and every = 1 this is dense decoding.
- keep_prompt_updates: in a whole-sequence step the rows before the window, whose contexts response-only steps leave behind, use
  `dV = V - base` instead, with base the whole V at the end of the last full or whole-sequence step. Salient rows are exact
  as ever. Window rows always use the dV of this step.
- keep_updated: the rows committed in the previous step join S in every layer, for its FFN and the next layer's k and v.
- shift_boundary: as above. Without it the first response position takes the logits of its own row in response-only steps.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from reference.diffusion_model_numpy import Array, Caches, Layer, Model, Rows, attend, dense, softmax
from reference.sampling_numpy import adjusted, penalised

Noise = Callable[[int, int, int], Array]
"""Gumbel noise `[V]` of (step, position, V)."""
Uniform = Callable[[int, int], float]
"""A number in [0, 1) of (step, position)."""


@dataclass(frozen=True)
class Call:
    """Arguments of a forward pass: step and block step, first and end position of the block, rows committed in the step before,
    and True in `shows_more` if it sees more positions than the block before."""

    step: int
    block_step: int
    start: int
    end: int
    changed: Rows
    shows_more: bool = False


@dataclass(frozen=True)
class LayerTrace:
    """A layer of a sparse step: salient positions of its input and of its output, and `cosine` `[r]`."""

    incoming: Rows
    salient: Rows
    cosine: Array


@dataclass(frozen=True)
class Pass:
    """A forward pass over rows `first`, `first + 1`, ...; `logits` are `[r, V]`, not shifted."""

    kind: str
    first: int
    logits: Array
    layers: list[LayerTrace] = field(default_factory=list)


class Dense:
    """Every step computes everything."""

    def __init__(self, model: Model, prompt_length: int):
        self.model = model

    def forward(self, tokens: Sequence[int], call: Call) -> Pass:
        return Pass("full", 0, dense(self.model, tokens)[0])


@dataclass(frozen=True)
class CachedMode:
    """Settings of Fast-dLLM; see the module docstring."""

    kind: Literal["prefix", "dual"]
    shift_boundary: bool = True

    def __call__(self, model: Model, prompt_length: int) -> "Cached":
        return Cached(model, self)


class Cached:
    """A stream of Fast-dLLM."""

    def __init__(self, model: Model, mode: CachedMode):
        self.model = model
        self.mode = mode
        self.caches: list[Caches] = []

    def forward(self, tokens: Sequence[int], call: Call) -> Pass:
        if call.block_step == 0:
            logits, self.caches = dense(self.model, tokens)
            return Pass("full", 0, logits)
        first = max(call.start - self.model.shift * self.mode.shift_boundary, 0)
        rows = np.arange(first, call.end if self.mode.kind == "dual" else len(tokens))
        x = self.model.embed[np.asarray(tokens)[rows]]
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            cache.k[rows], cache.v[rows] = self.model.keys_values(layer, x, rows)  # kept values of these are never read
            x = x + attend(self.model.queries(layer, x, rows), cache.k, cache.v) @ layer.o.T
            x = x + self.model.ffn(layer, x)
        return Pass(self.mode.kind, first, self.model.logits(x))


@dataclass(frozen=True)
class SparseMode:
    """DyLLM; see the module's text. `every` is the published M."""

    tau: float
    num_full_steps: int = 4
    every: int = 4
    whole_until: int = 4
    first_layer_full: bool = False
    keep_prompt_updates: bool = False
    keep_updated: bool = False
    shift_boundary: bool = False

    def __post_init__(self) -> None:
        if self.num_full_steps < 1 or self.every < 1:
            raise ValueError(f"expected num_full_steps and every of at least 1, got {self.num_full_steps} and {self.every}")

    def __call__(self, model: Model, prompt_length: int) -> "Sparse":
        return Sparse(model, self, prompt_length)

    def kind(self, step: int) -> Literal["full", "whole", "response"]:
        t = step + 1
        if t <= self.num_full_steps:
            return "full"
        return "response" if t > self.whole_until and t % self.every else "whole"


class Sparse:
    """A stream of DyLLM. The first forward pass is full and fills `caches`."""

    def __init__(self, model: Model, mode: SparseMode, prompt_length: int):
        self.model = model
        self.mode = mode
        self.window = max(prompt_length - model.shift * mode.shift_boundary, 0)
        self.caches: list[Caches] = []

    def forward(self, tokens: Sequence[int], call: Call) -> Pass:
        kind = "full" if call.shows_more else self.mode.kind(call.step)
        if kind == "full":
            logits, self.caches = dense(self.model, tokens)
            return Pass(kind, 0, logits)
        rows = np.arange(self.window if kind == "response" else 0, len(tokens))
        salient = rows if self.mode.first_layer_full else call.changed
        x = self.model.embed[np.asarray(tokens)[rows]]
        layers = []
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            x, trace = self.layer(layer, cache, x, rows, salient, call.changed)
            layers.append(trace)
            salient = trace.salient
        return Pass(kind, int(rows[0]), self.model.logits(x), layers)

    def layer(
        self, layer: Layer, cache: Caches, x: Array, rows: Rows, incoming: Rows, changed: Rows
    ) -> tuple[Array, LayerTrace]:
        """Runs a layer of a sparse step. Returns the residual stream `[r, H]` and updates the caches."""
        first = rows[0]
        before = cache.v.copy()
        q = self.model.queries(layer, x, rows)
        cache.k[incoming], cache.v[incoming] = self.model.keys_values(layer, x[incoming - first], incoming)
        context = cache.c[rows] + attend(q, cache.k, cache.v - before)
        prompt = rows[rows < self.window]
        if self.mode.keep_prompt_updates:
            context[prompt - first] = cache.c[prompt] + attend(q[prompt - first], cache.k, cache.v - cache.base)
        context[incoming - first] = attend(q[incoming - first], cache.k, cache.v)
        cosine = cosines(cache.c[rows], context)
        salient = rows[(cosine < self.mode.tau) | (self.mode.tau > 1)]
        if self.mode.keep_updated:
            salient = np.union1d(salient, changed)
        cache.c[rows] = context
        if first == 0:
            cache.base = cache.v.copy()
        x = x + context @ layer.o.T
        cache.f[salient] = self.model.ffn(layer, x[salient - first])
        return x + cache.f[rows], LayerTrace(incoming, salient, cosine)


def cosines(a: Array, b: Array) -> Array:
    """Returns the cosine similarity of each row of `a` with that of `b`, 0 for zero rows."""
    norms = np.sqrt(np.sum(a * a, axis=1)) * np.sqrt(np.sum(b * b, axis=1))
    return np.sum(a * b, axis=1) / np.maximum(norms, 1e-30)


Mode = Callable[[Model, int], Dense | Cached | Sparse]

LLADA_RULES = ("low_confidence", "random")
DREAM_RULES = ("origin", "maskgit_plus", "topk_margin", "entropy")


@dataclass(frozen=True)
class Request:
    """Settings of a generation; `quota` None is "even" for LLaDA's rules and "timesteps" for Dream's."""

    mask: int
    gen_length: int
    block_length: int
    steps: int
    remasking: str = "low_confidence"
    temperature: float = 0.0
    top_p: float = 1.0
    cfg_scale: float = 0.0
    quota: Literal["even", "timesteps"] | None = None
    timestep_eps: float = 1e-3
    threshold: float | None = None
    eos: Collection[int] = ()
    suffix_window: int | None = None
    forbid: Collection[int] = ()
    unranked: Collection[int] = ()
    first_alone: bool = False
    top_k: int = 0
    min_p: float = 0.0
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    biases: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ends: Collection[int] = ()
    allowed: Callable[[Sequence[int]], Collection[int]] | None = None

    def __post_init__(self) -> None:
        if min(self.gen_length, self.block_length, self.steps) < 1:
            raise ValueError(f"expected lengths and steps of at least 1, got {self}")
        blocks = self.gen_length // self.block_length
        if self.gen_length % self.block_length or (self.steps % blocks and self.threshold is None):
            raise ValueError(f"expected blocks that divide the length and steps that they divide, got {self}")
        if self.remasking not in (*LLADA_RULES, *DREAM_RULES):
            raise ValueError(f"expected one of {LLADA_RULES + DREAM_RULES}, got {self.remasking!r}")
        if self.threshold is not None and self.remasking in ("random", "origin"):
            raise ValueError(f"expected no threshold with {self.remasking!r}, which has no confidence")

    @property
    def block_steps(self) -> int:
        """The most steps that a block takes; each commits something if there is a threshold."""
        return self.block_length if self.threshold is not None else self.steps * self.block_length // self.gen_length

    @property
    def quotas(self) -> Literal["even", "timesteps"]:
        return self.quota or ("even" if self.remasking in LLADA_RULES else "timesteps")

    def share(self, block_step: int) -> float:
        """The part of the masks that Dream's schedule unmasks: `1 - s/t`, all at the last step."""
        times = np.linspace(1, self.timestep_eps, self.block_steps + 1)
        return 1.0 if block_step == self.block_steps - 1 else float(1 - times[block_step + 1] / times[block_step])

    def count(self, block_step: int, masks: int) -> int:
        """Returns the number of the block's remaining `masks` that a step commits by quota."""
        if self.quotas == "timesteps":
            return int(masks * self.share(block_step))
        alone = int(self.first_alone)
        base, remainder = divmod(self.block_length - alone, self.block_steps - alone)
        return base + (block_step - alone < remainder)


def nucleus(logits: Array, top_p: float) -> Array:
    """-inf for each token of `[V]` of which the strictly more likely ones hold top_p or more."""
    if top_p >= 1:
        return logits
    p = softmax(logits)
    return np.where([p[p > own].sum() < top_p for own in p], logits, -np.inf)


def filtered(logits: Array, request: Request) -> Array:
    """-inf for each token of `[V]` that top_k, then top_p, then min_p leave out."""
    if request.top_k:
        logits = np.where(logits >= np.sort(logits)[::-1][min(request.top_k, len(logits)) - 1], logits, -np.inf)
    kept = nucleus(logits, request.top_p)
    return np.where(logits >= logits.max() + np.log(request.min_p), kept, -np.inf) if request.min_p else kept


def changed_logits(logits: Array, tokens: Sequence[int], prompt_length: int, position: int, request: Request) -> Array:
    """The logits `[V]` of a position after biases and penalties."""
    if (request.penalties, request.biases, request.min_tokens) == ((1.0, 0.0, 0.0), {}, 0):
        return logits
    banned = request.ends if position - prompt_length < request.min_tokens else ()
    before = [token for token in tokens[prompt_length:position] if token != request.mask]
    return penalised(adjusted(logits, request.biases, banned), tokens[:prompt_length], before, *request.penalties)


@dataclass(frozen=True)
class Choice:
    """A candidate's token, its probability, and how it ranks; `gap` is that of the best two noisy logits."""

    token: int
    probability: float
    score: float
    gap: float


def choose(logits: Array, request: Request, step: int, position: int, noise: Noise | None, uniform: Uniform | None) -> Choice:
    """The choice for one candidate, from its logits `[V]`."""
    logits = logits.copy()
    logits[[request.mask, *request.forbid]] = -np.inf
    warped = filtered(logits / (request.temperature or 1.0), request)
    noisy = warped + (noise(step, position, len(logits)) if request.temperature > 0 and noise else 0)
    ranked_by = (logits if request.remasking in LLADA_RULES else warped).copy()
    ranked_by[[*request.unranked]] = -np.inf
    p = softmax(ranked_by)
    token = int(np.argmax(noisy))
    best = np.sort(p)[::-1]
    score = float(p[token])
    if request.remasking in ("random", "origin") and uniform:
        score = uniform(step, position)
    elif request.remasking == "topk_margin":
        score = float(best[0] - best[1])
    elif request.remasking == "entropy":
        score = float(np.sum(p * np.log(p + 1e-10)))
    ranked = np.sort(noisy)[::-1]
    return Choice(token, float(p[token]), score, float(ranked[0] - ranked[1]))


def commits(choices: Sequence[Choice], request: Request, block_step: int) -> list[int]:
    """The indices of the candidates that a step commits, in order of position."""
    if request.allowed is not None or (request.first_alone and block_step == 0):
        return [0]
    if request.remasking == "origin":
        return [i for i, choice in enumerate(choices) if choice.score < request.share(block_step)]
    ranked = sorted(range(len(choices)), key=lambda i: (-choices[i].score, i))
    if request.threshold is not None:
        return sorted([ranked[0], *[i for i in ranked[1:] if choices[i].probability >= request.threshold]])
    return sorted(ranked[: request.count(block_step, len(choices))])


@dataclass(frozen=True)
class Step:
    """A forward pass and its commit.

    Attributes:
        kind: "full", "whole", "response", "prefix" or "dual".
        candidates: the masked positions of the block, `[c]`.
        logits: theirs, `[c, V]`, shifted, guided and penalised, before anything is forbidden.
        choices: one for each candidate.
        committed: the positions that were committed.
        layers: those of a sparse step (of the stream that sees the prompt), else none.
    """

    kind: str
    block: int
    block_step: int
    candidates: Rows
    logits: Array
    choices: list[Choice]
    committed: Rows
    layers: list[LayerTrace]

    def margin(self, request: Request) -> float:
        """Returns the rounding error of noisy logits, scores and probabilities below which no choice of the step changes.

        The edge of the nucleus and cosines near tau are not covered.
        """
        taken = np.isin(self.candidates, self.committed)
        score = np.array([choice.score for choice in self.choices])
        probability = np.array([choice.probability for choice in self.choices])
        gaps = [choice.gap for choice in self.choices]
        if request.allowed is not None or (request.first_alone and self.block_step == 0):
            return gaps[0]
        if request.remasking == "origin":
            gaps.append(float(np.abs(score - request.share(self.block_step)).min()))
        elif request.threshold is not None:
            ranked = np.sort(score)[::-1]
            away = np.sort(np.abs(probability - request.threshold))
            gaps += [float(away[0]), float(ranked[0] - ranked[1]) if len(ranked) > 1 else np.inf]
        elif taken.any() and not taken.all():
            gaps.append(float(score[taken].min() - score[~taken].max()))
        return min(gaps)


@dataclass(frozen=True)
class Generation:
    """All tokens, prompt included; the response up to and with its EOS if that stopped it; and the steps."""

    tokens: list[int]
    output: list[int]
    steps: list[Step]


def ending(tokens: Sequence[int], prompt_length: int, request: Request) -> int | None:
    """The position of the first EOS of the response with no mask before it."""
    for position in range(prompt_length, len(tokens)):
        if tokens[position] == request.mask:
            return None
        if tokens[position] in request.eos:
            return position
    return None


def candidate_logits(
    streams: Sequence[Dense | Cached | Sparse],
    tokens: Sequence[int],
    prompt_length: int,
    candidates: Rows,
    request: Request,
    call: Call,
) -> tuple[Pass, Array]:
    """The forward of the stream that sees the prompt, and the candidates' logits `[c, V]`, shifted and guided."""
    hidden = [request.mask] * prompt_length + list(tokens[prompt_length:])
    passes = [stream.forward(seen, call) for stream, seen in zip(streams, (tokens, hidden), strict=False)]
    first = passes[0].first
    rows = np.maximum(candidates - streams[0].model.shift, first) - first
    logits = passes[0].logits[rows]
    if len(passes) == 2:
        without = passes[1].logits[rows]
        logits = without + (request.cfg_scale + 1) * (logits - without)
    return passes[0], logits


def generate(
    model: Model,
    prompt: Sequence[int],
    request: Request,
    mode: Mode = Dense,
    noise: Noise | None = None,
    uniform: Uniform | None = None,
) -> Generation:
    """Denoises `prompt` and `gen_length` masks after it; `mode` is `Dense`, a `CachedMode` or a `SparseMode`.

    Raises:
        ValueError: a mask in the prompt, or randomness that is needed and not given.
    """
    if request.mask in prompt:
        raise ValueError("expected a prompt without the mask token")
    if (request.temperature > 0 and noise is None) or (request.remasking in ("random", "origin") and uniform is None):
        raise ValueError("expected noise for a temperature, and uniform numbers for random and origin")
    tokens = [*prompt, *[request.mask] * request.gen_length]
    steps = []
    streams = [mode(model, len(prompt)) for _ in range(2 if request.cfg_scale else 1)]
    changed = np.array([], np.int64)
    end = None
    for block in range(request.gen_length // request.block_length):
        start = len(prompt) + block * request.block_length
        for block_step in range(request.block_steps if request.allowed is None else request.block_length):
            candidates = start + np.flatnonzero(np.array(tokens[start : start + request.block_length]) == request.mask)
            if not len(candidates) or end is not None:
                break
            stop = start + request.block_length
            call = Call(len(steps), block_step, start, stop, changed, request.suffix_window is not None and block_step == 0)
            seen = tokens if request.suffix_window is None else tokens[: stop + request.suffix_window]
            run, logits = candidate_logits(streams, seen, len(prompt), candidates, request, call)
            logits = np.array(
                [changed_logits(row, tokens, len(prompt), int(p), request) for p, row in zip(candidates, logits, strict=True)]
            )
            if request.allowed is not None:
                others = np.setdiff1d(np.arange(logits.shape[1]), [*request.allowed(tokens[len(prompt) : candidates[0]])])
                logits[:, others] = -np.inf
            choices = [
                choose(row, request, call.step, int(p), noise, uniform) for p, row in zip(candidates, logits, strict=True)
            ]
            taken = commits(choices, request, block_step)
            for i in taken:
                tokens[candidates[i]] = choices[i].token
            changed = candidates[taken]
            steps.append(Step(run.kind, block, block_step, candidates, logits, choices, changed, run.layers))
            end = ending(tokens, len(prompt), request)
    return Generation(tokens, tokens[len(prompt) : len(tokens) if end is None else end + 1], steps)


def seeded_noise(seed: int) -> Noise:
    """Gumbel noise for tests that bring none."""
    return lambda step, position, vocab: np.random.default_rng([seed, step, position]).gumbel(size=vocab)


def seeded_uniform(seed: int) -> Uniform:
    """Uniform numbers for tests that bring none."""
    return lambda step, position: float(np.random.default_rng([seed, step, position, 1]).random())
