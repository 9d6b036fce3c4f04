"""FSDP2 over all ranks: the same code for one process and for many, gloo on CPUs and NCCL on GPUs."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


def own_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's shards."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


@contextmanager
def all_ranks(device: torch.device) -> Iterator[DeviceMesh]:
    """The mesh of all ranks: of the caller's process group, or of one made here (torchrun's, or this process alone)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    made = not dist.is_initialized()
    if made:
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        meeting: dict[str, Any] = {"rank": 0, "world_size": 1, "store": HashStore()} if alone else {}
        dist.init_process_group(backend, device_id=bound, **meeting)
    try:
        yield init_device_mesh(device.type, (dist.get_world_size(),))
    finally:
        if made:
            dist.destroy_process_group()


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Activation checkpointing: keep only what enters a block, and run it again in the backward pass."""
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        vars(block)["forward"] = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def shard(transformer: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Shard every block and the rest, in place; layers are gathered in `compute`, gradients reduced in float32.

    Inputs are not cast: a time in bfloat16 would be another time. A process alone leaves frozen weights as they are,
    where gathering them would only copy them.
    """
    alone = mesh.size() == 1
    kept = {one for one in transformer.parameters() if alone and one.dtype == compute and not one.requires_grad}
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*blocks, transformer):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=kept)


@contextmanager
def opened(transformer: nn.Module) -> Iterator[nn.Module]:
    """The transformer with its outermost weights gathered, so that its dtype is what it computes in."""
    if isinstance(transformer, FSDPModule):
        transformer.unshard()
    yield transformer


def whole(tensor: Tensor) -> Tensor | None:
    """A sharded tensor on rank 0's CPU, None on the other ranks; all ranks call."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.to("cpu", copy=True) if dist.get_rank() == 0 else None


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of them, on rank 0 only; empty elsewhere. All ranks call, with the same names in the same order."""
    found = {name: whole(tensor) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def from_all(item: Any) -> list[Any]:
    """Every rank's item, by rank; for errors and diagnoses, not for tensors."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def reduced(values: Tensor, op: Literal["sum", "max"]) -> list[float]:
    """A vector summed (or its largest taken) over the ranks, element by element. Waits for the device."""
    dist.all_reduce(values, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return cast(list[float], values.tolist())


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, which every rank has, cut into shards as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return full.to(parameter.device, parameter.dtype, copy=True)
    value = full.to(parameter.device, parameter.dtype, copy=True)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def sync_gradients(transformer: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks, or only adds them up here."""
    cast(FSDPModule, transformer).set_requires_gradient_sync(now)
