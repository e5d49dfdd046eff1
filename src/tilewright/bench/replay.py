"""What the replay page shows of a generation: every round with its drafts, and what the target thought of each token."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tilewright.bench.compare import environment
from tilewright.bench.figures import first_difference
from tilewright.decode.drafters.base import Proposal
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.request import Result
from tilewright.decode.sampling import Sampling
from tilewright.decode.session import Session
from tilewright.decode.state import DecodeState, Models
from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.tokenizer import StreamDecoder
from tilewright.report.replay import Passage, Replay, Round, Step, Token

MULTIPLE = 256
"""Texts are padded to a multiple of so many tokens, so that those of all lengths share a few programs."""
TIMED = 3
"""Runs of each way, of which the fastest counts."""


@partial(jax.jit, static_argnums=(0, 1))
def opinions(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "1 T"]
) -> tuple[Float[Array, "1 T"], Float[Array, "1 T"]]:
    """For each token the target's probability of it, and by how much its largest logit there exceeds the second."""
    logits = decoder.logits(config, ops, params, decoder.forward_full(config, ops, params, tokens).hidden[:, :-1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    best = jax.lax.top_k(logits, 2)[0]
    none = jnp.full((1, 1), jnp.nan)
    probability = jnp.minimum(jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1)), 1.0)  # which rounding may exceed
    return tuple(jnp.concatenate([none, x], axis=1) for x in (probability, best[..., 0] - best[..., 1]))  # type: ignore[return-value]


def described(lm: LanguageModel, prompt: Sequence[int], result: Result) -> list[Token]:
    """A result's tokens with their texts and with what the target thinks of them, at temperature 1 and before any filter."""
    probability, margin = opinions_of(lm, [*prompt, *result.tokens])
    facts = zip(result.tokens, token_texts(lm, result.tokens), range(len(prompt), len(probability)), strict=True)
    return [Token(token, text, float(probability[at]), float(margin[at])) for token, text, at in facts]


def opinions_of(lm: LanguageModel, text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`opinions` of one text, float32 `[len(text)]` each."""
    padded = np.zeros((1, -(-len(text) // MULTIPLE) * MULTIPLE), np.int32)
    padded[0, : len(text)] = text
    probability, margin = opinions(lm.target, lm.ops, lm.programs.models.target, padded)
    return np.asarray(probability)[0, : len(text)], np.asarray(margin)[0, : len(text)]


class Difference(NamedTuple):
    """Where two generations part: the index of the first token that differs, and the target's margin there.

    The margin is the largest logit less the second. Programs that round differently part where it is close to 0.
    """

    at: int
    margin: float


def difference(lm: LanguageModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Difference | None:
    """Where two generations after one prompt first differ; None if they are equal."""
    at = first_difference(a, b)
    if at is None:
        return None
    text = [*prompt, *max(a, b, key=len)[: at + 1]]
    return Difference(at, float(opinions_of(lm, text)[1][-1]))


def token_texts(lm: LanguageModel, tokens: Sequence[int]) -> list[str]:
    """What each token adds to a text; the last one has what is left."""
    decoding = StreamDecoder(lm.tokenizer)
    texts = [decoding.push([token]) for token in tokens]
    if texts:
        texts[-1] += decoding.flush()
    return texts


def proposals(session: Session, lm: LanguageModel) -> Iterator[np.ndarray]:
    """Runs a session round by round; yields the drafts of its only row, `[block_size - 1]`, before each round."""
    drafter = lm.drafter
    assert drafter is not None, "a replay needs a drafter"

    @partial(jax.jit, donate_argnums=1)
    def propose(models: Models, state: DecodeState) -> tuple[DecodeState, Proposal]:
        return state, drafter.propose(lm.programs.target, models, state)

    session.prefill()
    while not session.finished:
        proposal = session.batch.run(propose)
        drafts, count = np.asarray(proposal.block)[0, 1:], int(np.asarray(proposal.drafts)[0])
        session.advance(1)
        yield drafts[:count]


def passage(lm: LanguageModel, title: str, prompt: str | Sequence[int], sampling: Sampling) -> Passage:
    """Decodes one prompt both ways. Times are those of a run in one piece, shared evenly by its steps or rounds.

    The run is the fastest of a few, both ways alternating.
    """
    tokens = lm.encode(prompt)
    timed = [[lm.generate([tokens], sampling, speculative=way) for way in (False, True)] for _ in range(TIMED)]
    plain, drafted = (min(runs, key=lambda run: run.decode_seconds) for runs in zip(*timed, strict=True))
    session = lm.start([tokens], sampling)
    drafts = list(proposals(session, lm))
    result = session.results()[0]
    assert result.tokens == drafted[0].tokens, "the same prompt gives the same tokens"
    emitted, at, rounds = described(lm, tokens, result), 0, []
    for proposed, added, accepted in zip(drafts, result.acceptance_lengths, result.accepted, strict=True):
        shown = [Token(int(token), text) for token, text in zip(proposed, token_texts(lm, proposed.tolist()), strict=True)]
        own = emitted[at : at + added]
        rounds.append(Round(drafted.decode_seconds / drafted.rounds, shown, accepted, own))
        at += added
    seconds = plain.decode_seconds / plain.rounds
    baseline = [Step(token, seconds) for token in described(lm, tokens, plain[0])]
    text = prompt if isinstance(prompt, str) else lm.tokenizer.decode(tokens, skip_special_tokens=False)
    return Passage(title, text, baseline, rounds)


def replay(
    lm: LanguageModel,
    names: tuple[str, str],
    prompts: Sequence[tuple[str, str | Sequence[int]]],
    sampling: Sampling | Sequence[Sampling],
    on_passage: Callable[[], None] = lambda: None,
) -> Replay:
    """Everything that `report.replay.write_replay` shows.

    Args:
        names: of the target and of the drafter.
        prompts: title and prompt of each passage.
        sampling: one for all, or one each that differ in their seeds.
    """
    passages, each = [], lm.each_sampling(prompts, sampling)
    for (title, prompt), own in zip(prompts, each, strict=True):
        passages.append(passage(lm, title, prompt, own))
        on_passage()
    assert lm.drafter is not None
    told, usual = ("temperature", "seed"), vars(Sampling())
    settings = {name: value for name, value in vars(each[0]).items() if name in told or value != usual[name]}
    if len({own.seed for own in each}) > 1:
        settings["seed"] = [own.seed for own in each]
    return Replay("A generation, round by round", *names, lm.drafter.block_size, passages, {**environment(lm), **settings})
