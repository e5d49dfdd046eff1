"""Data of the replay page: every round of a generation with its drafts, and the target's probability of each token."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tilewright.bench.compare import environment
from tilewright.kernels.operations import Operations
from tilewright.llm.chosen import exactness
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.llm.language_model import LanguageModel
from tilewright.llm.stream import Stream
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.tokenizer import StreamDecoder
from tilewright.report.replay import Passage, Replay, ReplayRound, ReplayStep, ReplayToken
from tilewright.runtime.interfaces import Choice, Proposal, Variant
from tilewright.runtime.layout import rows_of, with_rows
from tilewright.runtime.output import Generation, Result
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.pacer import Pacer
from tilewright.speculation.team import Team

MULTIPLE = 256
"""Texts are padded to a multiple of this, so that few programs serve all lengths."""
TIMED = 3
"""Timed runs of each variant, of which the fastest counts."""


@partial(jax.jit, static_argnums=(0, 1))
def token_probabilities(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "1 T"]
) -> tuple[Float[Array, "1 T"], Float[Array, "1 T"]]:
    """Returns the target's probability of each token, and its largest logit minus the second largest; NaN for the first
    token."""
    logits = decoder.logits(config, ops, params, decoder.forward_full(config, ops, params, tokens).hidden[:, :-1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    best = jax.lax.top_k(logits, 2)[0]
    none = jnp.full((1, 1), jnp.nan)
    probability = jnp.minimum(jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1)), 1.0)  # rounding may exceed 1
    return tuple(jnp.concatenate([none, x], axis=1) for x in (probability, best[..., 0] - best[..., 1]))  # type: ignore[return-value]


def described(lm: LanguageModel, prompt: Sequence[int], result: Result) -> list[ReplayToken]:
    """Returns a result's tokens with texts, probabilities (temperature 1, before filters) and margins."""
    probability, margin = text_probabilities(lm, [*prompt, *result.tokens])
    facts = zip(result.tokens, token_texts(lm, result.tokens, prompt), range(len(prompt), len(probability)), strict=True)
    return [ReplayToken(token, text, float(probability[place]), float(margin[place])) for token, text, place in facts]


