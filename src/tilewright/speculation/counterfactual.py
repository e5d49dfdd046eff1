"""Counterfactual acceptance of n-gram drafts, computed on the host from the text alone."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tilewright.speculation.drafters.ngram import NGram, Suffix
from tilewright.speculation.suffix_index import HostIndex

Rounds = list[tuple[int, int]]
"""(drafts, accepted drafts) of consecutive rounds."""


class SuffixAutomaton:
    """Automaton of all parts of a text, extended token by token (Blumer et al., 1985).

    A state stands for parts that end at the same places. It knows the longest of them, and the first of these places. Its link
    leads to the state of the longest shorter suffix that ends at more places. A token takes constant time on average, and two
    states at most.
    """

    def __init__(self) -> None:
        self.lengths = [0]
        self.links = [-1]
        self.first_ends = [-1]
        self.steps: list[dict[int, int]] = [{}]
        self.last = 0

    def new_state(self, length: int, link: int, first_end: int, steps: dict[int, int]) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.first_ends.append(first_end)
        self.steps.append(steps)
        return len(self.steps) - 1

    def add(self, token: int) -> None:
        """Appends a token to the text."""
        length = self.lengths[self.last] + 1
        state = self.last
        self.last = self.new_state(length, 0, length - 1, {})
        while state >= 0 and token not in self.steps[state]:
            self.steps[state][token] = self.last
            state = self.links[state]
        if state < 0:
            return
        following = self.steps[state][token]
        if self.lengths[following] > self.lengths[state] + 1:
            first_end = self.first_ends[following]
            shorter = self.new_state(self.lengths[state] + 1, self.links[following], first_end, dict(self.steps[following]))
            while state >= 0 and self.steps[state].get(token) == following:
                self.steps[state][token] = shorter
                state = self.links[state]
            self.links[following] = shorter
            following = shorter
        self.links[self.last] = following

    def longest_suffix(self, most: int) -> tuple[int, int]:
        """Returns the length, up to `most`, of the longest suffix that occurred before, and where it first ended."""
        state = max(self.links[self.last], 0)
        while self.links[state] >= 0 and self.lengths[self.links[state]] >= most:
            state = self.links[state]
        return min(self.lengths[state], most), self.first_ends[state]


class CounterfactualNGram:
    """Follows the text of one row and replays the rounds that an n-gram drafter would have drafted.

    Args:
        prompt: tokens of the row's prompt.
        widths: block widths to replay, each by itself: within a long repetition narrow blocks have more accepted rounds
            than wide blocks, so no width follows from another.
        corpus: index of the drafter's corpus; None for none.
    """

    def __init__(self, drafter: NGram, prompt: Sequence[int], widths: Collection[int], corpus: HostIndex | None = None):
        self.drafter = drafter
        self.corpus = corpus
        self.tokens: list[int] = []
        self.automaton = SuffixAutomaton()
        for token in prompt:
            self.add(token)
        continuation = self.continuation(max(widths, default=1))
        self.current_rounds: dict[int, list[Any]] = {width: [continuation[: width - 1], 0] for width in widths}

    def add(self, token: int) -> None:
        """Appends a token."""
        self.tokens.append(token)
        self.automaton.add(token)

    def continuation(self, width: int) -> list[int]:
        """Returns the drafts of a round of some width after the last token."""
        drafter = self.drafter
        length, end = self.automaton.longest_suffix(drafter.max_n)
        if length < drafter.min_n:
            length = 0
        if self.corpus is not None and isinstance(drafter, Suffix):
            other, drafts = self.corpus.find(self.tokens[-drafter.max_n :], drafter.min_n, drafter.min_score)
            if other > length:
                return drafts[: width - 1]
        return self.tokens[end + 1 : end + width] if length else []

    def push(self, tokens: Iterable[int]) -> dict[int, Rounds]:
        """Appends the row's next tokens. Returns the rounds that they complete, by width."""
        rounds: dict[int, Rounds] = {width: [] for width in self.current_rounds}
        for token in tokens:
            ended = []
            for width, current in self.current_rounds.items():
                drafts, agreed = current
                if agreed < len(drafts) and drafts[agreed] == token:
                    current[1] += 1
                else:
                    rounds[width].append((len(drafts), agreed))
                    ended.append(width)
            self.add(token)
            continuation = self.continuation(max(ended)) if ended else []
            for width in ended:
                self.current_rounds[width] = [continuation[: width - 1], 0]
        return rounds


def joined(rounds: Iterable[Mapping[int, Rounds]]) -> dict[int, Rounds]:
    """Joins the rounds of several rows."""
    all_rows: dict[int, Rounds] = {}
    for row in rounds:
        for width, pairs in row.items():
            all_rows.setdefault(width, []).extend(pairs)
    return all_rows
