"""How many rounds a dispatch runs, and what they do."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from tilewright.decode.costs import Costs
from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.policy import Choice, History, Plan, Policy
from tilewright.decode.programs import STEPS_PER_DISPATCH
from tilewright.decode.sampling import Warp
from tilewright.decode.state import StepInfo
from tilewright.decode.team import Team
from tilewright.engine.device import Sent
from tilewright.engine.programs import EnginePrograms
from tilewright.engine.scheduler import Job

FIRST_ROUNDS = 8
"""Of a dispatch before any was timed."""
IN_HURRY = 4
"""Where somebody waits for a first token, or for a place, dispatches are so many times as short."""
WAITED_S = 1e-4
"""How long somebody must have waited for a dispatch to know when it ended."""
SLOWER = 1.05
"""How much slower than before a round may be taken to be after each dispatch. The fastest lately is what counts: dispatches of
few rounds, and those beside which a host was at work, tell little of what more rounds would take."""


class Pacer:
    """Plans the rounds of dispatches that take about as long as asked for.

    Args:
        dispatch_s: how long that is.
        costs: of a team's rounds, for each number of rows; None without a team.
    """

    def __init__(self, programs: EnginePrograms, dispatch_s: float, costs: dict[int, Costs] | None = None):
        self.team = programs.drafter if isinstance(programs.drafter, Team) else None
        self.dispatch_s, self.costs = dispatch_s, costs or {}
        self.seconds: dict[tuple[int, Warp, Choice | None], float] = {}
        self.policies: dict[tuple[int, Warp], Policy] = {}
        members = self.team.members if self.team is not None else ()
        self.history = History({member.name: member.block_size for member in members})
        self.ngram = next((member for member in members if isinstance(member, NGram)), None)
        self.read_at, self.waited = 0.0, False

    def policy(self, rows: int, warp: Warp) -> Policy:
        """What chooses the rounds of so many rows."""
        assert self.team is not None
        if (rows, warp) not in self.policies:
            costs = self.costs[rows]
            self.policies[rows, warp] = Policy(self.history, dict(costs.rounds), self.team.choices, costs.dispatch)
        return self.policies[rows, warp]

    def most(self, seconds: float | None, hurry: bool) -> int:
        """How many rounds of so many seconds each a dispatch may have."""
        if seconds is None:
            return FIRST_ROUNDS
        wanted = self.dispatch_s / (IN_HURRY if hurry else 1)
        return int(np.clip(wanted / seconds, 1, STEPS_PER_DISPATCH))

    def plan(self, rows: int, warp: Warp, hurry: bool) -> tuple[Choice | None, int]:
        """What the next dispatch of so many rows does, and how many rounds of it.

        Args:
            hurry: whether somebody waits for its end.
        """
        if self.team is None:
            return None, self.most(self.seconds.get((rows, warp, None)), hurry)
        policy = self.policy(rows, warp)
        plan: Plan = policy.next(STEPS_PER_DISPATCH)
        seconds = self.seconds.get((rows, warp, plan.choice), policy.outlook([plan.choice])[plan.choice].seconds)
        return plan.choice, min(plan.rounds, self.most(seconds, hurry))

    def observe(self, sent: Sent, infos: StepInfo, began: float, ended: float) -> None:
        """Takes in what came of a dispatch.

        Args:
            began, ended: when somebody began to wait for it and had it. If it was there before, it is not known when it ended,
                nor how long the next one took, if that had been sent already.
        """
        rounds, waited = len(infos.settled), ended - began > WAITED_S
        follows = self.waited or sent.at >= self.read_at
        seconds = ended - max(sent.at, self.read_at) if sent.alone and rounds > 0 and waited and follows else None
        self.read_at, self.waited = ended, waited
        if seconds is not None:
            key = (sent.rows, sent.warp, sent.choice)
            self.seconds[key] = min(seconds / rounds, SLOWER * self.seconds.get(key, math.inf))
        if self.team is not None and sent.choice is not None and rounds:
            running = infos.settled > 0
            self.policy(sent.rows, sent.warp).observe(sent.choice, infos.drafted, infos.accepted, running, seconds)

    def overhear(self, sent: Sent, jobs: Collection[Job], heard: Sequence[int]) -> None:
        """Tells the policy what n-gram drafting would have given in what came behind the first `heard` tokens of each job."""
        if self.ngram is None:
            return
        rounds = [
            each for job, before in zip(jobs, heard, strict=True) if job.shadow is not None
            for each in job.shadow.push(job.request.tokens[before:])
        ]  # fmt: skip
        self.policy(sent.rows, sent.warp).overhear(self.ngram.name, [d for d, _ in rounds], [a for _, a in rounds])
