"""Flow-DPPO on SD3.5-medium for human preference (arXiv 2606.11025): `sd35m_flow_grpo_pickscore` with its loss.

The limit of 1e-5 is the published one; the KL term of Flow-GRPO stays, as the paper keeps it.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_dppo_pickscore",
        "loss": Choice(name="dppo", options={"limit": 1e-5, "beta": 0.01}),
    }
)
