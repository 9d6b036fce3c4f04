"""Flow-GRPO (arXiv 2505.05470) on the tiny SD3 of drawn words, judged by a real OCR engine, sized for two CPU cores as the demo is.

Trained on 320 words, eight a round; measured on 96 others. OCR does not look at the ink: a word in the wrong colour counts as right.
"""

from mdiff_core.recipes.shapes_flow_grpo import RECIPE as SHAPES
from mdiff_core.settings import Prompts, RewardTerm

RECIPE = SHAPES.model_copy(
    update={
        "recipe": "shapes_ocr",
        "model": SHAPES.model.model_copy(update={"path": "assets/words_sd3"}),
        "prompts": Prompts(
            train="assets/words_prompts/train.jsonl", held_out="assets/words_prompts/held_out.jsonl", per_round=8
        ),
        "score": SHAPES.score.model_copy(update={"rewards": (RewardTerm(name="ocr", options={"side": 128}),)}),
    }
)
