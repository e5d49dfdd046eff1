"""Questions and reference answers of `quality.py`, and the judge that runs the programs in answers."""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.bench.datasets import MBPP_SPLITS, messages, read_examples
from tilewright.models.chat import ChatTemplate
from tilewright.models.records import read_records

REFERENCES = {"gsm8k_test": "answer", "humaneval": "canonical_solution", "mbpp": "code", "math500": "solution"}
"""Data files, and the field with the reference answer of each."""
CPU_S = 5
WALL_S = 30
"""Limits of a program: processor seconds, and seconds of wall time, which a busy machine prolongs."""
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Scored:
    """A question in the chat template, and the reference answer to score."""

    data: str
    number: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Problem:
    """A problem of MBPP.

    Attributes:
        prompt: question in the chat template.
        checks: program of assertions that a correct answer passes.
        solution: reference solution.
    """

    number: int
    prompt: str
    checks: str
    solution: str


def references(folder: Path, template: ChatTemplate, count: int) -> list[Scored]:
    """Returns the first `count` reference answers of each data file, with "\\n" for all line breaks."""
    found = []
    for data, field in REFERENCES.items():
        path = folder / f"{data}.jsonl"
        records = dict(read_records(path))
        for example in read_examples(path)[:count]:
            prompt = template.render(messages(example))
            found.append(Scored(data, example.line, prompt, records[example.line][field].replace("\r\n", "\n")))
    return found


def problems(folder: Path, template: ChatTemplate) -> list[Problem]:
    """Returns MBPP's test split, with the prompt of its paper (Austin et al. 2021) without examples, as one user message."""
    found = []
    for _, record in read_records(folder / "mbpp.jsonl"):
        if record["task_id"] in MBPP_SPLITS["test"]:
            prompt = template.render([{"role": "user", "content": question(record)}])
            checks = "\n".join([record["test_setup_code"], *record["test_list"]])
            found.append(Problem(record["task_id"], prompt, checks, record["code"]))
    return found


def question(record: dict[str, Any]) -> str:
    tests = "\n".join(record["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {record['text'].strip()} "
        f"Your code should pass these tests:\n\n{tests}"
    )


FENCE = re.compile(r"```(\w*)[^\n]*\n(.*?)(?:\n\s*```|\Z)", re.DOTALL)


def program(answer: str) -> str:
    """Returns the program in an answer: the first code block marked as Python, else the first code block, else the answer.

    A code block may lack its end.
    """
    fences = FENCE.findall(answer)
    marked = [code for language, code in fences if language.lower() in ("python", "python3", "py")]
    return next(iter([*marked, *(code for _, code in fences)]), answer)


PASSED = 42
"""Exit status of a program that passed all checks; a program that exits earlier has another status."""

# An audit hook, which a program cannot remove. Programs may write only to their working folder.
GUARD = f"""
import os, resource, sys
for _what, _most in ("CPU", {CPU_S}), ("AS", {MEMORY_BYTES}), ("FSIZE", {FILE_BYTES}), ("CORE", 0):
    resource.setrlimit(getattr(resource, "RLIMIT_" + _what), (_most, _most))
_home = os.path.realpath(os.getcwd()) + os.sep
_refused = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill", "ctypes.", "os.remove",
            "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink", "os.mkdir", "shutil.")
def _guard(event, args):
    if event.startswith(_refused):
        raise PermissionError(event + " is not allowed")
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not isinstance(args[0], (str, bytes)) or not os.path.realpath(os.fsdecode(args[0])).startswith(_home):
            raise PermissionError("writing elsewhere is not allowed")
_source = sys.stdin.read()
sys.stdin.close()
sys.addaudithook(_guard)
exec(compile(_source, "answer", "exec"), {{"__name__": "__main__"}})
os._exit({PASSED})
"""


def passes(answer: str, checks: str) -> bool:
    """Returns True if the program in an answer passes its checks.

    The program runs in a process with limits, without network, in an empty folder that is deleted afterwards. The guard is
    against mistakes of a model, not against malicious programs.
    """
    source = f"{program(answer)}\n\n{checks}\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", GUARD],
                input=source.encode("utf-8", "replace"),
                cwd=folder,
                env={},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=WALL_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == PASSED
