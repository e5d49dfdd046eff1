"""Training jobs for clusters: Slurm's script and the JobSet, each with the command that it starts in two local processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from parallel.processes import SECONDS, free_port
from tilewright.cli.main import app
from tilewright.cli.processes import CLUSTER, COORDINATOR, INDEX, PROCESSES, check_command

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"
JOBSET = ROOT / "deploy" / "kubernetes" / "train-slice.yaml"
SIZES = "vocab_size=264,hidden_size=32,layers=2,heads=2,kv_heads=1,head_dim=8,intermediate_size=32,context=32"
OPTIONS = f"--sizes {SIZES} -l 16 -b 8 --held-out 0.3 --evaluate-every 2 --save every=2 -n 4 --matmul-dtype float32".split()
SLURM_PORTS = range(65535 - 2**12 + 1, 65536)
"""Ports that JAX derives from a Slurm job's number."""


def jobset() -> dict[str, Any]:
    """The specification of the JobSet."""
    found = yaml.safe_load(JOBSET.read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return found["spec"]


def job() -> dict[str, Any]:
    """The specification of its only job."""
    (one,) = jobset()["replicatedJobs"]
    return one["template"]["spec"]


def test_slurm_starts_a_task_per_gpu_that_finds_the_others():
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    directives = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if "=" in line and line.startswith("#SB"))
    assert directives["ntasks-per-node"] == directives["gpus-per-node"]
    assert f"export {COORDINATOR}={CLUSTER}" in lines
    assert lines[-1] == 'exec srun --kill-on-bad-exit=1 tilewright train "$@"'


def test_pods_of_the_jobset_are_the_processes_of_one_run():
    spec = job()
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["parallelism"] == spec["completions"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["PODS"] == str(spec["completions"])
    chips = np.prod([int(n) for n in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")])
    assert chips == spec["completions"] * int(container["resources"]["limits"]["google.com/tpu"])
    assert f"--mesh=fsdp={chips}" in container["args"]
    said = container["command"][2]
    assert all(f"{name}=" in said for name in (COORDINATOR, PROCESSES, INDEX))
    assert f'$COORDINATOR:{container["ports"][0]["containerPort"]}"' in said
    assert jobset()["coordinator"] == {"replicatedJob": jobset()["replicatedJobs"][0]["name"], "jobIndex": 0, "podIndex": 0}
    assert jobset()["failurePolicy"]["maxRestarts"] > 0, "a run resumes"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_the_command_line_knows_what_the_jobset_asks():
    arguments = ["train", *job()["template"]["spec"]["containers"][0]["args"]]
    check_command(arguments)
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert bound.arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to train on, and stand-ins for `srun` and `tilewright` on the path."""
    root = tmp_path_factory.mktemp("cluster")
    for n in range(10):
        path = root / "text" / f"{n}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"one two three {n} four five six " * 12)
    commands = {
        "tilewright": f'exec {sys.executable} -m tilewright "$@"',
        "srun": 'shift; for n in 1 0; do SLURM_PROCID=$n SLURM_LOCALID=$n "$@" & done; wait -n && wait -n',
    }
    for name, text in commands.items():
        path = root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return root


def environment(folder: Path, devices: int, **more: str) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"  # the last one counts
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    source = str(ROOT / "src")
    common = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": path, "PYTHONPATH": source, "TILEWRIGHT_COMPILE_CACHE": "0"}
    return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **common, **more}


def arguments(folder: Path, name: str) -> list[str]:
    out = ["--mesh", "fsdp=8", "--out", str(folder / name), "--json", str(folder / f"{name}.json")]
    return ["lm", str(folder / "text"), *OPTIONS, *out]


def curve(folder: Path, name: str) -> list[list[float]]:
    points = json.loads((folder / f"{name}.json").read_text())["curve"]
    return [[point["step"], point["loss_nats_per_token"], point["held_out_loss_nats_per_token"]] for point in points]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[float]]:
    """Losses of one process with eight devices."""
    subprocess.run(
        ["tilewright", "train", *arguments(folder, "alone")], env=environment(folder, 8), check=True, timeout=SECONDS
    )
    return curve(folder, "alone")


def free_job() -> int:
    """Returns the number of a Slurm job for which JAX chooses a free port."""
    for port in SLURM_PORTS:
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", port)):
                return 2**12 + port - SLURM_PORTS[0]
    raise RuntimeError("no port is free")


@pytest.mark.slow
def test_slurms_script_trains_in_two_processes_as_one_does(folder: Path, alone: list[list[float]]):
    slurm = {"SLURM_JOB_ID": str(free_job()), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    command = ["bash", str(SBATCH), *arguments(folder, "slurm")]
    subprocess.run(command, env=environment(folder, 4, **slurm), check=True, timeout=SECONDS)
    np.testing.assert_allclose(curve(folder, "slurm"), alone, rtol=1e-4)


@pytest.mark.slow
def test_pods_of_the_jobset_train_as_one_process_does(folder: Path, alone: list[list[float]]):
    (container,) = job()["template"]["spec"]["containers"]
    port = free_port()
    script = container["command"][2].replace(f":{container['ports'][0]['containerPort']}", f":{port}")
    command = [*container["command"][:2], script, *container["command"][3:], *arguments(folder, "pods")]
    pods = [
        subprocess.Popen(
            command, env=environment(folder, 4, COORDINATOR="127.0.0.1", PODS="2", JOB_COMPLETION_INDEX=str(index))
        )
        for index in range(2)
    ]
    try:
        assert [pod.wait(SECONDS) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    np.testing.assert_allclose(curve(folder, "pods"), alone, rtol=1e-4)
