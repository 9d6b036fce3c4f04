"""Supervised fine-tuning of the shapes world's SD3 from nothing: every weight, flow matching, logit-normal times (arXiv 2403.03206, 3.1).

The model: `python -m mdiff_core.worlds.tiny_sd3 blank --seed 0 --out build/shapes_sd3_blank`. The pictures: `python -m
mdiff_core.worlds.shapes images --count 24000 --seed 7 --out build/shapes_images --exclude
assets/shapes_prompts/held_out.jsonl`. Nothing is right before about 2000 steps.
"""

from mdiff_core.options import Choice
from mdiff_core.settings import (
    Data,
    Ema,
    Evaluate,
    Model,
    Prompts,
    RewardTerm,
    Rollout,
    RunConfig,
    Sampling,
    Score,
    Train,
)

RECIPE = RunConfig(
    recipe="shapes_sft",
    algorithm="sft",
    model=Model(
        path="build/shapes_sd3_blank", family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32"
    ),
    prompts=Prompts(
        train="assets/shapes_prompts/train.jsonl", held_out="assets/shapes_prompts/held_out.jsonl", per_round=12
    ),
    data=Data(captions="build/shapes_images/captions.jsonl"),
    sampling=Sampling(width=64, height=64, steps=10, kernel=Choice(name="ode")),
    rollout=Rollout(group_size=1, batch=48, keep_engines=True),
    score=Score(rewards=(RewardTerm(name="shapes"),)),
    loss=Choice(name="sft", options={"logit_mean": 0.7}),
    train=Train(
        method="full",
        lr=2e-3,
        schedule="cosine",
        warmup_steps=200,
        total_steps=3_500,
        weight_decay=0.0,
        updates_per_round=500,
        batch=256,
        microbatch=256,
        precision="fp32",
        ema=Ema(decay=0.999),
    ),
    evaluate=Evaluate(prompts=48, samples=2, steps=10, weights="ema"),
    rounds=7,
)
