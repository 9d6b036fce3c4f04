"""How fast are rollouts, what do they weigh, how long does a weight sync take, and does a whole round hold? Random weights.

    python benchmarks/rollout.py [--cases sglang,sglang-compiled,plain,diffusers,sync,round] [--images 64] [--batch 16]
    python benchmarks/rollout.py --tiny          the same on a CPU with a model of a few million weights, to try the script

Prints each row as it is measured and all of them as a table last.
- `sglang`, `sglang-compiled`: the server's own denoising (from its log), a bare client, and rollouts into Arrow through the fleet.
- `plain`: the diffusers pipeline; `diffusers`: our engine, eager and compiled, and whether their pictures agree.
- `sync`: LoRA of rank 32 and full weights into a running server, from files and from tensors.
- `round`: rollout, score, pair, update by their stages, in each dtype, with guidance and without.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import sd35m
from mdiff_core import config, generation, jobs, policies, prompts, registry, seeds
from mdiff_core.engines.sglang.engine import ROLLOUT, SGLangEngine
from mdiff_core.engines.sglang.requests import sampling_body
from mdiff_core.fleet import ray_environment
from mdiff_core.fleet.actor import make_engine
from mdiff_core.options import Choice
from mdiff_core.sampler import latent_steps
from mdiff_core.settings import Model, Rollout
from mdiff_core.stages import pair, rollout, score, update
from mdiff_core.train.state import empty_state
from mdiff_core.types import PolicyVersion, Prompt, Request, SamplingPlan

DENOISED = re.compile(r"\[DenoisingStage\] finished in ([\d.]+) seconds")
CASES = ("sglang", "sglang-compiled", "plain", "diffusers", "sync", "round")
WORDS = ("a red circle", "two blue squares", "three green triangles", "four white stars")


class Bench:
    """The model, its base policy and the rows measured so far."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.rows = args, folder, list[tuple[str, str, str]]()
        self.device = torch.device("cpu" if args.tiny else "cuda")
        self.size = 64 if args.tiny else 512
        self.dtype = "float32" if args.tiny else "bfloat16"
        self.family = Choice(name="sd3", options={"max_sequence_length": 16 if args.tiny else 256})
        self.path = sd35m.build(folder / "model", self.device, tiny=args.tiny)
        self.base = policies.base_version(
            folder / "base",
            base=str(self.path),
            base_digest=registry.make("family", self.family).digest(str(self.path)),
        )

    def add(self, case: str, what: str, value: str) -> None:
        self.rows.append((case, what, value))
        sys.stdout.write(f"{case}: {what}: {value}\n")
        sys.stdout.flush()

    def model(self, dtype: str = "") -> Model:
        return Model(path=str(self.path), family=self.family, dtype=dtype or self.dtype)

    def rollout(self, name: str, **options: Any) -> Rollout:
        if name == "sglang" and self.args.attention:
            options["attention"] = self.args.attention
        gpus = float(self.device.type == "cuda")
        engine = Choice(name=name, options=options)
        return Rollout(
            group_size=self.args.batch, batch=self.args.batch * self.args.at_once, engine=engine, gpus_per_engine=gpus
        )

    def requests(self, images: int, guidance: float = 4.5) -> list[Request]:
        plan = SamplingPlan(
            width=self.size, height=self.size, frames=1, steps=10, guidance=guidance, negative="", kernel="flow_sde",
            kernel_options={"eta": 0.7}, sde_steps=(2, 3),
        )  # fmt: skip
        groups = range(-(-images // self.args.batch))
        indices = tuple(range(self.args.batch))
        return [
            Request(
                prompt=Prompt(id=str(group), text=f"{WORDS[group % 4]} {group}", metadata={}), group=f"g{group}", indices=indices,
                seeds=tuple(seeds.derive(group, index) for index in indices), plan=plan,
            )
            for group in groups
        ]  # fmt: skip

    @contextmanager
    def engine(self, settings: Rollout, dtype: str = "") -> Iterator[Any]:
        engine = make_engine(settings, self.model(dtype))
        try:
            yield engine
        finally:
            engine.close()


def timed(work: Callable[[], Any]) -> float:
    """Seconds, the GPU's queue included."""
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def draw(engine: Any, asked: Sequence[Request], at_once: int) -> list[Any]:
    return [
        found for start in range(0, len(asked), at_once) for found, _ in engine.generate(asked[start : start + at_once])
    ]


def sglang(bench: Bench, case: str, **options: Any) -> None:
    """Engine rate, bare client, and end to end."""
    args, asked = bench.args, bench.requests(bench.args.images)
    images = sum(len(request.seeds) for request in asked)
    with bench.engine(bench.rollout("sglang", **options)) as engine:
        engine.load(bench.base)
        bench.add(case, "first batch, s (warm-up)", f"{timed(lambda: draw(engine, asked[:1], 1)):.1f}")
        log = engine._server.folder / "server.log"
        before = log.stat().st_size
        client = images / timed(lambda: draw(engine, asked, args.at_once))
        denoising = sum(map(float, DENOISED.findall(log.read_bytes()[before:].decode(errors="replace"))))
        alone = images / denoising if denoising else float("nan")
        raw = raw_bytes(engine, asked[0], bench.device.type) / len(asked[0].seeds)
    bench.add(case, "denoising alone, images/s", f"{alone:.2f}")
    bench.add(case, "engine over HTTP, checked, images/s", f"{client:.2f}")
    out = bench.folder / case
    measured = generation.generate(asked, bench.rollout("sglang", **options), bench.model(), bench.base.path, out)
    rate = measured["images_per_s"]
    bench.add(case, "rollout into Arrow, images/s", f"{rate:.2f} ({rate / alone:.0%} of denoising alone)")
    size = sum(path.stat().st_size for path in out.rglob("*.arrow")) / images
    bench.add(case, "MB an image", f"{size / 1e6:.2f} in Arrow, {raw / 1e6:.2f} in the raw response with everything")


def raw_bytes(engine: SGLangEngine, request: Request, device: str) -> int:
    """Size of the answer to a request that asks for all latents and the text embeddings, as a bare client would."""
    assert engine._server is not None
    body = sampling_body(request, engine._serving, 0.7, latent_steps(request.plan.sde_steps), device)
    body |= {"rollout_return_denoising_env": True, "rollout_return_step_indices": None, "rollout_debug_mode": False}
    return len(engine._server.post(ROLLOUT, body, 600.0))


def plain(bench: Bench) -> None:
    """The pipeline as its users call it."""
    from diffusers import StableDiffusion3Pipeline

    dtype, args = vars(torch)[bench.dtype], bench.args
    pipe = StableDiffusion3Pipeline.from_pretrained(bench.path, torch_dtype=dtype).to(bench.device)
    pipe.set_progress_bar_config(disable=True)
    how = {
        "num_inference_steps": 10,
        "guidance_scale": 4.5,
        "width": bench.size,
        "height": bench.size,
        "output_type": "np",
    }
    how["max_sequence_length"] = bench.family.options["max_sequence_length"]
    calls = [
        lambda word=word: pipe([word] * args.batch, **how) for word in (*WORDS, *WORDS)[: -(-args.images // args.batch)]
    ]
    bench.add("plain", "first batch, s", f"{timed(calls[0]):.1f}")
    rate = len(calls) * args.batch / timed(lambda: [call() for call in calls])
    bench.add("plain", "diffusers pipeline, images/s", f"{rate:.2f}")


def diffusers(bench: Bench) -> None:
    """Our in-process engine; compiled blocks pay off on a GPU only."""
    asked = bench.requests(bench.args.images)
    images, drawn = sum(len(request.seeds) for request in asked), dict[bool, list[Any]]()
    for compiled in (False, True):
        name = "diffusers, compiled" if compiled else "diffusers"
        with bench.engine(bench.rollout("diffusers", compile=compiled)) as engine:
            engine.load(bench.base)
            bench.add(name, "first batch, s (warm-up)", f"{timed(lambda e=engine: draw(e, asked[:1], 1)):.1f}")
            rate = images / timed(lambda e=engine: draw(e, asked, 1))
            bench.add(name, "images/s", f"{rate:.2f}")
            drawn[compiled] = draw(engine, asked[:1], 1)
    pairs = zip(drawn[False], drawn[True], strict=True)
    apart = max(float(np.abs(a.frames.astype(int) - b.frames.astype(int)).mean()) for a, b in pairs)
    bench.add("diffusers, compiled", "mean difference of pictures, of 255", f"{apart:.3f}")


def sync(bench: Bench) -> None:
    """Each kind and way twice; the second time is told."""
    family = registry.make("family", bench.family)
    net = family.transformer(str(bench.path), vars(torch)[bench.dtype], bench.device)
    weights = {name: value.detach().cpu() for name, value in net.named_parameters()}
    targets = [name for name, layer in net.named_modules() if name.endswith(family.lora_targets)]
    rank, shapes = 32, {target: weights[f"{target}.weight"].shape for target in targets}
    del net
    made = dict[str, list[PolicyVersion]](lora=[], full=[])
    for number in range(2):
        lora = {f"{t}.lora_A.weight": torch.randn(rank, s[1]) / 100 for t, s in shapes.items()}
        lora |= {f"{t}.lora_B.weight": torch.randn(s[0], rank) / 100 for t, s in shapes.items()}
        common = {"ema_tensors": None, "parent": bench.base, "version": f"{number:05d}"}
        made["lora"].append(
            policies.write_lora(
                bench.folder / f"lora{number}", tensors=lora, rank=rank, alpha=64.0, targets=targets, **common
            )
        )
        scaled = {name: value * (1 + 0.01 * number) for name, value in weights.items()}
        made["full"].append(policies.write_full(bench.folder / f"full{number}", tensors=scaled, **common))
    for way in ("artifact", "tensors"):
        with bench.engine(bench.rollout("sglang", sync=way)) as engine:
            for kind, found in made.items():
                engine.load(found[0])
                took = timed(lambda e=engine, policy=found[1]: e.load(policy))
                bench.add("sync", f"{kind} from {way}, verified, s", f"{took:.2f}")


def whole_round(bench: Bench) -> None:
    """Through the stages: once as it is meant to be, then the drift of other dtypes and without guidance."""
    precisions = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    dtypes = ("float32",) if bench.args.tiny else ("bfloat16", "float16")
    for dtype in dtypes:
        for guidance in (4.5, 1.0):
            name = f"round, {precisions[dtype]}, guidance {guidance:g}"
            settings = bench.rollout("sglang").model_dump(mode="json")
            tree = {"model": bench.model(dtype).model_dump(mode="json"), "rollout": settings}
            run = config.load("shapes_flow_grpo", [f"{key}={json.dumps(value)}" for key, value in tree.items()] + [
                f"sampling.guidance={guidance}", f"sampling.width={bench.size}", f"sampling.height={bench.size}",
                'score.rewards=[{"name": "jpeg_compressibility"}]', "score.filters=[]", "prompts.per_round=2",
                f"train.precision={precisions[dtype]}", "train.lora.rank=32", "train.lora.alpha=64", "train.microbatch=8",
                "train.drift_limit=1000", 'sampling.window={"name": "subset", "options": {"k": 2, "steps": [2, 3]}}',
            ])  # fmt: skip
            one_round(bench, name, run, bench.folder / name.replace(", ", "-").replace(" ", "-"))


def one_round(bench: Bench, name: str, run: Any, folder: Path) -> None:
    """Seconds, memory and drift of its stages."""
    folder.mkdir()
    prompts.write(folder / "train.jsonl", prompts.read(run.prompts.train))
    empty_state(folder / "state")
    drawn, scores, rows = folder / "drawn", folder / "scores", folder / "rows"
    took = {
        "rollout": timed(lambda: rollout.run(jobs.rollout_job(run, 0), folder, bench.base.path, drawn)),
        "score": timed(lambda: score.run(jobs.score_job(run), drawn, scores)),
        "pair": timed(lambda: pair.run(jobs.pair_job(run, 0, "transitions"), drawn, scores, rows)),
    }
    found = update.run(
        jobs.update_job(run, 0), rows, bench.base.path, folder / "state", folder / "policy", folder / "next"
    )
    took["update"] = found["seconds"]
    bench.add(name, "seconds a stage (rollout with its start)", ", ".join(f"{k} {v:.1f}" for k, v in took.items()))
    bench.add(name, "drift, largest and mean", f"{found['drift_max']:.2e}, {found['drift_mean']:.2e}")
    bench.add(name, "peak memory of the update, GiB", f"{found['peak_memory_gb']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="samples of a request")
    parser.add_argument("--at-once", type=int, default=4, help="requests of a batch")
    parser.add_argument("--attention", default="", help="SGLang's attention backend")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    os.environ.update(ray_environment())
    ways = {
        "sglang": lambda bench: sglang(bench, "sglang"),
        "sglang-compiled": lambda bench: sglang(bench, "sglang, compiled", compile="blocks"),
        "plain": plain,
        "diffusers": diffusers,
        "sync": sync,
        "round": whole_round,
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for case in args.cases.split(","):
            ways[case](bench)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    sys.stdout.write(
        f"\n{card}, torch {torch.__version__}, {' '.join(sys.argv)}\n\n| case | what | value |\n|---|---|---|\n"
    )
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in bench.rows))


if __name__ == "__main__":
    main()
