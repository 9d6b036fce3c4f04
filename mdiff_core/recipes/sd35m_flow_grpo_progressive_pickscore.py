"""Flow-GRPO on SD3.5-medium with MixGRPO's window (arXiv 2507.21802): four steps that move on by one every 25 rounds.

Window, shift interval and stride are the paper's, which trains FLUX.1-dev; the rest is `sd35m_flow_grpo_pickscore`'s, without its KL term,
as the paper has none.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_flow_grpo_progressive_pickscore",
        "sampling": BASE.sampling.model_copy(
            update={"window": Choice(name="progressive", options={"size": 4, "every": 25, "stride": 1})}
        ),
        "loss": Choice(name="flow_grpo", options={"clip": 1e-4}),
    }
)
