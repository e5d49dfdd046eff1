"""`tilewright verify-exact`: the first promise as a command."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tilewright.bench.compare import environment
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.datasets import read_examples
from tilewright.bench.exact import ExactFinding, agreeing, mixed_lengths
from tilewright.bench.exact_paths import QUICK, THOROUGH, USUAL, Effort, Loaded, Verification
from tilewright.cli import common
from tilewright.cli.options import Flag, Several, check_least, check_some, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, progress_console, write_json
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.tables import print_table
from tilewright.report.exact import by_path, difference_lines, exact_table
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions

QUICK_DRAFTER = "dflash"
"""The demo's drafter that `--quick` takes."""
MOST_LINES = 20
"""Differences that are printed."""


@option_class
class Asking:
    """Options of the requests, and of the drafters that answer them.

    Attributes:
        drafter: folders, Hugging Face ids, "ngram" or "none"; for the demo also "dflash", "dflash2" and "eagle3", for
            smollm2-135m "dflash2". "auto", the default, stands for n-gram and those of the package (for the demo with --quick
            the default is "dflash"). A team of them, whose rounds are chosen as they go, joins them.
        batch_size: rows decoded together; the largest is the number of the engine's slots.
        requests: how many; by default 16 (6 with --quick, 64 with --thorough), or all of a file that has fewer.
        max_new_tokens: the most of a request; some ask for less.
        prompt_file: a JSONL file of prompts, read as `bench speculative` reads its data, of several turns the first; by default
            the packaged code, cut at many lengths.
        seed: of the requests that draw, and of the order in which they come.
        quick: fewer requests, kinds of sampling and orders.
        thorough: more of them, and more widths.
    """

    drafter: Several[str] | None = None
    batch_size: Several[int] | None = None
    requests: int | None = None
    max_new_tokens: int | None = None
    prompt_file: Path | None = None
    seed: int = 0
    quick: Flag = False
    thorough: Flag = False

    def effort(self) -> Effort:
        """Number of requests, batches, widths and orders to try.

        Raises:
            ValueError: a number that makes no sense, or options that exclude each other.
        """
        if self.quick and self.thorough:
            raise ValueError("expected --quick or --thorough, found both")
        effort = QUICK if self.quick else THOROUGH if self.thorough else USUAL
        sizes = self.batch_size
        check_least(self, batch_size=1, requests=1, max_new_tokens=1)
        check_some(self, *([] if sizes is None else ["batch_size"]))
        Sampling(seed=self.seed)  # which checks it
        given = {name: getattr(self, name) for name in ("requests", "max_new_tokens") if getattr(self, name) is not None}
        return replace(effort, batches=tuple(sorted({1, *(sizes or effort.batches)})), **given)

    def names(self, model: str) -> list[str]:
        """The drafters, as they are named. Raises a `ValueError` where one is named twice, or is another model's."""
        every = [NGRAM, *common.PACKAGED_DRAFTERS.get(model, {})]
        named = ([QUICK_DRAFTER] if self.quick and model == common.DEMO else every) if self.drafter is None else self.drafter
        names = [name for each in named for name in (every if each == common.AUTO else () if each == "none" else (each,))]
        common.check_drafters(names, model)
        return names

    def prompts(self, lm: LanguageModel, effort: Effort) -> list[list[int]]:
        """The prompts as tokens. Raises a `ValueError` where the file is malformed, or has fewer than were asked for."""
        if self.prompt_file is None:
            whole = [lm.encode(prompt_text(each, (), None)) for each in read_examples(common.packaged_prompts_file())]
            room = lm.target.max_position_embeddings - effort.max_new_tokens
            if room < 1:
                raise ValueError(f"the model's context of {room + effort.max_new_tokens} leaves no room for a prompt")
            return mixed_lengths([each[:room] for each in whole], effort.requests, self.seed)
        examples = read_examples(self.prompt_file)
        if self.requests is not None and len(examples) < self.requests:
            raise ValueError(f"{self.prompt_file}: expected {self.requests} records, found {len(examples)}")
        return [lm.encode(prompt_text(each, (), None)) for each in examples[: effort.requests]]


@option_class
class ExactOptions(common.TargetOptions):
    """Options that name the target to load, and say how it multiplies.

    Attributes:
        dtype: "float32", in which all must agree; "bfloat16", or "auto", the checkpoint's.
    """

    dtype: str = "float32"


def verify_exact(
    model: str | None = None,
    /,
    *,
    asking: Asking = Asking(),
    target: ExactOptions = ExactOptions(),
    json_file: JsonFile = None,
) -> None:
    """Checks that every fast path gives the tokens of plain decoding. Exit status 1 if any differs.

    Args:
        model: the same as --model.
    """
    console = human_console(json_file)
    errors = Console(stderr=True, highlight=False, emoji=False)
    effort = asking.effort()
    named = common.named_model(model, target)
    names = asking.names(named.model)
    lm = named.load_with(None, errors)
    drafters: dict[str, Loaded] = {
        shown: lm.load_drafter(named.drafter_source(name), DrafterOptions(), progress_console(errors))
        for name, shown in common.short_names(names).items()
    }
    verification = Verification(lm, drafters, asking.prompts(lm, effort), effort, asking.seed)
    findings: list[ExactFinding] = []
    with progress(errors, verification.count()) as step:
        for finding in verification.findings(partial(step, count=0)):
            findings.append(finding)
            step()
    figures = figures_of(verification, findings)
    about = {"model": named.model, "drafters": list(drafters), "seed": asking.seed}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(effort).items()}
    kept = "" if lm.kv_dtype == "auto" else f", keys and values in {lm.kv_dtype}"
    write_json(json_file, {**environment(lm), **about, **settings, **figures})
    tell(console, f"{named.model}, {lm.dtype}{kept}, kernels {lm.kernels}", figures)
    if not figures["same"]:
        sys.exit(1)


def figures_of(verification: Verification, findings: Sequence[ExactFinding]) -> dict[str, Any]:
    """Record of the findings, as `--json` writes it."""
    agree, compared = agreeing(findings, len(verification.prompts))
    rows = []
    for finding in findings:
        row = {name: value for name, value in vars(finding).items() if name not in ("kind", "lacking", "plain_sha256")}
        differences = [asdict(each) for each in finding.differences]
        rows.append({**row, "sampling": finding.kind, "not_exercised": list(finding.lacking), "differences": differences})
        rows[-1]["same"] = finding.same
    return {
        "same": all(finding.same for finding in findings),
        "prompt_tokens": [len(prompt) for prompt in verification.prompts],
        "requests_compared": compared,
        "requests_agreeing": agree,
        "plain": {finding.kind: finding.plain_sha256 for finding in findings},
        "findings": rows,
    }


def tell(console: Console, title: str, figures: dict[str, Any]) -> None:
    """Prints the table, and where paths differ."""
    findings = figures["findings"]
    print_table(console, exact_table(title, figures["plain"], findings))
    for line in difference_lines(findings, MOST_LINES):
        console.print(line, markup=False, soft_wrap=True)
    groups = by_path(findings).values()
    same = sum(all(one["same"] for one in group) for group in groups)
    agree = figures["requests_agreeing"]
    compared = figures["requests_compared"]
    console.print(
        f"{same} of {len(groups)} paths give the tokens of plain decoding.", style="bold" if figures["same"] else "bold red"
    )
    console.print(f"{agree} of {compared} requests, kinds of sampling counted apart, get the same tokens on all paths.")
