"""`tilewright generate`: text from a model, with a drafter if there is one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.compare import compare, environment
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.speculative import encoded
from tilewright.cli.common import AdaptedModelOptions, DeviceOptions, gather_prompts
from tilewright.cli.options import (
    Flag,
    Numbers,
    Prompt,
    PromptFile,
    Repeated,
    TemplateOptions,
    Words,
    check_least,
    option_class,
)
from tilewright.cli.outputs import OutputFiles, progress, working, write_json, write_replay_page
from tilewright.compiled.ledger import Ledger
from tilewright.llm.acceptance import generation_figures, num_spec_tokens
from tilewright.llm.chosen import chosen_figures, round_drafters
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.tables import print_table
from tilewright.report import terminal
from tilewright.runtime.output import Generation, OutputProcessor, Piece, Result
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import NGRAM
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.team import Team

CHAT_HELP = """put the prompts to the model as a user's messages, in its own chat template; by default for smollm2-135m."""
STREAM_STEPS = 4
"""Steps or rounds for each dispatch while text is being shown."""


@option_class
class SamplingOptions:
    """Options by which tokens are drawn.

    Attributes:
        max_new_tokens: the length limit of each text.
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens with this much probability.
        top_k: keep this many most likely tokens; 0 keeps all.
        seed: the same seed gives the same text; without one, each prompt draws its own, which is shown.
        stop: a text that ends the generation; may be given several times.
        ignore_eos: go on past the end-of-sequence token.
        min_p: keep tokens at least this share as likely as the most likely one; 0 keeps all.
        repetition_penalty: makes tokens of the prompt and the text so far less likely; 1 does nothing, 1.1 is common.
        presence_penalty: taken off the logit of every token generated before, from -2 to 2.
        frequency_penalty: taken off once for each time that it was generated, from -2 to 2.
        logit_bias: TOKEN=BIAS, with commas between several: what is added to the logits of tokens (ids), from -100 to 100.
        min_tokens: so many tokens before the text may end.
        stop_token_ids: ids of further tokens that end the generation, with commas between them.
        include_stop: the text ends with the stop string, or the token, that ended it.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int | None = 160
    temperature: float | None = 0.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: int | None = None
    stop: Repeated = ()
    ignore_eos: bool = False
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Words = ()
    min_tokens: int = 0
    stop_token_ids: Numbers = ()
    include_stop: Flag = False
    skip_special_tokens: bool = True

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> Sampling:
        """Sampling parameters of the options.

        Args:
            defaults: values of options that are None.

        Raises:
            ValueError: a value is out of its range.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        return Sampling(**{**(defaults or {}), **given, "logit_bias": tuple(map(biased_token, self.logit_bias))})


