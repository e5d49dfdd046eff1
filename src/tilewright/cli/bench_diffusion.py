"""`tilewright bench diffusion`: compares modes of denoising on the same prompts."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.datasets import NOT_THINKING, read_examples
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.diffusion import environment, fitted_table, make_variants, measure, rows, rows_in_all, scalars_as_csv
from tilewright.cli.diffusion_options import (
    DEMO,
    DenoisingOption,
    DenoisingSettings,
    DiffusionModelOptions,
    encoded_prompts,
    held_out_problems,
)
from tilewright.cli.options import (
    COMMON,
    SAMPLING,
    Chat,
    Group,
    PromptFile,
    Several,
    changed_options,
    check_least,
    check_some,
    option_class,
)
from tilewright.cli.outputs import TableFiles, circumstances, progress, progress_console, write_text
from tilewright.compiled.timing import REPETITIONS
from tilewright.diffusion.options import Denoising, Mode, Saliency
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.metrics.tables import print_table
from tilewright.models import hub
from tilewright.models.chat import ChatTemplate
from tilewright.report.diffusion import figures_table, programs_table, write_diffusion
from tilewright.report.page import Report
from tilewright.train.arithmetic import Problem, is_right

ARITHMETIC = "arithmetic"
CARDS = ("README.md", "MODEL_CARD.md")
"""Files of a model's folder that can name its task, in a line `task: arithmetic`."""
MEASUREMENT = Group("Measurement", sort_key=2)


