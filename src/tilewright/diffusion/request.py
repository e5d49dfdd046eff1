"""Request to an engine that denoises."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.diffusion.options import Denoising
from tilewright.runtime.request import check_deadline
from tilewright.runtime.sampling import Sampling


@dataclass(frozen=True)
class DenoisingRequest:
    """One request of a diffusion language model.

    Attributes:
        prompt: token ids, at least one.
        denoising: how its response comes about.
        stop: strings that end it, once they stand in finished blocks.
        deadline_s: seconds after which it is ended, waiting or not; None for never.
        max_tokens: of the response, so many tokens are handed out; None for all of them.
    """

    prompt: Sequence[int]
    denoising: Denoising = field(default_factory=Denoising)
    stop: tuple[str, ...] = ()
    deadline_s: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, found {self.max_tokens}")
        Sampling(stop=self.stop)  # says what is wrong with the strings

    @property
    def logprobs(self) -> None:
        """None: a response does not come token by token, so no token has a probability given those before it."""

    @property
    def sampling(self) -> Sampling:
        asked = self.denoising
        most = asked.new_tokens if self.max_tokens is None else min(self.max_tokens, asked.new_tokens)
        return Sampling(most, asked.temperature, asked.top_p, seed=asked.seed, stop=self.stop, ignore_eos=asked.ignore_eos)
