"""`shapes_flow_grpo` with coefficient-preserving sampling: kernel and window as published (FlowCPS, arXiv 2509.05952)."""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_flow_grpo_cps",
        "sampling": FLOW_GRPO.sampling.model_copy(
            update={
                "kernel": Choice(name="cps", options={"eta": 0.8}),
                "window": Choice(name="window", options={"size": 3, "lo": 0, "hi": 5}),
            }
        ),
    }
)
