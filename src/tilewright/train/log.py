"""Log of a training run: rows of metrics as JSON lines, for TensorBoard and for Weights & Biases, and profiler traces.

A row is written some steps after its last step, when the device has computed its metrics, so that logging does not wait.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import numpy as np

from tilewright.metrics.metric import significant
from tilewright.parallel.mesh import is_first_process

Metrics = dict[str, Any]
"""Arrays by name, each with the shape of the task's seed."""

Row = dict[str, float]
"""Metrics of some steps by name; see docs/metrics.md."""

WEIGHT = "weight"
"""Key of a step's weight in means over steps: the number of tokens in its loss."""

RECORDED = ("gradient_norm", "learning_rate")
"""Metrics of a step that only the log has."""

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
WANDB_ID = "wandb-run"
"""Names of files and folders in the folder of a run."""

EVERY = 10
"""Default number of steps of a row."""
LINE_S = 60.0
"""Seconds between progress lines without a terminal, by default."""


@dataclass(frozen=True)
class LogOptions:
    """Settings of `--log`.

    Attributes:
        every: steps of a row of metrics, and without a terminal of a line. [default: rows of 10 steps, a line a minute]
        tensorboard: also write the rows for TensorBoard, to `training/tensorboard` of --out. [default: false]
        wandb: project of Weights & Biases that also gets the rows; WANDB_MODE=offline keeps them in `training/wandb`.
            [default: none]
        profile: first and last step of a profiler trace in `training/profile`, such as 10:15. [default: none]
    """

    every: int | None = None
    tensorboard: bool = False
    wandb: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"expected every of at least 1, found {self.every}")
        if self.profile is not None:
            steps = self.profiled
            if not steps or steps[0] < 1:
                raise ValueError(f"expected profile as first and last step, such as 10:15, found {self.profile!r}")

    @property
    def profiled(self) -> range:
        """Steps of the profiler trace, from 1; empty for none."""
        found = re.fullmatch(r"(\d+):(\d+)", self.profile or "")
        return range(int(found[1]), int(found[2]) + 1) if found else range(0)


