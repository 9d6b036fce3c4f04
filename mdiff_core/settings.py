"""The one settings tree: `config.py` makes it from a recipe and overrides, `jobs.py` cuts each stage's part out of it."""

from typing import Literal

from pydantic import Field, JsonValue

from mdiff_core.machines import Hardware as Hardware
from mdiff_core.machines import Machine as Machine
from mdiff_core.machines import Topology as Topology
from mdiff_core.options import Choice, Options

MOST_PIXELS, MOST_STEPS = 16_384, 1000


class Model(Options):
    """Which model is trained."""

    path: str
    """Local folder, or hub id, in diffusers layout; `owner/name@revision` holds on to a branch, tag or commit of the hub."""
    family: Choice
    """Architecture; options are the family's."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the frozen weights, in engines and in training alike."""


class Prompts(Options):
    """What is asked of the model."""

    train: str
    """JSONL (`input`, optional `metadata`; or GenEval's form) or txt, one prompt a line."""
    held_out: str
    """Same form; used by evaluation only."""
    per_round: int = Field(ge=1, le=100_000)
    """Groups per round."""
    oversample: float = Field(default=1.0, ge=1, le=100)
    """Groups drawn for each group of `per_round`, rounded up, so that enough are left when filters drop some; with `score.stream` the
    most that are drawn, a wave at a time, until `per_round` are left. Kept groups beyond those are not trained, but count in the
    baseline."""


class Sampling(Options):
    """How a sample is drawn during rollout."""

    width: int = Field(ge=8, le=MOST_PIXELS)
    """Pixels; a multiple of what the model's VAE and patches need."""
    height: int = Field(ge=8, le=MOST_PIXELS)
    """Pixels, likewise."""
    frames: int = Field(default=1, ge=1, le=10_000)
    """Of a video; 1 is an image."""
    steps: int = Field(ge=1, le=MOST_STEPS)
    """Sampler steps a sample, each one forward pass (two with guidance)."""
    guidance: float = Field(default=1.0, ge=1.0, le=1000.0)
    """Classifier-free guidance; 1 means none and costs one forward pass a step instead of two."""
    negative: str = ""
    """Text of the negative branch."""
    kernel: Choice
    """Stochastic kernel of the trained steps."""
    window: Choice = Choice(name="all")
    """Which steps are stochastic and trained."""


class Rollout(Options):
    """How the samples of a round are spread over engines."""

    group_size: int = Field(ge=1, le=100_000)
    """Samples per prompt."""
    weights: Literal["live", "ema", "old"] = "live"
    """Which of the policy's weights draw: those being trained, or an average of them (train.ema, train.old)."""
    engine: Choice = Choice(name="diffusers")
    """What draws the samples."""
    engines: int = Field(default=1, ge=0, le=1024)
    """Engines, each its own Ray actor, which is replaced when it dies or hangs. 0 draws in the stage's own process, without Ray."""
    gpus_per_engine: float = Field(default=0.0, ge=0.0, le=64.0)
    """GPUs Ray reserves for each engine; 0 runs on the CPU. With `engines` 0, anything above 0 takes the GPU that is there."""
    batch: int = Field(default=16, ge=1, le=100_000)
    """Samples an engine draws at once. Fixed by the recipe, never by load, so results do not depend on timing."""
    keep_engines: bool = False
    """Leave engines up for the next stage where Ray outlives this one, as in local runs; they keep their CPUs, GPUs and memory."""
    restarts: int = Field(default=2, ge=0)
    """Times a dead engine is started again before the stage fails."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest a batch may take before its engine counts as hung."""


class RewardTerm(Options):
    """One reward and its weight."""

    name: str
    """Of the reward."""
    options: dict[str, JsonValue] = Field(default={})
    """Of that reward; see its class."""
    weight: float = 1.0
    """Factor of the reward in the total; a negative one turns it round."""


