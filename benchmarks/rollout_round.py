"""Whole rounds for `rollout.py`: seconds, memory and drift of the stages."""

import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.measured import Peak, timed
from mdiff_core import config, jobs, prompts
from mdiff_core.settings import Rollout
from mdiff_core.stages import pair, rollout, score, update
from mdiff_core.train.state import empty_state

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def whole_round(bench: Any, dtype: str) -> None:
    """As it is meant to be, then without guidance."""
    for guidance in (4.5, 1.0):
        name = f"round, {PRECISIONS[dtype]}, guidance {guidance:g}"
        one_round(bench, name, bench.rollout("sglang"), dtype, guidance)


def exact(bench: Any) -> None:
    """In float32 and in half precision, fewer samples."""
    few = {"group_size": min(bench.args.batch, 4), "batch": min(bench.args.batch, 4)}
    for dtype in dict.fromkeys(("float32", bench.dtype)):
        for wanted in (True, False):
            name = f"exact, {PRECISIONS[dtype]}, {'training kernels' if wanted else 'other kernels'}"
            settings = bench.rollout("diffusers", deterministic=wanted).model_copy(update=few)
            one_round(bench, name, settings, dtype, 4.5)


def one_round(bench: Any, name: str, settings: Rollout, dtype: str, guidance: float) -> None:
    """Seconds, memory and drift of its stages."""
    tree = {"model": bench.model(dtype).model_dump(mode="json"), "rollout": settings.model_dump(mode="json")}
    run = config.load("shapes_flow_grpo", [f"{key}={json.dumps(value)}" for key, value in tree.items()] + [
        f"sampling.guidance={guidance}", f"sampling.width={bench.size}", f"sampling.height={bench.size}", "prompts.per_round=2",
        'score.rewards=[{"name": "jpeg_compressibility"}]', "score.filters=[]", f"train.precision={PRECISIONS[dtype]}",
        "train.lora.rank=32", "train.lora.alpha=64", "train.microbatch=8", "train.drift_limit=1000",
        'sampling.window={"name": "subset", "options": {"k": 2, "steps": [2, 3]}}',
    ])  # fmt: skip
    folder = bench.folder / re.sub(r"[ ,]+", "-", name)
    folder.mkdir()
    prompts.write(folder / prompts.TRAIN, prompts.read(run.prompts.train))
    empty_state(folder / "state")
    drawn, scores, rows, base = folder / "drawn", folder / "scores", folder / "rows", bench.base.path
    found: dict[str, Any] = {}
    stages: dict[str, Callable[[], Any]] = {
        "rollout": lambda: found.update(rollout.run(jobs.rollout_job(run, 0), folder, base, drawn)),
        "score": lambda: score.run(jobs.score_job(run), drawn, scores),
        "pair": lambda: pair.run(jobs.pair_job(run, 0, "transitions"), drawn, scores, rows),
        "update": lambda: found.update(
            update.run(jobs.update_job(run, 0), rows, base, folder / "state", folder / "policy", folder / "next")
        ),
    }
    took, most = dict[str, str](), dict[str, str]()
    for stage, work in stages.items():
        with Peak() as peak:
            took[stage] = f"{timed(work):.1f}"
        most[stage] = str(peak)
    started = f" (of it {found['rollout/start_seconds']:.1f} until the engine was up)"
    spelled = ", ".join(f"{stage} {value}{started if stage == 'rollout' else ''}" for stage, value in took.items())
    bench.rows.add(name, "seconds a stage", spelled)
    bench.rows.add(name, "peak memory a stage, GiB, all processes", "; ".join(f"{k} {v}" for k, v in most.items()))
    bench.rows.add(name, "peak of the update's own tensors, GiB", f"{found['peak_memory_gb']:.2f}")
    bench.rows.add(name, "drift, largest and mean", f"{found['drift_max']:.2e}, {found['drift_mean']:.2e}")
