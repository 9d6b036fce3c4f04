"""Online Diffusion-DPO (arXiv 2311.12908) on the tiny SD3 of the shapes world: the best of each group against its worst.

Rollouts are by the ode. One pair a group: as many samples as in `shapes_flow_grpo`, in more and smaller groups, and a lower rate.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_dpo",
        "sampling": FLOW_GRPO.sampling.model_copy(update={"kernel": Choice(name="ode"), "window": Choice(name="all")}),
        "loss": Choice(name="dpo", options={"beta": 200.0}),
        "prompts": FLOW_GRPO.prompts.model_copy(update={"per_round": 32}),
        "rollout": FLOW_GRPO.rollout.model_copy(update={"group_size": 8}),
        "train": FLOW_GRPO.train.model_copy(update={"lr": 1.5e-3}),
    }
)
