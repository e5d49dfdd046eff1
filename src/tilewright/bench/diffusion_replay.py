"""Data of the denoising replay: every step with what it committed, what it looked at, and what was salient."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.bench.diffusion import denoise, environment
from tilewright.bench.replay import TIMED, token_texts
from tilewright.diffusion.model import DiffusionModel
from tilewright.diffusion.options import Denoising
from tilewright.report.denoising import DenoisingPassage, DenoisingReplay, DenoisingStep, Placed
from tilewright.report.replay import ReplayToken


def plain(request: Denoising) -> Denoising:
    """The request whose steps compute everything: with the same quota, or one token a step where there is a threshold."""
    return replace(request, mode="dense", threshold=None, suffix_window=None)


def steps_of(model: DiffusionModel, prompt: Sequence[int], request: Denoising) -> list[DenoisingStep]:
    """Denoises one prompt step by step. Times are those of a run in one piece, the fastest of a few; its steps share them in
    proportion to what they take one by one."""
    whole = min(denoise(model, [prompt], request, 1, lambda _: None).seconds for _ in range(TIMED))
    session = model.start([prompt], request)
    mask = model.config.mask_token_id
    before = session.tokens()[0]
    found = []
    while not session.finished:
        began = time.perf_counter()
        (report,) = session.advance(1)
        took = time.perf_counter() - began
        after = session.tokens()[0]
        places = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old == mask != new]
        found.append((took, report, places))
        before = after
    places = [place for place, token in enumerate(before) if token != mask]
    texts = dict(zip(places, token_texts(model, [before[place] for place in places], prompt), strict=True))
    share = whole / sum(took for took, _, _ in found)
    size = len(prompt) + request.new_tokens
    return [
        DenoisingStep(
            seconds=took * share,
            span=report.span,
            committed=[Placed(place, ReplayToken(before[place], texts[place])) for place in placed],
            salient=[] if request.computes_all else (report.salient[0] / size).tolist(),
        )
        for took, report, placed in found
    ]


def denoising_replay(
    model: DiffusionModel,
    name: str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    requests: Sequence[Denoising],
    on_passage: Callable[[], None] = lambda: None,
) -> DenoisingReplay:
    """Everything that `report.denoising.write_denoising` shows.

    Args:
        name: of the model.
        prompts: title and tokens of each passage.
        requests: one each; they differ in their seeds.
    """
    passages = []
    for (title, prompt), request in zip(prompts, requests, strict=True):
        both = [steps_of(model, prompt, each) for each in (plain(request), request)]
        passages.append(DenoisingPassage(title, model.tokenizer.decode(list(prompt)), both[0], both[1]))
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
