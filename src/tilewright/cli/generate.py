"""`tilewright generate`: generates text with a language model and its drafter, or with a diffusion model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.compare import compare, environment
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.speculative import encoded
from tilewright.cli.common import AdaptedModelOptions, DeviceOptions, gather_prompts, given
from tilewright.cli.diffuse import DiffuseOutputs, ResponseOptions, respond
from tilewright.cli.diffusion_options import (
    DenoisingOption,
    DenoisingSettings,
    diffusion_model_options,
    is_diffusion,
)
from tilewright.cli.options import (
    COMMON,
    OUTPUT,
    SAMPLING,
    Flag,
    Prompt,
    PromptFile,
    Repeated,
    TemplateOptions,
    changed_options,
    option_class,
    settings,
)
from tilewright.cli.outputs import OutputFiles, progress, working, write_json, write_replay_page
from tilewright.compiled.ledger import Ledger
from tilewright.diffusion.options import SAMPLED
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

CHAT_HELP = """format the prompts as user messages, with the model's chat template; the default for smollm2-135m."""
STREAM_STEPS = 4
"""Decode steps or rounds per dispatch while text is shown."""
REPETITIONS = 5
"""Timed runs of `--compare` for each way of decoding."""


@dataclass(frozen=True)
class SamplingSettings:
    """Further sampling settings.

    Attributes:
        min_p: sample from tokens at least this share as likely as the most likely one; 0 for all.
        repetition_penalty: divides the logits of tokens in the prompt or the text so far; 1 for none.
        presence_penalty: subtracted from the logit of every generated token, from -2 to 2.
        frequency_penalty: subtracted from the logit once per occurrence in the generated text, from -2 to 2.
        logit_bias: TOKEN:BIAS, a token id and the number added to its logit, from -100 to 100.
        min_tokens: tokens to generate before the text may end.
        stop_token_ids: ids of further tokens that end generation.
        include_stop: keep the stop string or token at the end of the text.
        skip_special_tokens: leave special tokens out of the text. By default true.
        ignore_eos: continue after the end-of-sequence token.
    """

    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[str, ...] = ()
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False


@option_class(group=SAMPLING)
class SamplingOptions:
    """Options of sampling.

    Attributes:
        max_new_tokens: maximum number of tokens of each text.
        temperature: 0 chooses the most likely token.
        top_p: sample from the smallest set of most likely tokens with this total probability.
        top_k: sample from this many most likely tokens; 0 for all.
        seed: seed of the random numbers. By default each prompt gets a new one, which is printed.
        stop: text that ends generation; repeat the option for several.
    """

    max_new_tokens: Annotated[int | None, Parameter(alias="-n", group=COMMON)] = 160
    temperature: Annotated[float | None, Parameter(group=COMMON)] = 0.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: Annotated[int | None, Parameter(alias="-s")] = None
    stop: Repeated = ()
    sampling: Annotated[SamplingSettings, settings(SamplingSettings, "further settings of sampling")] = SamplingSettings()

    def parameters(self, defaults: Mapping[str, Any] | None = None) -> Sampling:
        """Makes the sampling parameters of the options.

        Args:
            defaults: values of options that are None.

        Raises:
            ValueError: a value is out of its range.
        """
        values = {**vars(self), **vars(self.sampling)}
        del values["sampling"]
        chosen = {name: value for name, value in values.items() if value is not None}
        return Sampling(**{**(defaults or {}), **chosen, "logit_bias": tuple(map(biased_token, self.sampling.logit_bias))})

    def refuse_for_denoising(self) -> None:
        """Raises a `ValueError` for options that search or change texts, since whole denoised responses are printed."""
        wrong = changed_options(self, "stop")
        for name in ("include_stop", "skip_special_tokens"):
            if getattr(self.sampling, name) != getattr(SamplingSettings(), name):
                wrong.append(f"--sampling {name}")
        if wrong:
            raise ValueError(f"{wrong[0]} is not offered by generate for a masked diffusion model; use serve")


def biased_token(text: str) -> tuple[int, float]:
    """Parses a token and its bias from "TOKEN:BIAS"."""
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"--sampling: expected logit_bias=TOKEN:BIAS,..., found {text!r}") from None


@option_class(group=OUTPUT)
class GenerateOutputs(OutputFiles):
    """Options of output besides the text.

    Attributes:
        compare_both: also decode without the drafter, in alternation, and print a table of both.
        replay: write an HTML page that replays the text round by round, with and without the drafter.
    """

    compare_both: Annotated[Flag, Parameter(name="--compare", group=COMMON)] = False
    replay: Path | None = None