class Score(Options):
    """From frames to one number per sample, and which samples train."""

    rewards: tuple[RewardTerm, ...] = Field(min_length=1)
    """What judges a sample; `combine` says how several make one number."""
    combine: Literal["sum", "zscore", "gdpo"] = "sum"
    """sum: weighted raw values; zscore: each normalised over the batch first; gdpo: group advantages per reward, then summed."""
    on_missing: Literal["raise", "mask"] = "raise"
    """What a missing or non-finite reward does, once `attempts` are used up: stop the stage, or leave the sample out."""
    batch: int = Field(default=64, ge=1)
    """Samples scored at once."""
    attempts: int = Field(default=3, ge=1)
    """Times a reward is asked about a sample that it fails on."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the second attempt; doubled for each further one, and longer when a server asks for it."""
    breaker: int = Field(default=3, ge=0)
    """Batches in a row without any score from a reward after which the stage stops, whatever `on_missing` says; 0 never."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Processes that score side by side, on Ray; one that hangs or dies is replaced. 0 scores in the stage's own process, where a reward
    that hangs cannot be stopped."""
    gpus_per_worker: float = Field(default=0.0, ge=0, le=64)
    """GPUs Ray reserves for each worker; workers with 0 see none. Rewards in the stage's own process take the GPU that is there."""
    keep_workers: bool = False
    """Leave workers up for the next stage where Ray outlives this one, as rollout.keep_engines does, so that a reward's network is loaded
    once. They do not see changes of your own reward's code."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest a worker may take over a batch, attempts included, before it counts as hung."""
    stream: bool = False
    """Score during the rollout, on its Ray cluster, as samples come; needs workers."""
    filters: tuple[Choice, ...] = ()
    """What leaves samples or groups out of training, in this order."""


class Advantage(Options):
    """From rewards to advantages, in float64."""

    mean: Literal["group", "batch"] = "group"
    """Whose mean is taken off a reward: that of the samples of its prompt, or of the round."""
    std: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation it is divided by; none leaves it as it is."""
    clamp: float = Field(default=5.0, gt=0)
    """Advantages are cut to +-clamp."""


class Lora(Options):
    """Low-rank adapter."""

    rank: int = Field(default=32, ge=1, le=1024)
    """Width of the adapter's bottleneck."""
    alpha: float = Field(default=64.0, gt=0, le=1e5)
    """The adapter counts alpha / rank."""
    init: Literal["gaussian", "default"] = "gaussian"
    """First values of A (B starts at 0): normal with deviation 1/rank, or uniform as PEFT's default."""
    targets: tuple[str, ...] = ()
    """Module-name suffixes; empty takes the family's."""


class Ema(Options):
    """Exponential moving average of the trained weights."""

    decay: float = Field(default=0.9, gt=0, lt=1)
    """Share of the average that stays at an update."""
    warmup: bool = True
    """Follow faster at first: min(decay, (1+t)/(10+t)) at optimizer step t; false decays by the same from the start."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps between updates."""


class Old(Options):
    """The old policy of DiffusionNFT (arXiv 2509.16117): old <- d old + (1-d) live after each round, where
    d = min(slope * (t - flat), most) at optimizer step t, and 0 before step `flat`."""

    flat: int = Field(default=0, ge=0)
    """Optimizer steps for which it is a copy of the live weights."""
    slope: float = Field(default=0.001, ge=0, le=1)
    """By how much the decay grows a step."""
    most: float = Field(default=0.5, ge=0, lt=1)
    """Where the decay stops growing."""


