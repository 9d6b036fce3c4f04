"""The demo: Flow-GRPO (arXiv 2505.05470) on the tiny SD3 of the shapes world, sized for two CPU cores.

Kernel, eta and loss are the paper's. Eight captions with two counted phrases, on which the start model's mean reward is about 0.4, are
trained on and measured on alike: only the seeds of the measurement are new, so its gain says nothing of other captions. Prompts, group
and learning rate were chosen among a dozen single-seed trials, whose differences are near their noise; see the README on what to expect.
"""

from mdiff_core.options import Choice
from mdiff_core.settings import (
    Advantage,
    Evaluate,
    Lora,
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
    recipe="shapes_flow_grpo",
    model=Model(
        path="assets/shapes_sd3", family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32"
    ),
    prompts=Prompts(
        train="assets/shapes_prompts/eight.jsonl", held_out="assets/shapes_prompts/eight.jsonl", per_round=8
    ),
    sampling=Sampling(
        width=64,
        height=64,
        steps=10,
        kernel=Choice(name="flow_sde", options={"eta": 0.7}),
        window=Choice(name="window", options={"size": 3, "lo": 2, "hi": 5}),
    ),
    rollout=Rollout(group_size=32, batch=64, keep_engines=True),
    score=Score(rewards=(RewardTerm(name="shapes"),), filters=(Choice(name="no_spread"),)),
    advantage=Advantage(std="batch"),
    loss=Choice(name="flow_grpo", options={"clip": 1e-3}),
    train=Train(
        lora=Lora(rank=16, alpha=32.0),
        # Above the gradients' size, so that Adam keeps their proportions: at 14 steps in all, a step of equal length in
        # every direction is mostly noise.
        eps=1e-5,
        lr=6e-3,
        microbatch=64,
        precision="fp32",
    ),
    evaluate=Evaluate(prompts=8, samples=16, steps=10),
    rounds=14,
)
