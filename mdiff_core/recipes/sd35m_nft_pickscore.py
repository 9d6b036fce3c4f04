"""DiffusionNFT on SD3.5-medium for human preference: the published settings (arXiv 2509.16117), one node of 8 GPUs.

From the paper: 10 steps (40 to evaluate) without guidance, 48 groups of 24, learning rate 3e-4, LoRA 32/64, advantages cut at 5, batch std,
velocity KL 1e-4, beta 1, fp16, one update a round, old policy min(0.001 t, 0.5). Its sampler is a second-order one, ours Euler's.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE
from mdiff_core.settings import Old

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_nft_pickscore",
        "sampling": BASE.sampling.model_copy(
            update={"guidance": 1.0, "kernel": Choice(name="ode"), "window": Choice(name="all")}
        ),
        "rollout": BASE.rollout.model_copy(update={"weights": "old"}),
        "loss": Choice(name="nft", options={"beta": 1.0, "c": 5.0, "kl": 1e-4, "timesteps": 0.99}),
        "train": BASE.train.model_copy(update={"updates_per_round": 1, "old": Old(flat=0, slope=0.001, most=0.5)}),
        "evaluate": BASE.evaluate.model_copy(update={"guidance": 1.0}),
    }
)