def generate(
    *prompt: Prompt,
    prompt_file: PromptFile = None,
    chat: Annotated[bool | None, Parameter(help=CHAT_HELP, group=COMMON)] = None,
    models: AdaptedModelOptions = AdaptedModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    options: SamplingOptions = SamplingOptions(),
    outputs: GenerateOutputs = GenerateOutputs(),
    templates: TemplateOptions = TemplateOptions(),
    denoising: DenoisingOption = DenoisingSettings(),
) -> None:
    """Generates text and marks the drafted tokens; with a diffusion model, shows each denoising step.

    Args:
        prompt: texts to continue, "-" for standard input; several texts form a batch.
    """
    console = outputs.console()
    notes = outputs.notes(console)
    sampled = options.parameters()
    if is_diffusion(models, notes):
        denoise(prompt, prompt_file, chat, models, devices, options, outputs, templates, denoising)
        return
    blocks = denoising.for_decoder(models.folder(notes))
    examples = gather_prompts(prompt, prompt_file, models.model, command=generate)
    template = models.prompt_template(True if templates.chat_template else chat, notes, templates)
    lm = models.load(notes, devices, decoding=None if blocks is None else "blocks")
    lm.denoising = given(blocks, lm.denoising)
    for option, value in (("--replay", outputs.replay), ("--compare", outputs.compare_both)):
        if value and lm.drafter is None:
            raise ValueError(f"{option} needs a drafter; name one with --drafter")
    texts = [prompt_text(example, (), template) for example in examples]
    tokens = [encoded(lm, text, template) for text in texts]
    sampling = lm.each_sampling(tokens, sampled)
    shown = texts if template is None else [f"{prompt_text(example, (), None)}\n\n" for example in examples]
    with Ledger() as ledger:
        generation, interrupted = show(lm, shown, tokens, sampling, console, notes)
        figures: dict[str, Any] = single_figures(lm, generation)
        notes.print(end_line(lm, generation, sampling, figures["chosen"]), style="dim", markup=False, soft_wrap=True)
        if outputs.compare_both and not interrupted:
            figures |= comparison(lm, tokens, sampling, notes)
            if figures["chosen"] is not None:
                notes.print(terminal.chosen_line(figures["chosen"]), markup=False, soft_wrap=True)
    names = ["text", "tokens", "finish_reason", "seed"]
    if sum(each.passes for each in generation):
        names += ["passes", "tokens_per_pass"]
    results = {name: [getattr(each, name) for each in generation] for name in names}
    write_json(outputs.json_file, {**figures, **ledger.figures(), **environment(lm), **results})
    if outputs.replay is not None and not interrupted:
        titled = [(f"prompt {n}", each) for n, each in enumerate(tokens, 1)]
        write_replay_page(outputs.replay, lm, (models.model, models.drafter_name), titled, sampling, notes)


def denoise(
    prompt: Sequence[str],
    prompt_file: Path | None,
    chat: bool | None,
    models: AdaptedModelOptions,
    devices: DeviceOptions,
    options: SamplingOptions,
    outputs: GenerateOutputs,
    templates: TemplateOptions,
    denoising: DenoisingSettings,
) -> None:
    """Denoises with a diffusion model.

    Raises:
        ValueError: an option is not supported by diffusion models.
    """
    options.refuse_for_denoising()
    others = [*(["--compare"] if outputs.compare_both else []), *changed_options(templates)]
    if others:
        raise ValueError(f"{others[0]} is for models that decode token by token; {models.model} denoises")
    length = options.max_new_tokens if changed_options(options, "max_new_tokens") else ResponseOptions.new_tokens
    denoising.check_mode()
    sampling = options.parameters({"temperature": 0.0})
    request = denoising.applied(
        new_tokens=given(length, ResponseOptions.new_tokens), **{name: getattr(sampling, name) for name in SAMPLED}
    )
    shown = DiffuseOutputs(json_file=outputs.json_file, replay=outputs.replay)
    respond(prompt, prompt_file, bool(chat), diffusion_model_options(models), devices, request, shown)


def end_line(lm: LanguageModel, generation: Generation, sampling: Sequence[Sampling], chosen: Mapping[str, Any] | None) -> str:
    """Returns the last line of a generation: tokens/s, τ, drafters, finish reason and seed."""
    results = list(generation)
    tokens = sum(len(result.tokens) for result in results)
    rounds = sum(len(result.acceptance_lengths) for result in results) if lm.drafter is not None else 0
    parts = [terminal.answer_line(tokens, generation.decode_seconds, rounds, chosen or {"choices": []})] if tokens else []
    if passes := sum(result.passes for result in results):
        parts.append(f"{tokens / passes:.2f} tokens per pass")
    ends = Counter(ending(result, each) for result, each in zip(results, sampling, strict=True))
    parts += [end if len(results) == 1 else f"{count} {end}" for end, count in ends.items()]
    if len(results) == 1 and results[0].seed is not None:
        parts.append(f"seed {results[0].seed}")
    return " · ".join(parts)


