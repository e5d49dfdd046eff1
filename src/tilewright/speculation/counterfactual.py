"""What n-gram drafting would have given, told from the text alone: no device, and no round that runs for it."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from tilewright.speculation.drafters.ngram import NGram

Rounds = list[tuple[int, int]]
"""(drafted, accepted) of each."""


class CounterfactualNGram:
    """Follows the text of one row and holds rounds of n-grams against it, as `longest_suffix_match` would draft them.

    Args:
        prompt: the row's.
        widths: of the blocks whose rounds are told. Each goes through the text by itself: where a text repeats itself for long,
            narrow blocks have more rounds that are right than wide ones, so that one width does not tell of another.
    """

    def __init__(self, drafter: NGram, prompt: Sequence[int], widths: Collection[int]):
        self.drafter = drafter
        self.tokens: list[int] = []
        self.first: dict[tuple[int, ...], int] = {}
        self.found: int | None = None
        for token in prompt:
            self.add(token)
        self.running = {width: [self.proposed(width), 0] for width in widths}

    def add(self, token: int) -> None:
        """Appends a token, and finds where what the text ends with came before."""
        self.tokens.append(token)
        last = len(self.tokens) - 1
        lengths = range(self.drafter.min_n, min(self.drafter.max_n, last + 1) + 1)
        grams = [tuple(self.tokens[last + 1 - n :]) for n in lengths]
        self.found = next((self.first[gram] for gram in reversed(grams) if gram in self.first), None)
        for gram in grams:
            self.first.setdefault(gram, last)

    def proposed(self, width: int) -> range:
        """Place of the drafts of a round that begins with the last token."""
        last = len(self.tokens) - 1
        return range(0) if self.found is None else range(self.found + 1, min(self.found + width, last + 1))

    def push(self, tokens: Iterable[int]) -> dict[int, Rounds]:
        """Takes the row's next tokens. Returns the rounds of each width that they complete."""
        rounds: dict[int, Rounds] = {width: [] for width in self.running}
        for token in tokens:
            ended = []
            for width, own in self.running.items():
                drafts, agreed = own
                if agreed < len(drafts) and self.tokens[drafts[agreed]] == token:
                    own[1] += 1
                else:
                    rounds[width].append((len(drafts), agreed))
                    ended.append(width)
            self.add(token)
            for width in ended:
                self.running[width] = [self.proposed(width), 0]
        return rounds


def joined(rounds: Iterable[Mapping[int, Rounds]]) -> dict[int, Rounds]:
    """Those of several rows together."""
    all_rows: dict[int, Rounds] = {}
    for own in rounds:
        for width, each in own.items():
            all_rows.setdefault(width, []).extend(each)
    return all_rows
