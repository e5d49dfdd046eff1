"""`tilewright generate`: text from a model, with a drafter if there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from tilewright.bench.compare import acceptance_figures, compare, comparison_figures, environment
from tilewright.bench.figures import mean_distinct_ngram_ratio
from tilewright.cli.common import (
    JsonFile,
    ModelOptions,
    check_json_file,
    gather_prompts,
    human_console,
    write_json,
)
from tilewright.compiled.ledger import Ledger
from tilewright.decode.language_model import Generation, LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.report import terminal

STREAM_STEPS = 4
"""Steps or rounds for each dispatch while text is being shown."""


@Parameter(name="*")
@dataclass(frozen=True)
class SamplingOptions:
    """How to draw tokens.

    Attributes:
        max_new_tokens: the length limit of each text.
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens with this much probability.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: the same seed gives the same text.
        stop: a text that ends the generation; may be given several times.
        ignore_eos: go on past the end-of-sequence token.
    """

    max_new_tokens: int = 160
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def sampling(self) -> Sampling:
        return Sampling(**vars(self))


def generate(
    *prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    prompt_file: Path | None = None,
    models: ModelOptions = ModelOptions(),
    options: SamplingOptions = SamplingOptions(),
    compare_both: Annotated[bool, Parameter(name="--compare", negative=())] = False,
    repetitions: int = 5,
    json_file: JsonFile = None,
) -> None:
    """Generates text and shows which tokens were drafted.

    Parameters
    ----------
    prompt
        Texts to continue, "-" for standard input; several form a batch.
    prompt_file
        A JSONL file with a prompt in each record (prompt, question, problem, text or turns).
    compare_both
        Also decode without the drafter, alternating, and print a table of both.
    repetitions
        How often `--compare` times each way.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    if repetitions < 1:
        raise ValueError(f"expected at least 1 repetition, found {repetitions}")
    sampling = options.sampling()
    console = human_console(json_file)
    prompts = gather_prompts(prompt, prompt_file, models.model)
    lm = models.load(console)
    if compare_both and lm.drafting is None:
        raise ValueError("--compare needs a drafter; name one with --drafter")
    with Ledger() as ledger:
        generation, interrupted = show(lm, prompts, sampling, console)
        figures: dict[str, Any] = single_figures(lm, generation)
        if compare_both and not interrupted:
            with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                row = bar.add_task("comparing", total=2 * (repetitions + 1))
                both = compare(lm, [prompts], sampling, repetitions, lambda: bar.advance(row))
            figures |= comparison_figures(lm, both)
            console.print(terminal.comparison_table(figures))
    if lm.drafting is not None:
        console.print("rounds by accepted draft tokens")
        console.print("\n".join(terminal.histogram_lines(figures["acceptance_histogram"])), markup=False)
    texts = {"text": [r.text for r in generation], "tokens": [r.tokens for r in generation]}
    reasons = {"finish_reason": [r.finish_reason for r in generation]}
    write_json(json_file, {**figures, "compilations": ledger.compilations, **environment(lm), **texts, **reasons})


def single_figures(lm: LanguageModel, generation: Generation) -> dict[str, Any]:
    """The figures of one run; those that need a second way of decoding are None."""
    rate = generation.tokens_per_s if generation.decode_seconds else None
    return {
        "autoregressive_tokens_per_s": None if lm.drafting else rate,
        "speculative_tokens_per_s": rate if lm.drafting else None,
        "speedup": None,
        "identical": None,
        "rounds": generation.rounds,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(generation.results),
        **acceptance_figures(lm, generation),
    }


def show(lm: LanguageModel, prompts: list[str], sampling: Sampling, console: Console) -> tuple[Generation, bool]:
    """Generates and prints: a single text as it comes, several one after another at the end.

    Interrupting it (Ctrl-C) keeps what was generated so far. Returns that, and whether it was interrupted.
    """
    most = lm.table.batches[-1]
    sessions = [lm.start(prompts[i : i + most], sampling) for i in range(0, len(prompts), most)]
    alone = len(prompts) == 1
    interrupted = False
    if lm.drafting is not None:
        console.print(terminal.legend())
    try:
        with Progress(console=console, transient=True, disable=alone or not console.is_terminal) as bar:
            row = bar.add_task("generating", total=len(prompts) * sampling.max_new_tokens)
            for session in sessions:
                if alone:
                    with console.status("compiling"):
                        session.prefill()
                    console.print(prompts[0], end="", style="dim", markup=False, soft_wrap=True)
                while not session.finished:
                    for piece in session.advance(STREAM_STEPS if alone else 64):
                        if alone:
                            console.print(terminal.piece_text(piece.text, piece.drafted), end="", soft_wrap=True)
                        bar.advance(row)
    except KeyboardInterrupt:
        interrupted = True
    results = [result for session in sessions for result in session.results()]
    if alone:
        console.print()
    else:
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), 1):
            console.rule(f"{number} of {len(prompts)} ({result.finish_reason})")
            console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
            console.print(result.text, markup=False, soft_wrap=True)
    if interrupted:
        console.print("interrupted", style="red")
    prefill, decode = (sum(getattr(s, f"{part}_seconds") for s in sessions) for part in ("prefill", "decode"))
    return Generation(results, prefill, decode, sum(s.rounds for s in sessions)), interrupted
