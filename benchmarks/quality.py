"""Measures the quality of weight formats on a GGUF file, and of llama.cpp on the same file.

Two tasks. `likelihood`: the likelihood of reference answers (GSM8K, HumanEval, MBPP, MATH-500), given the question in the
model's chat template, with the same token ids on every side. `mbpp`: greedy answers to MBPP's 500 test problems, whose programs
are run; n-gram drafts must not change an answer.

    python benchmarks/quality.py MODEL.gguf --data FOLDER --records FILE.jsonl [--llama-python PYTHON] [--json FILE]

The file of records keeps every answer: an interrupted run, or a run with other `--ways`, continues from the file. The table
and the JSON cover all records. Exit status 1 if drafts changed an answer.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, takewhile
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import App
from jax import Array
from jaxtyping import Float, Int
from llama_cpp_peer import Peer
from quality_tasks import Problem, Scored, passes, problems, references
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer

import tilewright as tw
from tilewright.cli.common import keep_programs
from tilewright.cli.options import WORDS
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.kernels.operations import Operations
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.tables import print_table
from tilewright.models import decoder
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import decoder_config
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.shapes import ShapeTable

PEER = "llama.cpp"
DRAFTED = "+ngram"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "weights": "dequantised"},
    "bfloat16": {"dtype": "bfloat16", "weights": "dequantised"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
}
TASKS = {
    "likelihood": (*FORMATS, PEER),
    "mbpp": ("bfloat16", "bfloat16" + DRAFTED, "int8", "int8" + DRAFTED, PEER),
}
"""Ways of each task (format, drafts or llama.cpp), with their names in tables."""
SLOTS = 16
BLOCK_SIZE = 4
"""Slots of the engine, and tokens of a block. Every round drafts, even if that is slower with many rows."""
PEER_POSITIONS = 4096
"""Context of llama.cpp, longer than every question with its reference answer."""


class Records:
    """A JSONL file of results by (task, way, number), from which an interrupted run continues.

    The first line holds the settings. Files with other settings are refused.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.found = dict[tuple[str, str, int | str], dict[str, Any]]()
        if not path.exists():
            self.append(settings)
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != settings:
            raise ValueError(f"{path}: expected records of {json.dumps(settings)}, found {first}")
        for line in lines:
            record = json.loads(line)
            self.found[record["task"], record["way"], record["number"]] = record

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def add(self, task: str, way: str, number: int | str, **values: Any) -> None:
        record = {"task": task, "way": way, "number": number, **values}
        self.append(record)
        self.found[task, way, number] = record

    def for_way(self, task: str, way: str) -> dict[Any, dict[str, Any]]:
        return {key[2]: record for key, record in self.found.items() if key[:2] == (task, way)}


@contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(what, total=total)
        yield lambda: bar.advance(row)


@partial(jax.jit, static_argnums=(0, 1))
def log_likelihoods(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "1 T"]
) -> Float[Array, " T"]:
    """Returns the log-likelihood of the token after each position; the last value is meaningless."""
    logits = decoder.logits(config, ops, params, decoder.forward_full(config, ops, params, tokens).hidden[0])
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens[0], -1)[:, None], axis=1)[:, 0]


def score(lm: LanguageModel, tokens: Sequence[int], start: int) -> float:
    """Returns the log-likelihood in nats of the tokens from `start` on. Padding after the text changes no earlier position."""
    size = max(256, 1 << (len(tokens) - 1).bit_length())
    padded = jnp.asarray([[*tokens, *[0] * (size - len(tokens))]], jnp.int32)
    found = log_likelihoods(lm.target, lm.ops, lm.model.models.target, padded)
    return float(np.asarray(found, np.float64)[start - 1 : len(tokens) - 1].sum())


def score_all(
    scorer: Callable[[list[int], int], float],
    way: str,
    scored: Sequence[Scored],
    tokenizer: Tokenizer,
    records: Records,
    console: Console,
) -> None:
    with counting(console, f"{way}: likelihood", len(scored)) as advance:
        for each in scored:
            prompt = encode(tokenizer, each.prompt, False)
            answer = encode(tokenizer, each.answer, False)
            nats = scorer([*prompt, *answer], len(prompt))
            size = len(each.answer.encode())
            records.add(f"likelihood {each.data}", way, each.number, nats=nats, tokens=len(answer), bytes=size)
            advance()


