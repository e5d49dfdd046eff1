"""Arithmetic written out in steps: problems whose answers can be checked, for models too small to know anything.

A response works column by column from the ones on, so that each of its characters follows from a few others. Every problem is
either held out or not, by a hash of its text, whatever the seed that it is drawn with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

NAMES = "abcd"
"""Of a problem's numbers: what a digit of one of them is looked up by."""
PLACES = ("ones", "tens", "hundreds", "thousands")
ANSWER = "answer:"
HELD_OUT = 16
"""One problem in so many is held out."""
PRODUCTS = 0.3
"""Share of the problems that are products."""


@dataclass(frozen=True)
class Problem:
    """Numbers to be added up, or one to be multiplied by a digit.

    Attributes:
        numbers: at least two, of at most as many digits as there are `PLACES`; of a product the second has one digit.
        product: whether they are multiplied.
    """

    numbers: tuple[int, ...]
    product: bool = False

    @property
    def prompt(self) -> str:
        given = " ".join(f"{name}={number}" for name, number in zip(NAMES, self.numbers, strict=False))
        return f"{given} {('*' if self.product else '+').join(NAMES[: len(self.numbers)])}\n"

    @property
    def answer(self) -> int:
        return self.numbers[0] * self.numbers[1] if self.product else sum(self.numbers)

    @property
    def response(self) -> str:
        """A line for each column, with its sums or its product and sum, the digit that stays and the carry; then the answer.

        That has a digit for each column and one for the last carry, so that each stands at its own place.
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
        """Working of a column, its carry and its digit. Every intermediate result has two digits."""
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
"""No problem that is drawn has more to write."""


def is_right(problem: Problem, response: str) -> bool:
    """True if a response ends with the right answer, however it came to it."""
    begin, found, told = response.strip().rpartition("\n")[2].rpartition(ANSWER)
    return not begin and bool(found) and told.isascii() and told.isdecimal() and int(told) == problem.answer


def draw(rng: np.random.Generator) -> Problem:
    """A sum of two to four numbers of as many digits each, two to four, or a product of such a number by a digit."""
    size = int(rng.choice((2, 3, 4), p=(0.2, 0.3, 0.5)))
    product = bool(rng.random() < PRODUCTS)
    count = 1 if product else int(rng.choice((2, 3, 4), p=(0.2, 0.3, 0.5)))
    numbers = rng.integers(10 ** (size - 1), 10**size, count).tolist()
    return Problem((*numbers, int(rng.integers(2, 10))) if product else tuple(numbers), product)


def problems(rng: np.random.Generator, held_out: bool) -> Iterator[Problem]:
    """Problems without end, all of them held out or none."""
    while True:
        problem = draw(rng)
        if problem.held_out is held_out:
            yield problem
