"""AdamW over sharded float32 weights, its schedule, and the norm that is the same on every rank."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mdiff_core.errors import BadSetting
from mdiff_core.settings import Train

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019); the learning rate is set before each step."""
    return torch.optim.AdamW(
        parameters, lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, fused=True
    )


def learning_rate(train: Train, step: int) -> float:
    """Of the optimizer step `step`, counted from 0: linear warm-up, then constant, or down to 0 at `total_steps`."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    span = train.total_steps - train.warmup_steps
    if span <= 0:
        raise BadSetting(
            f"train.total_steps: {train.total_steps} leaves the {train.schedule} schedule no steps after "
            f"train.warmup_steps={train.warmup_steps}; set it to the optimizer steps of the whole run"
        )
    done = min(1.0, (step - train.warmup_steps) / span)
    return train.lr * (1 - done if train.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards, as views."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Global L2 norm over all shards, a scalar on the device; inf or nan if any gradient is. Collective."""
    gradients = local(p.grad for p in parameters if p.grad is not None)
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    return square.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    if factor != 1.0:
        torch._foreach_mul_(local(p.grad for p in parameters if p.grad is not None), factor)


def moments_of(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`exp_avg.<name>` and `exp_avg_sq.<name>` of every parameter that was stepped, sharded as it is."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for moment in MOMENTS
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }


def restore_moments(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Tensor], steps: int
) -> None:
    """Continue where `moments_of` was taken, after `steps` steps."""
    for name, parameter in parameters.items():
        if f"{MOMENTS[0]}.{name}" in moments:
            count = torch.tensor(float(steps), device=parameter.device)
            optimizer.state[parameter] = {"step": count, **{m: moments[f"{m}.{name}"] for m in MOMENTS}}
