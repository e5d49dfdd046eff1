"""`tilewright diffuse`: denoises a response with a diffusion language model and shows each step."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.diffusion import DenoisingRun, environment, run_figures
from tilewright.bench.diffusion_replay import denoising_replay
from tilewright.cli.common import DeviceOptions, gather_prompts, stopped_by_interrupt
from tilewright.cli.diffusion_options import (
    DEMO,
    DenoisingOption,
    DenoisingSettings,
    DiffusionModelOptions,
    encoded_prompts,
    held_out_problems,
)
from tilewright.cli.options import COMMON, OUTPUT, SAMPLING, Chat, Flag, Prompt, PromptFile, option_class
from tilewright.cli.outputs import OutputFiles, progress, progress_console, write_file, write_json
from tilewright.compiled.ledger import Ledger
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.steps import STEPS_PER_DISPATCH
from tilewright.llm.diffusion_model import Denoised, DenoisingStream, DiffusionModel
from tilewright.models.tokenizer import StreamDecoder
from tilewright.report.denoising import write_denoising
from tilewright.report.unmasking import Piece, figures_line, frame

FRAME_S = 1 / 8
"""Target time between two frames, in seconds."""


@option_class(group=SAMPLING)
class ResponseOptions:
    """Options of the responses.

    Attributes:
        new_tokens: length of each response, a multiple of the block length.
        temperature: 0 chooses the most likely token.
        top_p: sample from the smallest set of most likely tokens with this total probability.
        seed: seed of the random numbers. By default each response that samples gets a new one, which is printed.
        ignore_eos: continue after the end-of-sequence token.
    """

    new_tokens: Annotated[int, Parameter(alias="-n", group=COMMON)] = 128
    temperature: Annotated[float, Parameter(group=COMMON)] = 0.0
    top_p: float = 1.0
    seed: Annotated[int | None, Parameter(alias="-s")] = None
    ignore_eos: Flag = False

    def request(self, denoising: DenoisingSettings) -> Denoising:
        """Makes the request. Raises a `ValueError` for a value out of its range, and for sparse settings in another mode."""
        denoising.check_mode()
        return denoising.applied(**vars(self))


@option_class(group=OUTPUT)
class DiffuseOutputs(OutputFiles):
    """Options of output besides the text.

    Attributes:
        replay: write an HTML page that replays the response step by step, beside dense steps.
    """

    replay: Path | None = None


def diffuse(
    *prompt: Prompt,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    models: DiffusionModelOptions = DiffusionModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    response: ResponseOptions = ResponseOptions(),
    denoising: DenoisingOption = DenoisingSettings(),
    outputs: DiffuseOutputs = DiffuseOutputs(),
) -> None:
    """Denoises a response with a diffusion language model and shows each step.

    Args:
        prompt: texts to respond to, "-" for standard input; several texts form batches.
    """
    respond(prompt, prompt_file, chat, models, devices, response.request(denoising), outputs)


def respond(
    prompt: Sequence[str],
    prompt_file: Path | None,
    chat: bool,
    models: DiffusionModelOptions,
    devices: DeviceOptions,
    request: Denoising,
    outputs: DiffuseOutputs,
) -> None:
    """Denoises a response to every prompt with one request's options, and shows each step."""
    console = outputs.console()
    otherwise = [held_out_problems(1)[0].prompt] if models.model == DEMO else []
    examples = gather_prompts(prompt, prompt_file, models.model, otherwise, diffuse)
    template = models.prompt_template(chat, console)
    model = models.load_model(console, devices=devices)
    texts = [prompt_text(example, (), template) for example in examples]
    if models.model == DEMO:
        texts = [text if text.endswith("\n") else f"{text}\n" for text in texts]  # its training problems end with a newline
    tokens = encoded_prompts(model, texts, template)
    for each in tokens:
        model.check(each, request)
    with Ledger() as ledger:
        run, interrupted = show(model, texts, tokens, request, console)
    figures = {"seconds": run.seconds, "tokens_per_s": run.tokens / run.seconds if run.seconds else None, **run_figures(run)}
    console.print(figures_line(figures), style="dim", markup=False, soft_wrap=True)
    names = {
        "text": "text",
        "response_tokens": "tokens",
        "finish_reason": "finish_reason",
        "seed": "seed",
        "committed": "committed",
        "passes": "passes",
        "tokens_per_pass": "tokens_per_pass",
    }
    results = {name: [getattr(result, field) for result in run.results] for name, field in names.items()}
    settings = {**vars(request), "saliency": vars(request.saliency)}
    del settings["seed"], settings["steps"]
    about = {**environment(model), "model": models.model, **settings, "steps_asked": request.steps}
    write_json(outputs.json_file, {**figures, **ledger.figures(), **about, **results})
    if outputs.replay is not None and not interrupted:
        requests = [replace(request, seed=result.seed) for result in run.results]
        titled = [(f"prompt {n}", each) for n, each in enumerate(tokens, 1)]
        with progress(console, len(tokens), "replay") as step:
            shown = denoising_replay(model, models.model, titled, requests, step)
        write_file(console, outputs.replay, lambda partial: write_denoising(partial, shown))


