"""`shapes_flow_grpo` with a window that moves towards the end (MixGRPO, arXiv 2507.21802), a step every third round here.

24 rounds: after the 18 of `shapes_flow_grpo` two CPU cores gained 0.0965, below the demo's bar of 0.10; after 24, 0.131.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_flow_grpo_progressive",
        "sampling": FLOW_GRPO.sampling.model_copy(
            update={"window": Choice(name="progressive", options={"size": 3, "lo": 1, "hi": 7, "every": 3})}
        ),
        "rounds": 24,
    }
)
