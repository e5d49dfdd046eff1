"""Records the accepted drafts of every choice in the texts of data files, and simulates the policy on the record.

    python benchmarks/round_traces.py record traces.json --data humaneval.jsonl gsm8k_test.jsonl --samples 4
    python benchmarks/round_traces.py simulate traces.json
    python benchmarks/round_traces.py simulate traces.json --uneven 0.1 --seeds 6
    python benchmarks/round_traces.py simulate traces.json --costs round.json

`--uneven` simulates a shared machine: the initial costs have errors of this size, the costs of two shapes are measured under
different load, and the times of dispatches have the same errors. `--costs` reads the costs of rounds from a JSON file, for
example of `benchmarks/round_parts.py --chip v5e:2x2 --json round.json`.
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
from tilewright.bench.speculative import build_prompts
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
    parser.add_argument("--costs", type=Path, help="JSON of round_parts.py, replaces the recorded costs")
    parser.add_argument("--uneven", type=float, default=0.0, help="standard deviation of the logarithm of costs and times")
    parser.add_argument("--seeds", type=int, default=1, help="number of draws of these errors; figures are means")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    if options.what == "record":
        recorded(options, console)
    costs = None if options.costs is None else costs_of(json.loads(options.costs.read_text(encoding="utf-8"))["data"])
    recording = Recording.load(options.traces)
    drawn = [simulate(recording, costs, options.uneven, seed) for seed in range(options.seeds)]
    rows = [averaged(rows) for rows in zip(*drawn, strict=True)]
    table = Table(title="tokens/s of the policy, simulated on recorded acceptance")
    for name in ("data", "tokens", "plain", "best choice", "its tokens/s", "policy", "of best", "of plain"):
        table.add_column(name, justify="left" if name in ("data", "best choice") else "right")
    for row in rows:
        rates = [f"{row[name]:,.0f}" for name in ("best_tokens_per_s", "policy_tokens_per_s")]
        shares = [f"{row[name]:.3f}" for name in ("of_best", "of_plain")]
        table.add_row(row["dataset"], str(row["tokens"]), f"{row['plain_tokens_per_s']:,.0f}", row["best"], *rates, *shares)
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def averaged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages the rows of one dataset over seeds. Adds the smallest share of the best choice."""
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("policy_tokens_per_s", "of_best", "of_plain")}
    return {**rows[0], **means, "least_of_best": min(row["of_best"] for row in rows)}


def recorded(options: argparse.Namespace, console: Console) -> None:
    """Records and writes the traces."""
    model_options = ModelOptions(options.model, options.dtype, options.weights, drafter=options.drafter)
    lm = model_options.load(console)
    template = model_options.chat_template(console)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, seed=0)
    files = {path.stem: path for path in options.data} or {"held-out code": packaged_prompts_file()}
    assert lm.pacing is not None
    lm.pacing.patient = True
    traces = []
    with Progress(console=console, transient=True) as bar:
        row = bar.add_task("recording", total=len(files) * options.samples)
        for name, path in files.items():
            prompts = build_prompts(lm, name, read_examples(path)[: options.samples], template, sampling).prompts
            traces += record(lm, name, prompts, sampling, lambda: bar.advance(row))
    runner = lm.start([[0]], sampling).engine.runner
    runner.programs.warm(runner.programs.declared(runner.sampling))
    lm.pacing.costs.clear()  # costs measured so far are of dispatches with one step
    lm.pacing.files = None
    costs = lm.pacing.measured(runner, 1, sampling.temperature > 0, lm.pacing.team.choices)
    about = {"date": datetime.date.today().isoformat(), **environment(lm), "temperature": options.temperature}
    expected = {member.name: member.expected_acceptance for member in lm.pacing.team.members if member.expected_acceptance}
    Recording(traces, costs, about, expected).save(options.traces)


if __name__ == "__main__":
    main()
