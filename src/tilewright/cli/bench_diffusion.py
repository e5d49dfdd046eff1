"""`tilewright bench diffusion`: ways of denoising the same prompts, side by side."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from tilewright.bench.datasets import NOT_THINKING, read_examples
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.diffusion import environment, fitted_table, measure, rows, rows_in_all, scalars_as_csv, ways_of
from tilewright.cli.diffusion_options import DEMO, DiffusionModelOptions, StepOptions, encoded_prompts, held_out_problems
from tilewright.cli.options import Chat, PromptFile, Several, check_least, check_some, option_class
from tilewright.cli.outputs import TableFiles, circumstances, progress, progress_console, write_text
from tilewright.compiled.timing import REPETITIONS
from tilewright.diffusion.model import DiffusionModel
from tilewright.diffusion.options import Denoising, Mode
from tilewright.metrics.tables import print_table
from tilewright.models import hub
from tilewright.models.chat import ChatTemplate
from tilewright.report.diffusion import figures_table, programs_table, write_diffusion
from tilewright.report.page import Report
from tilewright.train.arithmetic import Problem, is_right

ARITHMETIC = "arithmetic"
CARDS = ("README.md", "MODEL_CARD.md")
"""Where a model's folder says what it is for: a line `task: arithmetic`."""


@option_class
class Compared:
    """Options of the ways that are compared, and of the prompts. The first four take several values.

    Attributes:
        modes: of "dense", "prefix", "dual" and "sparse"; plain dense steps always run, for the others are compared with them.
        tau: thresholds of saliency, for each of which sparse steps run.
        threshold: every mode runs with a quota a step, and once more with each of these: steps commit all tokens so likely.
        suffix_window: all of these again with each of these numbers of positions behind the block, those further on left out.
        task: "arithmetic" asks held-out problems and checks their answers; "prompts" is `--prompt-file` without a check. By
            default what the model's card says, if it has a line `task: arithmetic`.
        problems: how many prompts, from the beginning.
        new_tokens: the length of each response, a multiple of the block length; by default as many blocks as the longest
            solution of the problems takes, 128 tokens for other prompts.
        seed: of what is drawn.
        batch_size: rows denoised together.
        timed: prompts that are denoised over and over, all ways in turns.
        repetitions: how often.
        beside: prompts that are gone through step by step beside dense passes; 0 leaves that out.
    """

    modes: Several[Mode] = ("dense", "prefix", "dual", "sparse")
    tau: Several[float] = (0.99,)
    threshold: Several[float] = ()
    suffix_window: Several[int] = ()
    task: Literal["arithmetic", "prompts"] | None = None
    prompt_file: PromptFile = None
    chat: Chat = False
    problems: int = 32
    new_tokens: int | None = None
    seed: int = 0
    batch_size: int = 1
    timed: int = 8
    repetitions: int = REPETITIONS
    beside: int = 4

    def __post_init__(self) -> None:
        check_least(self, problems=1, batch_size=1, timed=1, repetitions=1, beside=0)
        check_some(self, "modes", *(["tau"] if self.tau or "sparse" in self.modes else []))
        check_some(self, *(name for name in ("threshold", "suffix_window") if getattr(self, name)))
        if self.task == ARITHMETIC and self.prompt_file is not None:
            raise ValueError("expected --task arithmetic, which has its own problems, or --prompt-file, found both")

    def arithmetic(self, model: str, console: Console) -> bool:
        """True if problems are asked. Raises a `ValueError` where they are not, and there is no file of prompts."""
        if self.prompt_file is not None:
            return False
        known = self.task == ARITHMETIC or model == DEMO
        if self.task == "prompts" or not (known or card_task(hub.resolve(model, None, progress_console(console)))):
            raise ValueError("expected --prompt-file, or --task arithmetic for problems with answers that are checked")
        return True

    def texts(self, model: str, template: ChatTemplate | None, console: Console) -> tuple[list[str], list[Problem]]:
        """The prompts, and the problems that they ask, if they do.

        Raises:
            ValueError: there are none, or problems are to be put in a chat, which no model was trained on.
        """
        if self.arithmetic(model, console):
            if self.chat:
                raise ValueError("expected --prompt-file with --chat: problems are asked as they are")
            asked = held_out_problems(self.problems)
            return [problem.prompt for problem in asked], asked
        assert self.prompt_file is not None
        return [prompt_text(each, (), template, NOT_THINKING) for each in read_examples(self.prompt_file)[: self.problems]], []

    def length(self, model: DiffusionModel, problems: Sequence[Problem], block: int) -> int:
        """Tokens of a response."""
        if self.new_tokens is not None:
            return self.new_tokens
        longest = max((len(model.tokenizer.encode(problem.response).ids) + 1 for problem in problems), default=128)
        return -(-longest // block) * block if problems else longest


def card_task(folder: Path) -> bool:
    """True if a model's card says that it does arithmetic."""
    cards = (folder / name for name in CARDS)
    lines = (line for card in cards if card.is_file() for line in card.read_text(encoding="utf-8").splitlines())
    return any(line.strip() == f"task: {ARITHMETIC}" for line in lines)


def bench_diffusion(
    *,
    compared: Compared = Compared(),
    models: DiffusionModelOptions = DiffusionModelOptions(),
    options: StepOptions = StepOptions(),
    outputs: TableFiles = TableFiles(),
) -> None:
    """Denoises the same prompts in every mode, in turns, and prints speed, accuracy and what each step changed.

    Every figure is defined in docs/metrics.md.
    """
    console = outputs.console()
    if "sparse" not in compared.modes:
        for tau in compared.tau:
            options.require_sparse(options.saliency(tau), "--modes", ", ".join(compared.modes))
    if compared.new_tokens is not None:
        options.request(compared.new_tokens, compared.seed)
    template = models.asked_template(compared.chat, console)
    texts, problems = compared.texts(models.model, template, console)
    model = models.load_model(console)
    base = options.request(compared.length(model, problems, options.block_length), compared.seed)
    ways = ways_of(base, compared.modes, compared.tau, compared.threshold, compared.suffix_window)
    prompts = encoded_prompts(model, texts, template)
    for prompt in prompts:
        model.check(prompt, base)
    model = model.with_table(fitted_table(prompts, base, compared.batch_size))
    sizes = {name: getattr(compared, name) for name in ("timed", "repetitions")} | {"compared": compared.beside}
    with progress(console, rows_in_all(len(ways), len(prompts), **sizes), "denoising") as step:
        found = measure(model, ways, prompts, batch_size=compared.batch_size, **sizes, on_row=lambda rows: step(count=rows))
    right = (lambda n, text: is_right(problems[n], text)) if problems else None
    figures = rows(found, right)
    about = facts(model, models, compared, base, problems)
    if outputs.csv is not None:
        write_text(outputs.csv, scalars_as_csv(figures))
    asked = f"{len(prompts)} {'problems' if problems else 'prompts'}"
    lead = f"{models.model}, {asked}, responses of {base.new_tokens} tokens in blocks of {base.block}."
    report = Report("Denoising side by side", lead, figures, circumstances(about))
    outputs.write(console, {**about, "data": figures}, lambda path: write_diffusion(path, report))
    for table in (figures_table(figures), programs_table(figures)):
        print_table(console, table)


def facts(
    model: DiffusionModel, models: DiffusionModelOptions, compared: Compared, base: Denoising, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Settings that the figures depend on."""
    names = ("problems", "batch_size", "timed", "repetitions", "beside", "seed")
    settled = ("new_tokens", "steps", "block_length", "remasking", "temperature", "top_p", "guidance")
    switches = {name: value for name, value in vars(base.saliency).items() if name != "tau"}
    return {
        "date": datetime.date.today().isoformat(),
        **environment(model),
        "model": models.model,
        "task": ARITHMETIC if problems else "prompts",
        **{name: getattr(compared, name) for name in names},
        **{name: getattr(base, name) for name in settled},
        **switches,
    }