def biased_token(text: str) -> tuple[int, float]:
    """The token and its bias in "TOKEN=BIAS"."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"expected --logit-bias of the form TOKEN=BIAS, found {text!r}") from None


@option_class
class GenerateOutputs(OutputFiles):
    """Options of what is made besides the text.

    Attributes:
        verbose: also print which rounds were chosen, and how many drafts they had accepted.
        compare_both: also decode without the drafter, alternating, and print a table of both.
        repetitions: how often `--compare` times each way.
        replay: write an HTML page that plays the text token by token, with the drafter and without, and shows every round.
    """

    verbose: Flag = False
    compare_both: Annotated[bool, Parameter(name="--compare", negative=())] = False
    repetitions: int = 5
    replay: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, repetitions=1)


def generate(
    *prompt: Prompt,
    prompt_file: PromptFile = None,
    chat: Annotated[bool | None, Parameter(help=CHAT_HELP)] = None,
    models: AdaptedModelOptions = AdaptedModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    options: SamplingOptions = SamplingOptions(),
    outputs: GenerateOutputs = GenerateOutputs(),
    templates: TemplateOptions = TemplateOptions(),
) -> None:
    """Generates text and shows which tokens were drafted.

    Args:
        prompt: texts to continue, "-" for standard input; several form a batch.
    """
    console = outputs.console()
    notes = outputs.notes(console)
    asked = options.sampling()
    examples = gather_prompts(prompt, prompt_file, models.model, command=generate)
    template = models.asked_template(True if templates.chat_template else chat, notes, templates)
    lm = models.load(notes, devices)
    for option, given in (("--replay", outputs.replay is not None), ("--compare", outputs.compare_both)):
        if given and lm.drafter is None:
            raise ValueError(f"{option} needs a drafter; name one with --drafter")
    texts = [prompt_text(example, (), template) for example in examples]
    tokens = [encoded(lm, text, template) for text in texts]
    sampling = lm.each_sampling(tokens, asked)
    shown = texts if template is None else [f"{prompt_text(example, (), None)}\n\n" for example in examples]
    with Ledger() as ledger:
        generation, interrupted = show(lm, shown, tokens, sampling, console, notes)
        figures: dict[str, Any] = single_figures(lm, generation)
        notes.print(end_line(lm, generation, sampling, figures["chosen"]), style="dim", markup=False, soft_wrap=True)
        if outputs.compare_both and not interrupted:
            figures |= comparison(lm, tokens, sampling, outputs.repetitions, notes)
    if outputs.verbose:
        say_rounds(figures, notes)
    said = {"text": [r.text for r in generation], "tokens": [r.tokens for r in generation]}
    said |= {"finish_reason": [r.finish_reason for r in generation], "seed": [r.seed for r in generation]}
    write_json(outputs.json_file, {**figures, **ledger.figures(), **environment(lm), **said})
    if outputs.replay is not None and not interrupted:
        titled = [(f"prompt {n}", each) for n, each in enumerate(tokens, 1)]
        write_replay_page(outputs.replay, lm, (models.model, models.drafter_name), titled, sampling, notes)


def say_rounds(figures: Mapping[str, Any], notes: Console) -> None:
    """Prints which rounds were chosen, and how many of them had so many drafts accepted."""
    if figures["chosen"] is not None:
        notes.print(terminal.chosen_line(figures["chosen"]), markup=False, soft_wrap=True)
    if figures["speculative_decoding"] and figures["speculative_decoding"]["num_spec_steps"]:
        notes.print("rounds by accepted draft tokens")
        counts = figures["speculative_decoding"]["acceptance_histogram"]
        notes.print("\n".join(terminal.histogram_lines(counts)), markup=False)


def end_line(lm: LanguageModel, generation: Generation, sampling: Sequence[Sampling], chosen: Mapping[str, Any] | None) -> str:
    """Line that ends a generation: tokens a second, τ, who drafted, and why it stopped."""
    results = list(generation)
    tokens = sum(len(result.tokens) for result in results)
    rounds = sum(len(result.acceptance_lengths) for result in results) if lm.drafter is not None else 0
    parts = [terminal.answer_line(tokens, generation.decode_seconds, rounds, chosen or {"choices": []})] if tokens else []
    ends = Counter(ending(result, each) for result, each in zip(results, sampling, strict=True))
    parts += [end if len(results) == 1 else f"{count} {end}" for end, count in ends.items()]
    if len(results) == 1 and results[0].seed is not None:
        parts.append(f"seed {results[0].seed}")
    return " · ".join(parts)


def ending(result: Result, sampling: Sampling) -> str:
    """Words on why a text ended."""
    if result.finish_reason == "length":
        return f"cut at --max-new-tokens {sampling.max_new_tokens}"
    if result.finish_reason == "stop":
        return f"stopped at {result.stop_reason!r}"
    return "came to its end" if result.finish_reason == "eos" else result.finish_reason


COMPARED = (
    "autoregressive_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
    "speedup_range",
    "round_cost_steps",
    "identical",
    "first_differences",
    "block_size",
    "responses",
    "tokens",
    "rounds",
    "tokens_per_round",
    "tau_by_response",
    "tau_published",
    "distinct_4gram_ratio",
    "speculative_decoding",
    "chosen",
)
"""Figures that `--compare` gives: those of docs/metrics.md, and the speed of both ways."""


def comparison(
    lm: LanguageModel, tokens: Sequence[list[int]], sampling: Sequence[Sampling], repetitions: int, console: Console
) -> Any:
    """The figures of decoding both ways, after printing them."""
    with progress(console, 2 * (repetitions + 1), "comparing") as step:
        measured = compare(lm, [tokens], sampling, repetitions, step)
    names = {"autoregressive_tokens_per_s": "baseline_tokens_per_s", "speculative_tokens_per_s": "tokens_per_s"}
    figures = {name: measured[names.get(name, name)] for name in COMPARED} | {"repetitions": repetitions}
    print_table(console, terminal.comparison_table(figures))
    say_doubts(figures, "the speedup", console)
    return figures


def say_doubts(figures: Mapping[str, Any], what: str, console: Console) -> None:
    """Prints why a speedup is not to be trusted, if it is not."""
    if found := terminal.doubts(figures):
        remedy = "measure again while nothing else runs"
        console.print(f"warning: {what}: {'; '.join(found)}: {remedy}", style="red", markup=False, soft_wrap=True)


def single_figures(lm: LanguageModel, generation: Generation) -> dict[str, Any]:
    """The figures of one run; those that need a second way of decoding are None."""
    rate = generation.tokens_per_s if generation.decode_seconds else None
    return {
        "autoregressive_tokens_per_s": None if lm.drafter else rate,
        "speculative_tokens_per_s": rate if lm.drafter else None,
        "speedup": None,
        "identical": None,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        **generation_figures(generation.results, num_spec_tokens(lm)),
        "chosen": chosen_figures(lm, generation.results),
    }


def show(
    lm: LanguageModel,
    prompts: list[str],
    tokens: list[list[int]],
    sampling: Sequence[Sampling],
    console: Console,
    notes: Console,
) -> tuple[Generation, bool]:
    """Generates and prints: a single text as it comes, several one after another at the end.

    Interrupting it (Ctrl-C) keeps what was generated so far. Returns that, and whether it was interrupted.

    Args:
        console: where texts go, and if people read there, their prompts.
        notes: where all else goes.
    """
    alone = len(prompts) == 1
    read = notes is console
    interrupted = False
    if lm.drafter is not None and notes.is_terminal and alone and read:
        notes.print(terminal.legend(beside_ngrams(lm)))
    stream = lm.start(tokens, sampling)
    try:
        with stream:
            with working(notes, "getting ready; a first run compiles for minutes"):
                stream.prefill()
            if alone and read:
                console.print(prompts[0], end="", style="dim", markup=False, soft_wrap=True)
            with progress(notes, sum(each.max_new_tokens for each in sampling), "generating", not alone) as step:
                while not stream.finished:
                    before = len(stream.rows[0].acceptance_lengths)
                    pieces = stream.advance(STREAM_STEPS if alone else 64)
                    if alone:
                        print_pieces(lm, pieces, stream.rows[0], before, console)
                    step(count=len(pieces))
    except KeyboardInterrupt:
        interrupted = True
    generation = stream.generation()
    if alone:
        console.print()
    else:
        for number, (prompt, result) in enumerate(zip(prompts, generation, strict=True), 1):
            if read:
                seed = "" if result.seed is None else f", seed {result.seed}"
                console.rule(f"{number} of {len(prompts)} ({result.finish_reason}{seed})")
                console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
                console.print(result.text, markup=False, soft_wrap=True)
            elif not console.quiet:
                console.file.write(f"{result.text}\n")
    return generation, interrupted


def print_pieces(lm: LanguageModel, pieces: Sequence[Piece], row: OutputProcessor, before: int, console: Console) -> None:
    """Prints the tokens of all rounds but the first `before` in the colours of their sources."""
    if not console.is_terminal:
        if not console.quiet:  # as another process than the first is
            console.file.write("".join(piece.text for piece in pieces))
            console.file.flush()
        return
    mixed = bool(beside_ngrams(lm))
    rounds = zip(row.acceptance_lengths, round_drafters(row, lm.drafter), strict=True)
    sources = [name for added, name in list(rounds)[before:] for _ in range(added)]
    for piece, source in zip(pieces, sources, strict=True):
        console.print(terminal.piece_text(piece.text, piece.drafted, mixed and source == NGRAM), end="", soft_wrap=True)


def beside_ngrams(lm: LanguageModel) -> str:
    """Names of the drafters that n-grams take turns with; empty where they draft alone, or do not."""
    members = lm.drafter.members if isinstance(lm.drafter, Team) else ()
    return ", ".join(one.other.name for one in members if isinstance(one, NGramsFirst))