def answer_all(lm: LanguageModel, way: str, problems: Sequence[Problem], new: int, records: Records, console: Console) -> None:
    """Answers problems with continuous batching."""
    left = {each.number: encode(lm.tokenizer, each.prompt, False) for each in problems}
    longest = max(map(len, left.values())) + new
    table = ShapeTable(batches=(SLOTS,), capacities=(-(-longest // 256) * 256,), chunks=(64, 256))
    engine = lm.engine(EngineOptions(table=table, queue_requests=len(left), queue_tokens=sum(map(len, left.values()))))
    engine.warm(console if console.is_terminal else None)
    engine.accept_requests()
    handles: dict[int, RequestHandle] = {}

    def keep(number: int, update: RequestOutput) -> None:
        if update.end is None:
            return
        result = handles[number].result
        if update.end not in ("eos", "length") or result is None:
            raise RuntimeError(f"expected an answer to problem {number}, found the end {update.end}: {update.error}")
        drafts = {"rounds": len(result.acceptance_lengths), "drafted": sum(result.drafted), "accepted": sum(result.accepted)}
        add_answer(records, way, number, result.tokens, update.end, lm.tokenizer, **drafts)
        advance()

    with counting(console, f"{way}: mbpp", len(left)) as advance:
        for number, prompt in left.items():
            handles[number] = engine.submit(GenerateRequest(prompt, tw.Sampling(max_new_tokens=new)), partial(keep, number))
        while engine.step():
            pass
    engine.stop()


def add_answer(records: Records, way: str, number: int, tokens: list[int], end: str, tokenizer: Tokenizer, **more: int) -> None:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    records.add("mbpp", way, number, tokens=tokens, text=text, end=end, **more)


def ask_peer(
    peer: Peer,
    model: Path,
    problems: Sequence[Problem],
    ends: Sequence[int],
    tokenizer: Tokenizer,
    new: int,
    records: Records,
    console: Console,
) -> None:
    """Answers problems with llama.cpp, in batches of `SLOTS` rows."""
    prompts = {each.number: encode(tokenizer, each.prompt, False) for each in problems}
    left = list(prompts)
    longest = max(map(len, prompts.values())) + new
    peer.ask("open", model=str(model), threads=cores(), rows=SLOTS, positions=-(-longest // 256) * 256, flash=True)
    with counting(console, f"{PEER}: mbpp", len(left)) as advance:
        for start in range(0, len(left), SLOTS):
            group = left[start : start + SLOTS]
            made = peer.ask("generate", prompts=[prompts[number] for number in group], new=new, ends=list(ends))
            for number, tokens in zip(group, made["tokens"], strict=True):
                add_answer(records, PEER, number, tokens, "eos" if tokens[-1] in ends else "length", tokenizer)
                advance()


def judge_all(problems: Sequence[Problem], every: Sequence[Problem], records: Records, console: Console) -> int:
    """Runs each different program once, including the reference solutions.

    Args:
        problems: problems of this run.
        every: all problems; records may have answers to any of them.

    Returns:
        the number of reference solutions of `problems` that pass: an upper bound that is set by the judge.
    """
    checks = {each.number: each.checks for each in every}
    answers = [
        *((each.number, each.solution) for each in problems),
        *((n, record["text"]) for way in TASKS["mbpp"] for n, record in records.for_way("mbpp", way).items()),
    ]
    texts = {judged(*answer): answer for answer in answers}
    left = [key for key in texts if ("judged", "", key) not in records.found]
    with counting(console, "running programs", len(left)) as advance, ThreadPoolExecutor(cores()) as pool:
        for key, passed in zip(left, pool.map(lambda key: passes(texts[key][1], checks[texts[key][0]]), left), strict=True):
            records.add("judged", "", key, passed=passed)
            advance()
    return sum(records.found["judged", "", judged(each.number, each.solution)]["passed"] for each in problems)


def judged(number: int, text: str) -> str:
    """Returns the key of the verdict on an answer."""
    return f"{number} {hashlib.sha256(text.encode()).hexdigest()}"


def likelihood_figures(records: Records) -> list[dict[str, Any]]:
    """Returns figures for each data file and way, over the answers that every way has scored."""
    rows = []
    for data in dict.fromkeys(task.split(" ")[1] for task, _, _ in records.found if task.startswith("likelihood ")):
        ways = {way: found for way in TASKS["likelihood"] if (found := records.for_way(f"likelihood {data}", way))}
        common = set.intersection(*(set(found) for found in ways.values()))
        base = next(iter(ways.values()))
        for way, found in ways.items():
            nats, tokens, size = (sum(found[number][name] for number in common) for name in ("nats", "tokens", "bytes"))
            more = [(base[number]["nats"] - found[number]["nats"]) for number in sorted(common)]
            rows.append(
                {
                    "data": data,
                    "way": way,
                    "answers": len(common),
                    "tokens": tokens,
                    "bytes": size,
                    "nats_per_token": nats / tokens,
                    "nats_per_byte": nats / size,
                    "lost_nats_per_token": sum(more) / tokens,
                    "lost_nats_per_token_error": float(np.std(more, ddof=1) * math.sqrt(len(more)) / tokens)
                    if more[1:]
                    else None,
                }
            )
    return rows


def mbpp_figures(records: Records) -> dict[str, Any]:
    """Returns pass@1 of each way, the equal answers of pairs of ways, and counts of drafts."""
    ways = {way: found for way in TASKS["mbpp"] if (found := records.for_way("mbpp", way))}
    rows = []
    for way, found in ways.items():
        passed = sum(records.found["judged", "", judged(n, record["text"])]["passed"] for n, record in found.items())
        share = passed / len(found)
        tokens = sum(len(record["tokens"]) for record in found.values())
        row = {
            "way": way,
            "problems": len(found),
            "passed": passed,
            "pass_at_1": share,
            "error": math.sqrt(share * (1 - share) / len(found)),
            "tokens": tokens,
            "ended_by_itself": sum(record["end"] == "eos" for record in found.values()) / len(found),
        }
        if way != PEER:
            row |= {name: sum(record[name] for record in found.values()) for name in ("rounds", "drafted", "accepted")}
        rows.append(row)
    plain = [way for way in ways if not way.endswith(DRAFTED)]
    compared = [*combinations(plain, 2), *((way, way + DRAFTED) for way in plain if way + DRAFTED in ways)]
    return {"ways": rows, "pairs": [alike(pair, ways[pair[0]], ways[pair[1]]) for pair in compared]}


def alike(ways: tuple[str, str], first: dict[int, Any], second: dict[int, Any]) -> dict[str, Any]:
    """Counts equal answers of two ways, and equal tokens from the beginning."""
    both = [(first[number], second[number]) for number in first if number in second]
    pairs = (zip(a["tokens"], b["tokens"], strict=False) for a, b in both)
    same = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    return {
        "ways": ways,
        "problems": len(both),
        "equal_tokens": sum(a["tokens"] == b["tokens"] for a, b in both),
        "equal_texts": sum(a["text"] == b["text"] for a, b in both),
        "same_tokens_median": statistics.median(same) if same else None,
    }


def changed_by_drafts(pairs: Sequence[dict[str, Any]]) -> list[str]:
    """Lists the formats in which drafts changed an answer; must be empty."""
    return [pair["ways"][0] for pair in pairs if pair["ways"][1].endswith(DRAFTED) and pair["equal_tokens"] < pair["problems"]]


def show(console: Console, likelihood: Sequence[dict[str, Any]], mbpp: dict[str, Any]) -> None:
    table = Table(title="Reference answers, given the question", caption="lost: relative to the first way of the same data")
    for name in ("data", "way", "answers", "tokens", "nats/token", "nats/byte", "lost nats/token"):
        table.add_column(name, justify="left" if name in ("data", "way") else "right")
    for row in likelihood:
        error = row["lost_nats_per_token_error"]
        lost = f"{row['lost_nats_per_token']:.5f}" + ("" if error is None else f" ± {error:.5f}")
        figures = f"{row['answers']}", f"{row['tokens']:,}", f"{row['nats_per_token']:.4f}", f"{row['nats_per_byte']:.4f}", lost
        table.add_row(row["data"], row["way"], *figures)
    if likelihood:
        print_table(console, table)
    table = Table(title="MBPP, greedy", caption="ended: with the end-of-sequence token; τ: tokens per round")
    for name in ("way", "problems", "passed", "pass@1", "tokens", "ended", "τ"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in mbpp["ways"]:
        tau = f"{row['tokens'] / row['rounds']:.2f}" if "rounds" in row else ""
        rate = f"{row['pass_at_1']:.1%} ± {row['error']:.1%}"
        figures = f"{row['problems']}", f"{row['passed']}", rate, f"{row['tokens']:,}", f"{row['ended_by_itself']:.1%}", tau
        table.add_row(row["way"], *figures)
    if mbpp["ways"]:
        print_table(console, table)
        console.print(f"reference solutions that pass: {mbpp['solutions_passed']}", markup=False)
    for pair in mbpp["pairs"]:
        first, second = pair["ways"]
        same = f"{pair['equal_texts']} of {pair['problems']} equal, the same for {pair['same_tokens_median']:g} tokens (median)"
        console.print(f"answers of {first} and {second}: {same}", markup=False)


@dataclass(frozen=True)
class Run:
    """Inputs shared by all ways of a run."""

    model: Path
    scored: Sequence[Scored]
    problems: Sequence[Problem]
    new: int
    tokenizer: Tokenizer
    records: Records
    console: Console

    def left(self, way: str, tasks: Sequence[str]) -> tuple[list[Scored], list[Problem]]:
        """Returns the answers to score and the problems to answer that a way has no record of."""
        scores = "likelihood" in tasks and way in TASKS["likelihood"]
        answers = "mbpp" in tasks and way in TASKS["mbpp"]
        found = self.records.found
        scored = [each for each in self.scored if scores and (f"likelihood {each.data}", way, each.number) not in found]
        return scored, [each for each in self.problems if answers and ("mbpp", way, each.number) not in found]

    def ours(self, way: str, scored: Sequence[Scored], problems: Sequence[Problem]) -> None:
        name = way.removesuffix(DRAFTED)
        drafts = {"drafter": "ngram", "block_size": BLOCK_SIZE} if way.endswith(DRAFTED) else {}
        lm = tw.load(self.model, **FORMATS[name], **drafts)
        if scored:
            score_all(partial(score, lm), way, scored, self.tokenizer, self.records, self.console)
        if problems:
            answer_all(lm, way, problems, self.new, self.records, self.console)

    def peer(self, python: Path, scored: Sequence[Scored], problems: Sequence[Problem], ends: Sequence[int]) -> None:
        with Peer(python) as peer:
            self.console.print(f"{PEER}: {peer.ask('about')}", markup=False)
            if scored:
                peer.ask("open", model=str(self.model), threads=cores(), rows=1, positions=PEER_POSITIONS, flash=True)
                scorer = lambda tokens, start: peer.ask("score", tokens=tokens, start=start)  # noqa: E731
                score_all(scorer, PEER, scored, self.tokenizer, self.records, self.console)
            if problems:
                ask_peer(peer, self.model, problems, ends, self.tokenizer, self.new, self.records, self.console)


def main(
    model: Path,
    *,
    data: Path,
    records: Path,
    ways: Annotated[tuple[str, ...], WORDS] = (),
    tasks: Annotated[tuple[str, ...], WORDS] = tuple(TASKS),
    llama_python: Path | None = None,
    answers: int = 200,
    most_problems: int = 500,
    new_tokens: int = 512,
    json_file: JsonFile = None,
) -> None:
    """Measures the quality of a GGUF file's formats.

    Parameters
    ----------
    model
        GGUF file.
    data
        Folder with gsm8k_test.jsonl, humaneval.jsonl, mbpp.jsonl and math500.jsonl.
    records
        JSONL file that keeps every answer.
    ways
        Ways to run; by default all, llama.cpp only with --llama-python.
    tasks
        Tasks to run: likelihood, mbpp.
    llama_python
        A Python interpreter with llama-cpp-python.
    answers
        Number of reference answers of each data file.
    most_problems
        Maximum number of problems of MBPP's test split.
    new_tokens
        Maximum number of tokens of an answer.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    all_ways = tuple(dict.fromkeys(way for each in TASKS.values() for way in each))
    selected = ways or tuple(way for way in all_ways if way != PEER or llama_python is not None)
    if wrong := [*(set(selected) - set(all_ways)), *(set(tasks) - set(TASKS))]:
        raise ValueError(f"expected ways among {'; '.join(all_ways)} and tasks among {', '.join(TASKS)}, found {wrong[0]}")
    if PEER in selected and llama_python is None:
        raise ValueError(f"expected --llama-python for {PEER}, found none")
    console = human_console(json_file)
    template = ChatTemplate.load(model)
    tokenizer = load_tokenizer(model)
    if template is None:
        raise ValueError(f"expected a model with a chat template, found {model} without one")
    keep_programs()
    reference_answers = references(data, template, answers)
    every = problems(data, template)
    tried = every[:most_problems]
    kept = Records(records, {"model": hashlib.sha256(model.read_bytes()).hexdigest(), "new_tokens": new_tokens})
    run = Run(model, reference_answers, tried, new_tokens, tokenizer, kept, console)
    for way in selected:
        scored, unanswered = run.left(way, tasks)
        if not scored and not unanswered:
            continue
        if way != PEER:
            run.ours(way, scored, unanswered)
        elif llama_python is not None:
            run.peer(llama_python, scored, unanswered, decoder_config(model).eos_token_ids)
    solved = judge_all(tried, every, kept, console)
    likelihood = likelihood_figures(kept)
    mbpp = {"solutions_passed": solved, **mbpp_figures(kept)}
    show(console, likelihood, mbpp)
    versions = {"tilewright": tw.__version__, "jax": jax.__version__}
    settings = {"model": model.name, "answers": answers, "new_tokens": new_tokens, "slots": SLOTS}
    write_json(json_file, {"chip": chip_name(), **versions, **settings, "likelihood": likelihood, "mbpp": mbpp})
    if changed := changed_by_drafts(mbpp["pairs"]):
        raise SystemExit(f"expected the same answers with drafts, found different ones in {', '.join(changed)}")


if __name__ == "__main__":
    app = App(name="quality", help=__doc__)
    app.default(main)
    app()
