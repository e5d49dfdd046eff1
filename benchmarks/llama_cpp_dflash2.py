"""Compares DFlash 2 with llama.cpp's: the same target and drafter, one row, greedy.

    cmake -S LLAMA_CPP -B BUILD -DGGML_NATIVE=ON && cmake --build BUILD --target llama-server llama-quantize
    python benchmarks/llama_cpp_dflash2.py MODEL --data FILE ... --llama BUILD/bin [--drafter NAME] [--exact] [--json FILE]

`dflash2_to_gguf.py` writes the drafter for llama.cpp's server, which runs in another process with one thread per core.

With `--exact`, both sides compute in float32 from the file's dequantised weights, once and without times. Tilewright gets each
prompt with llama.cpp's first token, so that both sides draft their first block at the same position. Responses and accepted
drafts are compared round by round.

Otherwise both sides decode in turns: Tilewright in the file's bits, plainly, in whole blocks of `--block-size`, and in rounds
that its policy chooses; llama.cpp plainly, with the same files in the same whole blocks, and in its fastest setting. Trials on
the first prompts choose llama.cpp's formats of target and drafter, flash attention, and the number and least probability of
drafts. Seconds exclude the prompt. llama.cpp rounds differently, so its texts differ sooner or later. Run on an idle machine.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import httpx2
import jax
from cyclopts import App, Parameter
from dflash2_to_gguf import convert
from rich.console import Console
from rich.table import Table

import tilewright as tw
from tilewright.bench.datasets import read_examples
from tilewright.bench.speculative import DatasetPrompts, build_prompts
from tilewright.cli.common import keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, quotients, spread
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models import hub
from tilewright.models.chat import ChatTemplate
from tilewright.speculation.drafters.load import DrafterOptions

POSITIONS = 2048
TARGET_KINDS = ("Q4_0", "Q8_0")
"""Formats, beside the file's own, that llama.cpp's trials run the target in."""
DRAFTER_KINDS = ("BF16", "Q8_0", "Q4_0")
"""Formats of the drafter; the first is that of its checkpoint."""
DRAFTS = (2, 3, 5, 7)
LEAST_PROBABILITIES = (0.0, 0.3, 0.6)
"""Numbers of drafts, and least probabilities of a draft, that the trials run."""
TRIED = 2
TRIED_TOKENS = 48
"""Prompts of a trial, each the first of a file, and tokens of their responses."""
START_S = 120
ACCEPTED = re.compile(r"accepted +(\d+)/ *(\d+) draft tokens")
"""Line that llama.cpp's server writes for each round with `LLAMA_TRACE`."""


class Setting(NamedTuple):
    """Settings of llama.cpp: model files, flash attention, the most drafts of a round, and the least probability of a draft."""

    target: Path
    flash: bool
    drafter: Path | None = None
    drafts: int = 0
    least: float = 0.0

    def __str__(self) -> str:
        flash = f"flash attention {'on' if self.flash else 'off'}"
        drafting = (
            "" if self.drafter is None else f", drafter {self.drafter.stem}, {self.drafts} drafts of at least {self.least}"
        )
        return f"{self.target.stem}, {flash}{drafting}"


class Response(NamedTuple):
    """Greedy response to a prompt.

    Attributes:
        tokens: generated tokens, without an end token.
        made: number of tokens generated in `seconds`. llama.cpp computes the first token with the prompt, Tilewright in the
            first round.
        accepted: accepted drafts of each round; of llama.cpp only where it is traced.
        seconds: time of the rounds.
    """

    tokens: list[int]
    made: int
    accepted: list[int]
    seconds: float


