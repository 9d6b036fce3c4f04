"""Does each algorithm learn? Runs of the shapes recipes to their end, several seeds each, and the table of docs/results.md.

    python benchmarks/algorithms.py [--recipes shapes_nft ...] [--seeds 0 1 2] [--rounds 4] [--jobs 8] [--out docs/results.md] [a.b=c ...]

Further arguments are overrides of every recipe. A run calls the stages that the workflow calls, in the same order and with the same
jobs, but in one process, without Flyte and Ray; `--jobs` runs go side by side. On a GPU give rollout.gpus_per_engine=1
hardware.rollout.gpu=1 rollout.batch=256 and as many jobs as it has memory and the machine has cores for. What was run is kept
in `--store`, so that the command can be repeated and goes on.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mdiff_core import config
from mdiff_core.settings import RunConfig

ROOT = Path(__file__).parents[1]
SHAPES = [name for name in config.RECIPES if name.startswith("shapes_") and config.recipe(name).algorithm == "rl"]
REWARD = "reward/mean"
Run = dict[str, Any]
"""What a finished run has to say: recipe, seed, rounds, seconds, measured_on, before, after, rollouts."""

PAGE = """# Results

Does each algorithm learn? Reward of the policy on prompts that it is not trained on, before and after, over {seeds} seeds: mean ±
standard deviation, and the gain of each seed. Seconds are of a run, {jobs} of them side by side.

| recipe | rounds | seconds | measured on | before | after | gain | gain by seed |
|---|---|---|---|---|---|---|---|
{rows}

Made by `{command}`
on {machine}.
"""


def main() -> int:
    """Run all, write the page."""
    arguments = parsed()
    arguments.store.mkdir(parents=True, exist_ok=True)
    asked = [(recipe, seed) for seed in arguments.seeds for recipe in arguments.recipes]
    runs: dict[tuple[str, int], Run] = {}
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        going = {pool.submit(finished, *pair, arguments): pair for pair in asked}
        for done in as_completed(going):
            runs[going[done]] = found = done.result()
            say(
                f"{found['recipe']} seed {found['seed']}: {found['before']:.4f} -> {found['after']:.4f} in {found['seconds']:.0f} s"
            )
    rows = [row(recipe, [runs[recipe, seed] for seed in arguments.seeds]) for recipe in arguments.recipes]
    page = PAGE.format(
        seeds=len(arguments.seeds),
        jobs=arguments.jobs,
        command=" ".join(["python", "benchmarks/algorithms.py", *sys.argv[1:]]),
        machine=machine(),
        rows="\n".join(rows),
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page, encoding="utf-8")
    say(page)
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--store", type=Path, default=ROOT / "build/results", help="where finished runs are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results.md")
    parser.add_argument("overrides", nargs="*", default=[])
    return parser.parse_args()


def finished(recipe: str, seed: int, arguments: argparse.Namespace) -> Run:
    """The run of a recipe with a seed: found in the store, or made and kept there."""
    rounds = [f"rounds={arguments.rounds}"] if arguments.rounds else []
    settings = config.load(
        recipe, [f"seed={seed}", "rollout.engines=0", "rollout.keep_engines=true", *rounds, *arguments.overrides]
    )
    kept = arguments.store / f"{config.digest(settings.model_dump(mode='json'), {})}.json"
    if not kept.exists():
        found = run(settings, arguments.jobs)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(found))
        new.replace(kept)
    kept_run: Run = json.loads(kept.read_text())
    return kept_run


def run(settings: RunConfig, jobs: int) -> Run:
    """All rounds, measured before and after."""
    import torch

    from mdiff_core import jobs as stage_jobs
    from mdiff_core import policies, prompts, registry
    from mdiff_core.stages import evaluate, pair, rollout, score, update
    from mdiff_core.train.state import empty_state

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))
    started, rollouts, kind = time.monotonic(), [], registry.find("loss", settings.loss.name).rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts.write(folder / prompts.TRAIN, prompts.read(settings.prompts.train))
        prompts.write(folder / prompts.HELD_OUT, prompts.read(settings.prompts.held_out))
        digest = registry.make("family", settings.model.family).digest(settings.model.path)
        policies.base_version(folder / "policy", base=settings.model.path, base_digest=digest)
        empty_state(folder / "state")
        policy, state = folder / "policy", folder / "state"

        def measured(name: str) -> float:
            return float(evaluate.run(stage_jobs.evaluate_job(settings), folder, policy, folder / name)[REWARD])

        before = measured("before")
        for number in range(settings.rounds):
            made = folder / f"round-{number}"
            drawn, scores, pairs = made / "drawn", made / "scores", made / "pairs"
            rollout.run(stage_jobs.rollout_job(settings, number), folder, policy, drawn)
            rollouts.append(score.run(stage_jobs.score_job(settings), drawn, scores)[REWARD])
            pair.run(stage_jobs.pair_job(settings, number, kind), drawn, scores, pairs)
            after = made / "policy", made / "state"
            update.run(stage_jobs.update_job(settings, number), pairs, policy, state, *after)
            policy, state = after
        return {
            "recipe": settings.recipe,
            "seed": settings.seed,
            "rounds": settings.rounds,
            "seconds": time.monotonic() - started,
            "measured_on": f"{settings.evaluate.prompts} × {settings.evaluate.samples} of {Path(settings.prompts.held_out).name}",
            "before": before,
            "after": measured("after"),
            "rollouts": rollouts,
            "checksum": policies.open_policy(policy).checksum,
        }


def row(recipe: str, runs: Sequence[Run]) -> str:
    """A line of the table."""
    gains = [run["after"] - run["before"] for run in runs]
    cells = [
        f"`{recipe}`",
        str(runs[0]["rounds"]),
        f"{statistics.mean(run['seconds'] for run in runs):.0f}",
        runs[0]["measured_on"],
        spread([run["before"] for run in runs]),
        spread([run["after"] for run in runs]),
        spread(gains, "+"),
        ", ".join(f"{gain:+.3f}" for gain in gains),
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over the seeds."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{deviation}"


def machine() -> str:
    """What it ran on."""
    import torch

    card = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0))
    return (
        f"{card}{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}"
    )


def say(line: str) -> None:
    """On standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
