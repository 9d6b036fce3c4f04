"""Online DPO on SD3.5-medium for human preference: Diffusion-DPO's loss (arXiv 2311.12908), best against worst of each group.

Beta 2000 is the paper's for Stable Diffusion 1.5. The paper is offline; prompts, groups, LoRA and learning rate are those of
`sd35m_flow_grpo_pickscore`, whose authors compare with online DPO. Without guidance, as the loss is
of the plain velocity.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_dpo_pickscore",
        "sampling": BASE.sampling.model_copy(
            update={"guidance": 1.0, "kernel": Choice(name="ode"), "window": Choice(name="all")}
        ),
        "loss": Choice(name="dpo", options={"beta": 2000.0}),
        "train": BASE.train.model_copy(update={"updates_per_round": 1}),
        "evaluate": BASE.evaluate.model_copy(update={"guidance": 1.0}),
    }
)