class Server:
    """llama.cpp's server in a process, used as a context manager.

    Args:
        folder: folder of llama.cpp's programs.
        traced: read the accepted drafts of each round.
        exact: compute in float32, caches included.
    """

    def __init__(self, folder: Path, setting: Setting, traced: bool = False, exact: bool = False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        threads = ["-t", str(cores()), "-tb", str(cores())]
        command = [str(folder / "llama-server"), "-m", str(setting.target), "--port", str(self.port), "-c", str(POSITIONS)]
        command += ["-np", "1", *threads, "-fa", "on" if setting.flash else "off"]
        if setting.drafter is not None:
            command += ["-md", str(setting.drafter), "--spec-type", "draft-dflash", "--spec-draft-n-max", str(setting.drafts)]
            command += ["--spec-draft-p-min", str(setting.least)]
        if exact:
            command += ["-ctk", "f32", "-ctv", "f32"]
            command += [] if setting.drafter is None else ["-ctkd", "f32", "-ctvd", "f32"]
        self.command = command
        self.traced = traced

    def __enter__(self) -> "Server":
        self.log = TemporaryFile()
        trace = {"LLAMA_TRACE": "1"} if self.traced else {}
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log, env={**os.environ, **trace})
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600, trust_env=False)
        end = time.monotonic() + START_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                text = self.text(0)
                self.close()
                raise RuntimeError(f"expected {' '.join(self.command)} to serve, found:\n{text}")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def is_ready(self) -> bool:
        try:
            return self.client.get("/health").status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False

    def text(self, start: int) -> str:
        """Returns what the server wrote from a byte on. The process shares the file's position, so it is left at the end."""
        end = self.log.seek(0, os.SEEK_END)
        return os.pread(self.log.fileno(), end - start, start).decode(errors="replace")

    def about(self) -> str:
        return str(self.client.get("/props").json().get("build_info", "unknown"))

    def generate(self, prompt: Sequence[int], new: int, ends: Sequence[int]) -> Response:
        """Decodes greedily, up to `new` tokens."""
        written = self.log.seek(0, os.SEEK_END)
        # A chain of one sampler costs least.
        greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0}
        body = {"prompt": list(prompt), "n_predict": new, "cache_prompt": False, "return_tokens": True, **greedy}
        answer = self.client.post("/completion", json=body).raise_for_status().json()
        times = answer["timings"]
        rounds: list[int] = []
        if self.traced:
            # The log is written by a thread of its own; the line of the release is the last one of a request.
            end = time.monotonic() + START_S
            while "stop processing" not in self.text(written) and time.monotonic() < end:
                time.sleep(0.01)
            rounds = [int(found[1]) for found in ACCEPTED.finditer(self.text(written))]
            # Rounds without drafts, at the end of the response, are not traced.
            rounds += [0] * (times["predicted_n"] - 1 - sum(rounds) - len(rounds))
        tokens = without_end(answer["tokens"], ends)
        return Response(tokens, times["predicted_n"] - 1, rounds, times["predicted_ms"] / 1e3)


def without_end(tokens: Iterable[int], ends: Sequence[int]) -> list[int]:
    return list(takewhile(lambda token: token not in ends, tokens))


def ours(lm: LanguageModel, ends: Sequence[int], new: int, prompt: Sequence[int], speculative: bool = True) -> Response:
    made = lm.generate([list(prompt)], tw.Sampling(new), speculative=speculative)
    result = made[0]
    return Response(without_end(result.tokens, ends), len(result.tokens), list(result.accepted), made.decode_seconds)


def whole_rounds(response: Response) -> list[int]:
    """Returns accepted drafts without the last round's, in which llama.cpp drafts no more than the response has room for."""
    return response.accepted[:-1]


def tokens_per_round(responses: Iterable[Response]) -> float:
    """Returns accepted drafts + 1, the mean over all whole rounds. Drafts behind an end count."""
    rounds = [accepted + 1 for each in responses for accepted in whole_rounds(each)]
    return sum(rounds) / len(rounds)


Run = Callable[[], list[Response]]


