"""The last pass over the shapes world's SD3 before RL: captions of which a part is wrong, as in data from the web.

Starts from what `shapes_sft` made, exported to build/shapes_sd3_clean. The pictures: `python -m mdiff_core.worlds.shapes
images --count 24000 --seed 7 --mislabelled 0.1 --out build/shapes_images_web --exclude
assets/shapes_prompts/held_out.jsonl`. What it unlearns is what the demo's reward brings back.
"""

from mdiff_core.recipes.shapes_sft import RECIPE as SFT
from mdiff_core.settings import Data, Ema

RECIPE = SFT.model_copy(
    update={
        "recipe": "shapes_base",
        "model": SFT.model.model_copy(update={"path": "build/shapes_sd3_clean"}),
        "data": Data(captions="build/shapes_images_web/captions.jsonl"),
        "train": SFT.train.model_copy(
            update={
                "lr": 5e-4,
                "warmup_steps": 30,
                "total_steps": 600,
                "updates_per_round": 150,
                "batch": 64,
                "microbatch": 64,
                "ema": Ema(decay=0.99),
            }
        ),
        "rounds": 4,
    }
)
