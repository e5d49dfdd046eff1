"""Measures the quality of each GGUF format, in Tilewright and in llama.cpp on the same file.

    python benchmarks/file_formats.py --llama-python PYTHON --data FOLDER [--text FILE ...] [--kinds KIND ...] [--json FILE]

llama.cpp quantises SmolLM2's file (Q4_1) and a file of random weights to each format. The rows of the random model are
multiples of 256. SmolLM2's rows of 576 are not, so llama.cpp replaces K-quants by other types in all but its down
projections. The scored texts are windows of text files and reference answers (`quality_tasks.py`), with the same token ids on
every side. The reference dequantises the file and computes in float32. "ours" is `weights="auto"`, which keeps the file's
blocks if the kernels read them. The loss over the reference is the cost of 8-bit activations, and of a second quantisation if
the blocks are not kept.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
import numpy as np
from cyclopts import App, Parameter
from int8_quality import windows
from llama_cpp_peer import Peer
from quality import score
from quality_tasks import references
from random_checkpoint import write_gguf
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

import tilewright as tw
from tilewright.cli.common import keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.metrics.tables import print_table
from tilewright.models import published
from tilewright.models.chat import ChatTemplate
from tilewright.models.gguf import open_gguf
from tilewright.models.gguf_blocks import BLOCK_FORMATS
from tilewright.models.published_configs import MODELS
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.runtime.memory import step_bytes

DEMO = "smollm2-135m"
RANDOM = "random"
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
WINDOW = 256
PEER_POSITIONS = 2048
"""Context of llama.cpp, longer than every question with its reference answer."""
SIDES = ("ours", "llama.cpp")

Task = tuple[list[int], int]
"""Token ids, and the index of the first scored token."""


def random_file(folder: Path) -> Path:
    """Writes a model of random weights with SmolLM2's tokenizer, whose rows have 512 and 1,024 weights."""
    demo = published.find(DEMO)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
    file = folder / f"{RANDOM}.gguf"
    write_gguf(file, replace(MODELS[DEMO], **sizes), open_gguf(demo))
    return file


def texts(paths: Sequence[Path], tokenizer: Tokenizer, count: int) -> list[Task]:
    cut = windows([encode(tokenizer, path.read_text(encoding="utf-8"), False) for path in paths], WINDOW)
    return [(window, 1) for window in cut[:count]]


def answers(data: Path, template: ChatTemplate, tokenizer: Tokenizer, count: int) -> list[Task]:
    """Returns `count` reference answers of each data file."""
    found = []
    for each in references(data, template, count):
        prompt, answer = (encode(tokenizer, text, False) for text in (each.prompt, each.answer))
        found.append(([*prompt, *answer], len(prompt)))
    return found


def scores(scorer: Callable[[list[int], int], float], tasks: Sequence[Task], name: str) -> np.ndarray:
    """Returns the negative log-likelihood of each task, in nats."""
    return np.asarray([-scorer(tokens, start) for tokens, start in track(tasks, name, transient=True)])


def figures(losses: dict[str, dict[str, np.ndarray]], task: str, each: Sequence[Task]) -> dict[str, list[float]]:
    """Returns nats per token of the float32 model and the excess of the other sides, with standard errors over the texts."""
    tokens = sum(len(ids) - start for ids, start in each)
    reference = losses["float32"][task]

    def per_token(nats: np.ndarray) -> list[float]:
        return [float(nats.sum() / tokens), float(nats.std(ddof=1) * np.sqrt(len(nats)) / tokens)]

    return {"float32": per_token(reference), **{f"{side}_more": per_token(losses[side][task] - reference) for side in SIDES}}


