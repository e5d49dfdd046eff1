"""Replicas by Ray Serve: one is killed, one is taken away under load, all end at SIGTERM.

`make scale` runs it; it needs the extra `ray`.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from parallel.processes import free_port
from reference.dflash_numpy import as_folders, random_pair
from tilewright.runtime.shape_file import table_text
from tilewright.runtime.shapes import ShapeTable

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
REQUESTS = 200
CLIENTS = 8
LONG = 1500
TABLE = ShapeTable(batches=(1, 4), capacities=(2048,), chunks=(64,), widths=())
READY_S = 600.0
ANSWER_S = 120.0
TRIES = 60

PATIENT = {
    "JAX_PLATFORMS": "cpu",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    **dict.fromkeys(("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"), "120"),
}
"""Ray gives a proxy 5 s to begin, and kills it then."""

pytestmark = pytest.mark.slow


@dataclass
class Outcome:
    """What a client has seen of one request.

    Attributes:
        answers: texts that came to their end.
        cut: streams that ended with an error event.
        retried: attempts of which no byte of an answer came.
    """

    answers: list[str] = field(default_factory=list)
    cut: int = 0
    retried: int = 0


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of replicas of a small model, the first of which is ready, and the process that was started."""
    pair = random_pair(3, target_layers=2, drafter_layers=1, taps=(0, 1), block_size=4, max_position_embeddings=2048)
    target, _ = as_folders(folder, pair)
    (shapes := folder / "shapes.json").write_text(table_text(TABLE), encoding="utf-8")
    port = free_port()
    words = [sys.executable, str(ROOT / "deploy" / "ray_serve.py"), str(target), "--compile", f"shapes={shapes}"]
    words += [
        "--memory",
        "pages=256",
        "--cpus",
        "0.5",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--log",
        "level=warning",
        *options,
    ]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "deploy")])
    started = subprocess.Popen(words, env=os.environ | PATIENT | {"PYTHONPATH": path})
    found = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: started.poll() is not None or is_ready(found), READY_S)
        assert started.poll() is None, "it ended before it was ready"
        yield found, started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(60)
        finally:
            started.kill()


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def replicas() -> list[int]:
    """Processes of the replicas, which Ray names after what they run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith(b"ray::ServeReplica:default:Replica"):
            found.append(int(path.parent.name))
    return sorted(found)


def dispatches(url: str) -> float:
    """Those of whichever replica is asked."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as answer:
        (line,) = (each for each in answer.read().decode().splitlines() if each.startswith("tilewright_dispatches_total{"))
    return float(line.split()[-1])


