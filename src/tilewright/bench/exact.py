"""Requests of `tilewright verify-exact`, the plain answers to them, and the comparison with other ways' answers.

In float32 the plain answer is that of a loop without a cache (`exact_plain.py`), which shares nothing with the runtime. In
other dtypes, and with weights, keys or values of 8 bits, a program that adds up in another order rounds differently. There it
is that of the runtime's plain decoding, one request at a time. Every other way must give it, token for token.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.bench.exact_plain import draw_scores, next_logits, plain_tokens, score_lead, top_margin
from tilewright.bench.speculative_figures import first_difference
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.sampling import Sampling, later_seed

KINDS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, top_p=0.9),
    "penalised": Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2),
}
"""Kinds of sampling; "mixed" goes through them by turns, so that rows of all kinds run side by side."""
STOP = ("\n\n",)
"""Stop strings of every fourth of the mixed requests."""
SHORTER = (1.0, 0.75, 1.0, 0.4)
"""Of the length limit, by turns: rows end at different times."""


@dataclass(frozen=True)
class ExactRequest:
    """One request.

    Attributes:
        number: which of the requests, from 0.
        prompt: token ids.
        about: empty for the request itself; else how this one was made of it.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    about: str = ""

    @property
    def end(self) -> int:
        """The position behind its last token, in the longest case."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class PathAnswer:
    """Tokens that one way of decoding gave for a request."""

    asked: ExactRequest
    tokens: Sequence[int]


@dataclass(frozen=True)
class PathResult:
    """Result of one way of decoding all requests.

    Attributes:
        answers: in any order.
        exercised: what happened on the way, as counts: rounds, accepted drafts, preemptions and so on.
        lacking: the names of what should have happened and did not.
        problem: what went wrong besides the tokens; empty if nothing did.
    """

    answers: Sequence[PathAnswer]
    exercised: Mapping[str, int] = field(default_factory=dict)
    lacking: Sequence[str] = ()
    problem: str = ""


@dataclass(frozen=True)
class TokenDifference:
    """Place where an answer parts from the plain one. `metrics/exactness.py` defines its fields, which `--json` has too.

    Attributes:
        lead: None also where one of the tokens is missing.
    """

    number: int
    about: str
    position: int
    token: int | None
    text: str | None
    plain_token: int | None
    plain_text: str | None
    margin: float
    lead: float | None


@dataclass(frozen=True)
class ExactFinding:
    """One way with one kind of sampling.

    Attributes:
        drafter: "none" for plain decoding.
        sha256: of the answers to the requests themselves, in their order (see `digest`).
        plain_sha256: the same of plain decoding.
        answers: how many were compared, those to requests made of others included.
    """

    path: str
    drafter: str
    kind: str
    sha256: str
    plain_sha256: str
    answers: int
    exercised: Mapping[str, int]
    lacking: Sequence[str]
    differences: Sequence[TokenDifference]
    problem: str
    seconds: float

    @property
    def same(self) -> bool:
        return not self.differences and not self.problem


def digest(answers: Iterable[Sequence[int]]) -> str:
    """The SHA-256, in hex, of several token lists: of each its length and its ids, as little-endian 32-bit integers."""
    hashed = hashlib.sha256()
    for tokens in answers:
        hashed.update(np.asarray([len(tokens), *tokens], "<i4").tobytes())
    return hashed.hexdigest()


def sampling_of(kind: str, number: int, seed: int, max_new_tokens: int) -> Sampling:
    """The sampling of a request: limits differ between requests, and each has a seed of its own."""
    limit = max(1, int(max_new_tokens * SHORTER[number % len(SHORTER)]))
    names = list(KINDS)
    own = KINDS[names[number % len(names)] if kind == "mixed" else kind]
    stop = STOP if kind == "mixed" and number % 4 == 3 else ()
    return replace(own, max_new_tokens=limit, seed=later_seed(seed, number), stop=stop)


def requests_of(prompts: Sequence[Sequence[int]], kind: str, seed: int, max_new_tokens: int) -> list[ExactRequest]:
    """The requests of one kind."""
    return [ExactRequest(n, tuple(prompt), sampling_of(kind, n, seed, max_new_tokens)) for n, prompt in enumerate(prompts)]


def mixed_lengths(prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[list[int]]:
    """So many prompts of all lengths from 1 token to whole: the given ones in turn, each cut somewhere else."""
    parts = np.random.default_rng(seed % 2**64).permutation(count) + 1
    each = [prompts[n % len(prompts)] for n in range(count)]
    return [list(prompt[: max(1, len(prompt) * int(part) // count)]) for prompt, part in zip(each, parts, strict=True)]


class Plain:
    """Plain decoding: the answers that all others are held against, and what the target thinks of its tokens.

    Args:
        lm: its table has a batch of 1.

    Attributes:
        uncached: answers are those of the loop without a cache.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.uncached = lm.dtype == "float32" and lm.weights == "auto" and lm.kv_dtype == "auto"
        self.known: dict[tuple[tuple[int, ...], Sampling], list[int]] = {}
        self.margins: dict[tuple[object, ...], tuple[float, float | None]] = {}

    def answer(self, asked: ExactRequest) -> list[int]:
        """Decodes a request by itself, the first time that it is asked."""
        key = asked.prompt, asked.sampling
        if key not in self.known and self.uncached:
            self.known[key] = plain_tokens(self.lm, asked.prompt, asked.sampling)
        elif key not in self.known:
            self.known[key] = self.lm.generate([asked.prompt], asked.sampling, speculative=False)[0].tokens
        return self.known[key]

    def difference(self, answer: PathAnswer) -> TokenDifference | None:
        """Place where an answer parts from the plain one; None if it does not."""
        asked = answer.asked
        want = self.answer(answer.asked)
        at = first_difference(answer.tokens, want)
        if at is None:
            return None
        token, plain = (each[at] if at < len(each) else None for each in (answer.tokens, want))
        key = asked.prompt, asked.sampling, at, token
        if key not in self.margins:
            logits = next_logits(self.lm, [*asked.prompt, *want[:at]])
            lead = None
            if plain is not None and token is not None:
                lead = score_lead(draw_scores(logits, asked.sampling, asked.prompt, want[:at]), plain, token)
            self.margins[key] = top_margin(logits), lead
        shown = [None if each is None else self.text(each) for each in (token, plain)]
        return TokenDifference(asked.number, asked.about, at, token, shown[0], plain, shown[1], *self.margins[key])

    def text(self, token: int) -> str:
        return self.lm.tokenizer.decode([token], skip_special_tokens=False)

    def finding(
        self, path: str, drafter: str, kind: str, asked: Sequence[ExactRequest], ran: PathResult, seconds: float
    ) -> ExactFinding:
        """Compares all answers of a way.

        Args:
            asked: the requests themselves; of each the hash takes the last answer.
        """
        given = {answer.asked.number: answer.tokens for answer in ran.answers if answer.asked.about in ("", AGAIN)}
        found = digest(given.get(each.number, ()) for each in asked)
        differences = [each for each in map(self.difference, ran.answers) if each is not None]
        about = (ran.exercised, ran.lacking, differences, ran.problem, seconds)
        return ExactFinding(path, drafter, kind, found, digest(map(self.answer, asked)), len(ran.answers), *about)


AGAIN = "asked again"
LIKE = "with the same beginning"
NEXT = "after half its answer"


def made_of(plain: Plain, asked: ExactRequest) -> list[ExactRequest]:
    """Requests that begin as a given one does: the same again, one that parts from it late, and one that goes on from it."""
    part = len(asked.prompt) * 3 // 4
    turned = (*asked.prompt[:part], *reversed(asked.prompt[part:]))
    answer = plain.answer(asked)
    half = len(answer) // 2
    left = replace(asked.sampling, max_new_tokens=max(1, asked.sampling.max_new_tokens - half))
    return [
        replace(asked, about=AGAIN),
        replace(asked, prompt=turned, about=LIKE),
        replace(asked, prompt=(*asked.prompt, *answer[:half]), sampling=left, about=NEXT),
    ]


def agreeing(findings: Sequence[ExactFinding], requests: int) -> tuple[int, int]:
    """Of the requests of all kinds, how many get the plain answer on every path, whatever was made of them; and all."""
    kinds = {finding.kind for finding in findings}
    parted = {(each.kind, difference.number) for each in findings for difference in each.differences}
    return len(kinds) * requests - len(parted), len(kinds) * requests
