"""Batches to engines and back: the fleet's bounded loop against Ray Data's actor pool, with engines that only keep time.

    python benchmarks/streaming.py [--batches 60] [--engines 2] [--seconds 0.2] [--megabytes 40]

Prints, for each, seconds to the first batch and to the last, the rate against the engines' own, and what came in order.
Docs: docs/decisions/rollout-streaming.md.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mdiff_core import policies
from mdiff_core.fleet import Fleet, local_ray, ray_environment
from mdiff_core.fleet.actor import EngineActor
from mdiff_core.options import Choice, Options
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, PolicyVersion, Prompt, Request, SamplingPlan, Trajectory

MODEL = Model(path="no/model", family=Choice(name="sd3"), dtype="float32")
PLAN = SamplingPlan(
    width=512, height=512, frames=1, steps=1, guidance=1.0, negative="", kernel="ode", kernel_options={}, sde_steps=()
)  # fmt: skip


class PacedOptions(Options):
    """How long a batch takes and how much comes back."""

    seconds: float
    megabytes: float


class PacedEngine:
    """Sleeps, then returns a latent of the wanted size."""

    Options = PacedOptions
    batches_at_once = 1

    def __init__(self, options: PacedOptions, **parts: Any) -> None:
        self.options = options

    def load(self, policy: PolicyVersion, weights: str = "live") -> str:
        self.policy = policy
        return policy.checksum

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Trajectory, Mapping[str, Condition]]]:
        time.sleep(self.options.seconds)
        count = sum(len(request.seeds) for request in requests)
        for request in requests:
            for index, seed in zip(request.indices, request.seeds, strict=True):
                latents = torch.full((int(self.options.megabytes * 2**18 / count),), float(seed))
                yield (
                    Trajectory(
                        sample=f"{request.group}/{index}", group=request.group, index=index, prompt=request.prompt, seed=seed,
                        policy=self.policy.version, weights=self.policy.checksum, condition="k", negative="", guidance=1.0,
                        sigmas=torch.tensor([1.0, 0.0]), sde_steps=(), latent_steps=(), latents=latents,
                        log_probs=torch.zeros(0), clean=torch.zeros(1), frames=np.zeros((1, 8, 8, 3), np.uint8),
                    ),
                    {},
                )  # fmt: skip

    def close(self) -> None: ...


def register() -> None:
    """Runs in every worker, which gets this function without its module."""
    from mdiff_core.registry import REGISTRY

    REGISTRY["engine"]["paced"] = "benchmarks.streaming:PacedEngine"


def batches(count: int) -> list[list[Request]]:
    """16 samples each."""
    prompt = Prompt(id="p", text="text", metadata={})
    seeds = [tuple(range(16 * number, 16 * number + 16)) for number in range(count)]
    return [
        [Request(prompt=prompt, group=f"g{i}", indices=tuple(range(16)), seeds=seed, plan=PLAN)]
        for i, seed in enumerate(seeds)
    ]


class Pooled(EngineActor):
    """The same actor as Ray Data's pool wants it."""

    def __init__(self, rollout: str, model: str, policy: str) -> None:
        super().__init__(rollout, model, 1)
        self.load(policy, "live", None)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        results = np.empty(len(rows["batch"]), dtype=object)
        for at, batch in enumerate(rows["batch"]):
            results[at] = self.generate(batch)
        return {"number": rows["number"], "result": results}


def by_fleet(rollout: Rollout, policy: Path, asked: list[list[Request]]) -> Iterator[list[Trajectory]]:
    with Fleet(rollout, MODEL, policy) as fleet:
        for _, trajectories, _ in fleet.stream(asked):
            yield trajectories


def by_ray_data(rollout: Rollout, policy: Path, asked: list[list[Request]]) -> Iterator[list[Trajectory]]:
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    data = ray.data.from_items(
        [{"number": i, "batch": batch} for i, batch in enumerate(asked)], override_num_blocks=len(asked)
    )
    drawn = data.map_batches(
        Pooled, batch_size=1, fn_constructor_args=(rollout.to_json(), MODEL.to_json(), str(policy)), num_cpus=0,
        compute=ray.data.ActorPoolStrategy(size=rollout.engines, max_tasks_in_flight_per_actor=2),
    )  # fmt: skip
    for rows in drawn.iter_batches(batch_size=1, prefetch_batches=1):
        yield rows["result"][0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--megabytes", type=float, default=40.0)
    args = parser.parse_args()
    os.environ.update(ray_environment())
    register()
    import ray

    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ray.init(
        address="local", num_cpus=args.engines + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=2**30, runtime_env={"worker_process_setup_hook": register, "env_vars": path},
    )  # fmt: skip
    options = {"seconds": args.seconds, "megabytes": args.megabytes}
    rollout = Rollout(group_size=16, engine=Choice(name="paced", options=options), engines=args.engines)
    with local_ray(), tempfile.TemporaryDirectory() as folder:
        policies.base_version(Path(folder), base="no/model", base_digest="0" * 64)
        ideal = args.batches / args.engines * args.seconds
        for name, way in (
            ("fleet", by_fleet),
            ("ray data", by_ray_data),
            ("fleet", by_fleet),
            ("ray data", by_ray_data),
        ):
            started, first, seeds = time.monotonic(), 0.0, []
            for trajectories in way(rollout, Path(folder), batches(args.batches)):
                first = first or time.monotonic() - started
                seeds += [trajectory.seed for trajectory in trajectories]
            last = time.monotonic() - started
            share = (ideal - args.seconds / args.engines) / (last - first)
            ordered = seeds == list(range(16 * args.batches))
            sys.stdout.write(
                f"{name:9} first batch {first:6.2f} s, all {last:6.2f} s, {share:6.1%} of the engines' rate, "
                f"in order: {ordered}\n"
            )
    ray.shutdown()


if __name__ == "__main__":
    main()
