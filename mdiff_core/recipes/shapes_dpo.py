"""Online Diffusion-DPO (arXiv 2311.12908) on the tiny SD3 of the shapes world: the best of each group against its worst.

Rollouts are by the ode; the rest is `shapes_flow_grpo`'s.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_dpo",
        "sampling": FLOW_GRPO.sampling.model_copy(update={"kernel": Choice(name="ode"), "window": Choice(name="all")}),
        "loss": Choice(name="dpo", options={"beta": 2000.0}),
    }
)
