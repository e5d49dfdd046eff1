"""What n-gram drafting would have given, told from the text alone: no device, and no round that runs for it."""

from collections.abc import Iterable, Sequence

from tilewright.decode.drafters.ngram import NGram


class NGramShadow:
    """Follows the text of one row and holds the n-gram drafter's rounds against it, as `longest_suffix_match` would draft them.

    Args:
        prompt: the row's.
    """

    def __init__(self, drafter: NGram, prompt: Sequence[int]):
        self.drafter = drafter
        self.tokens: list[int] = []
        self.first: dict[tuple[int, ...], int] = {}
        self.proposal: list[int] = []
        self.agreed = 0
        for token in prompt[:-1]:
            self.add(token)
        self.add(prompt[-1], draft=True)

    def add(self, token: int, draft: bool = False) -> None:
        """Appends a token; a round that begins with it has its proposal made."""
        self.tokens.append(token)
        last = len(self.tokens) - 1
        lengths = range(self.drafter.min_n, min(self.drafter.max_n, last + 1) + 1)
        grams = [tuple(self.tokens[last + 1 - n :]) for n in lengths]
        if draft:
            at = next((self.first[gram] for gram in reversed(grams) if gram in self.first), last)
            count = min(last - at, self.drafter.block_size - 1)
            self.proposal, self.agreed = self.tokens[at + 1 : at + 1 + count], 0
        for gram in grams:
            self.first.setdefault(gram, last)

    def push(self, tokens: Iterable[int]) -> list[tuple[int, int]]:
        """Takes the row's next tokens. Returns (drafted, accepted) of the rounds that they complete."""
        rounds = []
        for token in tokens:
            if self.agreed < len(self.proposal) and self.proposal[self.agreed] == token:
                self.agreed += 1
                self.add(token)
            else:
                rounds.append((len(self.proposal), self.agreed))
                self.add(token, draft=True)
        return rounds
