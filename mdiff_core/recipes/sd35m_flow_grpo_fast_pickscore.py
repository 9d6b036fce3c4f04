"""Flow-GRPO-Fast without guidance on SD3.5-medium for human preference: the published settings, one node of 8 GPUs.

From the paper's code (arXiv 2505.05470, configuration `pickscore_sd3_fast_nocfg`): cps with eta 0.8 (arXiv 2509.05952), a window of three
steps in the first five, clip 1e-5, no KL, no guidance in training or evaluation. The rest is `sd35m_flow_grpo_pickscore`'s.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_flow_grpo_fast_pickscore",
        "sampling": BASE.sampling.model_copy(
            update={
                "guidance": 1.0,
                "kernel": Choice(name="cps", options={"eta": 0.8}),
                "window": Choice(name="window", options={"size": 3, "lo": 0, "hi": 5}),
            }
        ),
        "loss": Choice(name="flow_grpo", options={"clip": 1e-5}),
        "evaluate": BASE.evaluate.model_copy(update={"guidance": 1.0}),
    }
)
