"""Records how far every choice's drafts would be accepted in the texts of data files, and simulates the policy on that.

    python benchmarks/round_traces.py record traces.json --data humaneval.jsonl gsm8k_test.jsonl --samples 4
    python benchmarks/round_traces.py simulate traces.json
    python benchmarks/round_traces.py simulate traces.json --uneven 0.1 --seeds 6
    python benchmarks/round_traces.py simulate traces.json --costs round.json

With `--uneven` the policy begins with costs that are wrong by about so much, those of two shapes from moments of different
load, and hears of dispatches that are as uneven, which says more of what it does on a machine that others use too. The last
takes the costs of rounds from
`tilewright bench round --chip v5e:2x2 --json round.json`, say.
"""

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from acceptance_traces import Recording, costs_of, record, simulate
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.compare import environment
from tilewright.bench.datasets import read_examples
from tilewright.bench.speculative import ask
from tilewright.cli.common import ModelOptions, packaged_prompts_file
from tilewright.runtime.sampling import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "simulate"))
    parser.add_argument("traces", type=Path)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="JSONL files; by default the packaged prompts")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--costs", type=Path, help="what bench round --json wrote, in the place of the recorded costs")
    parser.add_argument("--uneven", type=float, default=0.0, help="standard deviation of the logarithm of costs and times")
    parser.add_argument("--seeds", type=int, default=1, help="how often that is drawn; figures are means")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    console = Console()
    if asked.what == "record":
        recorded(asked, console)
    costs = None if asked.costs is None else costs_of(json.loads(asked.costs.read_text(encoding="utf-8"))["data"])
    recording = Recording.load(asked.traces)
    drawn = [simulate(recording, costs, asked.uneven, seed) for seed in range(asked.seeds)]
    rows = [averaged(rows) for rows in zip(*drawn, strict=True)]
    table = Table(title="tokens/s of the policy, simulated on recorded acceptance")
    for name in ("data", "tokens", "plain", "best choice", "its tokens/s", "policy", "of best", "of plain"):
        table.add_column(name, justify="left" if name in ("data", "best choice") else "right")
    for row in rows:
        rates = [f"{row[name]:,.0f}" for name in ("best_tokens_per_s", "policy_tokens_per_s")]
        shares = [f"{row[name]:.3f}" for name in ("of_best", "of_plain")]
        table.add_row(row["dataset"], str(row["tokens"]), f"{row['plain_tokens_per_s']:,.0f}", row["best"], *rates, *shares)
    console.print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def averaged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the same data, drawn several times, with the least share of the best choice."""
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("policy_tokens_per_s", "of_best", "of_plain")}
    return {**rows[0], **means, "least_of_best": min(row["of_best"] for row in rows)}


def recorded(asked: argparse.Namespace, console: Console) -> None:
    """Writes the traces."""
    options = ModelOptions(asked.model, asked.dtype, asked.weights, drafter=asked.drafter)
    lm = options.load(console)
    template = options.chat_template(console)
    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, seed=0)
    files = {path.stem: path for path in asked.data} or {"held-out code": packaged_prompts_file()}
    assert lm.pacing is not None
    lm.pacing.patient = True
    traces = []
    with Progress(console=console, transient=True) as bar:
        row = bar.add_task("recording", total=len(files) * asked.samples)
        for name, path in files.items():
            prompts = ask(lm, name, read_examples(path)[: asked.samples], template, sampling).prompts
            traces += record(lm, name, prompts, sampling, lambda: bar.advance(row))
    runner = lm.start([[0]], sampling).engine.runner
    runner.programs.warm(runner.programs.declared(runner.sampling))
    lm.pacing.costs.clear()  # they took a recording's dispatches, of one step each, for usual ones
    lm.pacing.files = None
    costs = lm.pacing.measured(runner, 1, sampling.temperature > 0, lm.pacing.team.choices)
    about = {"date": datetime.date.today().isoformat(), **environment(lm), "temperature": asked.temperature}
    expected = {member.name: member.expected_acceptance for member in lm.pacing.team.members if member.expected_acceptance}
    Recording(traces, costs, about, expected).save(asked.traces)


if __name__ == "__main__":
    main()
