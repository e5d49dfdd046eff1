"""Requests to a denoising engine, and checks of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from tilewright.diffusion.options import SAMPLED, Denoising
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.tokenizer import encode
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.logprobs import MOST_ALTERNATIVES
from tilewright.runtime.request import check_deadline
from tilewright.runtime.sampling import Sampling


@dataclass(frozen=True)
class DenoisingRequest:
    """Request to a diffusion language model.

    Attributes:
        prompt: token ids, at least one.
        denoising: denoising options.
        stop: strings that end the response once they occur in finished blocks.
        deadline_s: seconds after which the request is ended, waiting or running; None for no deadline.
        max_tokens: number of the response's tokens that are delivered; None for all.
        include_stop, skip_special_tokens: as in `Sampling`.
        constraint: rule that the text must follow, from left to right, as in `GenerateRequest`; None for free text.
        logprobs: number of alternatives, from 0 to 20, whose log-probabilities come with those of each token, from the step
            that committed the token; None for no log-probabilities. They are computed from the model's logits without the mask
            token's, after biases, penalties and constraints, before temperature and filters.
    """

    prompt: Sequence[int]
    denoising: Denoising = field(default_factory=Denoising)
    stop: tuple[str, ...] = ()
    deadline_s: float | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, found {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise ValueError(f"expected logprobs from 0 to {MOST_ALTERNATIVES}, found {self.logprobs}")
        _ = self.sampling  # which validates the strings and the length
        options = self.denoising
        endless = {"ignore_eos": options.ignore_eos, "min_tokens": options.min_tokens, "logits_eos_inf": options.logits_eos_inf}
        if self.constraint is not None and any(endless.values()):
            found = next(name for name, value in endless.items() if value)
            raise ValueError(f"expected no {found} with a constraint, which ends the text itself")

    @property
    def sampling(self) -> Sampling:
        options = self.denoising.sampling()
        most = options.max_new_tokens if self.max_tokens is None else min(self.max_tokens, options.max_new_tokens)
        texts = {name: getattr(self, name) for name in ("stop", "include_stop", "skip_special_tokens")}
        return replace(options, max_new_tokens=most, **texts)


def encoded(config: DiffusionConfig, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Returns the tokens of a prompt, which may be token ids already.

    Raises:
        ValueError: the prompt is empty, or has an id outside of the vocabulary or a mask.
    """
    tokens = encode(tokenizer, prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not tokens:
        raise ValueError("expected a prompt of at least one token, found an empty one")
    vocab = config.decoder.vocab_size
    if outside := [token for token in tokens if not 0 <= token < vocab]:
        raise ValueError(f"expected token ids below the vocabulary size {vocab}, found {outside[0]}")
    if config.mask_token_id in tokens:
        raise ValueError(f"expected a prompt without the mask token {config.mask_token_id}, found one")
    return tokens


def request_of(prompt: Sequence[int], sampling: Sampling, defaults: Denoising) -> DenoisingRequest:
    """Returns a request with the options of a sampling, and the other options of `defaults`.

    A response has whole blocks; tokens behind the sampling's length are not delivered.
    """
    wanted = sampling.max_new_tokens
    block = wanted if defaults.block_length is None else defaults.block_length
    same = {name: getattr(sampling, name) for name in SAMPLED}
    denoising = replace(defaults, new_tokens=-(-wanted // block) * block, **same)
    return DenoisingRequest(
        prompt,
        denoising,
        sampling.stop,
        max_tokens=wanted,
        include_stop=sampling.include_stop,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def check_room(tokens: Sequence[int], request: Denoising, context: int) -> None:
    """Raises a `ValueError` if a prompt and its response do not fit a context."""
    if len(tokens) + request.new_tokens > context:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens leaves room for {max(0, context - len(tokens))} in the context of {context}; "
            f"new_tokens is {request.new_tokens}, in blocks of {request.block}"
        )
