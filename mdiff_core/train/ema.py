"""Averages that follow the trained weights, shard by shard."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mdiff_core.settings import Ema, Old
from mdiff_core.train.optim import local


def decay_at(ema: Ema, step: int) -> float:
    """The decay, or with warm-up min(decay, (1 + t) / (10 + t)), at optimizer step t, counted from 0."""
    return min(ema.decay, (1 + step) / (10 + step)) if ema.warmup else ema.decay


def is_due(ema: Ema, step: int) -> bool:
    """Whether the average moves after optimizer step `step`, counted from 0."""
    return (step + 1) % ema.every == 0


def old_decay_at(old: Old | None, step: int) -> float:
    """Of the old policy after a round that ends `step` optimizer steps into the run; 0 makes it a copy."""
    return 0.0 if old is None else min(old.slope * max(step - old.flat, 0), old.most)


@torch.no_grad()
def copies(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Averages that start at the weights, in the same shards."""
    return {name: value.detach().clone() for name, value in live.items()}


@torch.no_grad()
def follow(averages: Mapping[str, Tensor], live: Mapping[str, Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * live, in place."""
    torch._foreach_lerp_(local(averages.values()), local(live[name].detach() for name in averages), 1 - decay)
