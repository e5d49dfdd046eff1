"""One batch of requests on its way from prompts to results: the driver of prefill and of the dispatches of rounds."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from tokenizers import Tokenizer

from tilewright.decode.batch import Batch
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.pacing import Pacing
from tilewright.decode.policy import Choice, Plan, Policy
from tilewright.decode.programs import DECODING, STEPS_PER_DISPATCH, ProgramKey, Programs
from tilewright.decode.request import Generation, Piece, Request, Result
from tilewright.decode.sampling import Sampling, widest
from tilewright.decode.shadow import NGramShadow, joined
from tilewright.decode.state import StepInfo
from tilewright.decode.team import Team
from tilewright.models.tokenizer import StreamDecoder
from tilewright.parallel.mesh import agreed_seconds


class Session:
    """Decodes a batch: `advance` until `finished`, then `results`; `results` may also be taken earlier.

    Its device memory is taken by the first `advance` (or `prefill`) and goes back when it is finished.

    Attributes:
        rows: the requests, in order.
        batch: them on the device.
        prefill_seconds, decode_seconds: time spent in the programs, compilation excluded.
        drafted: who drafted last, "none" for plain decoding; None before the first round, when all contexts are complete.
        rounds: rounds (steps, without a drafter) run so far, counted once for the whole batch.
        policy: what chooses the rounds of a team, from the prefill on.
    """

    def __init__(
        self, programs: Programs, tokenizer: Tokenizer, prompts: Sequence[list[int]], sampling: Sequence[Sampling],
        drafter: Drafter | Team | None, pacing: Pacing | None = None,
    ):  # fmt: skip
        self.programs, self.pacing = programs, pacing
        self.policy: Policy | None = None
        self.shadows = shadows(drafter, prompts) if isinstance(drafter, Team) else []
        self.rows = [Request(i, p, s, StreamDecoder(tokenizer)) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
        ends = [row.end for row in self.rows]
        positions = max(ends if drafter is None else [*ends, drafter.block_size])  # a block is written in one piece
        shape = programs.table.shape(len(self.rows), positions, widest(each.warp for each in sampling))
        self.batch = Batch(programs, shape, drafter)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.rounds = 0
        self.drafted: str | None = None

    @property
    def keys(self) -> list[ProgramKey]:
        """The programs that this session needs."""
        return self.batch.keys(self.rows)

    def prefill(self) -> None:
        """Compiles what is missing and fills the caches with the prompts, if that was not done before."""
        if self.finished or self.batch.device_state is not None:
            return
        for key in self.keys:
            if self.pacing is None or key.name not in DECODING:
                self.programs.get(key)
        if self.pacing is not None:
            self.policy = self.pacing.policy(self.batch)
        began = time.perf_counter()
        self.batch.admit(dict(enumerate(self.rows)))
        jax.block_until_ready(self.batch.device_state)
        self.prefill_seconds = time.perf_counter() - began

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def advance(self, steps: int = STEPS_PER_DISPATCH, choice: Choice | None = None) -> list[Piece]:
        """Runs up to `steps` steps or rounds on the device and returns what they added to each row, in the order it came.

        Args:
            choice: what a team's rounds do; by default its policy says so, and may look again after fewer rounds.

        Raises:
            ValueError: not 1 <= steps <= 64, or a choice that is not the team's.
        """
        if not 1 <= steps <= STEPS_PER_DISPATCH:
            raise ValueError(f"expected from 1 to {STEPS_PER_DISPATCH} steps, found {steps}")
        if self.finished:
            return []
        self.prefill()
        running = [row for row in self.rows if row.finish_reason is None]
        if choice is None and self.policy is not None and self.pacing is not None:
            left = max(row.end - len(row.prompt) - len(row.tokens) for row in running)
            self.pacing.add_wanted(self.policy, self.batch, left)
        began = time.perf_counter()
        infos, choice = self.dispatch(steps, choice)
        self.decode_seconds += time.perf_counter() - began
        self.rounds += len(infos.settled)
        heard = [len(row.tokens) for row in self.rows]
        pieces = self.take(infos, choice)
        self.overhear(heard)
        stopped = [row.index for row in running if row.finish_reason == "stop"]
        if self.finished:
            self.batch.free()
        elif stopped:  # the other ends the device sees for itself
            self.batch.stop(stopped)
        return pieces

    def dispatch(self, steps: int, choice: Choice | None) -> tuple[StepInfo, Choice | None]:
        """Runs rounds of a choice, or of the policy's. Returns what came of them, and what they did."""
        if self.policy is None:
            return self.batch.advance(steps, choice), choice
        plan = self.policy.next(steps) if choice is None else Plan(choice, steps)
        began = time.perf_counter()
        infos = self.batch.advance(plan.rounds, plan.choice)
        seconds = agreed_seconds(self.programs.target.mesh, time.perf_counter() - began)
        drafted, accepted, settled = (np.asarray(each) for each in (infos.drafted, infos.accepted, infos.settled))
        caught_up = self.drafted not in (None, plan.choice.drafter)
        self.policy.observe(plan.choice, drafted, accepted, settled > 0, seconds, caught_up)
        self.drafted = plan.choice.drafter
        return infos, plan.choice

    def overhear(self, heard: Sequence[int]) -> None:
        """Tells the policy what n-gram drafting would have given in what came behind the first `heard` tokens of each row."""
        if self.policy is None or not self.shadows:
            return
        own = zip(self.shadows, self.rows, heard, strict=True)
        self.policy.overhear(NGram.name, joined(shadow.push(row.tokens[before:]) for shadow, row, before in own))

    def take(self, infos: StepInfo, choice: Choice | None) -> list[Piece]:
        """Hands each row the tokens that each round settled for it."""
        pieces: list[Piece] = []
        for tokens, settled, drafted, accepted in zip(*infos[:4], strict=True):
            for i, row in enumerate(self.rows):
                if row.finish_reason is None and settled[i] > 0:
                    new = tokens[i, : settled[i]].tolist()
                    eos = self.programs.target.config.eos_token_ids
                    pieces += row.add_round(new, int(drafted[i]), int(accepted[i]), eos, choice)
        return pieces

    def results(self) -> list[Result]:
        """What every row has given so far."""
        return [row.result() for row in self.rows]

    def generation(self) -> Generation:
        """The same with the times that it took."""
        return Generation(self.results(), self.prefill_seconds, self.decode_seconds, self.rounds)


def shadows(team: Team, prompts: Sequence[Sequence[int]]) -> list[NGramShadow]:
    """One for each prompt, if n-grams are in the team."""
    ngram = next((member for member in team.members if isinstance(member, NGram)), None)
    return [] if ngram is None else [NGramShadow(ngram, prompt, team.widths_of(ngram)) for prompt in prompts]