def text_probabilities(lm: LanguageModel, text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns `token_probabilities` of one text, float32 `[len(text)]` each."""
    padded = np.zeros((1, -(-len(text) // MULTIPLE) * MULTIPLE), np.int32)
    padded[0, : len(text)] = text
    probability, margin = token_probabilities(lm.target, lm.ops, lm.model.models.target, padded)
    return np.asarray(probability)[0, : len(text)], np.asarray(margin)[0, : len(text)]


def token_texts(lm: LanguageModel | DiffusionModel, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """Returns the text that each token adds after a prompt. The last token includes the decoder's remaining bytes."""
    decoding = StreamDecoder(lm.tokenizer, prompt=prompt)
    texts = [decoding.push([token]) for token in tokens]
    if texts:
        texts[-1] += decoding.flush()
    return texts


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def propose(
    drafter: Variant, target: Target, models: Models, state: DecodeState, slots: Array, table: Array
) -> tuple[DecodeState, Proposal]:
    """Drafts the next block of some slots. DONATES state, and returns it unchanged except for the drafter's context."""
    some = drafter.complete_context(target, models, rows_of(state, slots, table))
    return with_rows(state, some, slots), drafter.propose(target, models, some)


def proposals(stream: Stream, lm: LanguageModel, choices: Iterable[Choice | None]) -> Iterator[np.ndarray]:
    """Runs a stream of one row round by round. Yields the row's drafts before each round.

    Args:
        choices: choices of a team's rounds.
    """
    drafter = lm.drafter
    assert drafter is not None, "a replay needs a drafter"
    stream.prefill()
    for choice in choices:
        if stream.finished:
            break
        proposal = stream.apply(partial(propose, drafter.variant(choice), lm.model.target))
        drafts = np.asarray(proposal.block)[0, 1:]
        count = int(np.asarray(proposal.drafts)[0])
        stream.advance(1, choice)
        yield drafts[:count]


def passage(lm: LanguageModel, title: str, prompt: str | Sequence[int], sampling: Sampling) -> Passage:
    """Decodes one prompt with and without the drafter, for the page.

    Times are those of the fastest of several alternating, uninterrupted runs. Rounds share a run's time evenly, or, where
    rounds are chosen adaptively, in proportion to their measured costs.
    """
    tokens = lm.encode(prompt)
    timed = [[lm.generate([tokens], sampling, speculative=speculative) for speculative in (False, True)] for _ in range(TIMED)]
    plain, drafted = (min(runs, key=lambda run: run.decode_seconds) for runs in zip(*timed, strict=True))
    stream = lm.start([tokens], sampling)
    choices = drafted[0].choices
    drafts = list(proposals(stream, lm, choices or repeat(None)))
    result = stream.results()[0]
    assert result.tokens == drafted[0].tokens, "the same prompt gives the same tokens"
    emitted = described(lm, tokens, result)
    start = 0
    rounds = []
    seconds = round_seconds(stream, drafted)
    for n, (proposed, added, accepted) in enumerate(zip(drafts, result.acceptance_lengths, result.accepted, strict=True)):
        texts = token_texts(lm, proposed.tolist(), [*tokens, *result.tokens[:start]])
        shown = [ReplayToken(int(token), text) for token, text in zip(proposed, texts, strict=True)]
        new = emitted[start : start + added]
        choice = result.choices[n] if result.choices else None
        about = {} if choice is None else {"drafter": choice.drafter, "width": choice.width}
        rounds.append(ReplayRound(seconds[n], shown, accepted, new, **about))
        start += added
    each = plain.decode_seconds / plain.rounds
    baseline = [ReplayStep(token, each) for token in described(lm, tokens, plain[0])]
    text = prompt if isinstance(prompt, str) else lm.tokenizer.decode(tokens, skip_special_tokens=False)
    return Passage(title, text, baseline, rounds)


def round_seconds(stream: Stream, timed: Generation) -> list[float]:
    """Returns the time of each round of a single text, in seconds."""
    chooser = stream.engine.decoding.chooser
    result = timed[0]
    if not isinstance(chooser, Pacer):
        return [timed.decode_seconds / timed.rounds] * timed.rounds
    policy = chooser.policy(1)
    costs = [
        policy.cost(choice).expected(float(drafted == 0))
        for choice, drafted in zip(result.choices, result.drafted, strict=True)
    ]
    return [cost / sum(costs) * timed.decode_seconds for cost in costs]


def replay(
    lm: LanguageModel,
    names: tuple[str, str],
    prompts: Sequence[tuple[str, str | Sequence[int]]],
    sampling: Sampling | Sequence[Sampling],
    on_passage: Callable[[], None] = lambda: None,
) -> Replay:
    """Returns the data for `report.replay.write_replay`.

    Args:
        names: names of the target and of the drafter.
        prompts: title and prompt of each passage.
        sampling: one for all prompts, or one each with different seeds.
    """
    passages = []
    each = lm.each_sampling(prompts, sampling)
    for (title, prompt), request in zip(prompts, each, strict=True):
        passages.append(passage(lm, title, prompt, request))
        on_passage()
    assert lm.drafter is not None
    if isinstance(lm.drafter, Team):
        names = names[0], " or ".join(member.name for member in lm.drafter.members) + ", chosen for each round"
    always = ("temperature", "seed")
    usual = vars(Sampling())
    settings = {name: value for name, value in vars(each[0]).items() if name in always or value != usual[name]}
    if len({request.seed for request in each}) > 1:
        settings["seed"] = [request.seed for request in each]
    if isinstance(lm.drafter, Team):
        settings["widths"] = exactness(lm)
    return Replay("A generation, round by round", *names, lm.drafter.block_size, passages, {**environment(lm), **settings})