@option_class(group=MEASUREMENT)
class DiffusionBenchOptions:
    """Options of the compared variants and of the prompts. The first four take several values.

    Attributes:
        modes: modes to compare: "dense", "prefix", "dual", "sparse". Plain dense steps always run, as the baseline.
        tau: saliency thresholds of sparse steps.
        threshold: probability thresholds. Every mode runs with a fixed number of tokens per step, and once with each of these.
        suffix_window: numbers of visible positions after the block. Every variant also runs with each of these.
        task: "arithmetic" asks held-out problems and checks the answers; "prompts" reads --prompt-file. By default the task in
            the model's card.
        problems: number of prompts, from the first on.
        new_tokens: length of each response, a multiple of the block length. By default long enough for all solutions, or 128.
        temperature: 0 chooses the most likely token.
        top_p: sample from the smallest set of most likely tokens with this total probability.
        seed: seed of the random numbers.
        batch_size: rows denoised together.
        timed: number of prompts that are timed, all variants in alternation.
        repetitions: number of timed runs.
        beside: number of prompts whose steps are compared with dense passes; 0 for none.
    """

    modes: Annotated[Several[Mode], Parameter(group=COMMON)] = ("dense", "prefix", "dual", "sparse")
    tau: Annotated[Several[float], Parameter(group=COMMON)] = (0.99,)
    threshold: Annotated[Several[float], Parameter(group=COMMON)] = ()
    suffix_window: Several[int] = ()
    task: Literal["arithmetic", "prompts"] | None = None
    prompt_file: PromptFile = None
    chat: Chat = False
    problems: int = 32
    new_tokens: Annotated[int | None, Parameter(alias="-n", group=COMMON)] = None
    temperature: Annotated[float, Parameter(group=SAMPLING)] = 0.0
    top_p: Annotated[float, Parameter(group=SAMPLING)] = 1.0
    seed: Annotated[int, Parameter(alias="-s", group=SAMPLING)] = 0
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

    def check(self, denoising: DenoisingSettings) -> None:
        """Raises a `ValueError` for keys of `--denoising` that are options here, and for sparse settings without sparse."""
        named = denoising.set_values("mode", "threshold", "suffix_window", "tau")
        if named:
            key = next(iter(named))
            option = "modes" if key == "mode" else key.replace("_", "-")
            raise ValueError(f"--denoising: expected --{option}, which takes several values, found {key}={named[key]}")
        sparse = list(denoising.set_values(*vars(Saliency())))
        if "sparse" not in self.modes:
            sparse += changed_options(self, "tau")
            if sparse:
                raise ValueError(f"expected --modes sparse with {', '.join(sparse)}, found {', '.join(self.modes)}")

    def request(self, denoising: DenoisingSettings, new_tokens: int) -> Denoising:
        """Makes the request of dense steps. Raises a `ValueError` for a value out of its range."""
        return denoising.applied(new_tokens=new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed)

    def arithmetic(self, model: str, console: Console) -> bool:
        """Returns True for arithmetic problems. Raises a `ValueError` without a task and without a file of prompts."""
        if self.prompt_file is not None:
            return False
        has_task = self.task == ARITHMETIC or model == DEMO
        if self.task == "prompts" or not (has_task or card_task(hub.resolve(model, None, progress_console(console)))):
            raise ValueError("expected --prompt-file, or --task arithmetic for problems with checked answers, found neither")
        return True

    def texts(self, model: str, template: ChatTemplate | None, console: Console) -> tuple[list[str], list[Problem]]:
        """Returns the prompts, and their problems if the task is arithmetic.

        Raises:
            ValueError: There is no task and no file, or --chat is set for arithmetic problems.
        """
        if self.arithmetic(model, console):
            if self.chat:
                raise ValueError("expected --prompt-file with --chat: arithmetic problems have no chat template")
            problems = held_out_problems(self.problems)
            return [problem.prompt for problem in problems], problems
        assert self.prompt_file is not None
        return [prompt_text(each, (), template, NOT_THINKING) for each in read_examples(self.prompt_file)[: self.problems]], []

    def length(self, model: DiffusionModel, problems: Sequence[Problem], block: int) -> int:
        """Returns the number of tokens of a response."""
        if self.new_tokens is not None:
            return self.new_tokens
        longest = max((len(model.tokenizer.encode(problem.response).ids) + 1 for problem in problems), default=128)
        return -(-longest // block) * block if problems else longest


def card_task(folder: Path) -> bool:
    """Returns True if a model's card names the task arithmetic."""
    cards = (folder / name for name in CARDS)
    lines = (line for card in cards if card.is_file() for line in card.read_text(encoding="utf-8").splitlines())
    return any(line.strip() == f"task: {ARITHMETIC}" for line in lines)


def bench_diffusion(
    *,
    compared: DiffusionBenchOptions = DiffusionBenchOptions(),
    models: DiffusionModelOptions = DiffusionModelOptions(),
    denoising: DenoisingOption = DenoisingSettings(),
    outputs: TableFiles = TableFiles(),
) -> None:
    """Denoises the same prompts in every mode and compares speed and accuracy.

    docs/metrics.md defines every figure.
    """
    console = outputs.console()
    compared.check(denoising)
    if compared.new_tokens is not None:
        compared.request(denoising, compared.new_tokens)
    template = models.prompt_template(compared.chat, console)
    texts, problems = compared.texts(models.model, template, console)
    model = models.load_model(console)
    block = denoising.applied().block
    base = compared.request(denoising, compared.length(model, problems, block))
    variants = make_variants(base, compared.modes, compared.tau, compared.threshold, compared.suffix_window)
    prompts = encoded_prompts(model, texts, template)
    for prompt in prompts:
        model.check(prompt, base)
    model = model.with_table(fitted_table(prompts, base, compared.batch_size))
    sizes = {name: getattr(compared, name) for name in ("timed", "repetitions")} | {"compared": compared.beside}
    with progress(console, rows_in_all(len(variants), len(prompts), **sizes), "denoising") as step:
        found = measure(model, variants, prompts, batch_size=compared.batch_size, **sizes, on_row=lambda rows: step(count=rows))
    right = (lambda n, text: is_right(problems[n], text)) if problems else None
    figures = rows(found, right)
    about = run_settings(model, models, compared, base, problems)
    if outputs.csv is not None:
        write_text(outputs.csv, scalars_as_csv(figures))
    count = f"{len(prompts)} {'problems' if problems else 'prompts'}"
    lead = f"{models.model}, {count}, responses of {base.new_tokens} tokens in blocks of {base.block}."
    report = Report("Denoising side by side", lead, figures, circumstances(about))
    outputs.write(console, {**about, "data": figures}, lambda path: write_diffusion(path, report))
    for table in (figures_table(figures), programs_table(figures)):
        print_table(console, table)


def run_settings(
    model: DiffusionModel,
    models: DiffusionModelOptions,
    compared: DiffusionBenchOptions,
    base: Denoising,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """Returns the settings of the measurement."""
    names = ("problems", "batch_size", "timed", "repetitions", "beside", "seed")
    fields = ("new_tokens", "steps", "block_length", "remasking", "temperature", "top_p", "guidance")
    switches = {name: value for name, value in vars(base.saliency).items() if name != "tau"}
    return {
        "date": datetime.date.today().isoformat(),
        **environment(model),
        "model": models.model,
        "task": ARITHMETIC if problems else "prompts",
        **{name: getattr(compared, name) for name in names},
        **{name: getattr(base, name) for name in fields},
        **switches,
    }
