"""Data of the denoising replay: for each step the committed tokens, the span and the salient share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.bench.diffusion import denoise, environment
from tilewright.bench.replay import TIMED, token_texts
from tilewright.diffusion.options import Denoising
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.report.denoising import DenoisingPassage, DenoisingReplay, DenoisingStep, Placed
from tilewright.report.replay import ReplayToken


def plain(request: Denoising) -> Denoising:
    """Returns the request with dense steps: the same quota, or one token per step for requests with a threshold."""
    return replace(request, mode="dense", threshold=None, suffix_window=None, first_alone=False)


def run_steps(model: DiffusionModel, prompt: Sequence[int], request: Denoising) -> list[DenoisingStep]:
    """Denoises one prompt step by step. The time of the fastest uninterrupted run is divided over the steps in proportion to
    their individual times."""
    whole = min(denoise(model, [prompt], request, 1, lambda _: None).seconds for _ in range(TIMED))
    session = model.start([prompt], request)
    mask = model.config.mask_token_id
    before = session.tokens()[0]
    found = []
    while not session.finished:
        started_at = time.perf_counter()
        session.advance(1)
        report = session.reports[-1]
        seconds = time.perf_counter() - started_at
        after = session.tokens()[0]
        places = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old == mask != new]
        found.append((seconds, report, places))
        before = after
    places = [place for place, token in enumerate(before) if token != mask]
    texts = dict(zip(places, token_texts(model, [before[place] for place in places], prompt), strict=True))
    share = whole / sum(seconds for seconds, _, _ in found)
    size = len(prompt) + request.new_tokens
    return [
        DenoisingStep(
            seconds=seconds * share,
            span=report.span,
            committed=[Placed(place, ReplayToken(before[place], texts[place])) for place in placed],
            salient=[] if request.computes_all else (report.salient[0] / size).tolist(),
        )
        for seconds, report, placed in found
    ]


def denoising_replay(
    model: DiffusionModel,
    name: str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    requests: Sequence[Denoising],
    on_passage: Callable[[], None] = lambda: None,
) -> DenoisingReplay:
    """Returns the data for `report.denoising.write_denoising`.

    Args:
        name: name of the model.
        prompts: title and tokens of each passage.
        requests: one request per prompt, with different seeds.
    """
    passages = []
    for (title, prompt), request in zip(prompts, requests, strict=True):
        runs = [run_steps(model, prompt, each) for each in (plain(request), request)]
        passages.append(DenoisingPassage(title, model.tokenizer.decode(list(prompt)), runs[0], runs[1]))
        on_passage()
    first = requests[0]
    usual = vars(Denoising())
    settings = {
        field: value
        for field, value in vars(first).items()
        if field in ("new_tokens", "block_length", "remasking") or (value != usual[field] and field not in ("mode", "saliency"))
    }
    if first.mode == "sparse":
        settings |= vars(first.saliency)
    about = {**environment(model), **settings}
    return DenoisingReplay("Denoising, step by step", name, first.mode, first.block, passages, about)
