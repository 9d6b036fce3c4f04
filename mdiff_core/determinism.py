"""Kernels that give the same bits every time: of training, and of the engine whose steps training repeats."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Same bits every time on a GPU too, where some fast backward passes add in any order; CPUs do so anyway.

    Convolutions keep all of float32: whether one is rounded to TF32 depends on the algorithm, and that on the batch. Enter it
    before the process's first matrix product, at which cuBLAS reads how much memory it may work in.
    """
    if device.type == "cpu" or not wanted:
        yield
        return
    reserve_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = False
    # On by default in that mode: it writes all new memory once, to make reads before a write repeatable.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def reserve_workspace() -> None:
    """Let cuBLAS, which reads this once, have the fixed workspace that repeatable results need; costs 32 MiB."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
