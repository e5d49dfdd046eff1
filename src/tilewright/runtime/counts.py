"""What an engine counts, in its `EngineStats`."""

import numpy as np

from tilewright.runtime.request import EngineStats
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.state import StepInfo


def count_rounds(counted: EngineStats, sent: SentRounds, infos: StepInfo) -> None:
    """Counts rounds that were read."""
    rounds = len(infos.committed)
    ran = infos.committed > 0
    drafted = infos.drafted > 0
    counted.dispatches += 1
    counted.rounds += rounds
    counted.constrained_rounds += rounds if sent.masks == "host" else 0
    counted.automaton_rounds += rounds if sent.masks == "device" else 0
    counted.row_rounds += int(ran.sum())
    counted.padding_rows += rounds * sent.rows - int(ran.sum())
    counted.drafts += int(drafted.sum())
    counted.drafted += int(infos.drafted.sum())
    counted.accepted += int(infos.accepted.sum())
    most = infos.tokens.shape[2] - 1
    at_least = np.cumsum(np.bincount(infos.accepted[drafted], minlength=most + 1)[::-1])[::-1][1:]
    counted.accepted_at += [0] * (most - len(counted.accepted_at))
    for place, count in enumerate(at_least.tolist()):
        counted.accepted_at[place] += count
    name = "fixed" if sent.choice is None else str(sent.choice)
    counted.widths[name] = counted.widths.get(name, 0) + rounds
