"""Trains over the workers of a Ray cluster (Ray Train's JaxTrainer): `tilewright train` in one process per worker.

    pip install 'tilewright[train]' 'ray[train]>=2.50'
    python deploy/ray_train.py --workers 4 --topology 4x4 --accelerator TPU-V5E -- lm TEXT --mesh fsdp=16 --out DIR

The arguments behind `--` are those of `tilewright train`. All workers need the data and a shared folder for `--out`. Failed
workers start again, and the run resumes from its checkpoint. Not tested on TPUs and GPUs.
"""

import os
from typing import Annotated, Any

import ray
import ray.train
from cyclopts import App, Parameter
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer

from tilewright.cli.processes import check_command

PORT = 8476
"""Port of the first worker's coordinator on CPUs."""


def run_worker(settings: dict[str, Any]) -> None:
    """Runs the command as one process of the job."""
    import jax

    from tilewright.cli.main import app
    from tilewright.parallel.mesh import initialise_processes

    if not jax.distributed.is_initialized():  # on TPUs and GPUs Ray has joined the processes
        context = ray.train.get_context()
        address = broadcast_from_rank_zero(f"{ray.util.get_node_ip_address()}:{settings['port']}")
        initialise_processes(address, context.get_world_size(), context.get_world_rank())
    os.chdir(settings["folder"])  # relative paths are those of the caller
    app(settings["arguments"], exit_on_error=False, print_error=False, result_action="return_value")  # not sys.exit(0)


def main(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    workers: int = 1,
    topology: str | None = None,
    accelerator: str | None = None,
    gpus: int = 0,
    cpus: float = 1.0,
    restarts: int = 3,
    port: int = PORT,
) -> None:
    """Trains on the Ray cluster at RAY_ADDRESS, or on a cluster of this machine.

    Args:
        arguments: behind `--`, the arguments of `tilewright train`, such as `lm TEXT --mesh fsdp=16 --out DIR`.
        workers: number of processes; on TPUs the hosts of the slice.
        topology: chips of the TPU slice, such as 4x4.
        accelerator: type of the accelerator, such as TPU-V5E.
        gpus: GPUs of each worker.
        cpus: CPUs of each worker, without a TPU.
        restarts: number of times that failed workers start again.
        port: port of the first worker's coordinator on CPUs.
    """
    command = ["train", *arguments]
    check_command(command)
    if topology is not None:
        scaling = ScalingConfig(num_workers=workers, use_tpu=True, topology=topology, accelerator_type=accelerator)
    else:
        resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        scaling = ScalingConfig(
            num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources, accelerator_type=accelerator
        )
    trainer = JaxTrainer(
        run_worker,
        train_loop_config={"arguments": command, "folder": os.getcwd(), "port": port},
        scaling_config=scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    )
    trainer.fit()


if __name__ == "__main__":
    App(default_command=main)()