def compared(file: Path, peer: Peer, tasks: dict[str, list[Task]]) -> dict[str, Any]:
    """Scores one file on every side. Returns its record."""
    types = Counter(tensor.tensor_type.name for tensor in open_gguf(file).tensors.values() if len(tensor.shape) == 2)
    record: dict[str, Any] = {"types": dict(types), "kept": all(name in BLOCK_FORMATS for name in types)}
    losses = dict[str, dict[str, np.ndarray]]()
    for name, weights in (("float32", "dequantised"), ("ours", "auto")):
        lm = tw.load(file, dtype="float32", weights=weights)
        record[f"{name}_step_bytes"] = step_bytes(lm.model.models.target)
        losses[name] = {task: scores(partial(score, lm), each, f"{name}: {task}") for task, each in tasks.items()}
    peer.ask("open", model=str(file), threads=cores(), rows=1, positions=PEER_POSITIONS, flash=False)
    theirs = lambda tokens, start: peer.ask("score", tokens=tokens, start=start)  # noqa: E731
    losses["llama.cpp"] = {task: scores(theirs, each, f"llama.cpp: {task}") for task, each in tasks.items()}
    return {**record, "scored": {task: figures(losses, task, each) for task, each in tasks.items()}}


def table(model: str, found: dict[str, dict[str, Any]], tasks: Sequence[str]) -> Table:
    shown = Table(title=model, caption="nats per token of the float32 model, and excess of the other two")
    for column in ("file", "matrices", "kept", *(f"{task}, {side}" for task in tasks for side in ("float32", *SIDES))):
        shown.add_column(column, justify="left" if column in ("file", "matrices", "kept") else "right")
    for kind, record in found.items():
        cells = []
        for each in record["scored"].values():
            cells.append(f"{each['float32'][0]:.4f}")
            cells += [f"{each[f'{side}_more'][0]:+.4f} ± {each[f'{side}_more'][1]:.4f}" for side in SIDES]
        types = ", ".join(f"{count} {name}" for name, count in sorted(record["types"].items()))
        shown.add_row(kind, types, "yes" if record["kept"] else "no", *cells)
    return shown


def main(
    *,
    llama_python: Path,
    data: Path,
    text: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)] = (Path("docs/cpu.md"),),
    models: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (DEMO, RANDOM),
    kinds: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = KINDS,
    most_windows: int = 16,
    most_answers: int = 8,
    json_file: JsonFile = None,
) -> None:
    """Measures the quality of formats of GGUF files.

    Parameters
    ----------
    llama_python
        A Python interpreter with llama-cpp-python.
    data
        Folder with gsm8k_test.jsonl, humaneval.jsonl, mbpp.jsonl and math500.jsonl.
    text
        Text files to score in windows.
    models
        Models: smollm2-135m, random.
    kinds
        Formats, with llama.cpp's names.
    most_windows
        Maximum number of windows of the texts.
    most_answers
        Maximum number of answers of each data file.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if unknown := [name for name in models if name not in (DEMO, RANDOM)]:
        raise ValueError(f"expected models among {DEMO} and {RANDOM}, found {unknown[0]!r}")
    if min(most_windows, most_answers) < 2:
        raise ValueError(f"expected at least 2 windows and answers, found {most_windows} and {most_answers}")
    console = human_console(json_file)
    demo = published.find(DEMO)
    keep_programs()
    tokenizer = load_tokenizer(demo)
    template = ChatTemplate.load(demo)
    assert template is not None, "SmolLM2's file has a chat template"
    tasks = {"text": texts(text, tokenizer, most_windows), "answers": answers(data, template, tokenizer, most_answers)}
    tokens = {task: sum(len(ids) - start for ids, start in each) for task, each in tasks.items()}
    report: dict[str, Any] = {
        "chip": chip_name(),
        "tilewright": tw.__version__,
        "jax": jax.__version__,
        "window": WINDOW,
        "text": [path.name for path in text],
        "scored_tokens": tokens,
        "data": {},
        "tasks": {task: len(each) for task, each in tasks.items()},
    }
    with Peer(llama_python) as peer, TemporaryDirectory() as folder:
        report["llama_cpp_python"] = peer.ask("about")
        for model in models:
            source = demo if model == DEMO else random_file(Path(folder))
            found = report["data"][model] = {}
            for kind in kinds:
                file = Path(folder) / f"{model}-{kind}.gguf"
                peer.ask("quantise", source=str(source), target=str(file), kind=kind)
                found[kind] = compared(file, peer, tasks)
                write_json(None if json_file == "-" else json_file, report)  # keeps the results if a later file fails
            print_table(console, table(model, found, list(tasks)))
    write_json(json_file, report)


if __name__ == "__main__":
    app = App(name="file_formats", help=__doc__)
    app.default(main)
    app()
