"""Images, machines and launchers of the stages."""

from typing import Any

from flytekit import Resources
from flytekit.extras import accelerators
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig

from mdiff_core.errors import BadSetting
from mdiff_core.registry import nearest
from mdiff_core.settings import Hardware, Machine, RunConfig, Topology

ROLLOUT_IMAGE = "{{.image.rollout.fqn}}:{{.image.rollout.version}}"
TRAIN_IMAGE = "{{.image.train.fqn}}:{{.image.train.version}}"
SCORE_IMAGE = "{{.image.score.fqn}}:{{.image.score.version}}"

SMALL = Resources(cpu="1", mem="2Gi")
"""Of tasks that only order others, and of the pod that submits a Ray job (flyte#5666)."""
HEAD = Resources(cpu="4", mem="16Gi")
"""Of Ray's head, which writes the tables."""
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300"}
"""Survivors of a rank's out-of-memory would otherwise hang for an hour and a half."""
SHARED_MEMORY = "64Gi"

ACCELERATORS = {
    name: value for name, value in vars(accelerators).items() if isinstance(value, accelerators.BaseAccelerator)
}
"""Flyte's by name."""


def check(config: RunConfig) -> None:
    """BadSetting for an accelerator that Flyte does not know."""
    for stage, name in config.hardware.model_dump(exclude={"topology", "rollout_workers"}).items():
        if name["accelerator"] and name["accelerator"] not in ACCELERATORS:
            hint = nearest(name["accelerator"], ACCELERATORS)
            raise BadSetting(
                f"hardware.{stage}.accelerator: '{name['accelerator']}' is not one that Flyte knows; {hint}"
            )


def resources(machine: Machine) -> Resources:
    """What the stage asks for; requests equal limits, so that it gets what it counts on."""
    return Resources(cpu=machine.cpu, mem=machine.memory, gpu=str(machine.gpu) if machine.gpu else None)


def pod(machine: Machine) -> dict[str, Any]:
    """Keywords of `with_overrides` for a stage in a plain pod or a group of equal ones."""
    asked: dict[str, Any] = {"requests": resources(machine), "limits": resources(machine)}
    return asked | ({"accelerator": ACCELERATORS[machine.accelerator]} if machine.accelerator else {})


def ray(hardware: Hardware) -> dict[str, Any]:
    """Keywords of `with_overrides` for a stage on Ray: GPUs are the workers' alone."""
    asked = {"accelerator": ACCELERATORS[hardware.rollout.accelerator]} if hardware.rollout.accelerator else {}
    return {"task_config": ray_job(hardware.rollout_workers, hardware.rollout), **asked}


def ray_job(replicas: int, machine: Machine) -> RayJobConfig:
    """A head that runs no actors, and `replicas` workers."""
    worker = WorkerNodeConfig(
        group_name="rollout", replicas=replicas, requests=resources(machine), limits=resources(machine)
    )
    return RayJobConfig(
        head_node_config=HeadNodeConfig(ray_start_params={"num-cpus": "0"}, requests=HEAD, limits=HEAD),
        worker_node_config=[worker],
        shutdown_after_job_finishes=True,
        ttl_seconds_after_finished=120,
    )


def elastic(topology: Topology) -> Elastic:
    """torchrun's launcher for a topology of more than one process."""
    nodes, processes = map(int, topology.split("x"))
    waits = {"timeout": 1800, "join_timeout": 1800, "read_timeout": 1800}
    return Elastic(
        nnodes=nodes, nproc_per_node=processes, max_restarts=0, rdzv_configs=waits, increase_shared_mem=False
    )
