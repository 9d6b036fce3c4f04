"""`shapes_flow_grpo` with a window of three steps drawn anew each round from the noisier half (Flow-GRPO-Fast, arXiv 2505.05470).

Not from the very first step, whose noise is so large that it tells little about the policy.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_flow_grpo_window",
        "sampling": FLOW_GRPO.sampling.model_copy(
            update={"window": Choice(name="window", options={"size": 3, "lo": 1, "hi": 6})}
        ),
    }
)