def show(
    model: DiffusionModel,
    texts: Sequence[str],
    tokens: Sequence[list[int]],
    request: Denoising,
    console: Console,
) -> tuple[DenoisingRun, bool]:
    """Denoises and prints responses: shows a single response live, prints several at the end.

    Ctrl-C ends denoising and keeps the tokens committed so far.

    Returns:
        the run, and True if it was interrupted.
    """
    run = DenoisingRun([], [], [], 0.0, 0, request.computes_all)
    interrupted = False
    most = model.table.batches[-1]
    live = len(texts) == 1 and console.is_terminal
    with progress(console, len(texts), "denoising", not live) as step:
        for first in range(0, len(texts), most):
            session = model.start(tokens[first : first + most], request)
            session.prefill(progress_console(console) if live else None)
            try:
                if live:
                    show_live(model, session, texts[0], console, run)
                while not session.finished:
                    advance(session, STEPS_PER_DISPATCH, run)
            except KeyboardInterrupt:
                interrupted = True
            run.results += [unfinished(model, result) for result in session.results()] if interrupted else session.results()
            run.reports.append(session.reports)
            run.positions.append([len(each) + request.new_tokens for each in session.prompts])
            step(count=len(session.prompts))
            if interrupted:
                break
    print_texts(texts, run, console)
    if interrupted:
        console.print("interrupted", style="red")
    return run, interrupted


def unfinished(model: DiffusionModel, result: Denoised) -> Denoised:
    """Removes the masks of an interrupted response; a finished response stays as it is."""
    committed = [token for token in result.tokens if token != model.config.mask_token_id]
    if len(committed) == len(result.tokens):
        return result
    return replace(result, tokens=committed, finish_reason="interrupted")


def print_texts(texts: Sequence[str], run: DenoisingRun, console: Console) -> None:
    """Prints the prompts with their responses."""
    for number, (prompt, result) in enumerate(zip(texts, run.results, strict=False), 1):
        seed = "" if result.seed is None else f"seed {result.seed}"
        if len(texts) > 1:
            console.rule(f"{number} of {len(texts)} ({', '.join(filter(None, (result.finish_reason, seed)))})")
        console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
        console.print(result.text, markup=False, soft_wrap=True)
        if len(texts) == 1 and seed:
            console.print(seed, style="dim")


def advance(session: DenoisingStream, steps: int, run: DenoisingRun) -> float:
    """Runs up to `steps` steps in one dispatch and adds them to the run. Returns the seconds per step.

    Ctrl-C takes effect after the dispatch, so that the state and the figures belong to the same step.
    """
    interrupts: list[bool] = []
    with stopped_by_interrupt(lambda: interrupts.append(True)):
        started_at = time.perf_counter()
        before = len(session.reports)
        session.advance(steps)
        seconds = time.perf_counter() - started_at
        run.seconds += seconds
        run.dispatches += 1
    if interrupts:
        raise KeyboardInterrupt
    return seconds / max(len(session.reports) - before, 1)


def show_live(
    model: DiffusionModel,
    session: DenoisingStream,
    prompt: str,
    console: Console,
    run: DenoisingRun,
    steps: int | None = None,
    pause_s: float = 0.0,
) -> None:
    """Denoises one prompt and draws a frame after each dispatch, with the newly committed tokens highlighted.

    Args:
        steps: steps per frame; None for the number of steps that fit into `FRAME_S`.
        pause_s: seconds to wait after each frame.
    """
    count = steps or 1
    before = session.tokens()[0]
    with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
        live.update(frame(console, prompt, pieces(model, before, before, session.prompts[0]), "step 0"), refresh=True)
        while not session.finished:
            each = advance(session, count, run)
            if steps is None:
                count = min(max(round(FRAME_S / each), 1), STEPS_PER_DISPATCH)
            after = session.tokens()[0]
            shown = pieces(model, after, before, session.prompts[0])
            live.update(frame(console, prompt, shown, status(session, run, each)), refresh=True)
            time.sleep(pause_s)
            before = after


def status(session: DenoisingStream, run: DenoisingRun, seconds: float) -> str:
    """Returns the status line below a frame."""
    result = session.results()[0]
    last = session.reports[-1]
    size = len(session.prompts[0]) + session.requests[0].new_tokens
    parts = [f"step {result.steps}", f"{sum(result.committed) / max(result.steps, 1):.2f} tokens per forward"]
    parts += [
        f"{sum(result.committed) / run.seconds:,.0f} tokens/s",
        f"{1000 * seconds:.1f} ms a step",
        f"computed: {last.span}",
    ]
    if not run.computed_all:
        parts.append(f"salient {last.salient[0].mean() / size:.0%}")
    return " · ".join(parts)


def pieces(model: DiffusionModel, tokens: Sequence[int], before: Sequence[int], prompt: Sequence[int]) -> list[Piece]:
    """Pairs the text of each token, None for a mask, with True if the token was a mask before."""
    mask = model.config.mask_token_id
    decoder = StreamDecoder(model.tokenizer, prompt=prompt)
    found: list[Piece] = []
    for new, old in zip(tokens, before, strict=True):
        if new == mask:
            found += [(remainder, False)] if (remainder := decoder.flush()) else []
            found.append((None, False))
        else:
            found.append((decoder.push([new]), old == mask))
    return [*found, (decoder.flush(), False)]
