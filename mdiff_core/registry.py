"""Names to plug-ins. Adding one is a file and a line here; nothing is imported before it is asked for."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice, Options

REGISTRY: dict[str, dict[str, str]] = {
    "family": {
        "sd3": "mdiff_core.families.sd3:SD3",
    },
    "kernel": {
        "cps": "mdiff_core.kernels.cps:CPS",
        "dance_sde": "mdiff_core.kernels.dance_sde:DanceSDE",
        "flow_sde": "mdiff_core.kernels.flow_sde:FlowSDE",
        "ode": "mdiff_core.kernels.ode:ODE",
    },
    "window": {
        "all": "mdiff_core.windows:All",
        "window": "mdiff_core.windows:RandomWindow",
        "progressive": "mdiff_core.windows:Progressive",
        "subset": "mdiff_core.windows:Subset",
    },
    "engine": {
        "diffusers": "mdiff_core.engines.diffusers:DiffusersEngine",
        "sglang": "mdiff_core.engines.sglang.engine:SGLangEngine",
    },
    "reward": {
        "aesthetic": "mdiff_core.rewards.aesthetic:Aesthetic",
        "clip": "mdiff_core.rewards.clip:ClipScore",
        "hps": "mdiff_core.rewards.hps:Hps",
        "http": "mdiff_core.rewards.http:Http",
        "image_reward": "mdiff_core.rewards.image_reward:ImageReward",
        "jpeg_compressibility": "mdiff_core.rewards.jpeg:JpegCompressibility",
        "jpeg_incompressibility": "mdiff_core.rewards.jpeg:JpegIncompressibility",
        "ocr": "mdiff_core.rewards.ocr:Ocr",
        "ocr_flow_grpo": "mdiff_core.rewards.ocr:OcrFlowGRPO",
        "pickscore": "mdiff_core.rewards.pickscore:PickScore",
        "python": "mdiff_core.rewards.python:Python",
        "shapes": "mdiff_core.rewards.shapes:Shapes",
        "vlm_judge": "mdiff_core.rewards.vlm_judge:VlmJudge",
    },
    "filter": {
        "no_spread": "mdiff_core.filters:NoSpread",
        "duplicates": "mdiff_core.filters:Duplicates",
        "score_range": "mdiff_core.filters:ScoreRange",
        "metadata": "mdiff_core.filters:Metadata",
        "python": "mdiff_core.filters:PythonFilter",
    },
    "loss": {
        "awm": "mdiff_core.losses.awm:AWM",
        "dpo": "mdiff_core.losses.dpo:DPO",
        "dppo": "mdiff_core.losses.dppo:DPPO",
        "flow_grpo": "mdiff_core.losses.flow_grpo:FlowGRPO",
        "grpo_guard": "mdiff_core.losses.grpo_guard:GRPOGuard",
        "nft": "mdiff_core.losses.nft:NFT",
        "sft": "mdiff_core.losses.sft:SFT",
    },
}
"""slot -> name -> "module:Class"."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: the closest known name, or all of them."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"


def find(slot: str, name: str) -> Any:
    """The class registered as `name` in `slot`; BadSetting names the nearest one when there is none."""
    names = REGISTRY[slot]
    if name not in names:
        raise BadSetting(f"{slot}: '{name}' is not a known {slot}; {nearest(name, names)}")
    module, _, attribute = names[name].partition(":")
    return vars(import_module(module))[attribute]


def options(slot: str, choice: Choice) -> Options:
    """The plug-in's own options, validated; pydantic's error locations are the option names."""
    checked: Options = find(slot, choice.name).Options.from_json(json.dumps(choice.options))
    return checked


def make(slot: str, choice: Choice, **parts: Any) -> Any:
    """An instance of the plug-in; `parts` is what the slot's contract says the maker passes."""
    return find(slot, choice.name)(options(slot, choice), **parts)
