"""A stand-in for the trained policies: a velocity of a few parameters, each row computed by itself."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mdiff_core.contracts import Kernel
from mdiff_core.types import CleanRows, Conditioning, Moments, Preferences, Samples, Transitions

LATENT = (2, 3, 3)
UNCONDITIONAL = Conditioning(positive={}, negative={}, guidance=1.0)


class ToyPolicy(nn.Module):
    """v = tanh(w x + u sigma + b), elementwise."""

    def __init__(self, kernel: Kernel, seed: int, grad: bool) -> None:
        super().__init__()
        self.kernel = kernel
        draw = torch.Generator().manual_seed(seed)
        w, u, b = (nn.Parameter(0.5 * torch.randn(LATENT, generator=draw), requires_grad=grad) for _ in range(3))
        self.w, self.u, self.b = w, u, b

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return torch.tanh(self.w * x + self.u * sigma.reshape(-1, 1, 1, 1) + self.b)

    def transition(self, rows: Transitions) -> Moments:
        v = self.velocity(rows.x, rows.sigma, rows.conditioning)
        return self.kernel.moments(rows.x, v, rows.sigma, rows.sigma_next, rows.sigma_ceiling)

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        return self.kernel.log_prob(x_next, moments)


class ToyPolicies:
    """Live and others with different weights; asking for one that was not declared fails the test."""

    def __init__(self, kernel: Kernel, needs: Iterable[str] = ()) -> None:
        self.kernel = kernel
        self.live = ToyPolicy(kernel, 0, grad=True)
        names = ("reference", "old", "start", "ema")
        self.others = {name: ToyPolicy(kernel, seed, grad=False) for seed, name in enumerate(names, 1)}
        self.needs = frozenset(needs)

    def frozen(self, name: str) -> ToyPolicy:
        assert name in self.needs, f"the loss uses '{name}' without declaring it"
        return self.others[name]

    def on_policy(self, *names: str) -> "ToyPolicies":
        """These are what the live one is, as on the first step of a round."""
        for name in names:
            self.others[name].load_state_dict(self.live.state_dict())
        return self


def transitions(
    policy: ToyPolicy, sigmas: Tensor, steps: list[int], advantage: list[float], **change: Any
) -> Transitions:
    """Rows that `policy` itself would have drawn at `steps` of `sigmas`, so that every ratio starts at 1."""
    batch, draw = len(steps), torch.Generator().manual_seed(7)
    columns: dict[str, Any] = {
        "x": torch.randn(batch, *LATENT, generator=draw),
        "sigma": sigmas[steps],
        "sigma_next": sigmas[[step + 1 for step in steps]],
        "sigma_ceiling": sigmas[1].expand(batch),
        "advantage": torch.tensor(advantage),
        "conditioning": UNCONDITIONAL,
        "seed": torch.arange(100, 100 + batch),
    }
    rows = Transitions(x_next=columns["x"], log_prob=torch.zeros(batch), **columns)
    with torch.no_grad():
        moments = policy.transition(rows)
        x_next = policy.kernel.step(rows.x, moments, torch.randn(batch, *LATENT, generator=draw))
        columns |= {"x_next": x_next, "log_prob": policy.log_prob(x_next, moments)}
    return Transitions(**columns | change)


def latents(batch: int, seed: int = 3) -> Tensor:
    return torch.randn(batch, *LATENT, generator=torch.Generator().manual_seed(seed))


def clean_rows(advantage: list[float]) -> CleanRows:
    batch = len(advantage)
    seed = torch.arange(200, 200 + batch)
    return CleanRows(x0=latents(batch), advantage=torch.tensor(advantage), conditioning=UNCONDITIONAL, seed=seed)


def samples(advantage: list[float], sigma: list[float]) -> Samples:
    return Samples(
        x0=latents(len(sigma)),
        sigma=torch.tensor(sigma),
        advantage=torch.tensor(advantage),
        conditioning=UNCONDITIONAL,
        seed=torch.arange(200, 200 + len(sigma)),
    )


def preferences(sigma: list[float]) -> Preferences:
    return Preferences(
        better=latents(len(sigma)),
        worse=latents(len(sigma), seed=4),
        sigma=torch.tensor(sigma),
        conditioning=UNCONDITIONAL,
        seed=torch.arange(200, 200 + len(sigma)),
    )
