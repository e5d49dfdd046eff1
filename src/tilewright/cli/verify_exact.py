"""`tilewright verify-exact`: checks that speculative decoding and batching give the tokens of plain decoding."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
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
from tilewright.report.exact import difference_lines, exact_table, group_by_path
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM, DrafterOptions

QUICK_DRAFTER = "dflash"
"""Drafter of the demo for `--quick`."""
MOST_LINES = 20
"""Maximum number of printed differences."""


@option_class
class Asking:
    """Options of the requests and the drafters.

    Attributes:
        drafter: folders, Hugging Face ids, "ngram", "mtp" (the head for multi-token prediction in the folder of a target such
            as Qwen3.5), "self" (a target that was trained to denoise blocks, such as Nemotron-Labs-Diffusion) or "none"; for
            the demo also "dflash", "dflash2" and "eagle3", for smollm2-135m "dflash2".
            "auto", the default, is n-grams and the packaged drafters (for the demo with --quick "dflash"). All drafters
            together are checked too.
        batch_size: batch sizes; the largest is the number of the engine's slots.
        requests: number of requests. By default 16 (6 with --quick, 64 with --thorough), or all prompts of a shorter file.
        max_new_tokens: maximum number of tokens of a request; some requests have fewer.
        prompt_file: a JSONL file of prompts, in the formats of `bench speculative`; of a conversation the first turn is used.
            By default the packaged code, cut at many lengths.
        seed: seed of the sampling requests and of the order of arrival.
        quick: fewer requests, kinds of sampling and orders.
        thorough: more requests, kinds of sampling, orders and widths.
    """

    drafter: Annotated[Several[str] | None, Parameter(alias="-d")] = None
    batch_size: Several[int] | None = None
    requests: int | None = None
    max_new_tokens: Annotated[int | None, Parameter(alias="-n")] = None
    prompt_file: Annotated[Path | None, Parameter(alias="-f")] = None
    seed: Annotated[int, Parameter(alias="-s")] = 0
    quick: Flag = False
    thorough: Flag = False

    def effort(self) -> Effort:
        """Returns the numbers of requests, batches, widths and orders.

        Raises:
            ValueError: a number is out of its range, or options exclude each other.
        """
        if self.quick and self.thorough:
            raise ValueError("expected --quick or --thorough, found both")
        effort = QUICK if self.quick else THOROUGH if self.thorough else USUAL
        sizes = self.batch_size
        check_least(self, batch_size=1, requests=1, max_new_tokens=1)
        check_some(self, *([] if sizes is None else ["batch_size"]))
        Sampling(seed=self.seed)  # checks the seed
        chosen = {name: getattr(self, name) for name in ("requests", "max_new_tokens") if getattr(self, name) is not None}
        return replace(effort, batches=tuple(sorted({1, *(sizes or effort.batches)})), **chosen)

    def names(self, model: str) -> list[str]:
        """Returns the names of the drafters. Raises a `ValueError` for a repeated one or one of another model."""
        available = [NGRAM, *common.PACKAGED_DRAFTERS.get(model, {})]
        named = (
            ([QUICK_DRAFTER] if self.quick and model == common.DEMO else available) if self.drafter is None else self.drafter
        )
        names = [name for each in named for name in (available if each == common.AUTO else () if each == "none" else (each,))]
        common.check_drafters(names, model)
        return names

    def prompts(self, lm: LanguageModel, effort: Effort) -> list[list[int]]:
        """Returns the tokens of the prompts. Raises a `ValueError` for a malformed file or too few prompts."""
        if self.prompt_file is None:
            prompts = [lm.encode(prompt_text(each, (), None)) for each in read_examples(common.packaged_prompts_file())]
            room = lm.target.max_position_embeddings - effort.max_new_tokens
            if room < 1:
                raise ValueError(f"the model's context of {room + effort.max_new_tokens} leaves no room for a prompt")
            return mixed_lengths([each[:room] for each in prompts], effort.requests, self.seed)
        examples = read_examples(self.prompt_file)
        if self.requests is not None and len(examples) < self.requests:
            raise ValueError(f"{self.prompt_file}: expected {self.requests} records, found {len(examples)}")
        return [lm.encode(prompt_text(each, (), None)) for each in examples[: effort.requests]]


@option_class
class ExactOptions(common.TargetOptions):
    """Options that name the target and its number formats.

    Attributes:
        dtype: "float32", in which all paths must agree; "bfloat16"; or "auto", the checkpoint's dtype.
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
    """Checks that speculative decoding and batching give the tokens of plain decoding. Exit status 1 if any token differs.

    Args:
        model: as --model.
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
    figures = verification_figures(verification, findings)
    about = {"model": named.model, "drafters": list(drafters), "seed": asking.seed}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(effort).items()}
    cache = "" if lm.kv_dtype == "auto" else f", KV cache in {lm.kv_dtype}"
    write_json(json_file, {**environment(lm), **about, **settings, **figures})
    print_findings(console, f"{named.model}, {lm.dtype}{cache}, kernels {lm.kernels}", figures)
    if not figures["same"]:
        sys.exit(1)


def verification_figures(verification: Verification, findings: Sequence[ExactFinding]) -> dict[str, Any]:
    """Returns the findings as a JSON record."""
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


def print_findings(console: Console, title: str, figures: dict[str, Any]) -> None:
    """Prints the table and the differences."""
    findings = figures["findings"]
    print_table(console, exact_table(title, figures["plain"], findings))
    for line in difference_lines(findings, MOST_LINES):
        console.print(line, markup=False, soft_wrap=True)
    groups = group_by_path(findings).values()
    same = sum(all(one["same"] for one in group) for group in groups)
    agree = figures["requests_agreeing"]
    compared = figures["requests_compared"]
    console.print(
        f"{same} of {len(groups)} paths give the tokens of plain decoding.", style="bold" if figures["same"] else "bold red"
    )
    console.print(f"{agree} of {compared} requests (once per kind of sampling) get the same tokens on all paths.")
