"""The rows of one batch on the device: requests are admitted, rounds run, rows end, and the memory goes back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tilewright.decode.drafters.base import Drafter
from tilewright.decode.policy import Choice
from tilewright.decode.programs import ProgramKey, Programs, read_models
from tilewright.decode.request import Request
from tilewright.decode.sampling import row_sampling, widest
from tilewright.decode.scores import alternatives
from tilewright.decode.shapes import Shape
from tilewright.decode.state import DecodeState, Models, StepInfo
from tilewright.decode.team import Team


class Batch:
    """Rows of a fixed shape. No device memory is held before the first admission, nor after `free`.

    Attributes:
        models: the parameters that its programs read.
        device_state: the rows on the device, None while there are none. Programs consume it: whoever else needs it uses `run`.
    """

    def __init__(self, programs: Programs, shape: Shape, drafter: Drafter | Team | None):
        self.programs, self.shape, self.drafter = programs, shape, drafter
        self.models = read_models(programs.models, drafter)
        self.device_state: DecodeState | None = None
        self.rounds: dict[Choice | None, tuple[Callable[..., Any], Models]] = {}

    def key(self, name: str, chunk: int = 0) -> ProgramKey:
        return ProgramKey(name, self.shape, self.drafter, chunk)

    def round_key(self, choice: Choice | None) -> ProgramKey:
        """The program that runs rounds: of a team those of this choice."""
        drafter = self.drafter
        if (choice is not None) != isinstance(drafter, Team):
            raise ValueError(f"expected a choice for a team of drafters and for nothing else, found {choice}")
        if isinstance(drafter, Team) and choice is not None:
            drafter = drafter.turn(choice)
        return ProgramKey("decode" if self.programs.table.device_loop else "step", self.shape, drafter)

    def keys(self, requests: Iterable[Request]) -> list[ProgramKey]:
        """The programs that these requests need: those of the shape, of the prefill chunks only what their prompts use."""
        used = {chunk for _, chunk in self.plan(requests)}
        return [key for key in self.programs.keys(self.shape, self.drafter) if key.name != "prefill" or key.chunk in used]

    def plan(self, requests: Iterable[Request]) -> list[tuple[int, int]]:
        """The chunks, pairs of (first position, length), in which these prompts are prefilled together."""
        return list(self.programs.table.prefill_plan(max(len(request.prompt) for request in requests) - 1))

    def run(self, program: Callable[..., tuple[DecodeState, Any]], *args: Any, models: Models | None = None) -> Any:
        """Gives the state to `program(models, state, *args) -> (state, result)` and goes on from the one that it returns.

        Args:
            models: what the program reads, if not all of the batch's.
        """
        assert self.device_state is not None, "no request was admitted, or the batch was freed"
        self.device_state, result = program(models or self.models, self.device_state, *args)
        return result

    def admit(self, rows: Mapping[int, Request]) -> None:
        """Puts requests into rows, whatever these held, and fills their caches; the other rows stay as they are.

        All of a prompt but its last token is prefilled; that one is the row's known token.

        Raises:
            ValueError: a request that the batch's shape does not serve.
        """
        requests = list(rows.values())
        self.check(requests)
        if self.device_state is None:
            self.device_state = self.programs.empty_state(self.shape, *self.programs.get(self.key("allocate"))())
        lengths = np.zeros(self.shape.batch, np.int32)
        lengths[list(rows)] = [len(request.prompt) - 1 for request in requests]
        self.device_state = self.with_requests(self.device_state, list(rows), requests)
        for start, chunk in self.plan(requests):
            count = np.clip(lengths - start, 0, chunk).astype(np.int32)
            self.run(self.programs.get(self.key("prefill", chunk)), np.full_like(count, start), count)

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.end > self.shape.capacity:
                raise ValueError(f"expected a request of at most {self.shape.capacity} positions, found one of {request.end}")
            if widest((self.shape.warp, request.sampling.warp)) != self.shape.warp:
                raise ValueError(f"the batch's programs are for {self.shape.warp} sampling, found {request.sampling.warp}")

    def with_requests(self, state: DecodeState, rows: list[int], requests: Sequence[Request]) -> DecodeState:
        """The state with requests in `rows`, their caches still to be filled."""
        lengths = np.asarray([len(request.prompt) for request in requests], np.int32)
        tokens = np.zeros((len(rows), self.shape.capacity), np.int32)
        for own, request in zip(tokens, requests, strict=True):
            own[: len(request.prompt)] = request.prompt
        new: dict[str, Any] = {
            "tokens": tokens,
            "known": lengths - 1,
            "end": np.asarray([request.end for request in requests], np.int32),
            "done": np.zeros(len(rows), bool),
            "ignore_eos": np.asarray([request.sampling.ignore_eos for request in requests]),
            "sampling": row_sampling([request.sampling for request in requests], lengths),
        }

        def put(all_rows: Any, some: np.ndarray) -> np.ndarray:
            copied = np.array(all_rows)
            copied[rows] = some
            return copied

        return replace(state, **{name: jax.tree.map(put, getattr(state, name), some) for name, some in new.items()})

    def advance(self, steps: int, choice: Choice | None = None) -> StepInfo:
        """Runs up to `steps` rounds (steps, without a drafter), fewer once every row is done.

        Args:
            choice: what a team's rounds do.

        Returns:
            their infos, on the host, `[rounds, ...]` each.
        """
        if choice not in self.rounds:  # a key of large configurations takes as long to look up as a small round
            key = self.round_key(choice)
            self.rounds[choice] = self.programs.get(key), read_models(self.programs.models, key.drafter)
        program, models = self.rounds[choice]
        if self.programs.table.device_loop:
            scored = alternatives(self.shape.warp, self.programs.target.config.vocab_size)
            return StepInfo.unpacked(np.asarray(self.run(program, np.int32(steps), models=models)), scored)
        taken: list[StepInfo] = []
        while len(taken) < steps and not self.done.all():
            taken.append(jax.device_get(self.run(program, models=models)))
        return jax.tree.map(lambda *each: np.stack(each), *taken)

    @property
    def done(self) -> np.ndarray:
        """Which rows have ended, bool `[B]`; those that hold no request have."""
        assert self.device_state is not None, "no request was admitted, or the batch was freed"
        return np.asarray(self.device_state.done)

    def stop(self, rows: Sequence[int]) -> None:
        """Ends rows, which stay as they are from now on."""
        assert self.device_state is not None, "no request was admitted, or the batch was freed"
        done = self.done.copy()
        done[rows] = True
        self.device_state = replace(self.device_state, done=done)

    def free(self) -> None:
        """Gives the rows' memory back."""
        self.device_state = None
