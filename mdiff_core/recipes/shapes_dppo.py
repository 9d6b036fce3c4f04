"""Flow-DPPO (arXiv 2606.11025) on the tiny SD3 of the shapes world; all but the loss is `shapes_flow_grpo`'s."""

from mdiff_core.options import Choice
from mdiff_core.recipes.shapes_flow_grpo import RECIPE as FLOW_GRPO

RECIPE = FLOW_GRPO.model_copy(
    update={
        "recipe": "shapes_dppo",
        "loss": Choice(name="dppo"),
    }
)
