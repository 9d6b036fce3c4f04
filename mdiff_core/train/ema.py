"""Averages that follow the trained weights, shard by shard."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mdiff_core.settings import Ema
from mdiff_core.train.optim import local


def decay_at(ema: Ema, step: int) -> float:
    """min(decay, (1 + t) / (10 + t)) at optimizer step t, counted from 0: early on, the average follows fast."""
    return min(ema.decay, (1 + step) / (10 + step))


def is_due(ema: Ema, step: int) -> bool:
    """Whether the average moves after optimizer step `step`, counted from 0."""
    return (step + 1) % ema.every == 0


@torch.no_grad()
def copies(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Averages that start at the weights, in the same shards."""
    return {name: value.detach().clone() for name, value in live.items()}


@torch.no_grad()
def follow(averages: Mapping[str, Tensor], live: Mapping[str, Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * live, in place."""
    torch._foreach_lerp_(local(averages.values()), local(live[name].detach() for name in averages), 1 - decay)
