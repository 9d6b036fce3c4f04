"""Every random number of a run derives from names, not from a state: nothing to save, nothing to get out of step."""

import hashlib

import torch
from torch import Tensor


def derive(*parts: int | str) -> int:
    """A seed in [0, 2**62) from (run seed, round, prompt id, sample index, ...), the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by `derive`: CPU noise is the same for every device and batch size."""
    return torch.Generator("cpu").manual_seed(derive(*parts))


def normal_like(x: Tensor, seeds: Tensor, *parts: int | str) -> Tensor:
    """Standard normal noise shaped as x [B, ...], row b drawn from (seeds[b], *parts) alone; float32 on x's device."""
    rows = [torch.randn(x.shape[1:], generator=generator(int(seed), *parts)) for seed in seeds.tolist()]
    return torch.stack(rows).to(x.device)


def uniform_like(x: Tensor, seeds: Tensor, *parts: int | str) -> Tensor:
    """Uniform [0, 1) numbers [B], one per row of x, row b drawn from (seeds[b], *parts) alone."""
    rows = [torch.rand((), generator=generator(int(seed), *parts)) for seed in seeds.tolist()]
    return torch.stack(rows).to(x.device)
