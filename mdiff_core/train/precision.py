"""Number formats of training: which dtype computes, and loss scaling for fp16."""

from dataclasses import dataclass
from typing import Any

import torch

from mdiff_core.errors import BadSetting

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of `train.precision`: the forward and backward pass. Trained weights, sums of gradients and optimizer are float32."""
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of `model.dtype`."""

LEAST_SCALE = 2.0**-10


@dataclass(slots=True, kw_only=True)
class GradScaler:
    """Loss scale of fp16: halved after a step whose gradients overflowed, doubled after 2000 that did not.

    One for all ranks: each settles on the norm over all shards, so they cannot disagree. In other precisions the scale
    is 1 and stays so.
    """

    enabled: bool
    scale: float = 1.0
    streak: int = 0
    """Steps in a row without overflow."""

    FACTOR = 2.0
    INTERVAL = 2000
    START = 2.0**16

    @classmethod
    def of(cls, precision: str, saved: dict[str, Any] | None) -> "GradScaler":
        """For `train.precision`, as it was saved or as it starts."""
        if precision != "fp16":
            return cls(enabled=False)
        return cls(enabled=True, **(saved or {"scale": cls.START}))

    def settle(self, finite: bool) -> None:
        """After a step: adapt the scale. BadSetting when no scale helps."""
        if not self.enabled:
            return
        self.streak = self.streak + 1 if finite else 0
        if not finite:
            self.scale /= self.FACTOR
        elif self.streak == self.INTERVAL:
            self.scale, self.streak = self.scale * self.FACTOR, 0
        if self.scale < LEAST_SCALE:
            raise BadSetting(
                "train.precision: 'fp16' gradients overflow at every loss scale; use 'bf16' or a lower train.lr"
            )

    def saved(self) -> dict[str, Any] | None:
        """What the next round needs; None when there is nothing to scale."""
        return {"scale": self.scale, "streak": self.streak} if self.enabled else None
