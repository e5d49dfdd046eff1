"""Arithmetic problems solved step by step, with answers that can be checked, for very small models.

A response works column by column, starting with the ones, so that each character depends on a few others only. A hash of the
problem's text decides if it is held out, independently of the seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

NAMES = "abcd"
"""Names of a problem's numbers."""
PLACES = ("ones", "tens", "hundreds", "thousands")
ANSWER = "answer:"
HELD_OUT = 16
"""Number of problems per held-out problem."""
PRODUCTS = 0.3
"""Share of the problems that are products."""


@dataclass(frozen=True)
class Problem:
    """Sum of several numbers, or product of a number and a digit.

    Attributes:
        numbers: two to four numbers of at most four digits (`PLACES`); the second factor of a product has one digit.
        product: True to multiply the numbers.
    """

    numbers: tuple[int, ...]
    product: bool = False

    @property
    def prompt(self) -> str:
        values = " ".join(f"{name}={number}" for name, number in zip(NAMES, self.numbers, strict=False))
        return f"{values} {('*' if self.product else '+').join(NAMES[: len(self.numbers)])}\n"

    @property
    def answer(self) -> int:
        return self.numbers[0] * self.numbers[1] if self.product else sum(self.numbers)

    @property
    def response(self) -> str:
        """Solution: a line per column with intermediate results, digit and carry, then the answer.

        The answer has a digit per column and one for the last carry, with leading zeros, so that each place is fixed.
        """
        lines = []
        carry = 0
        size = len(str(max(self.numbers)))
        for place in range(size):
            steps, carry, digit = self._column(place, carry)
            lines.append(f"{PLACES[place]}:{steps},write:{digit},carry:{carry}\n")
        return "".join(lines) + f"{ANSWER}{self.answer:0{size + 1}}"

    @property
    def held_out(self) -> bool:
        return sha256(self.prompt.encode()).digest()[0] % HELD_OUT == 0

    def _column(self, place: int, carry: int) -> tuple[str, int, int]:
        """Returns the intermediate results of a column (two digits each), its carry and its digit."""
        digits = [number // 10**place % 10 for number in self.numbers]
        if self.product:
            partial = digits[0] * self.numbers[1]
            steps = f"a{digits[0]}*b{self.numbers[1]}={partial:02}+{carry}"
            total = partial + carry
        else:
            steps = f"{carry}"
            total = carry
            for name, digit in zip(NAMES, digits, strict=False):
                steps = f"{steps}+{name}{digit}={total + digit:02}"
                total = total + digit
        return (f"{steps}={total:02}" if self.product else steps), *divmod(total, 10)


LONGEST = Problem((10 ** len(PLACES) - 1,) * 4)
"""Problem with the longest solution."""


def is_right(problem: Problem, response: str) -> bool:
    """Returns True if the last line of a response is the right answer; the steps are not checked."""
    before, marker, digits = response.strip().rpartition("\n")[2].rpartition(ANSWER)
    return not before and bool(marker) and digits.isascii() and digits.isdecimal() and int(digits) == problem.answer


def draw(rng: np.random.Generator) -> Problem:
    """Draws a sum of two to four numbers with two to four digits each, or a product of such a number and a digit."""
    size = int(rng.choice((2, 3, 4), p=(0.2, 0.3, 0.5)))
    product = bool(rng.random() < PRODUCTS)
    count = 1 if product else int(rng.choice((2, 3, 4), p=(0.2, 0.3, 0.5)))
    numbers = rng.integers(10 ** (size - 1), 10**size, count).tolist()
    return Problem((*numbers, int(rng.integers(2, 10))) if product else tuple(numbers), product)


def problems(rng: np.random.Generator, held_out: bool) -> Iterator[Problem]:
    """Yields problems without end: only held-out ones, or only others."""
    while True:
        problem = draw(rng)
        if problem.held_out is held_out:
            yield problem
