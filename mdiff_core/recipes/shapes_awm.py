"""Advantage Weighted Matching (arXiv 2509.25050) on the tiny SD3 of the shapes world: rollouts by the ode.

The weighting is the paper's; each sample is trained at half of the sigmas, and the rest is `shapes_flow_grpo`'s, at a lower rate.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_awm",
        "sampling": FLOW_GRPO.sampling.model_copy(update={"kernel": Choice(name="ode"), "window": Choice(name="all")}),
        "loss": Choice(name="awm", options={"weighting": "ghuber", "power": 0.25, "timesteps": 0.5}),
        "train": FLOW_GRPO.train.model_copy(update={"lr": 1.5e-3}),
    }
)
