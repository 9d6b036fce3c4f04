"""Train for a round: one task per topology, because the launcher is fixed when a task is defined."""

import torch.distributed as dist
from flytekit import Cache, Deck, PythonFunctionTask, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core.jobs import UpdateJob
from mdiff_core.settings import Topology
from mdiff_core.stages import update as stage
from tasks import decks, hardware
from tasks.handoff import Artifact, Folders, Metrics, lineage, planned, retryable
from tasks.ranks import produce_on_ranks

COMMON = {
    "container_image": hardware.TRAIN_IMAGE,
    "cache": Cache(version=stage.VERSION, ignored_inputs=("store",)),
    "retries": 2,
    "environment": hardware.NCCL,
    "shared_memory": hardware.SHARED_MEMORY,
    "enable_deck": True,
    "deck_fields": (),
}

Outputs = tuple[Artifact, Artifact]
"""Policy and train state."""


def train(
    job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory
) -> tuple[FlyteDirectory, FlyteDirectory]:
    """On every rank; rank 0's result counts."""
    from mdiff_core.train import shard  # brings FSDP, for which the workflow's other tasks should not have to wait

    inputs = {"pairs": pairs, "policy": policy, "state": state}
    made = planned(store, "update", stage.VERSION, job, inputs, ("policy", "state"))

    def run(read: Folders, write: Folders) -> Metrics:
        metrics = stage.run(
            UpdateJob.from_json(job), read["pairs"], read["policy"], read["state"], write["policy"], write["state"]
        )
        Deck("training", decks.numbers(metrics))
        return {**metrics, **lineage(write["policy"])} if dist.get_rank() == 0 else metrics

    with retryable(), shard.all_ranks(shard.own_device()):
        next_policy, next_state = produce_on_ranks(made, inputs, run)
    return next_policy, next_state


@task(**COMMON)
def update_1x1(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """Policy and train state after a round, one process; `job` is an UpdateJob as JSON."""
    return train(job, store, pairs, policy, state)


@task(task_config=hardware.elastic("1x2"), **COMMON)
def update_1x2(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """As update_1x1, 1 node(s) of 2 processes."""
    return train(job, store, pairs, policy, state)


@task(task_config=hardware.elastic("1x4"), **COMMON)
def update_1x4(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """As update_1x1, 1 node(s) of 4 processes."""
    return train(job, store, pairs, policy, state)


@task(task_config=hardware.elastic("1x8"), **COMMON)
def update_1x8(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """As update_1x1, 1 node(s) of 8 processes."""
    return train(job, store, pairs, policy, state)


@task(task_config=hardware.elastic("2x8"), **COMMON)
def update_2x8(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """As update_1x1, 2 node(s) of 8 processes."""
    return train(job, store, pairs, policy, state)


@task(task_config=hardware.elastic("4x8"), **COMMON)
def update_4x8(job: str, store: str, pairs: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Outputs:
    """As update_1x1, 4 node(s) of 8 processes."""
    return train(job, store, pairs, policy, state)


UPDATES: dict[Topology, PythonFunctionTask] = {
    "1x1": update_1x1,
    "1x2": update_1x2,
    "1x4": update_1x4,
    "1x8": update_1x8,
    "2x8": update_2x8,
    "4x8": update_4x8,
}
"""The task of each topology."""
