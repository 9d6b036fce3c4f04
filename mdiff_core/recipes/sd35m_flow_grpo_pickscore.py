"""Flow-GRPO on SD3.5-medium for human preference (PickScore): the published settings (arXiv 2505.05470), one node of 8 GPUs.

As `sd35m_flow_grpo_ocr`, with the paper's smaller KL weight of 0.01 for this reward and prompts of no special kind.
"""

from mdiff_core.options import Choice
from mdiff_core.recipes import sd35m_flow_grpo_ocr
from mdiff_core.settings import Prompts, RewardTerm, Score

RECIPE = sd35m_flow_grpo_ocr.RECIPE.model_copy(
    update={
        "recipe": "sd35m_flow_grpo_pickscore",
        "prompts": Prompts(
            train="assets/general_prompts/train.jsonl", held_out="assets/general_prompts/held_out.jsonl", per_round=48
        ),
        "score": Score(rewards=(RewardTerm(name="pickscore"),), filters=(Choice(name="no_spread"),)),
        "loss": Choice(name="flow_grpo", options={"clip": 1e-4, "beta": 0.01}),
    }
)
