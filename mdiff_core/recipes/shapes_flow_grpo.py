"""The demo: Flow-GRPO (arXiv 2505.05470) on the tiny SD3 of the shapes world, sized for two CPU cores.

Kernel, eta and loss are the paper's. Trained on 320 captions, eight a round; measured on 96 others.
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
        train="assets/shapes_prompts/train.jsonl", held_out="assets/shapes_prompts/held_out.jsonl", per_round=8
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
        lr=2e-3,
        microbatch=64,
        precision="fp32",
    ),
    evaluate=Evaluate(prompts=96, samples=4, steps=10),
    rounds=18,
)
