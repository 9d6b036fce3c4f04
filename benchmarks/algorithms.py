"""Does each algorithm learn? Runs of the shapes recipes to their end, several seeds each, and the table of docs/results.md.

    python benchmarks/algorithms.py [--recipes shapes_nft ...] [--seeds 0 1 2] [--rounds 4] [--out docs/results.md] [a.b=c ...]

Further arguments are overrides of every recipe. A run goes through the workflow as a user starts it. What of it exists in the store is
found again, so that the command can be repeated, and gives the same table. Seconds are those of its stages.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mdiff_core import config
from mdiff_core.observe import metrics

ROOT = Path(__file__).parents[1]

SHAPES = [name for name in config.RECIPES if name.startswith("shapes_") and config.recipe(name).algorithm == "rl"]

PAGE = """# Results

Does each algorithm learn? Reward of the policy on the prompts it is measured on, before and after, over {seeds} seeds: mean +- standard
deviation, and the gain of each seed. Made by `{command}`
on {machine}.

| recipe | rounds | seconds | measured on | before | after | gain | gain by seed |
|---|---|---|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run has to say."""

    rounds: int
    seconds: float
    measured_on: str
    before: float
    after: float


def main() -> int:
    """Run all, write the page."""
    arguments = parsed()
    lines = []
    for recipe in arguments.recipes:
        runs = [finished(recipe, seed, arguments) for seed in arguments.seeds]
        lines.append(row(recipe, runs))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    page = PAGE.format(
        seeds=len(arguments.seeds),
        command=" ".join(["python", "benchmarks/algorithms.py", *sys.argv[1:]]),
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, torch {torch_version()}",
        rows="\n".join(lines),
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page)
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--store", default="build/results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results.md")
    parser.add_argument("overrides", nargs="*", default=[])
    return parser.parse_args()


def finished(recipe: str, seed: int, arguments: argparse.Namespace) -> Run:
    """The run of a recipe with a seed, by the workflow's own command line."""
    overrides = json.dumps([f"store={arguments.store}", *arguments.overrides])
    command = [sys.executable, "-m", "flytekit.clis.sdk_in_container.pyflyte", "-c", "flyte.config", "run"]
    command += [
        "workflows/post_train.py",
        "post_train",
        "--recipe",
        recipe,
        "--seed",
        str(seed),
        "--overrides",
        overrides,
    ]
    command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
    said = output(command)
    found = re.search(r"^report (.+)/[^/]+$", said, flags=re.MULTILINE)
    if not found:
        raise SystemExit(f"{recipe}, seed {seed}: the run printed no report\n{said[-3000:]}")
    return read(ROOT / found[1])


def output(command: Sequence[str]) -> str:
    """What a command prints; SystemExit with the end of it when it fails. Nothing that it started outlives it."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{said[-3000:]}")
    return said


def read(folder: Path) -> Run:
    """From a run's records."""
    records, settings = metrics.read(folder), metrics.read_run(folder)["config"]
    rounds = [record for record in records if record["kind"] == "round"]
    rewards = [record[metrics.EVALUATED] for record in records if record["kind"] == "evaluation"]
    evaluate, prompts = settings["evaluate"], settings["prompts"]
    name = Path(prompts["held_out"]).name + (", which is trained on" if prompts["held_out"] == prompts["train"] else "")
    return Run(
        rounds=len(rounds),
        seconds=sum(seconds_of(record) for record in rounds),
        measured_on=f"{evaluate['prompts']} x {evaluate['samples']} of {name}",
        before=rewards[0],
        after=rewards[-1],
    )


def seconds_of(record: dict[str, Any]) -> float:
    """Of a round's stages."""
    return sum(value for name, value in record.items() if name.startswith("seconds/"))


def row(recipe: str, runs: Sequence[Run]) -> str:
    """A line of the table."""
    gains = [run.after - run.before for run in runs]
    cells = [
        f"`{recipe}`",
        str(runs[0].rounds),
        f"{statistics.mean(run.seconds for run in runs):.0f}",
        runs[0].measured_on,
        spread([run.before for run in runs]),
        spread([run.after for run in runs]),
        spread(gains, "+"),
        ", ".join(f"{gain:+.3f}" for gain in gains),
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean +- standard deviation over the seeds."""
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{deviation}"


def torch_version() -> str:
    """Of the package, without the seconds that importing it takes."""
    from importlib.metadata import version

    return version("torch")


if __name__ == "__main__":
    sys.exit(main())