def body(number: int) -> dict[str, Any]:
    """Every other one is a long stream, and its prompt is its own."""
    streams = number % 2 == 0
    fields = {"prompt": [1 + number % 30, 1 + number // 30, 5], "temperature": 1, "seed": number, "ignore_eos": True}
    return fields | {"stream": streams, "max_tokens": LONG if streams else 20}


def opened(url: str, fields: dict[str, Any]) -> Any:
    """The answer to a request, as it begins."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode())
    request.add_header("content-type", "application/json")
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def ask(url: str, number: int) -> Outcome:
    """Asks until an answer has begun."""
    outcome = Outcome()
    fields = body(number)
    while not outcome.answers and not outcome.cut:
        assert outcome.retried < TRIES
        try:
            with opened(url, fields) as answer:
                text = streamed(answer, outcome) if fields["stream"] else json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            if error.code != 503 or not error.headers["retry-after"]:
                raise
            text = None
        except (urllib.error.URLError, ConnectionError):
            text = None
        if text is not None:
            outcome.answers.append(text)
        elif not outcome.cut:
            outcome.retried += 1
            time.sleep(0.5)
    return outcome


def streamed(answer: Any, outcome: Outcome) -> str | None:
    """The text of a stream; None where it ended with an error event, or had none."""
    texts = []
    for line in answer:
        if line.startswith(b"data: {"):
            said = json.loads(line[6:])
            if "error" in said:
                assert said["error"]["code"] == "replica_lost"
                outcome.cut += 1
                return None
            texts += [choice["text"] for choice in said["choices"]]
        elif line == b"data: [DONE]\n":
            return "".join(texts)
    raise HTTPException("a stream ended without an end")


def test_one_of_two_replicas_is_killed(tmp_path: Path):
    with served(tmp_path, "--replicas", "2") as (url, _):
        wait_until(lambda: len(replicas()) == 2, READY_S)
        kill_one(url)


def test_a_replica_is_taken_away_under_load(tmp_path: Path):
    """Eight clients make it two replicas, and one client alone makes it one again: whatever is asked meanwhile is answered."""
    scaling = "--replicas 1 --max-replicas 2 --target-requests 2 --upscale-delay 1 --downscale-delay 1"
    outcomes = list[Outcome]()
    numbers = itertools.cycle(range(0, REQUESTS, 2))
    few = threading.Event()
    enough = threading.Event()

    def ask_on(url: str, ends: threading.Event) -> None:
        while not ends.is_set():
            outcomes.append(ask(url, next(numbers)))

    with served(tmp_path, *scaling.split()) as (url, _), ThreadPoolExecutor(CLIENTS) as threads:
        asking = [threads.submit(ask_on, url, few if n else enough) for n in range(CLIENTS)]
        try:
            counts = [dispatches(url)]
            wait_until(lambda: counts.append(dispatches(url)) or counts[-1] < counts[-2], READY_S)  # that is another's
            few.set()
            wait_until(lambda: len(replicas()) == 1, READY_S)
        finally:
            few.set()
            enough.set()
        for each in asking:
            each.result()
    print(f"\n{len(outcomes)} streams were answered while there were one, two and one replicas")
    assert all((len(one.answers), one.cut, one.retried) == (1, 0, 0) for one in outcomes)


def test_streams_come_to_their_end_at_sigterm(tmp_path: Path):
    with served(tmp_path, "--replicas", "2") as (url, started):
        wait_until(lambda: len(replicas()) == 2, READY_S)
        answers = [opened(url, body(number) | {"n": 8}) for number in range(0, 2 * CLIENTS, 2)]
        started.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(url), READY_S)
        assert len(replicas()) == 2, "they go on meanwhile"
        seen = Outcome()
        texts = [streamed(answer, seen) for answer in answers]
        assert started.wait(ANSWER_S) == 0
    assert not seen.cut
    assert len(texts) == CLIENTS
    assert all(texts)


def kill_one(url: str) -> None:
    """Asks for 200 answers, and kills a replica after a quarter of them."""
    first = replicas()
    done = threading.Semaphore(0)

    def counted(number: int) -> Outcome:
        found = ask(url, number)
        done.release()
        return found

    with ThreadPoolExecutor(CLIENTS) as threads:
        asking = [threads.submit(counted, number) for number in range(REQUESTS)]
        for _ in range(REQUESTS // 4):
            done.acquire()
        os.kill(first[0], signal.SIGKILL)
        outcomes = [each.result() for each in asking]
    seen = Counter("cut" if one.cut else "answered" for one in outcomes)
    retried = sum(one.retried for one in outcomes)
    print(f"\n{seen['answered']} answered, {seen['cut']} cut by an error event, {retried} attempts without a byte")
    assert all(len(one.answers) + one.cut == 1 for one in outcomes), "none is answered twice"
    assert 1 <= seen["cut"] <= CLIENTS
    assert all(number % 2 == 0 for number, one in enumerate(outcomes) if one.cut), "only what had begun is cut"
    wait_until(lambda: len(replicas()) == 2 and first[0] not in replicas(), READY_S)
    for number in (0, 1, 2, 3):
        (again,) = ask(url, number).answers
        assert outcomes[number].answers == [again], "seeds give the same text on any replica"
