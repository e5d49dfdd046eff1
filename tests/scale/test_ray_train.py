"""Training by Ray Train in two local workers of four CPU devices each: the losses of one process with eight.

Needs `ray[train]`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parallel.processes import free_port

pytest.importorskip("ray.train.v2.jax")

ROOT = Path(__file__).parents[2]
SECONDS = 900
SIZES = "vocab_size=264,hidden_size=32,layers=2,heads=2,kv_heads=1,head_dim=8,intermediate_size=32,context=32"
OPTIONS = f"--sizes {SIZES} -l 16 -b 8 --held-out 0.3 --evaluate-every 2 --save every=2 -n 4 --matmul-dtype float32".split()

pytestmark = pytest.mark.slow


def environment(devices: int) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"  # the last one counts
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    patient = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return {**os.environ, **patient, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": source}


def test_workers_train_as_one_process_does(tmp_path: Path):
    text = tmp_path / "text"
    text.mkdir()
    for n in range(10):
        (text / f"{n}.txt").write_text(f"one two three {n} four five six " * 12)

    def arguments(name: str) -> list[str]:
        out = ["--mesh", "fsdp=8", "--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json")]
        return ["lm", str(text), *OPTIONS, *out]

    def curve(name: str) -> list[list[float]]:
        points = json.loads((tmp_path / f"{name}.json").read_text())["curve"]
        return [[point["step"], point["loss_nats_per_token"], point["held_out_loss_nats_per_token"]] for point in points]

    alone = [sys.executable, "-m", "tilewright", "train", *arguments("alone")]
    subprocess.run(alone, env=environment(8), check=True, timeout=SECONDS)
    script = [sys.executable, str(ROOT / "deploy" / "ray_train.py"), "--workers", "2", "--port", str(free_port())]
    subprocess.run([*script, "--", *arguments("ray")], env=environment(4), check=True, timeout=SECONDS)
    np.testing.assert_allclose(curve("ray"), curve("alone"), rtol=1e-4)