def quantise(folder: Path, source: Path, out: Path, kind: str) -> None:
    """Writes a GGUF file in another format with llama.cpp's program."""
    command = [str(folder / "llama-quantize"), "--allow-requantize", str(source), str(out), kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compare_exactly(
    lm: LanguageModel, server: Server, datasets: Sequence[DatasetPrompts], ends: Sequence[int], new: int
) -> list[dict[str, Any]]:
    """Compares responses and rounds of each file."""
    records = []
    for dataset in datasets:
        pairs = []
        for prompt in dataset.prompts:
            peer = server.generate(prompt, new, ends)
            first = peer.tokens[:1]
            # Tilewright computes the token after the prompt in its first round.
            pairs.append((ours(lm, ends, new - 1, [*prompt, *first]), peer._replace(tokens=peer.tokens[1:])))
        same = [(mine, peer) for mine, peer in pairs if mine.tokens == peer.tokens]
        record: dict[str, Any] = {"dataset": dataset.name, "responses": len(pairs), "equal_responses": len(same)}
        record["equal_rounds"] = sum(whole_rounds(mine) == whole_rounds(peer) for mine, peer in same)
        for name, side in zip(("", "llama_cpp_"), zip(*pairs, strict=True), strict=True):
            record[f"{name}rounds"] = sum(len(whole_rounds(each)) for each in side)
            record[f"{name}tokens_per_round"] = tokens_per_round(side)
        records.append(record)
    return records


class Trials:
    """Trials that choose llama.cpp's settings by tokens per second.

    Args:
        prompts: prompts of the trials.
    """

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]], ends: Sequence[int], new: int):
        self.folder = folder
        self.prompts = prompts
        self.ends = ends
        self.new = new

    def rate(self, setting: Setting) -> float:
        with Server(self.folder, setting) as server:
            server.generate(self.prompts[0][:8], 8, self.ends)  # warms up
            made = [server.generate(prompt, self.new, self.ends) for prompt in self.prompts]
        return sum(each.made for each in made) / sum(each.seconds for each in made)

    def fastest(self, settings: Iterable[Setting]) -> Setting:
        """Returns the fastest setting, by the better of two measurements of each."""
        results = alternate({setting: partial(self.rate, setting) for setting in settings}, 2)
        return max(results, key=lambda setting: max(results[setting]))


