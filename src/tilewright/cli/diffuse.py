"""`tilewright diffuse`: a response of a diffusion language model, as its masks give way."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.diffusion import DenoisingRun, environment, run_figures
from tilewright.bench.diffusion_replay import denoising_replay
from tilewright.cli.common import DeviceOptions, gather_prompts, stopped_by_interrupt
from tilewright.cli.diffusion_options import DEMO, DiffusionModelOptions, StepOptions, encoded_prompts, held_out_problems
from tilewright.cli.options import Chat, Prompt, PromptFile, option_class
from tilewright.cli.outputs import OutputFiles, progress, progress_console, write_file, write_json
from tilewright.compiled.ledger import Ledger
from tilewright.diffusion.model import Denoised, DiffusionModel, DiffusionSession
from tilewright.diffusion.options import Denoising, Mode, Saliency
from tilewright.diffusion.steps import STEPS_PER_DISPATCH
from tilewright.models.tokenizer import StreamDecoder
from tilewright.report.denoising import write_denoising
from tilewright.report.unmasking import Piece, figures_line, frame

FRAME_S = 1 / 8
"""Seconds that the steps between two frames take, about, unless their number is given."""


@option_class
class ResponseOptions:
    """Options of the responses that are asked for.

    Attributes:
        new_tokens: the length of each response, a multiple of the block length.
        mode: which positions a step computes: "dense" all; "prefix" those from the block on, "dual" the block's alone, over
            cached keys and values; "sparse" those that are salient.
        threshold: each step commits all tokens at least this likely; without one, a quota.
        tau: sparse: a position is salient where the cosine between its attention contexts of two steps is below; above 1, all.
        suffix_window: how many positions behind the block a step knows of; by default all.
        seed: the same seed gives the same response; without one, each that draws gets its own, which is shown.
        ignore_eos: go on past the end-of-sequence token.
    """

    new_tokens: int = 128
    mode: Mode = "dense"
    threshold: float | None = None
    tau: float = Saliency.tau
    suffix_window: int | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def request(self, options: StepOptions) -> Denoising:
        """Raises a `ValueError` for what is out of its range, or says something of sparse steps where there are none."""
        dense = options.request(self.new_tokens, self.seed, self.tau)
        asks = {name: getattr(self, name) for name in ("mode", "threshold", "suffix_window", "ignore_eos")}
        if self.mode != "sparse":
            options.require_sparse(dense.saliency, "--mode", self.mode)
        return replace(dense, **asks)


@option_class
class DiffuseOutputs(OutputFiles):
    """Options of what is made besides the text.

    Attributes:
        steps_per_frame: denoising steps from one frame in the terminal to the next; by default as many as an eighth of a
            second holds.
        replay: write an HTML page that plays the response step by step, beside dense steps.
    """

    steps_per_frame: int | None = None
    replay: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_frame is not None and not 1 <= self.steps_per_frame <= STEPS_PER_DISPATCH:
            raise ValueError(f"expected steps_per_frame from 1 to {STEPS_PER_DISPATCH}, found {self.steps_per_frame}")


def diffuse(
    *prompt: Prompt,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    models: DiffusionModelOptions = DiffusionModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    asked: ResponseOptions = ResponseOptions(),
    options: StepOptions = StepOptions(),
    outputs: DiffuseOutputs = DiffuseOutputs(),
) -> None:
    """Denoises a response with a diffusion language model, and shows how its masks give way.

    Args:
        prompt: texts to respond to, "-" for standard input; several form batches.
    """
    console = outputs.console()
    request = asked.request(options)
    otherwise = [held_out_problems(1)[0].prompt] if models.model == DEMO else []
    examples = gather_prompts(prompt, prompt_file, models.model, otherwise, diffuse)
    template = models.asked_template(chat, console)
    model = models.load_model(console, devices=devices)
    texts = [prompt_text(example, (), template) for example in examples]
    if models.model == DEMO:
        texts = [text if text.endswith("\n") else f"{text}\n" for text in texts]  # as its problems end
    tokens = encoded_prompts(model, texts, template)
    for each in tokens:
        model.check(each, request)
    with Ledger() as ledger:
        run, interrupted = show(model, texts, tokens, request, outputs.steps_per_frame, console)
    figures = {"seconds": run.seconds, "tokens_per_s": run.tokens / run.seconds if run.seconds else None, **run_figures(run)}
    console.print(figures_line(figures), style="dim", markup=False, soft_wrap=True)
    said = {name: [getattr(result, name) for result in run.results] for name in ("text", "tokens", "finish_reason", "seed")}
    said["response_tokens"] = said.pop("tokens")
    said["committed"] = [result.committed for result in run.results]
    settings = {**vars(request), "saliency": vars(request.saliency)}
    del settings["seed"], settings["steps"]
    about = {**environment(model), "model": models.model, **settings, "steps_asked": request.steps}
    write_json(outputs.json_file, {**figures, **ledger.figures(), **about, **said})
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
    steps_per_frame: int | None,
    console: Console,
) -> tuple[DenoisingRun, bool]:
    """Denoises and prints: a single response as it comes, several one after another at the end.

    Interrupting it (Ctrl-C) keeps what was there so far. Returns that, and whether it was interrupted.
    """
    run = DenoisingRun([], [], [], 0.0, 0, request.computes_all)
    interrupted = False
    most = model.table.batches[-1]
    live = len(texts) == 1 and console.is_terminal
    with progress(console, len(texts), "denoising", not live) as step:
        for first in range(0, len(texts), most):
            session = model.start(tokens[first : first + most], request)
            model.programs.warm(model.programs.keys(session.shape), progress_console(console) if live else None)
            try:
                if live:
                    show_live(model, session, texts[0], steps_per_frame, console, run)
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
    """The tokens there are of a response that was interrupted; one that had come to its end is whole."""
    kept = [token for token in result.tokens if token != model.config.mask_token_id]
    return result if len(kept) == len(result.tokens) else replace(result, tokens=kept, finish_reason="interrupted")


def print_texts(texts: Sequence[str], run: DenoisingRun, console: Console) -> None:
    """The prompts with their responses."""
    for number, (prompt, result) in enumerate(zip(texts, run.results, strict=False), 1):
        seed = "" if result.seed is None else f"seed {result.seed}"
        if len(texts) > 1:
            console.rule(f"{number} of {len(texts)} ({', '.join(filter(None, (result.finish_reason, seed)))})")
        console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
        console.print(result.text, markup=False, soft_wrap=True)
        if len(texts) == 1 and seed:
            console.print(seed, style="dim")


def advance(session: DiffusionSession, steps: int, run: DenoisingRun) -> float:
    """Runs up to so many steps in one dispatch, adds them to the run, and returns the seconds of each.

    Ctrl-C interrupts after the dispatch: within it, state and figures would be those of different steps.
    """
    interrupts: list[bool] = []
    with stopped_by_interrupt(lambda: interrupts.append(True)):
        began = time.perf_counter()
        ran = session.advance(steps)
        seconds = time.perf_counter() - began
        run.seconds += seconds
        run.dispatches += 1
    if interrupts:
        raise KeyboardInterrupt
    return seconds / max(len(ran), 1)


def show_live(
    model: DiffusionModel,
    session: DiffusionSession,
    prompt: str,
    steps_per_frame: int | None,
    console: Console,
    run: DenoisingRun,
    pause_s: float = 0.0,
) -> None:
    """Denoises one prompt, a frame after each dispatch; what the last one committed stands out.

    Args:
        pause_s: seconds that each frame stands.
    """
    steps = steps_per_frame or 1
    before = session.tokens()[0]
    with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
        live.update(frame(console, prompt, pieces(model, before, before, session.prompts[0]), "step 0"), refresh=True)
        while not session.finished:
            each = advance(session, steps, run)
            if steps_per_frame is None:
                steps = min(max(round(FRAME_S / each), 1), STEPS_PER_DISPATCH)
            after = session.tokens()[0]
            shown = pieces(model, after, before, session.prompts[0])
            live.update(frame(console, prompt, shown, status(session, run, each)), refresh=True)
            time.sleep(pause_s)
            before = after


def status(session: DiffusionSession, run: DenoisingRun, seconds: float) -> str:
    """The line below a frame."""
    done = session.results()[0]
    last = session.reports[-1]
    size = len(session.prompts[0]) + session.requests[0].new_tokens
    parts = [f"step {done.steps}", f"{sum(done.committed) / max(done.steps, 1):.2f} tokens per forward"]
    parts += [
        f"{sum(done.committed) / run.seconds:,.0f} tokens/s",
        f"{1000 * seconds:.1f} ms a step",
        f"looked at: {last.span}",
    ]
    if not run.computed_all:
        parts.append(f"salient {last.salient[0].mean() / size:.0%}")
    return " · ".join(parts)


def pieces(model: DiffusionModel, tokens: Sequence[int], before: Sequence[int], prompt: Sequence[int]) -> list[Piece]:
    """Text that each token of a response adds, None for masks; and whether it was a mask before."""
    mask = model.config.mask_token_id
    decoder = StreamDecoder(model.tokenizer, prompt=prompt)
    found: list[Piece] = []
    for new, old in zip(tokens, before, strict=True):
        if new == mask:
            found += [(rest, False)] if (rest := decoder.flush()) else []
            found.append((None, False))
        else:
            found.append((decoder.push([new]), old == mask))
    return [*found, (decoder.flush(), False)]
