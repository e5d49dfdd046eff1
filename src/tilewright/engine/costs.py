"""What rounds of each number of rows cost in an engine: measured before it serves, and kept for the next process."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from tilewright.decode.costs import Bench, Costs, configuration, measure
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.policy import Choice
from tilewright.decode.shapes import Shape
from tilewright.decode.state import StepInfo
from tilewright.decode.team import Team
from tilewright.engine.device import Device
from tilewright.engine.programs import EngineKey


class EngineBench(Bench):
    """The first slots of an engine that serves nobody, the pool shared among them."""

    def __init__(self, device: Device, team: Team, rows: int):
        layout = device.programs.layout
        each = min(layout.pages // rows, layout.capacity // layout.page_size)
        super().__init__(team, device.programs.target.config.vocab_size, layout.batch, layout.capacity, each * layout.page_size)
        self.device, self.rows = device, rows
        self.table = np.arange(rows * each, dtype=np.int32).reshape(rows, each)

    def advance(self, rounds: int, choice: Choice) -> StepInfo:
        key = EngineKey("rounds", self.rows, self.device.programs.table.capacities[-1], choice=choice)
        slots, running = np.arange(self.rows, dtype=np.int32), np.ones(self.rows, bool)
        table = self.device.no_pages(self.rows, key.positions)
        table[:, : self.table.shape[1]] = self.table
        infos = self.device.run(key, slots, table, running, np.int32(rounds))
        return StepInfo.unpacked(np.asarray(infos))

    def rewind(self) -> None:
        assert self.device.state is not None
        self.device.state = self.rewound(self.device.state)


def measured_costs(device: Device, lm: LanguageModel, console: Console | None = None) -> dict[int, Costs]:
    """The costs of a team's rounds, by the number of rows, from a file where an earlier process has left them there."""
    team, found = device.programs.drafter, {}
    assert isinstance(team, Team)
    batches = device.programs.table.batches
    for rows in track(batches, "measuring rounds", console=console, transient=True, disable=console is None):
        about = kept_about(device, lm, team, rows)
        costs = None if lm.cost_files is None else lm.cost_files.read(about, team.choices)
        if costs is None or costs.rounds.keys() != set(team.choices):
            costs = measure(EngineBench(device, team, rows), team.choices)
            if lm.cost_files is not None:
                lm.cost_files.write(about, costs)
        found[rows] = costs
    return found


def kept_about(device: Device, lm: LanguageModel, team: Team, rows: int) -> dict[str, Any]:
    """What such costs depend on besides the machine."""
    layout = device.programs.layout
    shape = Shape(rows, layout.capacity, "greedy")
    paged = {"slots": layout.batch, "pages": layout.pages, "page_size": layout.page_size}
    return {**configuration(team, lm.programs, shape, lm.dtype, lm.weights), "paged": paged}
