"""Settings of the machines that a cluster gives to each stage."""

from typing import Literal

from pydantic import Field

from mdiff_core.options import Options

Topology = Literal["1x1", "1x2", "1x4", "1x8", "2x8", "4x8"]
"""nodes x processes on each; `tasks/update.py` has one task for each of them."""
QUANTITY = r"^\d+(\.\d+)?(m|[kMGTPE]i?)?$"
"""Kubernetes' way to write an amount."""


class Machine(Options):
    """What one stage asks of the cluster; ignored by local execution."""

    cpu: str = Field(default="2", pattern=QUANTITY)
    """Cores, as Kubernetes writes them."""
    memory: str = Field(default="4Gi", pattern=QUANTITY)
    """Bytes, as Kubernetes writes them."""
    gpu: int = Field(default=0, ge=0, le=64)
    """GPUs; 0 asks for none."""
    accelerator: str = ""
    """Flyte accelerator name such as H100 or H200; empty takes any."""


class Hardware(Options):
    """Machines per stage."""

    rollout: Machine = Machine()
    """Each Ray worker."""
    score: Machine = Machine()
    """The one pod, workers included."""
    pair: Machine = Machine()
    """The one pod, which needs no GPU but to encode captioned images."""
    update: Machine = Machine()
    """Each node."""
    topology: Topology = "1x1"
    """nodes x processes of the update stage."""
    rollout_workers: Literal[1, 2, 4, 8] = 1
    """Ray workers of the rollout stage."""
