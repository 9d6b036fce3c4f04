"""DiffusionNFT on SD3.5-medium with a text-rendering reward: the published settings (arXiv 2509.16117), one node of 8 GPUs.

As `sd35m_nft_pickscore`, with what the paper changes for this reward: two updates a round, beta 0.1, and an old policy that is a copy for
75 steps and then min(0.0075 (t - 75), 0.999).
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_ocr import RECIPE as BASE
from mdiff_core.settings import Old

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_nft_ocr",
        "sampling": BASE.sampling.model_copy(
            update={"guidance": 1.0, "kernel": Choice(name="ode"), "window": Choice(name="all")}
        ),
        "rollout": BASE.rollout.model_copy(update={"weights": "old"}),
        "loss": Choice(name="nft", options={"beta": 0.1, "c": 5.0, "kl": 1e-4, "timesteps": 0.99}),
        "train": BASE.train.model_copy(update={"updates_per_round": 2, "old": Old(flat=75, slope=0.0075, most=0.999)}),
        "evaluate": BASE.evaluate.model_copy(update={"guidance": 1.0}),
    }
)