def stacked(rows: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """Stacks the metrics of several rows by name."""
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric, weighted if all rows have weights; NaN if all weights are 0.

    A single row without weight is returned unchanged, still on the device, to avoid a transfer.
    """
    if not all(WEIGHT in row for row in rows):
        return rows[0] if len(rows) == 1 else {name: values.mean(0) for name, values in stacked(rows).items()}
    means = stacked(rows)
    weights = means.pop(WEIGHT, np.zeros(0))
    if not weights.any():
        return {name: np.full_like(values[0], np.nan) for name, values in means.items()}
    return {name: np.average(values, axis=0, weights=weights).astype(values.dtype) for name, values in means.items()}


def plain_row(metrics: Mapping[str, Any]) -> Row:
    """Returns metrics as numbers: means over several runs, without metrics that are not finite."""
    means = {name: float(np.mean(np.asarray(values))) for name, values in metrics.items()}
    return {name: float(f"{mean:.7g}") for name, mean in means.items() if math.isfinite(mean)}  # float32 has no more digits


def read_log(path: Path) -> list[Row]:
    """Reads the rows of a `metrics.jsonl`. A last line that a killed process left incomplete is left out.

    Raises:
        ValueError: the file cannot be read, or another line is not a row.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, found {line.strip()[:80]!r}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: expected an object with a step, found {line.strip()[:80]!r}")
        rows.append(row)
    return rows


@dataclass
class LoggedStep:
    """A step that the log has not written yet.

    Attributes:
        number: number of the step, from 1.
        metrics: metrics, which the device may still compute.
        waited: seconds that the loop has waited for batches so far.
        ended_at: training time at the end of the step.
    """

    number: int
    metrics: Metrics
    waited: float
    ended_at: float = 0.0

    def has_ended(self) -> bool:
        on_devices: list[Any] = [value for value in self.metrics.values() if isinstance(value, jax.Array)]
        return all(value.is_ready() for value in on_devices)


class TrainingLog:
    """Log of one process's part of a run; the first process writes.

    Args:
        options: settings.
        progress: unit and amount of work per step (see `loop.Task`).
        flops: floating-point operations per step; 0 if unknown.
        peak: peak of all devices in FLOP/s; None if unknown.

    Attributes:
        newest: the newest metrics, of steps and evaluations; empty before the first row.
        row_step: last step of the newest row of steps; 0 before the first row.
        on_row: called after each row of steps.
    """

    def __init__(self, options: LogOptions, progress: tuple[str, float], flops: float = 0.0, peak: float | None = None):
        self.options = options
        self.every = options.every or EVERY
        self.progress = progress
        self.flops = flops
        self.peak = peak
        self.newest: Row = {}
        self.row_step = 0
        self.on_row: Callable[[], None] = lambda: None
        self.running: deque[LoggedStep] = deque()
        self.ended: list[LoggedStep] = []
        self.evaluations: deque[tuple[int, Metrics]] = deque()
        self.timed_from: LoggedStep | None = None
        self.waited = 0.0
        self.left_out = 0.0
        self.tracing = False
        self.folder: Path | None = None
        self.writers: list[Callable[[int, Row], object]] = []
        self.resources = ExitStack()

    def open(self, folder: Path | None, step: int, title: str, run_fingerprint: Mapping[str, Any]) -> None:
        """Opens the files of a run that is at `step`; rows after this step, of an interrupted run, are removed.

        Args:
            folder: folder of the run; None writes nothing.
            step: number of steps so far.
            title: name of the run for Weights & Biases.
            run_fingerprint: settings of the run for Weights & Biases.

        Raises:
            ValueError: a setting needs a folder, or the file of rows is not one.
        """
        self.folder = folder
        if folder is None:
            if self.options.tensorboard or self.options.wandb is not None or self.options.profile is not None:
                raise ValueError("expected a folder for tensorboard, wandb and profile of --log, found no --out")
            return
        if not is_first_process():
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.open_rows(folder / METRICS, step)
        if self.options.tensorboard:
            from tensorboardX import SummaryWriter

            # Names of files have whole seconds: without the step, a run that goes on at once would overwrite its file.
            events = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1, filename_suffix=f".{step}")
            self.resources.callback(events.close)
            self.writers.append(lambda step, row: [events.add_scalar(name, value, step) for name, value in row.items()])
        if self.options.wandb is not None:
            self.open_wandb(folder, self.options.wandb, step, title, run_fingerprint)

    def open_rows(self, path: Path, step: int) -> None:
        """Opens the file of rows behind the rows up to `step`."""
        kept = [row for row in read_log(path) if row["step"] <= step] if path.exists() else []
        replacement = path.with_name(f".{path.name}.tmp")
        replacement.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
        replacement.replace(path)
        file = self.resources.enter_context(path.open("a", encoding="utf-8", buffering=1))
        self.writers.append(
            lambda step, row: file.write(json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")
        )

    def open_wandb(self, folder: Path, project: str, step: int, title: str, run_fingerprint: Mapping[str, Any]) -> None:
        """Opens a run of Weights & Biases, whose id is kept in the folder; resumes that run behind the first step."""
        import wandb

        kept = folder / WANDB_ID
        if step == 0 or not kept.exists():
            kept.write_text(uuid4().hex[:8], encoding="utf-8")
        run = wandb.init(
            project=project,
            name=title,
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            config=dict(run_fingerprint),
        )
        self.resources.callback(run.finish)
        self.writers.append(lambda step, row: run.log(row, step=step))

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, and measures how long the loop waits for them."""
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batch

    def training_time(self) -> float:
        """Returns a time in seconds that stands still during evaluations and checkpoints."""
        return time.perf_counter() - self.left_out

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leaves the time of an evaluation or a checkpoint out of the time of steps."""
        start = time.perf_counter()
        yield
        self.left_out += time.perf_counter() - start

    def begin(self, step: int) -> None:
        """Starts the profiler trace if `step` is its first step."""
        if step in self.options.profiled and not self.tracing:
            assert self.folder is not None, "`open` requires a folder for traces"
            self.flush()
            with self.apart():
                jax.profiler.start_trace(self.folder / PROFILE)
            self.tracing = True

    def note(self, step: int, metrics: Metrics) -> None:
        """Adds the metrics of a step that was dispatched, and writes rows of steps that have ended."""
        for value in metrics.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self.running.append(LoggedStep(step, metrics, self.waited))
        self.end_steps()
        if self.tracing and step == self.options.profiled[-1]:
            self.flush()
            self.end_trace()

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Adds the metrics of an evaluation after `step`, which are written with the next row."""
        self.evaluations.append((step, metrics))

    def flush(self) -> None:
        """Writes all metrics so far, for which it waits."""
        self.end_steps(wait=True)
        if self.ended:
            self.write_row()
        self.write_evaluations()

    def end_steps(self, wait: bool = False) -> None:
        """Notes the time of the steps that have ended, and writes a row of every so many of them; waits for all if desired."""
        newest = None
        while self.running and (wait or self.running[0].has_ended()):
            newest = self.running.popleft()
            jax.block_until_ready(newest.metrics)
            newest.ended_at = self.training_time()
            self.ended.append(newest)
            if newest.number % self.every == 0:
                self.write_row()
        if self.timed_from is None:  # behind the compilation, during which several steps may have ended
            self.timed_from = newest

    def write_row(self) -> None:
        """Writes a row of the steps that have ended, behind the evaluations before their last step."""
        last = self.ended[-1]
        self.write_evaluations(last.number)
        self.emit(last.number, plain_row(mean_metrics([step.metrics for step in self.ended])) | self.speed(last))
        self.row_step = last.number
        self.timed_from = last
        self.ended = []
        self.on_row()

    def write_evaluations(self, before: int | None = None) -> None:
        """Writes the evaluations, or only those after earlier steps than `before`."""
        while self.evaluations and (before is None or self.evaluations[0][0] < before):
            step, metrics = self.evaluations.popleft()
            self.emit(step, plain_row(metrics))

    def speed(self, last: LoggedStep) -> Row:
        """Returns the speed of the steps of a row; empty for the first steps, which compile."""
        first = self.timed_from or last
        steps = last.number - first.number
        seconds = last.ended_at - first.ended_at
        if steps <= 0 or seconds <= 0:
            return {}
        unit, amount = self.progress
        row = {"step_seconds": seconds / steps, f"{unit}_per_s": steps * amount / seconds}
        if self.flops and self.peak:
            row["model_flops_utilization"] = steps * self.flops / seconds / self.peak
        return plain_row({**row, "data_wait_share": min((last.waited - first.waited) / seconds, 1.0)})

    def emit(self, step: int, row: Row) -> None:
        self.newest = {**self.newest, **row}
        for write in self.writers if row else ():
            write(step, row)

    def line(self) -> str:
        """Formats the newest metrics for people."""
        unit = self.progress[0]
        forms = {
            f"{unit}_per_s": "{:,.1f} " + f"{unit}/s",
            "model_flops_utilization": "{:.1%} of peak",
            "data_wait_share": "{:.1%} waiting for data",
        }
        losses = [name for name in self.newest if name not in (*RECORDED, *forms, "step_seconds")]
        shown = (*losses, *(name for name in RECORDED if name in self.newest))
        texts = [f"{name.replace('_', ' ')} {significant(self.newest[name], 4)}" for name in shown]
        if (seconds := self.newest.get("step_seconds")) is not None:
            texts.append(f"{significant(seconds)} s/step")
        texts += [form.format(self.newest[name]) for name, form in forms.items() if name in self.newest]
        return "  ".join(texts)

    def end_trace(self) -> None:
        """Writes the profiler trace."""
        with self.apart():
            jax.profiler.stop_trace()
        self.tracing = False

    def close(self) -> None:
        """Writes what is left, and closes the files."""
        with self.resources:
            if self.tracing:
                self.end_trace()
            self.flush()
