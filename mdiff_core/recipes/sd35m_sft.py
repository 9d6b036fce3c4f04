"""Supervised fine-tuning of SD3.5-medium on captioned images, LoRA, one node of 8 GPUs.

Logit-normal times with mean 0 and std 1 and the sampler's shift of 3 (arXiv 2403.03206, sections 3.1 and 5.3.2). LoRA and precision
are those of `sd35m_flow_grpo_pickscore`; learning rate, batch, average and steps are ours. Write the captions first, as JSONL with
`image` and `input`.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes.sd35m_flow_grpo_pickscore import RECIPE as BASE
from mdiff_core.settings import Data, Ema

RECIPE = BASE.model_copy(
    update={
        "recipe": "sd35m_sft",
        "algorithm": "sft",
        "data": Data(captions="build/captions.jsonl"),
        "sampling": BASE.sampling.model_copy(
            update={"guidance": 1.0, "kernel": Choice(name="ode"), "window": Choice(name="all")}
        ),
        "loss": Choice(name="sft", options={"logit_mean": 0.0, "logit_std": 1.0, "shift": 3.0}),
        "train": BASE.train.model_copy(
            update={
                "lr": 1e-4,
                "warmup_steps": 100,
                "updates_per_round": 100,
                "batch": 256,
                "ema": Ema(decay=0.999),
            }
        ),
        "rounds": 20,
    }
)
