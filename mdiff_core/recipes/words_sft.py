"""Supervised fine-tuning of the word world's SD3 from the weights of the shapes', as `shapes_sft` does it from nothing. `make tiny-words`.

The model: `python -m mdiff_core.worlds.tiny_sd3 build --world words --seed 0 --vae-steps 600 --out build/words_sd3_blank`, which
refuses a VAE that loses the letters. The pictures: `python -m
mdiff_core.worlds.words images --count 24000 --seed 7 --out build/words_images --exclude assets/words_prompts/held_out.jsonl`.
"""

from mdiff_core.recipes.shapes_sft import RECIPE as SHAPES
from mdiff_core.settings import Data, Prompts, RewardTerm, Score

RECIPE = SHAPES.model_copy(
    update={
        "recipe": "words_sft",
        "model": SHAPES.model.model_copy(update={"path": "build/words_sd3_blank"}),
        "prompts": Prompts(
            train="assets/words_prompts/train.jsonl", held_out="assets/words_prompts/held_out.jsonl", per_round=12
        ),
        "data": Data(captions="build/words_images/captions.jsonl"),
        "train": SHAPES.train.model_copy(
            update={"lr": 2.5e-3, "total_steps": 400, "updates_per_round": 200, "batch": 512, "microbatch": 512}
        ),
        "rounds": 2,
        "score": Score(rewards=(RewardTerm(name="ocr", options={"side": 128}),)),
    }
)
