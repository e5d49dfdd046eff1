"""How many rounds a dispatch runs, and what they do."""

from collections.abc import Collection, Sequence

from tilewright.decode.costs import Costs
from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.policy import Choice, History, Plan, Policy
from tilewright.decode.programs import STEPS_PER_DISPATCH
from tilewright.decode.sampling import Warp
from tilewright.decode.shadow import NGramShadow, joined
from tilewright.decode.state import StepInfo
from tilewright.decode.team import Team
from tilewright.engine.device import Sent
from tilewright.engine.pace import Pace
from tilewright.engine.programs import EnginePrograms
from tilewright.engine.scheduler import Job


class Pacer(Pace):
    """Plans what the rounds of dispatches do, and how many there are.

    Args:
        dispatch_s: how long a dispatch takes, about.
        costs: of a team's rounds, for each number of rows; None without a team.
    """

    def __init__(self, programs: EnginePrograms, dispatch_s: float, costs: dict[int, Costs] | None = None):
        super().__init__(dispatch_s, STEPS_PER_DISPATCH)
        self.team = programs.drafter if isinstance(programs.drafter, Team) else None
        self.costs = costs or {}
        self.policies: dict[tuple[int, Warp], Policy] = {}
        members = self.team.members if self.team is not None else ()
        self.history = History({member.name: member.block_size for member in members})
        self.ngram = next((member for member in members if isinstance(member, NGram)), None)

    def policy(self, rows: int, warp: Warp) -> Policy:
        """What chooses the rounds of so many rows."""
        assert self.team is not None
        if (rows, warp) not in self.policies:
            costs = self.costs[rows]
            self.policies[rows, warp] = Policy(self.history, dict(costs.rounds), self.team.choices, costs.dispatch)
        return self.policies[rows, warp]

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
        """Takes in what came of a dispatch; times as `Pace.time` has them."""
        rounds = len(infos.settled)
        seconds = self.time((sent.rows, sent.warp, sent.choice), rounds, sent.at, sent.alone, began, ended)
        if self.team is not None and sent.choice is not None and rounds:
            running = infos.settled > 0
            self.policy(sent.rows, sent.warp).observe(sent.choice, infos.drafted, infos.accepted, running, seconds)

    def overhear(self, sent: Sent, jobs: Collection[Job], heard: Sequence[int]) -> None:
        """Tells the policy what n-gram drafting would have given in what came behind the first `heard` tokens of each job."""
        if self.ngram is None:
            return
        own = ((job.shadow, job.request.tokens[before:]) for job, before in zip(jobs, heard, strict=True))
        rounds = joined(shadow.push(tokens) for shadow, tokens in own if shadow is not None)
        self.policy(sent.rows, sent.warp).overhear(self.ngram.name, rounds)

    def shadow(self, prompt: Sequence[int]) -> NGramShadow | None:
        """What follows a request's text, if n-grams may draft."""
        if self.ngram is None or self.team is None:
            return None
        return NGramShadow(self.ngram, prompt, self.team.widths_of(self.ngram))