class Train(Options):
    """The optimizer's side."""

    method: Literal["lora", "full"] = "lora"
    """A low-rank adapter, or every weight of the transformer."""
    lora: Lora = Lora()
    lr: float = Field(gt=0, le=10)
    """AdamW's learning rate, after warm-up and before any decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after warm-up; linear and cosine fall to 0 at `total_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    total_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which linear and cosine decay; unused by constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's, of the averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's, beside the square root."""
    weight_decay: float = Field(default=1e-4, ge=0, le=100)
    """AdamW's, times the learning rate."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Norm of all gradients together to which a larger one is cut."""
    updates_per_round: int = Field(default=1, ge=1)
    """Optimizer steps a round's rows are split into, by whole groups."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a round's rows."""
    batch: int = Field(default=0, ge=0)
    """Rows per optimizer step, drawn from the artifact by (seed, round, step); 0 takes all rows of the step. Supervised
    fine-tuning sets it, as its rows are the whole data set."""
    microbatch: int = Field(default=8, ge=1)
    """Rows per forward pass and rank; changes memory, not the gradient."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the forward and backward pass; trained weights, sums of gradients and optimizer stay float32."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    ema: Ema | None = None
    old: Old | None = None
    """How the old policy of losses that have one follows the live one; null makes it what a round starts from."""
    drift_limit: float = Field(default=1e-2, gt=0)
    """Largest |log-prob of trainer - of engine| on the first step of a round before the run stops."""


class PromptSet(Options):
    """Further prompts to evaluate on."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """What its numbers are called."""
    prompts: str
    """A prompt file."""
    count: int = Field(ge=1)
    """Prompts taken from its beginning."""


class Evaluate(Options):
    """Held-out measurement with fixed seeds and the ode sampler."""

    every: int = Field(default=0, ge=0)
    """Rounds between evaluations; 0 measures only before the first and after the last round."""
    prompts: int = Field(default=16, ge=1)
    """Prompts taken from the beginning of prompts.held_out."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt."""
    steps: int = Field(ge=1, le=MOST_STEPS)
    """Sampler steps a sample."""
    guidance: float = Field(default=1.0, ge=1.0, le=1000.0)
    """As sampling.guidance, of the measurement."""
    width: int = Field(default=0, ge=0, le=MOST_PIXELS)
    """Pixels; 0 takes the rollout's (sampling)."""
    height: int = Field(default=0, ge=0, le=MOST_PIXELS)
    """Likewise."""
    weights: Literal["live", "ema", "old"] = "live"
    """Which of the policy's weights are measured."""
    sets: tuple[PromptSet, ...] = ()
    """More data sets beside prompts.held_out, each with its own numbers."""
    gold: tuple[RewardTerm, ...] = ()
    """Rewards that are never trained on: when the trained one rises and one of these falls, the alarm is raised. Weights have no use."""
    diversity_floor: float = Field(default=0.5, ge=0, le=1)
    """Share of the start's diversity within groups below which a rise of the reward raises the alarm."""


class Data(Options):
    """Captioned images or clips for supervised fine-tuning."""

    captions: str
    """JSONL with `input` and `image`, or `video`: an animated image or a folder of frames (paths relative to the file)."""
    uncond_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of captions replaced by the negative text, so that guidance works afterwards."""


class RunConfig(Options):
    """Everything a run is."""

    recipe: str
    """Name it was loaded as."""
    algorithm: Literal["rl", "sft"] = "rl"
    """Reinforcement learning on samples, or supervised fine-tuning on `data`."""
    model: Model
    prompts: Prompts
    data: Data | None = None
    """Needed by sft only."""
    sampling: Sampling
    rollout: Rollout
    score: Score
    advantage: Advantage = Advantage()
    loss: Choice
    """What is minimised."""
    train: Train
    evaluate: Evaluate
    hardware: Hardware = Hardware()
    rounds: int = Field(ge=1)
    """Rounds in all, those of an earlier start of the same run included."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """What every random number of the run derives from."""
    target_reward: float | None = None
    """Stop early once a round's reward mean reaches it."""
    store: str = ""
    """Where artifacts live: a folder or any fsspec URI; empty is `runs` locally and the raw-output prefix on a cluster."""
    name: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})?$")
    """Name of the run's folder and policy; empty derives one from recipe and settings."""
