"""A stage that runs as several processes, each calling the same code."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from flytekit.types.directory import FlyteDirectory

from mdiff_core import artifacts
from mdiff_core.artifacts import Production
from tasks.handoff import Folders, Run, fetch, handle_of


def produce_on_ranks(made: Production, inputs: Mapping[str, FlyteDirectory], run: Run) -> list[FlyteDirectory]:
    """As `produce`, on every rank of an initialised torch.distributed: rank 0 owns the outputs, each node fetches once."""
    rank, first_on_node = dist.get_rank(), os.environ.get("LOCAL_RANK", "0") == "0"
    asked: list[Any] = [made.done if rank == 0 else None]
    dist.broadcast_object_list(asked, src=0)
    if not asked[0]:
        if first_on_node:
            _ = {role: fetch(handle) for role, handle in inputs.items()}
        dist.barrier()
        here = {role: fetch(handle) for role, handle in inputs.items()}
        with artifacts.damage_told(here.values()):  # also of ranks but the first, which `produce` does not see
            _run_on_ranks(made, here, run, rank)
    return [handle_of(uri) for uri in made.uris.values()]


def _run_on_ranks(made: Production, inputs: Folders, run: Run, rank: int) -> None:
    def on_all(_: Folders, folders: Folders) -> Mapping[str, Any]:
        shared: list[Any] = [folders]
        dist.broadcast_object_list(shared, src=0)
        metrics = run(inputs, shared[0])
        dist.barrier()
        return metrics

    if rank == 0:
        artifacts.produce(made, on_all, inputs)
    else:
        on_all(inputs, {})
    dist.barrier()
