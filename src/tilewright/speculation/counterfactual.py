"""Counterfactual acceptance of n-gram drafts, computed on the host from the text alone."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from tilewright.speculation.drafters.ngram import NGram

Rounds = list[tuple[int, int]]
"""(drafts, accepted drafts) of consecutive rounds."""


class CounterfactualNGram:
    """Follows the text of one row and replays the n-gram rounds that `longest_suffix_match` would have drafted.

    Args:
        prompt: tokens of the row's prompt.
        widths: block widths to replay, each by itself: within a long repetition narrow blocks have more accepted rounds
            than wide blocks, so no width follows from another.
    """

    def __init__(self, drafter: NGram, prompt: Sequence[int], widths: Collection[int]):
        self.drafter = drafter
        self.tokens: list[int] = []
        self.first_ends: dict[tuple[int, ...], int] = {}
        self.match: int | None = None
        for token in prompt:
            self.add(token)
        self.current_rounds = {width: [self.proposed(width), 0] for width in widths}

    def add(self, token: int) -> None:
        """Appends a token and finds the earliest occurrence of the longest suffix."""
        self.tokens.append(token)
        last = len(self.tokens) - 1
        lengths = range(self.drafter.min_n, min(self.drafter.max_n, last + 1) + 1)
        grams = [tuple(self.tokens[last + 1 - n :]) for n in lengths]
        self.match = next((self.first_ends[gram] for gram in reversed(grams) if gram in self.first_ends), None)
        for gram in grams:
            self.first_ends.setdefault(gram, last)

    def proposed(self, width: int) -> range:
        """Returns the positions of the drafts of a round after the last token."""
        last = len(self.tokens) - 1
        return range(0) if self.match is None else range(self.match + 1, min(self.match + width, last + 1))

    def push(self, tokens: Iterable[int]) -> dict[int, Rounds]:
        """Appends the row's next tokens. Returns the rounds that they complete, by width."""
        rounds: dict[int, Rounds] = {width: [] for width in self.current_rounds}
        for token in tokens:
            ended = []
            for width, current in self.current_rounds.items():
                drafts, agreed = current
                if agreed < len(drafts) and self.tokens[drafts[agreed]] == token:
                    current[1] += 1
                else:
                    rounds[width].append((len(drafts), agreed))
                    ended.append(width)
            self.add(token)
            for width in ended:
                self.current_rounds[width] = [self.proposed(width), 0]
        return rounds


def joined(rounds: Iterable[Mapping[int, Rounds]]) -> dict[int, Rounds]:
    """Joins the rounds of several rows."""
    all_rows: dict[int, Rounds] = {}
    for row in rounds:
        for width, pairs in row.items():
            all_rows.setdefault(width, []).extend(pairs)
    return all_rows
