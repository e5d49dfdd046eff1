"""Requests of `tilewright verify-exact`, their reference tokens from plain decoding, and the comparison with other paths.

In float32 the reference comes from a loop without a cache (`exact_plain.py`), which shares no code with the runtime. Other
dtypes, and 8-bit weights, keys or values, round differently in programs that sum in another order. There the reference is the
runtime's plain decoding, one request at a time. Every other path must give the same tokens.
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
"""Kinds of sampling. "mixed" cycles through them, so that rows of all kinds run in one batch."""
STOP = ("\n\n",)
"""Stop strings of every fourth mixed request."""
SHORTER = (1.0, 0.75, 1.0, 0.4)
"""Factors on the length limit of successive requests, so that rows end at different times."""


@dataclass(frozen=True)
class ExactRequest:
    """One request.

    Attributes:
        number: index of the request, from 0.
        prompt: token ids.
        about: empty for an original request; otherwise the kind of its derivation (`derived_requests`).
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    about: str = ""

    @property
    def end(self) -> int:
        """Position after the last token, at the length limit."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class PathAnswer:
    """Tokens of a request from one path."""

    request: ExactRequest
    tokens: Sequence[int]


@dataclass(frozen=True)
class PathResult:
    """Result of all requests on one path.

    Attributes:
        answers: answers in any order.
        exercised: counts of rounds, accepted drafts, preemptions and other events.
        lacking: names of expected events that did not happen.
        problem: error other than different tokens; empty without one.
    """

    answers: Sequence[PathAnswer]
    exercised: Mapping[str, int] = field(default_factory=dict)
    lacking: Sequence[str] = ()
    problem: str = ""


@dataclass(frozen=True)
class TokenDifference:
    """First difference between an answer and the reference. `metrics/exactness.py` defines the fields, which are also those of
    `--json`.

    Attributes:
        lead: None also if one of the tokens is missing.
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
    """Result of one path with one kind of sampling.

    Attributes:
        drafter: "none" for plain decoding.
        sha256: digest of the answers to the original requests, in order.
        plain_sha256: digest of the reference.
        answers: number of compared answers, including those to derived requests.
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
    """Returns the SHA-256, in hex, of several token lists: of each its length and its ids, as little-endian 32-bit integers."""
    hashed = hashlib.sha256()
    for tokens in answers:
        hashed.update(np.asarray([len(tokens), *tokens], "<i4").tobytes())
    return hashed.hexdigest()


def request_sampling(kind: str, number: int, seed: int, max_new_tokens: int) -> Sampling:
    """Returns the sampling of a request, with its own seed and a length limit that differs between requests."""
    limit = max(1, int(max_new_tokens * SHORTER[number % len(SHORTER)]))
    names = list(KINDS)
    base = KINDS[names[number % len(names)] if kind == "mixed" else kind]
    stop = STOP if kind == "mixed" and number % 4 == 3 else ()
    return replace(base, max_new_tokens=limit, seed=later_seed(seed, number), stop=stop)


def make_requests(prompts: Sequence[Sequence[int]], kind: str, seed: int, max_new_tokens: int) -> list[ExactRequest]:
    """Returns the requests of one kind of sampling."""
    return [ExactRequest(n, tuple(prompt), request_sampling(kind, n, seed, max_new_tokens)) for n, prompt in enumerate(prompts)]


def mixed_lengths(prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[list[int]]:
    """Returns `count` prompts of all lengths from 1 token to whole: the given prompts in turn, each cut at another place."""
    parts = np.random.default_rng(seed % 2**64).permutation(count) + 1
    each = [prompts[n % len(prompts)] for n in range(count)]
    return [list(prompt[: max(1, len(prompt) * int(part) // count)]) for prompt, part in zip(each, parts, strict=True)]


class Plain:
    """Plain decoding: reference answers, and the target's margins where an answer differs.

    Args:
        lm: language model with a batch of 1 in its table.

    Attributes:
        uncached: True if the reference comes from the loop without a cache.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.uncached = lm.dtype == "float32" and not lm.quantised and lm.kv_dtype == "auto"
        self.references: dict[tuple[tuple[int, ...], Sampling], list[int]] = {}
        self.margins: dict[tuple[object, ...], tuple[float, float | None]] = {}

    def answer(self, request: ExactRequest) -> list[int]:
        """Returns the reference tokens of a request; decodes each request once."""
        key = request.prompt, request.sampling
        if key not in self.references and self.uncached:
            self.references[key] = plain_tokens(self.lm, request.prompt, request.sampling)
        elif key not in self.references:
            self.references[key] = self.lm.generate([request.prompt], request.sampling, speculative=False)[0].tokens
        return self.references[key]

    def difference(self, answer: PathAnswer) -> TokenDifference | None:
        """Returns the first difference between an answer and the reference; None if they are equal."""
        request = answer.request
        expected = self.answer(request)
        place = first_difference(answer.tokens, expected)
        if place is None:
            return None
        token, plain = (each[place] if place < len(each) else None for each in (answer.tokens, expected))
        key = request.prompt, request.sampling, place, token
        if key not in self.margins:
            logits = next_logits(self.lm, [*request.prompt, *expected[:place]])
            lead = None
            if plain is not None and token is not None:
                lead = score_lead(draw_scores(logits, request.sampling, request.prompt, expected[:place]), plain, token)
            self.margins[key] = top_margin(logits), lead
        texts = [None if each is None else self.text(each) for each in (token, plain)]
        return TokenDifference(request.number, request.about, place, token, texts[0], plain, texts[1], *self.margins[key])

    def text(self, token: int) -> str:
        return self.lm.tokenizer.decode([token], skip_special_tokens=False)

    def finding(
        self, path: str, drafter: str, kind: str, requests: Sequence[ExactRequest], ran: PathResult, seconds: float
    ) -> ExactFinding:
        """Compares all answers of a path with the reference.

        Args:
            requests: original requests. The hash takes the last answer to each.
        """
        last = {answer.request.number: answer.tokens for answer in ran.answers if answer.request.about in ("", AGAIN)}
        digested = digest(last.get(each.number, ()) for each in requests)
        differences = [each for each in map(self.difference, ran.answers) if each is not None]
        about = (ran.exercised, ran.lacking, differences, ran.problem, seconds)
        return ExactFinding(path, drafter, kind, digested, digest(map(self.answer, requests)), len(ran.answers), *about)


AGAIN = "asked again"
LIKE = "with the same beginning"
NEXT = "after half its answer"


def derived_requests(plain: Plain, request: ExactRequest) -> list[ExactRequest]:
    """Derives requests from one: the same request, one with a changed end of the prompt, and one that continues after half the
    answer."""
    part = len(request.prompt) * 3 // 4
    changed = (*request.prompt[:part], *reversed(request.prompt[part:]))
    answer = plain.answer(request)
    half = len(answer) // 2
    rest = replace(request.sampling, max_new_tokens=max(1, request.sampling.max_new_tokens - half))
    return [
        replace(request, about=AGAIN),
        replace(request, prompt=changed, about=LIKE),
        replace(request, prompt=(*request.prompt, *answer[:half]), sampling=rest, about=NEXT),
    ]


def agreeing(findings: Sequence[ExactFinding], requests: int) -> tuple[int, int]:
    """Returns the number of requests (per kind of sampling) that get the reference tokens on every path, and the number of
    all."""
    kinds = {finding.kind for finding in findings}
    parted = {(each.kind, difference.number) for each in findings for difference in each.differences}
    return len(kinds) * requests - len(parted), len(kinds) * requests