def figures(
    dataset: str, results: Mapping[str, Sequence[list[Response]]], counted: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns a record for each side: medians and ranges.

    Args:
        results: the responses of each side, by repetition.
        counted: tokens per round of the sides that draft.
    """
    per_token = {
        side: [sum(each.seconds for each in run) / sum(each.made for each in run) for run in runs]
        for side, runs in results.items()
    }
    records = []
    for side, times in per_token.items():
        rates = spread([1 / each for each in times])
        record: dict[str, Any] = {"dataset": dataset, "side": side, "responses": len(results[side][0])}
        record |= {"tokens": sum(each.made for each in results[side][0]), "tokens_per_round": counted.get(side, 1.0)}
        record |= {"tokens_per_s": rates.median, "tokens_per_s_range": list(rates.range)}
        for other, base in per_token.items():
            faster = quotients(base, times)
            record[f"speedup_over {other}"] = faster.median
            record[f"speedup_over {other} range"] = list(faster.range)
        records.append(record)
    return records


def exact_table(records: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(title="float32, one row, greedy")
    for column in ("", "equal responses", "of these, equal rounds", "rounds", "tokens per round", "llama.cpp's"):
        shown.add_column(column, justify="right" if column else "left")
    for each in records:
        equal = f"{each['equal_responses']} of {each['responses']}", f"{each['equal_rounds']}", f"{each['rounds']}"
        rates = (f"{each[f'{name}tokens_per_round']:.3f}" for name in ("", "llama_cpp_"))
        shown.add_row(each["dataset"], *equal, *rates)
    return shown


def timed_table(records: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Table:
    shown = Table(title="One row, greedy", caption="×: speedup over a side of llama.cpp, median")
    for column in ("", ""):
        shown.add_column(column)
    for column in ("tokens per round", "tokens/s", "range", *(f"× of {name}" for name in peers)):
        shown.add_column(column, justify="right")
    for each in records:
        least, most = each["tokens_per_s_range"]
        cells = [f"{each['tokens_per_round']:.2f}", significant(each["tokens_per_s"]), f"{least:.0f} to {most:.0f}"]
        ratios = [f"{each[f'speedup_over {name}']:.2f}" for name in peers]
        shown.add_row(each["dataset"], each["side"], *cells, *ratios)
    return shown


def main(
    model: str,
    *,
    data: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())],
    llama: Path,
    drafter: str = "smollm2-dflash2",
    exact: Annotated[bool, Parameter(negative=())] = False,
    block_size: int = 8,
    samples: int = 2,
    max_new_tokens: int = 96,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Compares DFlash 2 with llama.cpp's.

    Parameters
    ----------
    model
        GGUF file of a model with a chat template, or "smollm2-135m".
    data
        Files of prompts, as for `tilewright bench speculative`.
    llama
        Folder with llama-server and llama-quantize.
    drafter
        Folder or hub id of the drafter, or "smollm2-dflash2".
    exact
        Compare responses and rounds in float32, without times.
    block_size
        Tokens in a whole block, including the last committed token.
    samples
        Number of records of each file, from its beginning.
    max_new_tokens
        Maximum number of tokens of each text.
    repetitions
        Number of runs of each side.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    console = human_console(json_file)
    file = hub.resolve(model)
    keep_programs()
    formats: dict[str, Any] = (
        {"dtype": "float32", "weights": "dequantised"} if exact else {"dtype": "bfloat16", "weights": "auto"}
    )
    plain = tw.load(file, context=POSITIONS, **formats)
    blocks = plain.with_drafter(*plain.load_drafter(drafter, DrafterOptions(block_size)))
    ends = plain.target.eos_token_ids
    template = ChatTemplate.load(file)
    sampling = tw.Sampling(max_new_tokens)
    datasets = [build_prompts(plain, path.stem, read_examples(path)[:samples], template, sampling) for path in data]
    settings: dict[str, Setting] = {}
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if exact:
            target, converted = folder / "F32.gguf", folder / "drafter-F32.gguf"
            quantise(llama, file, target, "F32")
            convert(drafter, target, converted, kind="F32")  # the head is the target's, in its format
            settings["blocks"] = Setting(target, False, converted, block_size - 1)
            server = stack.enter_context(Server(llama, settings["blocks"], traced=True, exact=True))
            about = server.about()
            records = compare_exactly(blocks, server, datasets, ends, max_new_tokens)
            print_table(console, exact_table(records))
        else:
            tried = [each.prompts[0] for each in datasets[:TRIED]]
            settings = choose(Trials(llama, tried, ends, min(TRIED_TOKENS, max_new_tokens)), file, drafter, folder, block_size)
            for side, setting in settings.items():
                console.print(f"{side}: {setting}", markup=False)
            chosen = plain.with_drafter(*plain.load_drafter(drafter, DrafterOptions("auto")))
            mine = {"plain": (plain, False), "blocks": (blocks, True), "chosen rounds": (chosen, True)}
            records, about = in_turns(mine, settings, llama, datasets, ends, max_new_tokens, repetitions, console)
            print_table(console, timed_table(records, [f"llama.cpp, {side}" for side in settings]))
    console.print(f"llama.cpp {about}, {cores()} threads, {chip_name()}", markup=False)
    given = {"model": model, "drafter": drafter, "block_size": block_size, "samples": samples, "max_new_tokens": max_new_tokens}
    versions = {"tilewright": tw.__version__, "jax": jax.__version__, "llama_cpp": about}
    described = {side: str(setting) for side, setting in settings.items()}
    record = {"chip": chip_name(), **versions, **given, "formats": formats, "llama_cpp_settings": described}
    write_json(json_file, {**record, **({} if exact else {"repetitions": repetitions}), "data": records})


def choose(trials: Trials, file: Path, drafter: str, folder: Path, block_size: int) -> dict[str, Setting]:
    """Returns llama.cpp's settings: plain, in whole blocks, and the fastest."""
    targets = [file, *(folder / f"{kind}.gguf" for kind in TARGET_KINDS)]
    for target, kind in zip(targets[1:], TARGET_KINDS, strict=True):
        quantise(trials.folder, file, target, kind)
    drafters = [folder / f"drafter-{kind}.gguf" for kind in DRAFTER_KINDS]
    for converted, kind in zip(drafters, DRAFTER_KINDS, strict=True):
        convert(drafter, file, converted, kind=kind)
    plain = trials.fastest(Setting(target, True) for target in targets)
    plain = trials.fastest(plain._replace(flash=flash) for flash in (True, False))
    # A target in fewer bits is faster, and drafts made for the file's bits fit it less.
    pairs = product(dict.fromkeys((plain.target, file)), drafters)
    fastest = trials.fastest(Setting(target, plain.flash, each, block_size - 1) for target, each in pairs)
    fastest = trials.fastest(fastest._replace(drafts=drafts) for drafts in DRAFTS)
    fastest = trials.fastest(fastest._replace(least=least) for least in LEAST_PROBABILITIES)
    return {"plain": plain, "blocks": Setting(file, plain.flash, drafters[0], block_size - 1), "fastest": fastest}


def in_turns(
    mine: Mapping[str, tuple[LanguageModel, bool]],
    settings: Mapping[str, Setting],
    llama: Path,
    datasets: Sequence[DatasetPrompts],
    ends: Sequence[int],
    new: int,
    repetitions: int,
    console: Console,
) -> tuple[list[dict[str, Any]], str]:
    """Decodes every file on every side, in alternation. Returns records, and llama.cpp's version."""
    for lm, _ in mine.values():
        if lm.pacing is not None:
            lm.pacing.patient = True
    counted: dict[tuple[str, str], float] = {}
    for side, setting in settings.items():
        if setting.drafter is not None:
            with Server(llama, setting, traced=True) as server:
                for dataset in datasets:
                    responses = [server.generate(prompt, new, ends) for prompt in dataset.prompts]
                    counted[dataset.name, f"llama.cpp, {side}"] = tokens_per_round(responses)
    records = []
    with ExitStack() as stack:
        servers = {side: stack.enter_context(Server(llama, setting)) for side, setting in settings.items()}
        for server in servers.values():
            server.generate(datasets[0].prompts[0], 8, ends)  # warms up
        about = next(iter(servers.values())).about()
        for dataset in datasets:
            runs: dict[str, Run] = {}
            for side, (lm, speculative) in mine.items():
                runs[side] = partial(respond, partial(ours, lm, ends, new, speculative=speculative), dataset.prompts)
            for side, server in servers.items():
                runs[f"llama.cpp, {side}"] = partial(respond, partial(server.generate, new=new, ends=ends), dataset.prompts)
            for side in mine:
                runs[side]()  # compiles
            results = alternate(runs, repetitions)
            rounds = {side: tokens_per_round(results[side][0]) for side, (_, speculative) in mine.items() if speculative}
            rounds |= {side: counted[name, side] for name, side in counted if name == dataset.name}
            records += figures(dataset.name, results, rounds)
            console.print(f"{dataset.name}: done")
    return records, about


def respond(generate: Callable[..., Response], prompts: Sequence[Sequence[int]]) -> list[Response]:
    return [generate(prompt=prompt) for prompt in prompts]


if __name__ == "__main__":
    app = App(name="llama_cpp_dflash2", help=__doc__)
    app.default(main)
    app()