def ending(result: Result, sampling: Sampling) -> str:
    """Describes why a text ended."""
    if result.finish_reason == "length":
        return f"cut at --max-new-tokens {sampling.max_new_tokens}"
    if result.finish_reason == "stop":
        return f"stopped at {result.stop_reason!r}"
    return "ended by the model" if result.finish_reason == "eos" else result.finish_reason


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
"""Figures of `--compare`, defined in docs/metrics.md."""


def comparison(lm: LanguageModel, tokens: Sequence[list[int]], sampling: Sequence[Sampling], console: Console) -> Any:
    """Measures and prints decoding with and without the drafter. Returns the figures."""
    with progress(console, 2 * (REPETITIONS + 1), "comparing") as step:
        measured = compare(lm, [tokens], sampling, REPETITIONS, step)
    names = {"autoregressive_tokens_per_s": "baseline_tokens_per_s", "speculative_tokens_per_s": "tokens_per_s"}
    figures = {name: measured[names.get(name, name)] for name in COMPARED} | {"repetitions": REPETITIONS}
    print_table(console, terminal.comparison_table(figures))
    print_doubts(figures, "the speedup", console)
    return figures


def print_doubts(figures: Mapping[str, Any], label: str, console: Console) -> None:
    """Prints a warning if the measurement of a speedup is unreliable."""
    if found := terminal.doubts(figures):
        remedy = "measure again while nothing else runs"
        console.print(f"warning: {label}: {'; '.join(found)}: {remedy}", style="red", markup=False, soft_wrap=True)


def single_figures(lm: LanguageModel, generation: Generation) -> dict[str, Any]:
    """Returns the figures of one run; figures that compare with plain decoding are None."""
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
    """Generates and prints texts: streams a single text, prints several after generation.

    Ctrl-C ends generation and keeps the tokens so far.

    Args:
        console: receives the texts, and the prompts if it is a terminal.
        notes: receives all other lines.

    Returns:
        the generation, and True if it was interrupted.
    """
    is_single = len(prompts) == 1
    terminal_only = notes is console
    interrupted = False
    if lm.drafter is not None and notes.is_terminal and is_single and terminal_only:
        notes.print(terminal.legend(beside_ngrams(lm)))
    stream = lm.start(tokens, sampling)
    try:
        with stream:
            with working(notes, "preparing (the first run compiles for minutes)"):
                stream.prefill()
            if is_single and terminal_only:
                console.print(prompts[0], end="", style="dim", markup=False, soft_wrap=True)
            with progress(notes, sum(each.max_new_tokens for each in sampling), "generating", not is_single) as step:
                while not stream.finished:
                    before = len(stream.rows[0].acceptance_lengths)
                    pieces = stream.advance(STREAM_STEPS if is_single else 64)
                    if is_single:
                        print_pieces(lm, pieces, stream.rows[0], before, console)
                    step(count=len(pieces))
    except KeyboardInterrupt:
        interrupted = True
    generation = stream.generation()
    if is_single:
        console.print()
    else:
        for number, (prompt, result) in enumerate(zip(prompts, generation, strict=True), 1):
            if terminal_only:
                seed = "" if result.seed is None else f", seed {result.seed}"
                console.rule(f"{number} of {len(prompts)} ({result.finish_reason}{seed})")
                console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
                console.print(result.text, markup=False, soft_wrap=True)
            elif not console.quiet:
                console.file.write(f"{result.text}\n")
    return generation, interrupted


def print_pieces(lm: LanguageModel, pieces: Sequence[Piece], row: OutputProcessor, before: int, console: Console) -> None:
    """Prints the tokens of the rounds after the first `before`, coloured by their source."""
    if not console.is_terminal:
        if not console.quiet:  # only the first process prints
            console.file.write("".join(piece.text for piece in pieces))
            console.file.flush()
        return
    mixed = bool(beside_ngrams(lm))
    rounds = zip(row.acceptance_lengths, round_drafters(row, lm.drafter), strict=True)
    sources = [name for added, name in list(rounds)[before:] for _ in range(added)]
    for piece, source in zip(pieces, sources, strict=True):
        console.print(terminal.piece_text(piece.text, piece.drafted, mixed and source == NGRAM), end="", soft_wrap=True)


def beside_ngrams(lm: LanguageModel) -> str:
    """Returns the names of the drafters that draft where n-grams find nothing; empty without such drafters."""
    members = lm.drafter.members if isinstance(lm.drafter, Team) else ()
    return ", ".join(one.other.name for one in members if isinstance(one, NGramsFirst))
