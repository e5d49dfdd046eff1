"""What an engine counts."""

from dataclasses import replace

import numpy as np

from tilewright.decode.state import StepInfo
from tilewright.engine.device import Sent
from tilewright.engine.request import Figures
from tilewright.engine.scheduler import Chunk, Scheduler


class Counts:
    """Counts since the engine began; the names are those of `request.Figures`."""

    def __init__(self) -> None:
        self.counted = Figures()

    def warmed(self, programs: int, seconds: float) -> None:
        self.counted.programs, self.counted.warm_seconds = programs, seconds

    def filled(self, chunk: Chunk) -> None:
        """A prefill was sent."""
        self.counted.prefill_tokens += chunk.count
        self.counted.prefill_padding += chunk.size - chunk.count

    def rounds_ran(self, sent: Sent, infos: StepInfo) -> None:
        """Rounds were read."""
        counted, rounds = self.counted, len(infos.settled)
        ran, drafted = infos.settled > 0, infos.drafted > 0
        counted.dispatches += 1
        counted.rounds += rounds
        counted.row_rounds += int(ran.sum())
        counted.padding_rows += rounds * sent.rows - int(ran.sum())
        counted.drafts += int(drafted.sum())
        counted.drafted += int(infos.drafted.sum())
        counted.accepted += int(infos.accepted.sum())
        width = infos.tokens.shape[2] - 1
        at_least = np.cumsum(np.bincount(infos.accepted[drafted], minlength=width + 1)[::-1])[::-1][1:]
        grown = [0] * max(0, width - len(counted.accepted_at))
        counted.accepted_at += grown
        for place, count in enumerate(at_least.tolist()):
            counted.accepted_at[place] += count
        name = "fixed" if sent.choice is None else str(sent.choice)
        counted.widths[name] = counted.widths.get(name, 0) + rounds

    def figures(self, scheduler: Scheduler, asked: int, asked_tokens: int, step_age_s: float) -> Figures:
        """A snapshot."""
        counted, pages = self.counted, scheduler.pages
        return replace(
            counted,
            running=sum(seat is not None for seat in scheduler.seats),
            waiting=len(scheduler.waiting) + asked,
            waiting_tokens=scheduler.waiting_tokens + asked_tokens,
            slots=len(scheduler.seats),
            pages=pages.count,
            pages_used=pages.used,
            pages_cached=pages.cached,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            accepted_at=list(counted.accepted_at),
            widths=dict(counted.widths),
            ended=dict(counted.ended),
            step_age_s=step_age_s,
        )
