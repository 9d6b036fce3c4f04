"""GRPO-Guard on SD3.5-medium with a text-rendering reward (arXiv 2510.22319): `sd35m_flow_grpo_ocr` with its loss and no KL.

Clip 2e-6 is the published one for the normalised ratio; the paper's point is to do without heavy KL.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_ocr import RECIPE as BASE

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_grpo_guard_ocr",
        "loss": Choice(name="grpo_guard", options={"clip": 2e-6}),
    }
)
