"""What every reward with a network shares: where it runs, and how its weights are taken from a published checkpoint."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mdiff_core.errors import BadSetting
from mdiff_core.frames import FrameOptions


class ModelOptions(FrameOptions):
    """Where a reward's network runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and activations; vectors are compared in float32 whatever it is."""
    batch: int = Field(default=32, ge=1)
    """Frames in one forward pass."""

    def place(self) -> dict[str, Any]:
        """Keywords of `module.to`."""
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and not torch.cuda.is_available():
            raise BadSetting(
                "device: 'cuda', and there is no GPU here; use auto or cpu, or give the stage a GPU (hardware)"
            )
        return {"device": torch.device(name), "dtype": vars(torch)[self.dtype]}


def take(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load all weights; BadSetting when one is missing, left over or of another shape."""
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise BadSetting(f"'{where}': not the weights of this model ({reason}); give its own checkpoint") from error


def affine(tensors: Mapping[str, Tensor], prefix: str, where: str) -> nn.Sequential:
    """The layers `<prefix>N.weight` and `<prefix>N.bias`, one after another with nothing between: what the heads of aesthetic
    and ImageReward are. BadSetting when there are none."""
    numbers = sorted(
        int(found[1]) for name in tensors if (found := re.fullmatch(rf"{re.escape(prefix)}(\d+)\.weight", name))
    )
    if not numbers:
        raise BadSetting(f"'{where}': no {prefix}0.weight in it; give the published checkpoint")
    layers = []
    for number in numbers:
        weight = tensors[f"{prefix}{number}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        take(layer, {"weight": weight, "bias": tensors[f"{prefix}{number}.bias"]}, where)
        layers.append(layer)
    return nn.Sequential(*layers).eval().requires_grad_(False)
