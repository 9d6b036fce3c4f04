"""The model as a loss sees it: the policy being trained, its reference and its old self, behind contracts.Policies."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mdiff_core.contracts import Family, Kernel
from mdiff_core.errors import BadSetting
from mdiff_core.guidance import guided_velocity
from mdiff_core.types import Conditioning, Frozen, Moments, Transitions

View = Callable[[], AbstractContextManager[nn.Module]]
"""Puts a transformer's weights in place for as long as the context is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """Log-probs that a loss has asked for, so that drift is measured without another forward pass."""

    log_prob: Tensor
    """[B] float32, detached."""
    noisy: Tensor
    """[B] bool: whether the step has noise, and so a density."""


class ModelPolicy:
    """contracts.Policy over one view of the weights."""

    def __init__(self, view: View, family: Family, kernel: Kernel, *, trained: bool) -> None:
        self._view, self._family, self._kernel, self._trained = view, family, kernel, trained
        self.density: Density | None = None
        """Of the first `log_prob` since this was last set to None."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Guided velocity [B, *latent] float32; carries gradient only if this policy is the trained one."""
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()), self._view() as transformer:
            return guided_velocity(self._family, transformer, x, sigma, conditioning)

    def transition(self, rows: Transitions) -> Moments:
        """Gaussian of the step that `rows` took, under the recipe's kernel."""
        return self.moments(rows, self.velocity(rows.x, rows.sigma, rows.conditioning))

    def moments(self, rows: Transitions, v: Tensor) -> Moments:
        """Gaussian of the step that `rows` took, had the velocity been v [B, *latent]."""
        return self._kernel.moments(rows.x, v, rows.sigma, rows.sigma_next, rows.sigma_ceiling)

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B] float32 under the recipe's kernel."""
        value = self._kernel.log_prob(x_next, moments)
        if self.density is None:
            self.density = Density(log_prob=value.detach(), noisy=moments.scale > 0)
        return value


class TrainedPolicies:
    """contracts.Policies of a transformer in training.

    `frozen` holds a view for each policy but the live one; only those that the loss needs are given out.
    """

    def __init__(
        self,
        transformer: nn.Module,
        family: Family,
        kernel: Kernel,
        needs: frozenset[Frozen],
        *,
        live: View | None = None,
        frozen: Mapping[Frozen, View] | None = None,
    ) -> None:
        absent = sorted(needs - set(frozen or {}))
        if absent:
            raise BadSetting(
                f"loss: needs the {absent[0]} policy, which this model does not offer; choose another loss"
            )
        self.live = ModelPolicy(live or (lambda: nullcontext(transformer)), family, kernel, trained=True)
        views = {name: view for name, view in (frozen or {}).items() if name in needs}
        self._others = {name: ModelPolicy(view, family, kernel, trained=False) for name, view in views.items()}

    def frozen(self, name: Frozen) -> ModelPolicy:
        """Another policy. BadSetting unless the loss declared that it needs it."""
        if name not in self._others:
            raise BadSetting(f"loss: asked for policy '{name}', which its `needs` lack; declare it in the loss")
        return self._others[name]
