"""The last pass over the word world's SD3 before RL, as `shapes_base` is for shapes: captions of which three in ten are wrong.

Starts from what `words_sft` made, exported to build/words_sd3_clean. The pictures: `python -m mdiff_core.worlds.words
images --count 24000 --seed 7 --mislabelled 0.3 --out build/words_images_web --exclude assets/words_prompts/held_out.jsonl`.
"""

from mdiff_core.recipes.shapes_base import RECIPE as SHAPES
from mdiff_core.recipes.words_sft import RECIPE as SFT
from mdiff_core.settings import Data

RECIPE = SFT.model_copy(
    update={
        "recipe": "words_base",
        "model": SFT.model.model_copy(update={"path": "build/words_sd3_clean"}),
        "data": Data(captions="build/words_images_web/captions.jsonl"),
        "train": SHAPES.train,
        "rounds": SHAPES.rounds,
    }
)
