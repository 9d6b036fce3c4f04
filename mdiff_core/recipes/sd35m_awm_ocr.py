"""AWM on SD3.5-medium with a text-rendering reward: the published settings (arXiv 2509.25050), one node of 8 GPUs.

From the paper's code (configuration `ocr_sd3_no_cfg_1node`): 14 steps without guidance, 72 groups of 24, six sigmas a sample, generalised
Huber weighting of power 0.25, advantages cut at 1, a clip of 1 (none in practice), KL 0.003, one update a round, learning rate 3e-4, EMA
0.99. Left out: a second KL against an average of its own, and a sampler of higher order than ours.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_ocr import RECIPE as BASE
from mdiff_core.settings import Advantage, Ema

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_awm_ocr",
        "prompts": BASE.prompts.model_copy(update={"per_round": 72}),
        "sampling": BASE.sampling.model_copy(
            update={"steps": 14, "guidance": 1.0, "kernel": Choice(name="ode"), "window": Choice(name="all")}
        ),
        "advantage": Advantage(std="batch", clamp=1.0),
        "loss": Choice(
            name="awm", options={"weighting": "ghuber", "power": 0.25, "clip": 1.0, "kl": 0.003, "timesteps": 0.43}
        ),
        "train": BASE.train.model_copy(update={"updates_per_round": 1, "ema": Ema(decay=0.99)}),
        "evaluate": BASE.evaluate.model_copy(update={"guidance": 1.0}),
    }
)
