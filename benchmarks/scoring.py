"""What share of a round does scoring take: while samples are drawn (score.stream), or after? SD3.5-medium and CLIP-H, random weights.

    python benchmarks/scoring.py [--images 128] [--batch 16] [--engine diffusers] [--model FOLDER]
    python benchmarks/scoring.py --tiny         the same on a CPU with small models, to try the script

PickScore's network judges pictures of 512 px that one engine draws in 10 steps with guidance, on the same card. Both ways run with
engine and reward as processes of their own. A first round, not told, starts the engine, which is kept; the reward starts anew each time.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import sd35m
from benchmarks.rewards import random_clip
from mdiff_core import policies, prompts, registry
from mdiff_core.fleet import local_ray, ray_environment
from mdiff_core.jobs import RolloutJob, ScoreJob
from mdiff_core.options import Choice
from mdiff_core.settings import Model, RewardTerm, Rollout, Sampling, Score
from mdiff_core.stages import rollout, score

WORDS = ("a red circle", "two blue squares", "three green triangles", "four white stars")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples an engine draws, and a reward judges, at once")
    parser.add_argument("--engine", default="diffusers")
    parser.add_argument("--model", type=Path, help="where the drawing model is kept, to be found again")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    os.environ.update(ray_environment())
    with tempfile.TemporaryDirectory() as name, local_ray():
        folder = Path(name)
        jobs, policy = prepared(args, folder)
        found: dict[str, dict[str, float]] = {}
        for turn, stream in enumerate((False, False, True)):
            way = "streamed" if stream else "after"
            found[way] = one_round(*jobs[stream], folder, policy, folder / f"{turn}")
            say(
                f"{'first, ' * (not turn)}{way}: "
                + ", ".join(f"{name} {value:.2f} s" for name, value in found[way].items())
            )
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    say(f"\n{card}, torch {torch.__version__}, {' '.join(sys.argv)}\n")
    say("| scored | drawing s | reward at work s | round waits for scores s | both s | share | images/s |")
    say("|---|---|---|---|---|---|---|")
    for way, each in found.items():
        both = each["drawing"] + each["waiting"]
        cells = f"{each['drawing']:.2f} | {each['busy']:.2f} | {each['waiting']:.2f} | {both:.2f}"
        say(f"| {way} | {cells} | {each['waiting'] / both:.1%} | {args.images / both:.2f} |")


def prepared(args: argparse.Namespace, folder: Path) -> tuple[dict[bool, tuple[RolloutJob, ScoreJob]], Path]:
    """Models, prompts and a base policy; the jobs of both ways."""
    gpu, size = 0.0 if args.tiny else 0.5, 64 if args.tiny else 512
    place = args.model or folder / "model"
    path = (
        place
        if args.model and place.exists()
        else sd35m.build(place, torch.device("cpu" if args.tiny else "cuda"), tiny=args.tiny)
    )
    random_clip(folder / "clip", *(("base", "cpu") if args.tiny else ("huge", "cuda")))
    family = Choice(name="sd3", options={"max_sequence_length": 16 if args.tiny else 256})
    policies.base_version(
        folder / "policy", base=str(path), base_digest=registry.make("family", family).digest(str(path))
    )
    lines = "".join(
        f'{{"input": "{word}, {i}"}}\n' for i in range(-(-args.images // (4 * args.batch))) for word in WORDS
    )
    (folder / "lines.jsonl").write_text(lines)
    prompts.write(folder / prompts.TRAIN, prompts.read(folder / "lines.jsonl"))
    clip = {"model": str(folder / "clip"), "processor": str(folder / "clip"), "device": "cpu" if args.tiny else "cuda"}
    clip["dtype"] = "float32" if args.tiny else "bfloat16"

    def jobs(stream: bool) -> tuple[RolloutJob, ScoreJob]:
        judge = Score(
            rewards=(RewardTerm(name="pickscore", options=clip),), batch=args.batch, workers=1, gpus_per_worker=gpu, stream=stream,
        )  # fmt: skip
        draw = RolloutJob(
            model=Model(path=str(path), family=family, dtype="float32" if args.tiny else "bfloat16"),
            sampling=Sampling(
                width=size, height=size, steps=10, guidance=4.5, kernel=Choice(name="flow_sde", options={"eta": 0.7}),
                window=Choice(name="subset", options={"k": 2, "steps": [2, 3]}),
            ),
            rollout=Rollout(
                group_size=args.batch, batch=args.batch, engine=Choice(name=args.engine), gpus_per_engine=gpu, keep_engines=True,
            ),
            prompts_per_round=args.images // args.batch, score=judge if stream else None, seed=0, round=0,
        )  # fmt: skip
        return draw, ScoreJob(score=judge)

    return {stream: jobs(stream) for stream in (False, True)}, folder / "policy"


def one_round(draw: RolloutJob, judge: ScoreJob, folder: Path, policy: Path, out: Path) -> dict[str, float]:
    """Seconds of drawing, and those that scoring adds to it."""
    measured = rollout.run(draw, folder, policy, out / "drawn")
    drawing = measured["rollout/seconds"]
    if judge.score.stream:
        waited, busy = measured["rollout/score_wait_s"], measured["rollout/score_busy_s"]
        return {"drawing": drawing, "busy": busy, "waiting": waited}
    started = time.monotonic()
    busy = score.run(judge, out / "drawn", out / "scores")["score/busy_s"]
    return {"drawing": drawing, "busy": busy, "waiting": time.monotonic() - started}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
