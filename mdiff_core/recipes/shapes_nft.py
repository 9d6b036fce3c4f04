"""DiffusionNFT (arXiv 2509.16117) on the tiny SD3 of the shapes world: rollouts by the ode, from the old policy.

Loss and decay are the paper's for GenEval, but each sample is trained at half of the sigmas; the rest is `shapes_flow_grpo`'s, at a
lower rate.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO
from mdiff_core.settings import Old

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_nft",
        "sampling": FLOW_GRPO.sampling.model_copy(update={"kernel": Choice(name="ode"), "window": Choice(name="all")}),
        "rollout": FLOW_GRPO.rollout.model_copy(update={"weights": "old"}),
        "loss": Choice(name="nft", options={"kl": 1e-4, "timesteps": 0.5}),
        "train": FLOW_GRPO.train.model_copy(update={"lr": 1.5e-3, "old": Old(flat=0, slope=0.001, most=0.5)}),
    }
)
